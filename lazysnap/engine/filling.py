"""Memory filled from an image: block by block read, compared and put in its places, several blocks at a time.

Reading, comparing and copying overlap: each thread takes a block through all three.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

import torch

from lazysnap.levels.workers import Workers


@dataclass(frozen=True, eq=False)
class Wanted:
    """Bytes of an image, and where they are to be."""

    offset: int
    out: torch.Tensor
    """One dimension, uint8; its length is the number of bytes."""

    @property
    def end(self) -> int:
        """Where they end in the image."""
        return self.offset + len(self.out)


Block = Callable[[int], "AbstractContextManager[memoryview]"]
"""Gives a block of an image by its number, compared with its checksum."""


def fill(wanted: Sequence[Wanted], block_bytes: int, block: Block, threads: int) -> None:
    """Fill all that is wanted of one image; each block is asked for once. Blocks.

    Raises: what ``block`` raises; some of the memory may be filled then.
    """
    parts: dict[int, list[Wanted]] = defaultdict(list)
    for one in wanted:
        for index in range(one.offset // block_bytes, -(-one.end // block_bytes)):
            parts[index].append(one)

    def take(index: int) -> None:
        start = index * block_bytes
        with block(index) as data:
            found = torch.frombuffer(data, dtype=torch.uint8)
            for one in parts[index]:
                first, last = max(start, one.offset), min(start + len(data), one.end)
                # Copies of torch let go of the interpreter.
                one.out[first - one.offset : last - one.offset].copy_(found[first - start : last - start])

    Workers[None](min(threads, len(parts)), "lazysnap-fill").run(partial(take, index) for index in sorted(parts))


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor's memory, as ``Wanted.out`` takes it."""
    return tensor.view(-1).view(torch.uint8)
