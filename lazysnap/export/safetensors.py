"""Weights as one safetensors file, block by block: neither torch nor memory for more than a few blocks is needed."""

import functools
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from lazysnap.errors import UnsupportedState
from lazysnap.export.images import Image, Located, RankImages
from lazysnap.levels.files import pwrite_all
from lazysnap.levels.workers import Workers
from lazysnap.shard.checksum import block_ranges
from lazysnap.shard.layout import Layout

_THREADS = 2


@dataclass(frozen=True)
class _Move:
    """Bytes ``[source, source + nbytes)`` of an image go to ``target`` in the file."""

    source: int
    nbytes: int
    target: int


def write_weights(rank: RankImages, names: Mapping[str, str], path: str, beat: Callable[[int], None]) -> int:
    """Write the tensors ``names`` (name in the file -> name in the snapshot) to a new file; its bytes.

    Tied tensors are stored once, under the first of their names in the alphabet, and the header's ``__metadata__`` has
    the others, as ``safetensors.torch.save_model`` does. ``beat`` is told the bytes that were read, and may raise.
    Blocks. Raises: UnsupportedState, for a dtype that safetensors has not got; ShardCorrupt; LevelError; OSError.
    """
    located = {name: rank.find(stored) for name, stored in names.items()}
    for name, found in located.items():
        _check(name, found)
    first: dict[tuple[str, str], str] = {}
    for name in sorted(located):
        first.setdefault(located[name].key, name)
    tied = {name: first[found.key] for name, found in sorted(located.items()) if first[found.key] != name}
    specs = [replace(located[name].spec, name=name) for name in first.values()]
    layout = Layout.plan(specs, {"format": "pt", **tied})
    handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o666)
    try:
        os.ftruncate(handle, layout.size_bytes)
        pwrite_all(handle, 0, memoryview(layout.header))
        for image in rank.images:
            moves = [
                _Move(located[spec.name].offset, spec.nbytes, offset)
                for spec, offset in zip(layout.specs, layout.offsets, strict=True)
                if located[spec.name].image is image and spec.nbytes
            ]
            Workers[None](_THREADS, "lazysnap-export").run(_Copier(image, handle, beat).tasks(moves))
    finally:
        os.close(handle)
    return layout.size_bytes


def bytes_to_read(rank: RankImages, names: Mapping[str, str]) -> int:
    """What ``write_weights`` will tell its ``beat`` in all."""
    chosen = {(found.key, found.spec.nbytes) for found in map(rank.find, names.values())}
    return sum(nbytes for _, nbytes in chosen)


def _check(name: str, found: Located) -> None:
    if found.logical is not None:
        raise UnsupportedState(
            f"tensor {name!r} is {found.logical}, which safetensors cannot hold; export to .ckpt or a DCP directory, "
            "or choose other tensors with --only"
        )


@dataclass(frozen=True)
class _Copier:
    """Copies parts of one image to a file, each block read once."""

    image: Image
    handle: int
    beat: Callable[[int], None]

    def tasks(self, moves: list[_Move]) -> Iterator[Callable[[], None]]:
        """One task for each block that holds something wanted."""
        moves = sorted(moves, key=lambda move: move.source)
        first = 0
        manifest = self.image.manifest
        for offset, length in block_ranges(manifest.size_bytes, manifest.checksums.block_bytes):
            while first < len(moves) and moves[first].source + moves[first].nbytes <= offset:
                first += 1
            last = first
            while last < len(moves) and moves[last].source < offset + length:
                last += 1
            if last > first:
                yield functools.partial(self._copy, offset, length, moves[first:last])

    def _copy(self, offset: int, length: int, moves: list[_Move]) -> None:
        self.beat(0)
        block = self.image.reader.read(offset, length)
        done = 0
        for move in moves:
            begin, end = max(move.source, offset), min(move.source + move.nbytes, offset + length)
            pwrite_all(self.handle, move.target + begin - move.source, block[begin - offset : end - offset])
            done += end - begin
        self.beat(done)
