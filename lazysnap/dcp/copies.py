"""From shards into tensors: every block that is needed is read once, by several threads, and verified before use."""

import contextlib
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from lazysnap.dcp.blocks import BlockCache
from lazysnap.dcp.snapshot import OpenShard, OpenSnapshot, Stored, WholeTensor
from lazysnap.dcp.spans import Span, spans
from lazysnap.errors import ShardCorrupt
from lazysnap.levels.workers import Workers
from lazysnap.shard.pieces import Extent, overlaps

_THREADS = 4
_LEAST_UNIT = 1 << 20


@dataclass(frozen=True, eq=False)
class _Move:
    """One span of a file and its place in a tensor."""

    stored: Stored
    span: Span
    target: torch.Tensor

    def blocks(self) -> range:
        """The blocks that it touches."""
        size = self.stored.shard.manifest.checksums.block_bytes
        return range(self.span.start // size, (self.span.stop - 1) // size + 1)


class Copies:
    """Boxes of tensors to be filled from a snapshot: gathered first, then read all at once."""

    def __init__(self, snapshot: OpenSnapshot) -> None:
        self._snapshot = snapshot
        self._moves: list[_Move] = []
        self.bytes_read = 0

    def add(self, whole: WholeTensor, offsets: Extent, target: torch.Tensor) -> None:
        """Fill ``target`` with the box of its shape at ``offsets``. Nothing is read before ``run``."""
        for overlap in overlaps(whole.pieces, offsets, tuple(target.shape)):
            stored = whole.stored[overlap.piece.rank, overlap.piece.stored]
            box = target[overlap.target]
            size = stored.shard.manifest.checksums.block_bytes
            unit = size * -(-_LEAST_UNIT // size)
            place = (stored.offset, stored.dtype.itemsize)
            self._moves += [_Move(stored, span, box) for span in spans(place, stored.shape, overlap.source, unit)]

    def run(self, *, verify: bool) -> None:
        """Read. Blocks. Raises: ShardCorrupt, naming file and block; LevelError. The targets are garbage then."""
        numbers = {shard: number for number, shard in enumerate(dict.fromkeys(m.stored.shard for m in self._moves))}
        self._moves.sort(key=lambda move: (numbers[move.stored.shard], move.span.start))
        headers = {shard: _header_blocks(shard) if verify else range(0) for shard in numbers}
        uses = Counter((move.stored.shard, index) for move in self._moves for index in move.blocks())
        uses.update((shard, index) for shard, indices in headers.items() for index in indices)
        cache = BlockCache(uses, verify=verify)

        def tasks() -> Iterator[Callable[[], None]]:
            for shard, moves in itertools.groupby(self._moves, key=lambda move: move.stored.shard):
                if headers[shard]:
                    yield partial(_check_header, cache, shard, headers[shard])
                for _, part in itertools.groupby(moves, key=lambda move: move.blocks()[0]):
                    yield partial(_carry_out, cache, list(part))

        with contextlib.ExitStack() as stack:
            # One for each directory is enough: retention leaves the snapshot alone as a whole.
            for place in {shard.place.directory: shard.place for shard in numbers}.values():
                stack.enter_context(place.storage.lease(place.shard_path))
            stack.callback(cache.close)
            Workers[None](_THREADS, "lazysnap-dcp-read").run(tasks())
        self.bytes_read = cache.bytes_read
        self._moves.clear()


def _header_blocks(shard: OpenShard) -> range:
    return range((len(shard.header) - 1) // shard.manifest.checksums.block_bytes + 1)


def _check_header(cache: BlockCache, shard: OpenShard, indices: range) -> None:
    """See to it that what the header said when it was read alone is what its verified blocks say."""
    size = shard.manifest.checksums.block_bytes
    for index in indices:
        with cache.block(shard, index) as block:
            expected = shard.header[index * size : (index + 1) * size]
            if block[: len(expected)] != expected:
                raise ShardCorrupt(f"{shard.where}: the header changed while it was read")


def _carry_out(cache: BlockCache, moves: Sequence[_Move]) -> None:
    # Tensors of a model made for inference only may be written to in that mode only, which belongs to a thread.
    with torch.inference_mode(any(move.target.is_inference() for move in moves)):
        _move_all(cache, moves)


def _move_all(cache: BlockCache, moves: Sequence[_Move]) -> None:
    for move in moves:
        shard, span, dtype = move.stored.shard, move.span, move.stored.dtype
        size = shard.manifest.checksums.block_bytes
        blocks = move.blocks()
        within = span.start - blocks[0] * size
        if len(blocks) == 1 and within % dtype.itemsize == 0:
            with cache.block(shard, blocks[0]) as block:
                _copy(torch.frombuffer(block, dtype=torch.uint8)[within : within + span.stop - span.start], move)
            continue
        # It lies across blocks, or where no number of its kind may start.
        room = torch.empty(span.stop - span.start, dtype=torch.uint8)
        for index in blocks:
            with cache.block(shard, index) as block:
                first, last = max(span.start, index * size), min(span.stop, index * size + len(block))
                part = torch.frombuffer(block, dtype=torch.uint8)[first - index * size : last - index * size]
                room[first - span.start : last - span.start].copy_(part)
        _copy(room, move)


def _copy(data: torch.Tensor, move: _Move) -> None:
    span = move.span
    source = data.view(move.stored.dtype).as_strided(span.shape, span.strides)
    box = tuple(slice(at, at + size) for at, size in zip(span.offsets, span.shape, strict=True))
    move.target[box].copy_(source)
