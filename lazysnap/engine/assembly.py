"""A state put together from the shards of several ranks, for this rank: its own tensors, its part of every other.

The parts wanted are those of the live tensors, whatever the world and mesh were when the snapshot was taken: every
stored piece that overlaps a wanted box contributes (the way of torch's own resharding, without its plans).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from lazysnap.capture.dtypes import DTYPES, logical_facts, logical_form
from lazysnap.errors import ShardCorrupt
from lazysnap.levels.memory import map_anonymous
from lazysnap.shard.layout import Layout
from lazysnap.shard.manifest import CaptureMeta
from lazysnap.shard.pieces import Piece, check_coverage, distinct, extent_of, overlaps, volume
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


class Assembly:
    """The images of all ranks of one snapshot, and of the immutable tensors that they refer to."""

    def __init__(self, shards: Sequence[OpenShard], own: int) -> None:
        """``own``: the rank whose small state and rank-scoped tensors are wanted. Raises: ShardCorrupt."""
        self._own: dict[str, _Stored] = {}
        self._wholes: dict[str, _Whole] = {}
        self._aliases: dict[str, str] = {}
        self._made: dict[tuple[str, tuple[int, ...], tuple[int, ...]], torch.Tensor] = {}
        for shard in shards:
            self._add(shard, is_own=shard.rank == own)
        for name, whole in self._wholes.items():
            check_coverage(name, whole.pieces, whole.shape)

    def _add(self, shard: OpenShard, *, is_own: bool) -> None:
        self._aliases.update({alias: name for alias, name in shard.meta.aliases.items() if alias not in self._aliases})
        for spec, offset in zip(shard.layout.specs, shard.layout.offsets, strict=True):
            facts = shard.meta.tensors.get(spec.name, {})
            if spec.dtype not in DTYPES:
                raise ShardCorrupt(f"{shard.where}: tensor {spec.name}: torch has no dtype for {spec.dtype}")
            stored = _Stored(shard, spec.name, offset, DTYPES[spec.dtype], spec.shape, facts.get("dtype"))
            if "scope" not in facts:
                if is_own:
                    self._own[spec.name] = stored
                continue
            dtype, shape = stored.facts
            whole_shape, offsets = extent_of(facts, shape, f"{shard.where}: tensor {spec.name}")
            whole = self._wholes.setdefault(spec.name, _Whole(whole_shape, dtype))
            if (whole.shape, whole.dtype) != (whole_shape, dtype):
                raise ShardCorrupt(f"{shard.where}: tensor {spec.name} is {whole_shape}, elsewhere {whole.shape}")
            whole.pieces.append(Piece(shard.rank, spec.name, offsets, shape))
            whole.stored[shard.rank] = stored

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
        if stored_name not in self._own and stored_name not in self._wholes:
            raise ShardCorrupt(f"no shard has the tensor {name!r}")
        shape = self._shape(stored_name)
        if not isinstance(target, DTensor) or tuple(target.shape) != shape:
            return self._part(stored_name, (0,) * len(shape), shape)
        return like(target, self._part(stored_name, *box_of(target)))

    def _shape(self, stored_name: str) -> tuple[int, ...]:
        own = self._own.get(stored_name)
        return self._wholes[stored_name].shape if own is None else own.facts[1]

    def _part(self, stored_name: str, offsets: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
        """A box of a tensor; asked for again, by the name of one that was tied to it, the same one."""
        key = stored_name, offsets, shape
        if key not in self._made:
            own = self._own.get(stored_name)
            self._made[key] = (
                self._box(self._wholes[stored_name], offsets, shape)
                if own is None
                else _box_of_one(own.read(), offsets, shape)
            )
        return self._made[key]

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


def _box_of_one(whole: torch.Tensor, offsets: tuple[int, ...], shape: tuple[int, ...]) -> torch.Tensor:
    if tuple(whole.shape) == shape:
        return whole
    return whole[tuple(slice(at, at + size) for at, size in zip(offsets, shape, strict=True))].clone()
