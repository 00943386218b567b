"""Reads one rank's part of one snapshot: opens shards until no tensor is missing, then reads."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from lazysnap.errors import FormatError, LazySnapError, StateError
from lazysnap.ranks.world import World
from lazysnap.resolver import MEMORY, Entry, RestartPlan
from lazysnap.restore.snapshot import Snapshot
from lazysnap.restore.sources import Failure, Sources
from lazysnap.restore.targets import LiveTensors, is_empty_part, is_part, room_on_device
from lazysnap.snapshots.assembly import Assembly
from lazysnap.snapshots.reads import Reads
from lazysnap.snapshots.tensors import into
from lazysnap.state.codec import DecoderError, decode, tensor_names
from lazysnap.state.sharding import box_of, like
from lazysnap.state.source import StateSource

State = dict[str, Any]
Made = dict[object, torch.Tensor]
"""Tensors that exist already, by the storage that they share."""


class PartReader:
    """Reads the part of a snapshot that this rank needs."""

    def __init__(self, state_source: StateSource, world: World, sources: Sources, *, casts: bool) -> None:
        """``casts``: see ``check_fits``."""
        self._state_source = state_source
        self._casts = casts
        self._world = world
        self._sources = sources

    def read(self, plan: RestartPlan, chosen: Mapping[int, Entry]) -> Snapshot | Failure:
        """Read this rank's part. ``chosen``: the source of each reachable rank's shard.

        Blocks. Raises: StateError, if the live objects and the snapshot do not fit each other, or if the program's own
        objects raise.
        """
        own_rank = self._world.rank % plan.world_size
        own_shard = self._sources.open(chosen[own_rank])
        if isinstance(own_shard, Failure):
            return own_shard
        meta = own_shard.meta
        try:
            names = tensor_names(meta.state)
        except FormatError as error:
            return self._sources.refuse(chosen[own_rank], error)
        live = LiveTensors(self._state_source, names, f"step {plan.step}", casts=self._casts)
        assembly = Assembly(own_rank, live.wanted_box)
        assembly.request(filter(live.is_wanted, names))
        order = nearest_first(chosen, *self._neighbours(plan), meta.replicas or ())
        opened = self._open_shards(chosen, self._share_of(plan, chosen), order, live, assembly)
        if isinstance(opened, Failure):
            return opened
        state = self._read_state(chosen[own_rank], meta.state, partial(_room, assembly, live.target))
        if isinstance(state, Failure):
            return state
        farthest = max((chosen[rank] for rank in opened), key=attrgetter("distance"))
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

    def _share_of(self, plan: RestartPlan, chosen: Mapping[int, Entry]) -> list[int]:
        """Return the ranks whose shards this rank always opens: first the one whose state it takes.

        Some rank must open each shard: otherwise a tensor that no rank needs would not be noticed.
        """
        share = [self._world.rank % plan.world_size]
        for rank in range(self._world.rank, plan.world_size, self._world.size):
            if rank in chosen and rank not in share:
                share.append(rank)
        return share

    def _open_shards(
        self,
        chosen: Mapping[int, Entry],
        share: Sequence[int],
        order: Sequence[int],
        live: LiveTensors,
        assembly: Assembly,
    ) -> list[int] | Failure:
        """Open the shards of ``share``, then others in order until nothing is missing. Return the opened ones.

        Blocks. Raises: StateError, as soon as the snapshot turns out not to fit the live objects.
        """
        opened: list[int] = []

        def add(rank: int) -> Failure | None:
            shard = self._sources.open(chosen[rank])
            if isinstance(shard, Failure):
                return shard
            try:
                live.note(assembly.add(shard))
            except FormatError as error:
                return self._sources.refuse(chosen[rank], error)
            opened.append(rank)
            return None

        for rank in share:
            failure = add(rank)
            if failure is not None:
                return failure
        live.check_fits()
        failure = complete(assembly, [rank for rank in order if rank not in opened], add)
        if failure is not None:
            return failure
        live.check_fits()
        return opened

    def _read_state(
        self, entry: Entry, small: Any, room: Callable[[str, Made, Reads], torch.Tensor]
    ) -> State | Failure:
        """Read all tensors, and insert them into the small state.

        Blocks. Raises: StateError, for a value of a type that this process has not registered.

        Args:
            entry: the shard with the small state.
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
        except DecoderError as error:
            # Bytes in memory may have no checksums yet, and may be damaged. All others are verified.
            if entry.level == MEMORY:
                return self._sources.refuse(entry, error)
            return Failure(str(error), is_of_decoder=True)
        except LazySnapError as error:
            return self._sources.refuse(entry, error)
        if not isinstance(state, dict):
            return self._sources.refuse(entry, f"the small state is {type(state).__name__}, expected a dict")
        return state

    def _neighbours(self, plan: RestartPlan) -> tuple[int, list[int]]:
        """Return the rank of the snapshot whose part is most similar to this one's, and the ranks of its node."""
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
    """Return the ranks in the order in which their shards are opened: those likely to have missing parts first.

    Args:
        chosen: the source of each rank's shard.
        nearest: the rank whose part is most similar to this one's.
        node_ranks: the ranks of its node, which together hold one copy of its part.
        replicas: see ``CaptureMeta``.
    """

    def unlikeliness(rank: int) -> tuple[bool, bool, int, int, int]:
        entry = chosen[rank]
        return rank not in node_ranks, rank not in replicas, entry.distance, abs(rank - nearest), rank

    return sorted(chosen, key=unlikeliness)


def complete(assembly: Assembly, ranks: Iterable[int], add: Callable[[int], Failure | None]) -> Failure | None:
    """Open the shards of ``ranks`` until nothing is missing. Return the reason if something stays missing."""
    for rank in ranks:
        if not assembly.missing:
            return None
        failure = add(rank)
        if failure is not None:
            return failure
    if assembly.missing:
        return Failure(f"{next(iter(assembly.missing))}: a part of it is in no shard within reach")
    return None
