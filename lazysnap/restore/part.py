"""One rank's part of one snapshot: shards are opened until nothing that it wants is missing, then it is read."""

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from lazysnap.errors import LazySnapError, ShardCorrupt, StateMismatch
from lazysnap.ranks.world import World
from lazysnap.resolver import Entry, RestartPlan
from lazysnap.restore.assembly import Assembly, is_empty_part, wanted_box
from lazysnap.restore.shards import BadFrozen, BadShard, ShardOpener
from lazysnap.snapshots.reader import OpenShard
from lazysnap.snapshots.tensors import Facts
from lazysnap.state.codec import tensor_names
from lazysnap.state.modules import check_loadable, held_names, is_uninitialised
from lazysnap.state.source import StateSource

Target = Callable[[str], "torch.Tensor | None"]

_SHOWN = 5
"""Tensors that an error names."""


@dataclass(frozen=True)
class Part:
    """The tensors and state that were read."""

    state: dict[str, Any]
    levels: list[str]
    """That were read from."""
    parameters: dict[str, list[str]] | None
    """See ``Snapshot``."""
    captured_ns: int


class PartReader:
    """Reads what this rank wants of snapshots."""

    def __init__(self, source: StateSource, world: World, opener: ShardOpener, *, casts: bool = False) -> None:
        """``casts``: see ``check_fits``."""
        self._source = source
        self._casts = casts
        self._world = world
        self._opener = opener

    def read(self, plan: RestartPlan, chosen: Mapping[int, Entry]) -> Part:
        """``chosen``: of the ranks within reach where each shard is.

        Blocks. Raises: BadShard; ShardCorrupt, if a part is nowhere; StateMismatch.
        """
        own = self._world.rank % plan.world_size
        expected = self._source.expected()
        where = f"step {plan.step}"
        mine = self._open(plan, chosen[own])
        meta = mine[0].meta
        try:
            named = tensor_names(meta.state)
        except ShardCorrupt as error:
            raise BadShard(chosen[own], error) from error
        target = target_of(self._source, expected, named)
        assembly = Assembly(own, lambda name, shape: wanted_box(target(name), shape), read=self._opener.read)
        left = nearest_first(chosen, *self._nearby(plan), meta.replicas or ())
        levels = set()

        def add(rank: int) -> None:
            self._add(assembly, mine if rank == own else self._open(plan, chosen[rank]), chosen[rank])
            levels.add(chosen[rank].level)
            left.remove(rank)

        add(own)
        # Of a live tensor the shape is known; optimizer state may have another one than its parameter.
        live = set(held_names(expected, named).values())
        assembly.want(name for name in named if name not in live or not is_empty_part(target(name)))
        # Each shard is opened by some rank: what is wanted by none would else be lost without a word.
        for rank in range(self._world.rank, plan.world_size, self._world.size):
            if rank != own and rank in chosen:
                add(rank)
        check_fits(dict.fromkeys(named) | assembly.facts(), expected, where, casts=self._casts)
        complete(assembly, left, add, where)
        check_fits(dict.fromkeys(named) | assembly.facts(), expected, where, casts=self._casts)
        try:
            return Part(assembly.state(meta, target), sorted(levels), meta.parameters, meta.captured_ns)
        except (BadShard, BadFrozen):
            raise
        except LazySnapError as error:
            raise BadShard(chosen[own], error) from error

    @staticmethod
    def _add(assembly: Assembly, shards: Iterable[OpenShard], entry: Entry) -> None:
        try:
            for shard in shards:
                assembly.add(shard)
        except ShardCorrupt as error:
            raise BadShard(entry, error) from error

    def _nearby(self, plan: RestartPlan) -> tuple[int, list[int]]:
        """The rank of the snapshot whose part is most like this one's, and those of its node."""
        rank, size = self._world.rank, self._world.size
        if plan.world_size != size:
            return rank * plan.world_size // size, []
        return rank, self._world.node_ranks

    def _open(self, plan: RestartPlan, entry: Entry) -> list[OpenShard]:
        """A shard, and the frozen tensors that it refers to."""
        opened = self._opener.open(entry)
        if opened.meta.frozen is None:
            return [opened]
        try:
            return [opened, self._opener.open_frozen(opened.meta.frozen, plan, entry.rank)]
        except ShardCorrupt as error:
            raise BadShard(entry, error) from error


def nearest_first(
    chosen: Mapping[int, Entry], near: int, neighbours: Collection[int], replicas: Collection[int] = ()
) -> list[int]:
    """The ranks in the order in which their shards are opened: the likeliest to hold what is wanted come first.

    ``near``: whose part is most like this rank's; ``neighbours``: ranks of the same node, which hold what it has once;
    ``replicas``: see ``CaptureMeta``.
    """

    def likely(rank: int) -> tuple[bool, bool, int, int, int]:
        entry = chosen[rank]
        return rank not in neighbours, rank not in replicas, entry.speed, abs(rank - near), rank

    return sorted(chosen, key=likely)


def complete(assembly: Assembly, left: Iterable[int], add: Callable[[int], object], where: str) -> None:
    """Open the shards that are ``left`` until nothing is missing. Raises: ShardCorrupt, if something is in none."""
    for rank in list(left):
        if not assembly.missing:
            return
        add(rank)
    if assembly.missing:
        raise ShardCorrupt(f"{where}: {next(iter(assembly.missing))}: a part of it is in no shard within reach")


def target_of(source: StateSource, expected: Mapping[str, torch.Tensor], held: Iterable[str]) -> Target:
    """The live tensor that a name of the state is to fill: a parameter, or for optimizer state its parameter."""
    live = {there: expected[name] for name, there in held_names(expected, held).items()}
    prefixes = [(f"{path}.state.", parameters) for path, parameters in source.optimizer_parameters().items()]

    def target(name: str) -> torch.Tensor | None:
        if name in live:
            return live[name]
        for prefix, parameters in prefixes:
            number = name.removeprefix(prefix).split(".", 1)[0]
            if name.startswith(prefix) and number.isdecimal() and int(number) < len(parameters):
                return parameters[int(number)]
        return None

    return target


def check_fits(
    held: Mapping[str, Facts | None], expected: Mapping[str, torch.Tensor], where: str, *, casts: bool = False
) -> None:
    """Compare a snapshot with the live model. Raises: StateMismatch, naming the first tensors that differ.

    ``held``: every tensor of the snapshot, ``None`` where its facts are not known yet. ``casts``: one floating dtype
    may stand for another, since loading converts the values.
    """
    check_loadable(expected, where)
    names = held_names(expected, held)
    differences = []
    for name, tensor in expected.items():
        if name not in names:
            differences.append(f"{name}: not in the snapshot")
            continue
        facts = held[names[name]]
        if facts is None or is_uninitialised(tensor):
            continue
        dtype, shape = facts
        is_cast = casts and dtype.is_floating_point and tensor.is_floating_point()
        if (dtype != tensor.dtype and not is_cast) or shape != tuple(tensor.shape):
            differences.append(f"{name}: {dtype} {list(shape)} there, {tensor.dtype} {list(tensor.shape)} here")
    prefixes = tuple({name.split(".", 1)[0] + "." for name in expected})
    known = set(names.values())
    differences += [f"{name}: not in the model" for name in held if name.startswith(prefixes) and name not in known]
    if differences:
        more = f" and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        raise StateMismatch(
            f"{where} is of another model: {'; '.join(differences[:_SHOWN])}{more}. Nothing was loaded. Use the model "
            'it was taken from, another directory, or start fresh without "latest"'
        )
