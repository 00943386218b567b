"""A state put together from the shards of several ranks, for this rank: its own tensors, its part of every other.

The parts wanted are those of the live tensors, whatever the world and mesh were when the snapshot was taken: every
stored piece that overlaps a wanted box contributes (the way of torch's own resharding, without its plans). Shards are
added until nothing is missing: of thousands a rank opens the few that hold what it wants.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, TypeGuard

import torch
from torch.distributed.tensor import DTensor

from lazysnap.capture.dtypes import DTYPES, logical_facts, logical_form
from lazysnap.engine.filling import Wanted, bytes_of
from lazysnap.engine.fitting import Facts
from lazysnap.errors import ShardCorrupt
from lazysnap.shard.layout import Layout
from lazysnap.shard.manifest import CaptureMeta
from lazysnap.shard.pieces import Cover, Extent, Piece, distinct, extent_of, overlaps, volume
from lazysnap.state.codec import decode, tensor_names
from lazysnap.state.modules import is_uninitialised
from lazysnap.state.sharding import box_of, like, local_of


@dataclass(frozen=True, eq=False)
class OpenShard:
    """One image that can be read: a slot that is mapped, or a file."""

    rank: int
    layout: Layout
    meta: CaptureMeta
    fill: Callable[[Sequence[Wanted]], None]
    """Fills all that is wanted; verified. Raises: ShardCorrupt, LevelError."""
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
    def facts(self) -> Facts:
        """Dtype and shape as the program knows them. Raises: ShardCorrupt."""
        try:
            return logical_facts(self.dtype, self.shape, self.logical)
        except ValueError as error:
            raise ShardCorrupt(f"{self.shard.where}: tensor {self.name}: {error}") from error

    def rows(self, rows: slice | None) -> tuple[int, tuple[int, ...]]:
        """Where some rows of the first dimension are (``None``: all), and their shape."""
        if rows is None:
            return self.offset, self.shape
        width = volume(self.shape[1:]) * self.dtype.itemsize
        return self.offset + rows.start * width, (rows.stop - rows.start, *self.shape[1:])


class _Order:
    """What is to be read, from all shards together, and what is to be done with it afterwards."""

    def __init__(self) -> None:
        self._wanted: dict[OpenShard, list[Wanted]] = defaultdict(list)
        self._after: dict[OpenShard, list[Callable[[], object]]] = defaultdict(list)

    def into(self, stored: _Stored, rows: slice | None, out: torch.Tensor) -> None:
        """Read into a contiguous tensor, whose dtype stands in the shard as it is."""
        offset, _ = stored.rows(rows)
        if out.numel():
            self._wanted[stored.shard].append(Wanted(offset, bytes_of(out)))

    def new(self, stored: _Stored, rows: slice | None = None) -> torch.Tensor:
        """Read into memory of its own."""
        made = torch.empty(stored.rows(rows)[1], dtype=stored.dtype)
        self.into(stored, rows, made)
        return logical_form(made, stored.logical)

    def after(self, stored: _Stored, work: Callable[[], object]) -> None:
        """When what is wanted of its shard is read."""
        self._after[stored.shard].append(work)

    def carry_out(self) -> None:
        """Blocks. Raises: what the shards raise."""
        while self._wanted:
            shard, wanted = self._wanted.popitem()
            shard.fill(wanted)
            # What was read beside its place goes with its shard: of all shards together it could be the whole state.
            for work in self._after.pop(shard, ()):
                work()


@dataclass
class _Whole:
    """One tensor over all shards."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    pieces: list[Piece] = field(default_factory=list)
    stored: dict[int, _Stored] = field(default_factory=dict)
    """By rank."""


def _alone(stored: _Stored) -> _Whole:
    """A tensor of one rank."""
    dtype, shape = stored.facts
    piece = Piece(stored.shard.rank, stored.name, (0,) * len(shape), shape)
    return _Whole(shape, dtype, [piece], {piece.rank: stored})


Box = Callable[[str, Extent], tuple[Extent, Extent]]
"""Offsets and shape of what is wanted of a tensor, from its name and its global shape."""


