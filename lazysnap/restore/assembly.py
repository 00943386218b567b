"""A state put together from the shards of several ranks, for this rank: its own tensors, its part of every other.

The parts wanted are those of the live tensors, whatever the world and mesh were when the snapshot was taken: every
stored piece that overlaps a wanted box contributes (the way of torch's own resharding, without its plans). Shards are
added until nothing is missing: of thousands a rank opens the few that hold what it wants.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeGuard

import torch
from torch.distributed.tensor import DTensor

from lazysnap.errors import ShardCorrupt
from lazysnap.levels.blocks import Wanted
from lazysnap.shard.manifest import CaptureMeta
from lazysnap.shard.pieces import Cover, Extent, Piece, distinct
from lazysnap.snapshots.reader import OpenShard, read
from lazysnap.snapshots.tensors import Boxes, Facts, Whole
from lazysnap.state.codec import decode, tensor_names
from lazysnap.state.modules import is_uninitialised
from lazysnap.state.sharding import box_of, like, local_of


def _read_directly(shard: OpenShard, wanted: Sequence[Wanted]) -> None:
    read({shard: wanted})


Box = Callable[[str, Extent], tuple[Extent, Extent]]
"""Offsets and shape of what is wanted of a tensor, from its name and its global shape."""


class Assembly:
    """Images of one snapshot, and of the frozen tensors that they refer to, as far as they were opened."""

    def __init__(
        self, own: int, box: Box, *, read: Callable[[OpenShard, Sequence[Wanted]], None] = _read_directly
    ) -> None:
        """``own``: the rank whose small state and rank-scoped tensors are wanted. ``read``: see ``ShardOpener``."""
        self._rank = own
        self._read = read
        self._wanted_box = box
        self._own: dict[str, Whole] = {}
        self._wholes: dict[str, Whole] = {}
        self._aliases: dict[str, str] = {}
        self._made: dict[tuple[str, Extent, Extent], torch.Tensor] = {}
        self._covers: dict[str, Cover] = {}
        self._missing: dict[str, None] = {}
        self._asked: dict[str, set[str]] = defaultdict(set)
        """The wanted names by the name in the shards."""
        self.names: frozenset[str] = frozenset()
        """All wanted names."""

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
        for spec in shard.layout.specs:
            stored = shard.stored(spec.name)
            if not stored.is_scoped:
                if shard.rank == self._rank:
                    if spec.name in self._own:
                        raise ShardCorrupt(f"{shard.where}: tensor {spec.name!r} is in another image of the rank, too")
                    self._own[spec.name] = Whole.of(stored)
                    self._own[spec.name].add(stored, shard.rank)
                    self._look_again([spec.name])
                continue
            if spec.name not in self._wholes:
                self._wholes[spec.name] = Whole.of(stored)
            piece = self._wholes[spec.name].add(stored, shard.rank)
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
        boxes = Boxes()
        found = {name: self._tensor(name, target(name), boxes) for name in tensor_names(meta.state)}
        for shard, wanted in boxes.take().items():
            self._read(shard, wanted)
        state = decode(meta.state, tensor=found.__getitem__)
        if not isinstance(state, dict):
            raise ShardCorrupt(f"the small state is {type(state).__name__}, expected a dict")
        return state

    def _tensor(self, name: str, target: "torch.Tensor | None", boxes: Boxes) -> torch.Tensor:
        stored_name = self._stored_name(name)
        whole = self._own.get(stored_name) or self._wholes.get(stored_name)
        if whole is None:
            if isinstance(target, DTensor) and is_empty_part(target):
                return like(target, torch.empty(box_of(target)[1], dtype=target.dtype))
            raise ShardCorrupt(f"no shard has the tensor {name!r}")
        box = wanted_box(target, whole.shape)
        key = (stored_name, *box)
        if key not in self._made:  # else it was tied to another one: the same again
            self._made[key] = _room(box[1], whole, target)
            boxes.add(whole, distinct(whole.pieces), box[0], self._made[key])
        found = self._made[key]
        return like(target, found) if is_part(target, whole.shape) else found


def _room(shape: Extent, whole: Whole, target: "torch.Tensor | None") -> torch.Tensor:
    """Return the place where a tensor is put together: on the device of the live one that it is to fill, so that copies
    to the device overlap with reading and comparing.

    Optimizer state is given to the optimizer as it is; of parameters the device holds two until the restart is over, as
    much as their gradients will take. Where it has no room, and for scalars (``step`` of most optimizers stays on the
    CPU), it is host memory.
    """
    if target is not None and shape and not is_uninitialised(target) and tuple(target.shape) == whole.shape:
        with contextlib.suppress(torch.OutOfMemoryError):
            return whole.room(shape, local_of(target).device)
    return whole.room(shape)


def is_part(target: Any, shape: Extent) -> TypeGuard[DTensor]:
    """True if a live tensor takes its part of a tensor of that global shape; all others get it whole."""
    return isinstance(target, DTensor) and tuple(target.shape) == shape


def is_empty_part(target: Any) -> bool:
    """True if nothing of the tensor falls to this rank: no shard needs to be found for it."""
    return isinstance(target, DTensor) and 0 in box_of(target)[1]


def wanted_box(target: Any, shape: Extent) -> tuple[Extent, Extent]:
    """Return the part of a tensor of that global shape that a live tensor, or none, is given: offsets and shape."""
    return box_of(target) if is_part(target, shape) else ((0,) * len(shape), shape)
