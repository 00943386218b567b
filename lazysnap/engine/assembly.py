"""A state put together from the shards of several ranks, for this rank: its own tensors, its part of every other.

The parts wanted are those of the live tensors, whatever the world and mesh were when the snapshot was taken: every
stored piece that overlaps a wanted box contributes (the way of torch's own resharding, without its plans). Shards are
added until nothing is missing: of thousands a rank opens the few that hold what it wants.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeGuard

import torch
from torch.distributed.tensor import DTensor

from lazysnap.capture.dtypes import DTYPES, logical_facts, logical_form
from lazysnap.errors import ShardCorrupt
from lazysnap.levels.memory import map_anonymous
from lazysnap.shard.layout import Layout
from lazysnap.shard.manifest import CaptureMeta
from lazysnap.shard.pieces import Cover, Extent, Piece, distinct, extent_of, overlaps, volume
from lazysnap.state.codec import decode
from lazysnap.state.sharding import box_of, like


@dataclass(frozen=True)
class OpenShard:
    """One image that can be read: a slot that is mapped, or a file."""

    rank: int
    layout: Layout
    meta: CaptureMeta
    read_into: Callable[[int, memoryview], None]
    """Fills a buffer from an offset; verified. Raises: ShardCorrupt, LevelError."""
    where: str


@dataclass(frozen=True)
class _Stored:
    """One tensor in one image."""

    shard: OpenShard
    name: str
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    logical: str | None

    @cached_property
    def facts(self) -> tuple[torch.dtype, tuple[int, ...]]:
        """Dtype and shape as the program knows them. Raises: ShardCorrupt."""
        try:
            return logical_facts(self.dtype, self.shape, self.logical)
        except ValueError as error:
            raise ShardCorrupt(f"{self.shard.where}: tensor {self.name}: {error}") from error

    def read(self, rows: slice | None = None) -> torch.Tensor:
        """The tensor, or some rows of its first dimension, in memory of its own."""
        shape, offset = self.shape, self.offset
        if rows is not None:
            width = volume(shape[1:]) * self.dtype.itemsize
            shape, offset = (rows.stop - rows.start, *shape[1:]), offset + rows.start * width
        size = volume(shape) * self.dtype.itemsize
        if not size:
            return logical_form(torch.empty(shape, dtype=self.dtype), self.logical)
        buffer = map_anonymous(size)
        self.shard.read_into(offset, buffer)
        stored = torch.frombuffer(buffer, dtype=torch.uint8).view(self.dtype).view(shape)
        return logical_form(stored, self.logical)


@dataclass
class _Whole:
    """One tensor over all shards."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[Piece] = field(default_factory=list)
    stored: dict[int, _Stored] = field(default_factory=dict)
    """By rank."""


Box = Callable[[str, Extent], tuple[Extent, Extent]]
"""Offsets and shape of what is wanted of a tensor, from its name and its global shape."""