class Assembly:
    """Images of one snapshot, and of the immutable tensors that they refer to, as far as they were opened."""

    def __init__(self, own: int, box: Box) -> None:
        """``own``: the rank whose small state and rank-scoped tensors are wanted."""
        self._rank = own
        self._wanted_box = box
        self._own: dict[str, _Whole] = {}
        self._wholes: dict[str, _Whole] = {}
        self._aliases: dict[str, str] = {}
        self._made: dict[tuple[str, Extent, Extent], torch.Tensor] = {}
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
            self._asked[self._stored_name(name)].add(name)
        self._look_again(list(self._asked))

    def _stored_name(self, name: str) -> str:
        return name if name in self._own else self._aliases.get(name, name)

    @property
    def missing(self) -> Collection[str]:
        """Names of which a part that is wanted was in no shard so far."""
        return self._missing.keys()

    def pieces(self, name: str) -> Sequence[Piece]:
        """Where parts of a tensor were found."""
        whole = self._wholes.get(self._stored_name(name))
        return whole.pieces if whole is not None else ()

    def gap(self, name: str, axis: int) -> int:
        """Where along a dimension of a tensor, of which pieces were found, the first hole may be."""
        return self._covers[name].gap(axis)

    def add(self, shard: OpenShard) -> None:
        """One more image. Raises: ShardCorrupt, if it does not fit the others."""
        renamed = []
        for alias, name in shard.meta.aliases.items():
            if shard.rank != self._rank and "scope" not in shard.meta.tensors.get(name, {}):
                continue  # what is tied on another rank alone need not be here
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
                    if spec.name in self._own:
                        raise ShardCorrupt(f"{shard.where}: tensor {spec.name!r} is in another image of the rank, too")
                    self._own[spec.name] = _alone(stored)
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

    def facts(self) -> dict[str, Facts]:
        """Dtype and global shape of every tensor, by its name and its further names."""
        found: dict[str, Facts] = {name: (whole.dtype, whole.shape) for name, whole in self._own.items()}
        found.update({name: (whole.dtype, whole.shape) for name, whole in self._wholes.items()})
        aliases = self._aliases.items()
        found.update({alias: found[name] for alias, name in aliases if name in found and alias not in self._own})
        return found

    def state(self, meta: CaptureMeta, target: Callable[[str], "torch.Tensor | None"]) -> dict[str, Any]:
        """The state, this rank's part of every tensor read. ``target`` gives the live tensor that a name is to fill.

        Tensors with a DTensor as their target become DTensors of the same placement; all others are whole.
        Blocks: reads. Raises: ShardCorrupt, LevelError, FileNotFoundError.
        """
        order = _Order()
        found = {name: self._tensor(name, target(name), order) for name in tensor_names(meta.state)}
        order.carry_out()
        state = decode(meta.state, tensor=found.__getitem__)
        if not isinstance(state, dict):
            raise ShardCorrupt(f"the small state is {type(state).__name__}, expected a dict")
        return state

    def _tensor(self, name: str, target: "torch.Tensor | None", order: _Order) -> torch.Tensor:
        stored_name = self._stored_name(name)
        whole = self._own.get(stored_name) or self._wholes.get(stored_name)
        if whole is None:
            if isinstance(target, DTensor) and is_empty_part(target):
                return like(target, torch.empty(box_of(target)[1], dtype=target.dtype))
            raise ShardCorrupt(f"no shard has the tensor {name!r}")
        box = wanted_box(target, whole.shape)
        key = (stored_name, *box)
        if key not in self._made:  # else it was tied to another one: the same again
            self._made[key] = _box(whole, _room(box[1], whole, target), box[0], order)
        found = self._made[key]
        return like(target, found) if is_part(target, whole.shape) else found


def _room(shape: Extent, whole: _Whole, target: "torch.Tensor | None") -> torch.Tensor:
    """Where a tensor is put together: on the device of the live one that it is to fill, so that copies to the device
    overlap with reading and comparing.

    Optimizer state is given to the optimizer as it is; of parameters the device holds two until the restart is over, as
    much as their gradients will take. Where it has no room, and for scalars (``step`` of most optimizers stays on the
    CPU), it is host memory.
    """
    if target is not None and shape and not is_uninitialised(target) and tuple(target.shape) == whole.shape:
        with contextlib.suppress(torch.OutOfMemoryError):
            return torch.empty(shape, dtype=whole.dtype, device=local_of(target).device)
    return torch.empty(shape, dtype=whole.dtype)


def _box(whole: _Whole, out: torch.Tensor, offsets: Extent, order: _Order) -> torch.Tensor:
    shape = tuple(out.shape)
    for overlap in overlaps(distinct(whole.pieces), offsets, shape):
        stored = whole.stored[overlap.piece.rank]
        rows, *rest = overlap.source or (None,)  # a tensor without dimensions has none
        if stored.logical is None and stored.shape[1:] == shape[1:] == _lengths(rest):
            # Rows lie together, in the file and here.
            order.into(stored, rows, out[overlap.target] if overlap.target else out)
            continue
        # What the other dimensions leave out is read and dropped.
        box = (slice(None), *rest) if overlap.source else ()
        part = order.new(stored, rows)[box]
        order.after(stored, partial(out[overlap.target].copy_, part))
    return out


def _lengths(slices: Iterable[slice]) -> Extent:
    return tuple(part.stop - part.start for part in slices)


def is_part(target: Any, shape: Extent) -> TypeGuard[DTensor]:
    """Whether a live tensor takes its part of a tensor of that global shape; all others get it whole."""
    return isinstance(target, DTensor) and tuple(target.shape) == shape


def is_empty_part(target: Any) -> bool:
    """Whether nothing of the tensor falls to this rank: no shard needs to be found for it."""
    return isinstance(target, DTensor) and not volume(box_of(target)[1])


def wanted_box(target: Any, shape: Extent) -> tuple[Extent, Extent]:
    """What a live tensor, or none, is to be given of a tensor of that global shape: offsets and shape."""
    return box_of(target) if is_part(target, shape) else ((0,) * len(shape), shape)
