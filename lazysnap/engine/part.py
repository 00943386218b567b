"""One rank's part of one snapshot: shards are opened until nothing that it wants is missing, then it is read."""

from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any

import torch

from lazysnap.engine.assembly import Assembly, OpenShard, is_empty_part, wanted_box
from lazysnap.engine.holders import Holders, fill
from lazysnap.engine.shards import ShardOpener
from lazysnap.engine.world import World
from lazysnap.errors import ShardCorrupt, StateMismatch
from lazysnap.resolver import Entry, RestartPlan
from lazysnap.shard.manifest import CaptureMeta
from lazysnap.state.codec import tensor_names
from lazysnap.state.sharding import owner_of
from lazysnap.state.source import StateSource

_SHOWN = 5

Target = Callable[[str], "torch.Tensor | None"]


class BadShard(ShardCorrupt):
    """A source of one shard that turned out to be no good."""

    def __init__(self, entry: Entry, error: Exception) -> None:
        super().__init__(str(error))
        self.entry = entry


class PartReader:
    """Reads what this rank wants of snapshots."""

    def __init__(self, source: StateSource, world: World, opener: ShardOpener) -> None:
        self._source = source
        self._world = world
        self._opener = opener

    def read(self, plan: RestartPlan, chosen: Mapping[int, Entry]) -> tuple[dict[str, Any], list[str]]:
        """The state, and the levels that were read. ``chosen``: of the ranks within reach where each shard is.

        Blocks. Raises: BadShard; ShardCorrupt, if a part is nowhere; StateMismatch.
        """
        own = self._world.rank % plan.world_size
        expected = self._source.expected()
        target = target_of(self._source, expected)
        assembly = Assembly(own, lambda name, shape: wanted_box(target(name), shape))
        holders = Holders(chosen, *self._nearby(plan), partial(self._owner, plan, target))
        levels = set()

        def add(rank: int) -> CaptureMeta:
            shards = self._open(plan, chosen[rank])
            for shard in shards:
                assembly.add(shard)
            levels.add(chosen[rank].level)
            return shards[0].meta

        meta = add(own)
        holders.take(own)
        named = tensor_names(meta.state)
        assembly.want(name for name in named if not is_empty_part(target(name)))
        # Each shard is opened by some rank: what is wanted by none would else be lost without a word.
        for rank in range(self._world.rank, plan.world_size, self._world.size):
            if rank != own and rank in chosen:
                add(rank)
                holders.take(rank)
        where = f"step {plan.step}"
        check_facts(assembly, named, expected, where)
        fill(assembly, holders, add, where)
        check_facts(assembly, named, expected, where)
        return assembly.state(meta, target), sorted(levels)

    def _nearby(self, plan: RestartPlan) -> tuple[int, list[int]]:
        """The rank of the snapshot whose part is most like this one's, and those of its node."""
        rank, size = self._world.rank, self._world.size
        if plan.world_size != size:
            return rank * plan.world_size // size, []
        return rank, [place.rank for place in self._world.places if place.node == self._world.place.node]

    def _owner(self, plan: RestartPlan, target: Target, name: str) -> int | None:
        return owner_of(target(name), name) if plan.world_size == self._world.size else None

    def _open(self, plan: RestartPlan, entry: Entry) -> list[OpenShard]:
        """A shard, and the immutable tensors that it refers to."""
        try:
            opened = self._opener.open(entry, lambda error: BadShard(entry, error))
            if opened.meta.frozen is None:
                return [opened]
            return [opened, self._opener.open_frozen(opened.meta.frozen, plan, entry.rank)]
        except BadShard:
            raise
        except Exception as error:
            raise BadShard(entry, error) from error


def target_of(source: StateSource, expected: Mapping[str, torch.Tensor]) -> Target:
    """The live tensor that a name of the state is to fill: a parameter, or for optimizer state its parameter."""
    prefixes = [(f"{path}.state.", parameters) for path, parameters in source.optimizer_parameters().items()]

    def target(name: str) -> torch.Tensor | None:
        if name in expected:
            return expected[name]
        for prefix, parameters in prefixes:
            number = name.removeprefix(prefix).split(".", 1)[0]
            if name.startswith(prefix) and number.isdecimal() and int(number) < len(parameters):
                return parameters[int(number)]
        return None

    return target


def check_facts(assembly: Assembly, named: Collection[str], expected: Mapping[str, torch.Tensor], where: str) -> None:
    """Compare a snapshot, whose small state names ``named``, with the live model, as far as its shards are open.

    Raises: StateMismatch, naming the first tensors that differ.
    """
    facts = assembly.facts()
    held = {*named, *facts}
    differences = []
    for name, tensor in expected.items():
        if name not in held:
            differences.append(f"{name}: not in the snapshot")
        elif name in facts and facts[name] != (tensor.dtype, tuple(tensor.shape)):
            dtype, shape = facts[name]
            differences.append(f"{name}: {dtype} {list(shape)} there, {tensor.dtype} {list(tensor.shape)} here")
    prefixes = tuple({name.split(".", 1)[0] + "." for name in expected})
    beyond = (name for name in dict.fromkeys([*facts, *named]) if name.startswith(prefixes) and name not in expected)
    differences += [f"{name}: not in the model" for name in beyond]
    if differences:
        more = f" and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        raise StateMismatch(
            f"{where} is of another model: {'; '.join(differences[:_SHOWN])}{more}. Nothing was loaded. Use the model "
            'it was taken from, another directory, or start fresh without "latest"'
        )