class Assembly:
    """Images of one snapshot, and of the immutable tensors that they refer to, as far as they were opened."""

    def __init__(self, own: int, box: Box) -> None:
        """``own``: the rank whose small state and rank-scoped tensors are wanted."""
        self._rank = own
        self._wanted_box = box
        self._own: dict[str, _Stored] = {}
        self._wholes: dict[str, _Whole] = {}
        self._aliases: dict[str, str] = {}
        self._covers: dict[str, Cover] = {}
        self._missing: dict[str, None] = {}
        self._asked: dict[str, set[str]] = defaultdict(set)
        """By name in the shards: names that are wanted of it."""
        self.names: frozenset[str] = frozenset()
        """What is wanted."""

    def want(self, names: Iterable[str]) -> None:
        """Say which tensors are wanted: those that the small state names. Before the other shards are added."""
        self.names = frozenset(names)
        for name in sorted(self.names):
            self._missing[name] = None
            self._asked[self._aliases.get(name, name)].add(name)
        self._look_again(list(self._asked))

    @property
    def missing(self) -> Collection[str]:
        """Names of which a part that is wanted was in no shard so far."""
        return self._missing.keys()

    def pieces(self, name: str) -> Sequence[Piece]:
        """Where parts of a tensor were found."""
        whole = self._wholes.get(self._aliases.get(name, name))
        return whole.pieces if whole is not None else ()

    def gap(self, name: str, axis: int) -> int:
        """Where along a dimension of a tensor, of which pieces were found, the first hole may be."""
        return self._covers[name].gap(axis)

    def add(self, shard: OpenShard) -> None:
        """One more image. Raises: ShardCorrupt, if it does not fit the others."""
        renamed = []
        for alias, name in shard.meta.aliases.items():
            if self._aliases.setdefault(alias, name) == name and alias in self._missing:
                self._asked[alias].discard(alias)
                self._asked[name].add(alias)
                renamed.append(name)
        for spec, offset in zip(shard.layout.specs, shard.layout.offsets, strict=True):
            facts = shard.meta.tensors.get(spec.name, {})
            if spec.dtype not in DTYPES:
                raise ShardCorrupt(f"{shard.where}: tensor {spec.name}: torch has no dtype for {spec.dtype}")
            stored = _Stored(shard, spec.name, offset, DTYPES[spec.dtype], spec.shape, facts.get("dtype"))
            if "scope" not in facts:
                if shard.rank == self._rank:
                    self._own[spec.name] = stored
                    self._look_again([spec.name])
                continue
            dtype, shape = stored.facts
            whole_shape, offsets = extent_of(facts, shape, f"{shard.where}: tensor {spec.name}")
            whole = self._wholes.setdefault(spec.name, _Whole(whole_shape, dtype))
            if (whole.shape, whole.dtype) != (whole_shape, dtype):
                raise ShardCorrupt(f"{shard.where}: tensor {spec.name} is {whole_shape}, elsewhere {whole.shape}")
            piece = Piece(shard.rank, spec.name, offsets, shape)
            whole.pieces.append(piece)
            whole.stored[shard.rank] = stored
            for name in list(self._asked.get(spec.name, ())):
                if name in self._covers:
                    self._cover(name, [piece])
                else:
                    self._look_again([spec.name])
        self._look_again(renamed)

    def _look_again(self, stored_names: Iterable[str]) -> None:
        """Names are wanted of tensors that may have been found before."""
        for stored_name in stored_names:
            for name in list(self._asked.get(stored_name, ())):
                if stored_name in self._own:
                    self._missing.pop(name, None)
                elif stored_name in self._wholes and name not in self._covers:
                    whole = self._wholes[stored_name]
                    self._covers[name] = Cover(*self._wanted_box(name, whole.shape))
                    self._cover(name, whole.pieces)

    def _cover(self, name: str, pieces: Iterable[Piece]) -> None:
        cover = self._covers[name]
        for piece in pieces:
            cover.add(piece)
        if cover.is_whole:
            self._missing.pop(name, None)

    def facts(self) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtype and global shape of every tensor, by its name and its further names."""
        found = {name: stored.facts for name, stored in self._own.items()}
        found.update({name: (whole.dtype, whole.shape) for name, whole in self._wholes.items()})
        found.update({alias: found[name] for alias, name in self._aliases.items() if name in found})
        return found

    def state(self, meta: CaptureMeta, target: Callable[[str], "torch.Tensor | None"]) -> dict[str, Any]:
        """The state, this rank's part of every tensor read. ``target`` gives the live tensor that a name is to fill.

        Tensors with a DTensor as their target become DTensors of the same placement; all others are whole.
        Blocks: reads. Raises: ShardCorrupt, LevelError, FileNotFoundError.
        """
        state = decode(meta.state, tensor=lambda name: self._tensor(name, target(name)))
        if not isinstance(state, dict):
            raise ShardCorrupt(f"the small state is {type(state).__name__}, expected a dict")
        return state

    def _tensor(self, name: str, target: "torch.Tensor | None") -> torch.Tensor:
        stored_name = self._aliases.get(name, name)
        if stored_name in self._own:
            whole = self._own[stored_name].read()
            return _shard_of(whole, target) if isinstance(target, DTensor) else whole
        if stored_name not in self._wholes:
            if isinstance(target, DTensor) and is_empty_part(target):
                return like(target, torch.empty(box_of(target)[1], dtype=target.dtype))
            raise ShardCorrupt(f"no shard has the tensor {name!r}")
        found = self._wholes[stored_name]
        box = wanted_box(target, found.shape)
        filled = self._box(found, *box)
        return like(target, filled) if is_part(target, found.shape) else filled

    @staticmethod
    def _box(whole: _Whole, offsets: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        out = torch.empty(shape, dtype=whole.dtype)
        for overlap in overlaps(distinct(whole.pieces), offsets, shape):
            stored = whole.stored[overlap.piece.rank]
            if not overlap.source:
                out.copy_(stored.read())
                continue
            # Rows lie together in the file; what the other dimensions leave out is read and dropped.
            rows, *rest = overlap.source
            box = (slice(None), *rest)
            out[overlap.target].copy_(stored.read(rows)[box])
        return out


def is_part(target: Any, shape: Extent) -> TypeGuard[DTensor]:
    """Whether a live tensor takes its part of a tensor of that global shape; all others get it whole."""
    return isinstance(target, DTensor) and tuple(target.shape) == shape


def is_empty_part(target: Any) -> bool:
    """Whether nothing of the tensor falls to this rank: no shard needs to be found for it."""
    return isinstance(target, DTensor) and not volume(box_of(target)[1])


def wanted_box(target: Any, shape: Extent) -> tuple[Extent, Extent]:
    """What a live tensor, or none, is to be given of a tensor of that global shape: offsets and shape."""
    return box_of(target) if is_part(target, shape) else ((0,) * len(shape), shape)


def _shard_of(whole: torch.Tensor, target: DTensor) -> torch.Tensor:
    if tuple(whole.shape) != tuple(target.shape):
        return whole
    offsets, shape = box_of(target)
    box = tuple(slice(at, at + size) for at, size in zip(offsets, shape, strict=True))
    return like(target, whole[box].clone())
