"""One rank's part of one snapshot: shards are opened until nothing that it wants is missing, then it is read."""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch

from lazysnap.errors import FormatError, LazySnapError, StateError
from lazysnap.ranks.world import World
from lazysnap.resolver import Entry, RestartPlan
from lazysnap.restore.snapshot import Snapshot
from lazysnap.restore.sources import Failure, Sources
from lazysnap.restore.targets import (
    Target,
    check_fits,
    is_empty_part,
    is_part,
    room_on_device,
    target_of,
    wanted_box,
)
from lazysnap.snapshots.assembly import Assembly
from lazysnap.snapshots.reads import Reads
from lazysnap.snapshots.tensors import Facts, facts_of, into
from lazysnap.state.codec import decode, tensor_names
from lazysnap.state.modules import saved_names
from lazysnap.state.sharding import box_of, like
from lazysnap.state.source import StateSource

State = dict[str, Any]
Made = dict[object, torch.Tensor]
"""Tensors that were made already, by what they share."""


class PartReader:
    """Reads what this rank wants of snapshots."""

    def __init__(self, source: StateSource, world: World, sources: Sources, *, casts: bool) -> None:
        """``casts``: see ``check_fits``."""
        self._source = source
        self._casts = casts
        self._world = world
        self._sources = sources

    def read(self, plan: RestartPlan, chosen: Mapping[int, Entry]) -> Snapshot | Failure:
        """Read this rank's part. ``chosen``: for each rank within reach where its shard is.

        Blocks. Raises: StateError, if the live objects and the snapshot do not fit each other, or if the program's own
        objects raise.
        """
        own, where = self._world.rank % plan.world_size, f"step {plan.step}"
        mine = self._sources.open(chosen[own])
        if isinstance(mine, Failure):
            return mine
        meta = mine.meta
        try:
            named = tensor_names(meta.state)
        except FormatError as error:
            return self._sources.refuse(chosen[own], error)
        expected, resizable, target = self._live_tensors(named)
        assembly = Assembly(own, lambda name, shape: wanted_box(target(name), shape))
        # Of a live tensor the shape is known; optimizer state may have another one than its parameter.
        live = set(saved_names(expected, named).values())
        assembly.want(name for name in named if name not in live or not is_empty_part(target(name)))
        facts: dict[str, Facts | None] = dict.fromkeys(named)
        added: list[int] = []

        def add(rank: int) -> Failure | None:
            shard = mine if rank == own else self._sources.open(chosen[rank])
            if isinstance(shard, Failure):
                return shard
            try:
                facts.update({name: facts_of(stored) for name, stored in assembly.add(shard).items()})
            except FormatError as error:
                return self._sources.refuse(chosen[rank], error)
            added.append(rank)
            return None

        # Each shard is opened by some rank: what is wanted by none would else be lost without a word.
        share = [rank for rank in range(self._world.rank, plan.world_size, self._world.size) if rank in chosen]
        for rank in (own, *(rank for rank in share if rank != own)):
            failure = add(rank)
            if failure is not None:
                return failure
        check_fits(facts, expected, where, casts=self._casts, resizable=resizable)
        order = nearest_first(chosen, *self._nearby(plan), meta.replicas or ())
        failure = complete(assembly, [rank for rank in order if rank not in added], add)
        if failure is not None:
            return failure
        check_fits(facts, expected, where, casts=self._casts, resizable=resizable)
        state = self._read_state(chosen[own], meta.state, partial(_room, assembly, target))
        if isinstance(state, Failure):
            return state
        return Snapshot(
            state,
            plan.step,
            plan.run_id,
            plan.start,
            level=max((chosen[rank] for rank in added), key=lambda entry: entry.speed).level,
            world_size=plan.world_size,
            parameters=meta.parameters,
            captured_ns=meta.captured_ns,
        )

    def _live_tensors(self, named: Iterable[str]) -> tuple[Mapping[str, torch.Tensor], Collection[str], Target]:
        """Return the live tensors by name, the names of those that may be resized, and what each name is to fill.

        Raises: StateError, if the program's own objects raise: no other snapshot would help.
        """
        try:
            expected = self._source.expected()
            resizable = self._source.resizable_names()
            target = target_of(self._source, expected, named)
        except StateError:
            raise
        except Exception as error:
            raise StateError(
                f"the program's objects cannot be asked for the tensors to restore: {error!r}. Nothing was loaded"
            ) from error
        return expected, resizable, target

    def _read_state(self, own: Entry, small: Any, room: Callable[[str, Made, Reads], torch.Tensor]) -> State | Failure:
        """Read all tensors, and put them in their places in the small state. ``room`` returns the tensor to read into.

        Blocks. Raises: StateError, for a value of a type that this process has not registered.
        """
        reads, made = Reads(), Made()
        try:
            tensors = {name: room(name, made, reads) for name in tensor_names(small)}
        except FormatError as error:
            return self._sources.refuse(own, error)
        for shard, wanted in reads.jobs().items():
            failure = self._sources.read(shard, wanted)
            if failure is not None:
                return failure
        try:
            state = decode(small, tensor=tensors.__getitem__)
        except StateError:  # an older snapshot would have the same
            raise
        except LazySnapError as error:
            return self._sources.refuse(own, error)
        if not isinstance(state, dict):
            return self._sources.refuse(own, f"the small state is {type(state).__name__}, expected a dict")
        return state

    def _nearby(self, plan: RestartPlan) -> tuple[int, list[int]]:
        """Return the rank of the snapshot whose part is most like this one's, and the ranks of its node."""
        rank, size = self._world.rank, self._world.size
        if plan.world_size != size:
            return rank * plan.world_size // size, []
        return rank, self._world.node_ranks


def _room(
    assembly: Assembly, target_of_name: Callable[[str], torch.Tensor | None], name: str, made: Made, reads: Reads
) -> torch.Tensor:
    """Return the tensor that ``reads`` will fill; tied ones once. Raises: FormatError.

    With a DTensor as its target it is one of the same placement; all others are whole.
    """
    target = target_of_name(name)
    if is_empty_part(target) and name not in assembly:
        return like(target, torch.empty(box_of(target)[1], dtype=target.dtype))
    tensor = assembly.tensor(name)
    key = tensor.key
    if key not in made:
        made[key] = room_on_device(tensor, target)
        reads.add(tensor, into(made[key]))
    room = made[key]
    return like(target, room) if is_part(target, tensor.shape) else room


def nearest_first(
    chosen: Mapping[int, Entry], near: int, of_node: Collection[int], replicas: Collection[int] = ()
) -> list[int]:
    """Return the ranks in the order in which their shards are opened: the likeliest to hold what is wanted come first.

    ``near``: the rank whose part is most like this one's; ``of_node``: ranks of the same node, which together hold one
    copy of what it has; ``replicas``: see ``CaptureMeta``.
    """

    def likely(rank: int) -> tuple[bool, bool, int, int, int]:
        entry = chosen[rank]
        return rank not in of_node, rank not in replicas, entry.speed, abs(rank - near), rank

    return sorted(chosen, key=likely)


def complete(assembly: Assembly, left: Iterable[int], add: Callable[[int], Failure | None]) -> Failure | None:
    """Open the shards that are ``left`` until nothing is missing; why that cannot be."""
    for rank in left:
        if not assembly.missing:
            return None
        failure = add(rank)
        if failure is not None:
            return failure
    if assembly.missing:
        return Failure(f"{next(iter(assembly.missing))}: a part of it is in no shard within reach")
    return None
