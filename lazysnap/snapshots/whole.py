"""All tensors of a snapshot, whole: put together from the parts that are in the shards of all ranks. Needs no torch."""

import math
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from lazysnap.errors import ShardCorrupt, StateError
from lazysnap.levels.blocks import Wanted
from lazysnap.shard.layout import ITEM_BITS, TensorSpec
from lazysnap.shard.manifest import CaptureMeta
from lazysnap.shard.pieces import Extent, Overlap, Piece, tiles
from lazysnap.shard.strides import strides_of
from lazysnap.snapshots.reader import OpenShard, OpenSnapshot, Stored, read

Write = Callable[[int, memoryview], None]
"""Receives bytes of a tensor, and their offset in it (row-major). Called in several threads, for each byte once."""
Key = tuple[tuple[int, str], ...]


@dataclass(frozen=True)
class Tile:
    """A box of a tensor that one shard holds."""

    stored: Stored
    box: Overlap


@dataclass(frozen=True)
class Box:
    """A part of a tile."""

    tile: Tile
    offsets: Extent
    """The place of its first element in the tensor."""
    shape: Extent


@dataclass(frozen=True, eq=False)
class WholeTensor:
    """One tensor of all ranks."""

    name: str
    shape: Extent
    first: Stored
    """One of its parts; its dtype is that of all."""
    key: Key
    """Equal for tied tensors."""
    tiles: tuple[Tile, ...]
    """They cover the tensor, and do not overlap."""

    @property
    def item_bytes(self) -> int:
        """Bytes of one element; complex numbers may be stored as two."""
        return ITEM_BITS[self.first.spec.dtype] // 8 * math.prod(self.first.spec.shape[len(self.shape) :])

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.item_bytes * math.prod(self.shape)

    def spec(self, name: str) -> TensorSpec:
        """Its entry in a safetensors file, as ``name``."""
        return TensorSpec(name, self.first.spec.dtype, (*self.shape, *self.first.spec.shape[len(self.shape) :]))

    def boxes(self, most_bytes: int) -> Iterator["Box"]:
        """Its tiles, large ones cut along their first dimension."""
        for tile in self.tiles:
            offsets = tuple(part.start for part in tile.box.target)
            shape = tuple(part.stop - part.start for part in tile.box.target)
            if not shape:
                yield Box(tile, (), ())
                continue
            rows = max(1, most_bytes // (self.item_bytes * math.prod(shape[1:])))
            for row in range(0, shape[0], rows):
                yield Box(tile, (offsets[0] + row, *offsets[1:]), (min(rows, shape[0] - row), *shape[1:]))


class WholeSnapshot:
    """The tensors of an open snapshot by their names in the state of one rank."""

    def __init__(self, snapshot: OpenSnapshot, rank: int = 0) -> None:
        """``rank``: whose small state and own tensors are used.

        Raises: StateError, if the ranks number their parameters in different ways.
        """
        self.snapshot = snapshot
        self._rank = rank
        self._found: dict[str, WholeTensor] = {}
        first = snapshot.meta(0).parameters
        for other, held in enumerate(snapshot.ranks):
            if held[0].meta.parameters != first:
                raise StateError(
                    f"{held[0].where}: the optimizers of rank {other} hold other parameters than those of rank 0 "
                    "(pipeline parallelism?): their states have no distinct names; restore with as many ranks "
                    "as saved it, through the engine"
                )

    @property
    def meta(self) -> CaptureMeta:
        """The metadata of this rank."""
        return self.snapshot.meta(self._rank)

    def tensor(self, name: str) -> WholeTensor:
        """Return a tensor. Raises: ShardCorrupt, if shards lack a part of it, or do not fit each other."""
        if name not in self._found:
            with self.snapshot.naming():
                self._found[name] = self._put_together(name)
        return self._found[name]

    def _put_together(self, name: str) -> WholeTensor:
        own = self.snapshot.find(self._rank, name)
        if own is not None and not own.is_scoped:
            parts = {self._rank: own}
        else:
            # This rank first: of equal boxes the first one is read.
            order = [self._rank, *(rank for rank in range(len(self.snapshot.ranks)) if rank != self._rank)]
            held = [(rank, self.snapshot.find(rank, name)) for rank in order]
            parts = {rank: one for rank, one in held if one is not None and one.is_scoped}
        if not parts:
            raise ShardCorrupt(f"no shard has the tensor {name!r}")
        first = next(iter(parts.values()))
        shape = first.extent()[0]
        pieces = []
        for rank, stored in parts.items():
            whole, offsets = stored.extent()
            kind, expected = (stored.spec.dtype, stored.logical, whole), (first.spec.dtype, first.logical, shape)
            if kind != expected or len(stored.spec.shape) != len(first.spec.shape):
                raise ShardCorrupt(
                    f"{stored.shard.where}: tensor {stored.name} is {_text(*kind)}, elsewhere {_text(*expected)}"
                )
            pieces.append(Piece(rank, stored.name, offsets, stored.shape))
        found = tuple(Tile(parts[box.piece.rank], box) for box in tiles(name, pieces, shape))
        return WholeTensor(name, shape, first, tuple(one.key for one in parts.values()), found)


def _text(dtype: str, logical: str | None, shape: Extent) -> str:
    return f"{logical or dtype} {list(shape)}"


class Filling:
    """Copies of tensors to wherever they are wanted: collected first, then each block of the snapshot is read once."""

    def __init__(self) -> None:
        self._copies: list[_Copy] = []

    def add(self, tensor: WholeTensor, write: Write) -> None:
        """Have a whole tensor written."""
        for tile in tensor.tiles:
            self._copies.append(_Copy(tile.stored, _Runs(tensor.item_bytes, tile.box, tensor.shape), write))

    def add_box(self, tensor: WholeTensor, box: "Box", write: Write) -> None:
        """Have one of the ``boxes`` of a tensor written, as a tensor of its own."""
        piece = box.tile.box.piece
        source = tuple(slice(a - b, a - b + n) for a, b, n in zip(box.offsets, piece.offsets, box.shape, strict=True))
        part = Overlap(piece, source, tuple(slice(0, size) for size in box.shape))
        self._copies.append(_Copy(box.tile.stored, _Runs(tensor.item_bytes, part, box.shape), write))

    @property
    def size_bytes(self) -> int:
        """Bytes to be written."""
        return sum(copy.size_bytes for copy in self._copies)

    def run(self, snapshot: OpenSnapshot, beat: Callable[[int], None] = lambda count: None) -> None:
        """Read and write everything, with checksums. ``beat`` receives numbers of bytes written, and may raise.

        Blocks. Raises: ShardCorrupt; LevelError; FileNotFoundError; what a ``write`` raises.
        """
        copies, self._copies = self._copies, []
        jobs: dict[OpenShard, list[Wanted]] = defaultdict(list)
        for copy in copies:
            jobs[copy.stored.shard].append(copy.wanted(beat))
        read(jobs)


class _Runs:
    """The bytes of a box that follow each other both in the shard and where they go: ``count`` runs of ``length``."""

    def __init__(self, item_bytes: int, box: Overlap, whole: Extent) -> None:
        piece, target = box.piece.shape, whole
        sizes = [part.stop - part.start for part in box.source]
        self.length: int = item_bytes
        self._outer = len(sizes)
        while self._outer:
            self._outer -= 1
            self.length *= sizes[self._outer]
            if not sizes[self._outer] == piece[self._outer] == target[self._outer]:
                break
        self._sizes = sizes[: self._outer]
        self._from = [stride * item_bytes for stride in strides_of(piece, None)]
        self._to = [stride * item_bytes for stride in strides_of(target, None)]
        self.start: int = sum(part.start * step for part, step in zip(box.source, self._from, strict=True))
        self._target: int = sum(part.start * step for part, step in zip(box.target, self._to, strict=True))
        self.count: int = math.prod(self._sizes)

    @cached_property
    def extent(self) -> int:
        """Bytes from the first run to the end of the last one, in the shard."""
        return self.source(self.count - 1) + self.length

    def source(self, index: int) -> int:
        """Offset of a run from the first one, in the shard."""
        return self._offset(index, self._from)

    def target(self, index: int) -> int:
        """Offset of a run where it goes."""
        return self._target + self._offset(index, self._to)

    def _offset(self, index: int, steps: list[int]) -> int:
        offset = 0
        for dim in range(self._outer - 1, -1, -1):
            index, at = divmod(index, self._sizes[dim])
            offset += at * steps[dim]
        return offset


@dataclass(frozen=True, eq=False)
class _Copy:
    """The bytes of one box, on their way from a shard to where they are wanted."""

    stored: Stored
    runs: _Runs
    write: Write

    @property
    def size_bytes(self) -> int:
        return self.runs.count * self.runs.length

    def wanted(self, beat: Callable[[int], None]) -> Wanted:
        """The bytes to read, which are written and then counted by ``beat``."""
        runs, write = self.runs, self.write

        def put(at: int, data: memoryview) -> None:
            stop, done = at + len(data), 0
            index = bisect_right(range(runs.count), at, key=runs.source) - 1
            while index < runs.count and (start := runs.source(index)) < stop:
                first, last = max(start, at), min(start + runs.length, stop)
                if first < last:
                    write(runs.target(index) + first - start, data[first - at : last - at])
                    done += last - first
                index += 1
            beat(done)

        start = self.stored.offset + runs.start
        return Wanted(start, start + runs.extent, put)
