"""One rank's part of one snapshot: shards are opened until no tensor of the part is missing, then it is read."""

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from operator import attrgetter
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
    other_objects,
    room_on_device,
    target_of,
    wanted_box,
)
from lazysnap.snapshots.assembly import Assembly
from lazysnap.snapshots.reads import Reads
from lazysnap.snapshots.tensors import Facts, facts_of, into
from lazysnap.state.codec import DecoderError, decode, tensor_names
from lazysnap.state.modules import saved_names
from lazysnap.state.sharding import box_of, like
from lazysnap.state.source import StateSource

State = dict[str, Any]
Made = dict[object, torch.Tensor]
"""Tensors that were made already, by what they share."""


class PartReader:
    """Reads the part of a snapshot that this rank needs."""

    def __init__(self, source: StateSource, world: World, sources: Sources, *, casts: bool) -> None:
        """``casts``: see ``check_fits``."""
        self._source = source
        self._casts = casts
        self._world = world
        self._sources = sources

    def read(self, plan: RestartPlan, chosen: Mapping[int, Entry]) -> Snapshot | Failure:
        """Read this rank's part. ``chosen``: the source of each rank's shard, of ranks within reach.

        Blocks. Raises: StateError, if the live objects and the snapshot do not fit each other, or if the program's own
        objects raise.
        """
        own_rank = self._world.rank % plan.world_size
        where = f"step {plan.step}"
        own_shard = self._sources.open(chosen[own_rank])
        if isinstance(own_shard, Failure):
            return own_shard
        meta = own_shard.meta
        try:
            named = tensor_names(meta.state)
        except FormatError as error:
            return self._sources.refuse(chosen[own_rank], error)
        expected, resizable, target, is_of_other = self._live_tensors(named)
        assembly = Assembly(own_rank, lambda name, shape: wanted_box(target(name), shape))
        # Of a live tensor the shape is known; optimizer state may have another one than its parameter.
        live = set(saved_names(expected, named).values())
        assembly.request(name for name in named if name not in live or not is_empty_part(target(name)))
        facts: dict[str, Facts | None] = {name: None for name in named if not is_of_other(name)}
        added: list[int] = []

        def add(rank: int) -> Failure | None:
            shard = self._sources.open(chosen[rank])
            if isinstance(shard, Failure):
                return shard
            try:
                for name, stored in assembly.add(shard).items():
                    found = facts_of(stored)
                    if not is_of_other(name):
                        facts[name] = found
            except FormatError as error:
                return self._sources.refuse(chosen[rank], error)
            added.append(rank)
            return None

        # Each shard is opened by some rank: otherwise nobody would notice a tensor that no rank needs.
        share = [own_rank]
        for rank in range(self._world.rank, plan.world_size, self._world.size):
            if rank in chosen and rank != own_rank:
                share.append(rank)
        for rank in share:
            failure = add(rank)
            if failure is not None:
                return failure
        check_fits(facts, expected, where, casts=self._casts, resizable=resizable)
        order = nearest_first(chosen, *self._neighbours(plan), meta.replicas or ())
        failure = complete(assembly, [rank for rank in order if rank not in added], add)
        if failure is not None:
            return failure
        check_fits(facts, expected, where, casts=self._casts, resizable=resizable)
        state = self._read_state(chosen[own_rank], meta.state, partial(_room, assembly, target))
        if isinstance(state, Failure):
            return state
        farthest = max((chosen[rank] for rank in added), key=attrgetter("distance"))
        return Snapshot(
            state,
            plan.step,
            plan.run_id,
            plan.start,
            level=farthest.level,
            world_size=plan.world_size,
            parameters=meta.parameters,
            captured_ns=meta.captured_ns,
        )

    def _live_tensors(
        self, named: Iterable[str]
    ) -> tuple[Mapping[str, torch.Tensor], Collection[str], Target, Callable[[str], bool]]:
        """Return the live tensors by name, the names of those that may be resized, the target of each name, and
        whether a name is of another object.

        Raises: StateError, if the program's own objects raise: no other snapshot would help.
        """
        try:
            expected = self._source.expected()
            resizable = self._source.resizable_names()
            target = target_of(self._source, expected, named)
            is_of_other = other_objects(self._source, expected)
        except StateError:
            raise
        except Exception as error:
            raise StateError(
                f"the program's objects cannot be asked for the tensors to restore: {error!r}. Nothing was loaded"
            ) from error
        return expected, resizable, target, is_of_other

    def _read_state(
        self, entry: Entry, small: Any, room: Callable[[str, Made, Reads], torch.Tensor]
    ) -> State | Failure:
        """Read all tensors, and put them in their places in the small state.

        Blocks. Raises: StateError, for a value of a type that this process has not registered.

        Args:
            entry: the shard that has the small state.
            small: the small state, encoded.
            room: returns the tensor to read into.
        """
        reads = Reads()
        made = Made()
        tensors = {}
        try:
            for name in tensor_names(small):
                tensors[name] = room(name, made, reads)
        except FormatError as error:
            return self._sources.refuse(entry, error)
        for shard, pieces in reads.jobs().items():
            failure = self._sources.read(shard, pieces)
            if failure is not None:
                return failure
        try:
            state = decode(small, tensor=tensors.__getitem__)
        except StateError:  # an older snapshot would have the same
            raise
        except DecoderError as error:  # another source would have the same
            return Failure(str(error), is_of_decoder=True)
        except LazySnapError as error:
            return self._sources.refuse(entry, error)
        if not isinstance(state, dict):
            return self._sources.refuse(entry, f"the small state is {type(state).__name__}, expected a dict")
        return state

    def _neighbours(self, plan: RestartPlan) -> tuple[int, list[int]]:
        """Return the rank of the snapshot whose part is most like this one's, and the ranks of its node."""
        if plan.world_size != self._world.size:
            return self._world.rank * plan.world_size // self._world.size, []
        return self._world.rank, self._world.node_ranks


def _room(
    assembly: Assembly, target_of_name: Callable[[str], torch.Tensor | None], name: str, made: Made, reads: Reads
) -> torch.Tensor:
    """Return the tensor that ``reads`` will fill; the same one for tied names. Raises: FormatError.

    For a DTensor it is a DTensor of the same placement, for any other target the whole tensor.
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
    if is_part(target, tensor.shape):
        return like(target, room)
    return room


def nearest_first(
    chosen: Mapping[int, Entry], nearest: int, node_ranks: Collection[int], replicas: Collection[int] = ()
) -> list[int]:
    """Return the ranks in the order in which their shards are opened: those likeliest to have missing parts come first.

    Args:
        chosen: the source of each rank's shard.
        nearest: the rank whose part is most like this one's.
        node_ranks: the ranks of its node, which together hold one copy of its part.
        replicas: see ``CaptureMeta``.
    """

    def unlikeliness(rank: int) -> tuple[bool, bool, int, int, int]:
        entry = chosen[rank]
        return rank not in node_ranks, rank not in replicas, entry.distance, abs(rank - nearest), rank

    return sorted(chosen, key=unlikeliness)


def complete(assembly: Assembly, ranks: Iterable[int], add: Callable[[int], Failure | None]) -> Failure | None:
    """Open the shards of ``ranks`` until nothing is missing. Return why something stays missing, if it does."""
    for rank in ranks:
        if not assembly.missing:
            return None
        failure = add(rank)
        if failure is not None:
            return failure
    if assembly.missing:
        return Failure(f"{next(iter(assembly.missing))}: a part of it is in no shard within reach")
    return None
