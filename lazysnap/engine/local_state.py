"""Collects the state of this rank at a boundary from the live objects."""

import time
from dataclasses import replace

from torch.distributed.tensor import DTensor

from lazysnap.capture.plan import CapturePlan, Key, check_walk, frozen_keys, lazy_keys, make_plan
from lazysnap.engine.messages import MessageKind, Messages
from lazysnap.ranks.partition import Partition, replicated_keys
from lazysnap.ranks.world import World
from lazysnap.state.sharding import local_of
from lazysnap.state.source import StateSource
from lazysnap.state.walk import StateWalker, Walk

_SLOW_S = 0.1


class LocalState:
    """Collects the state, and selects the part that this rank captures. Used on the training thread.

    Keeps the last walk, to compare the next one with, and the partition that all ranks agreed on.
    """

    def __init__(self, source: StateSource, world: World, messages: Messages) -> None:
        self._source = source
        self._world = world
        self._messages = messages
        self._walker = StateWalker()
        self._partition: Partition | None = None
        """Invariant: ``None`` if there is only one rank, which captures everything."""
        self._lazy: set[Key] = set()
        """Memory that changes only after the gate, as in the partition."""
        self._frozen: set[Key] = set()
        """Memory of parameters without gradient, as in the partition."""
        self._names_looked_at: list[str] = []
        """Names of the tensors that were searched for DTensors."""
        self._has_dtensors = False
        """True if some of them were DTensors."""
        self._was_slow = False
        """True if collecting the state was slow at the last capture."""

    def forget_partition(self) -> None:
        """Compute this rank's part again at the next capture, within the agreement of the first one."""
        self._partition = None

    def collect(self) -> Walk:
        """Return the whole current state. Raises: StateError."""
        started = time.perf_counter()
        state = self._source.collect()
        collected = time.perf_counter()
        everything = self._walker.walk(state)
        encoded = time.perf_counter()
        is_slow = encoded - started > _SLOW_S
        # Not only the first one: a framework may import or set up something in it.
        if is_slow and self._was_slow:
            ms = (encoded - started) * 1e3
            self._messages.tell(MessageKind.SLOW_STATE, ms=ms, encoding_ms=(encoded - collected) * 1e3)
        self._was_slow = is_slow
        return everything

    def part_of(self, everything: Walk) -> Walk:
        """Return the part of the state that this rank captures. The first call is collective with several ranks."""
        if self._world.is_alone:
            return self._without_meshes(everything)
        if self._partition is None or not self._partition.holds_for(everything):
            check_walk(everything)
            parameters = list(self._source.replicated_parameters())
            replicated = replicated_keys(parameters, self._source.optimizers())
            self._partition = self._world.agree_partition(everything, replicated)
            self._lazy = self._partition.keys_of_parts(everything, lazy_keys(self._source))
            self._frozen = self._partition.keys_of_parts(everything, frozen_keys(self._source))
        return self._partition.apply(everything)

    def _without_meshes(self, everything: Walk) -> Walk:
        """A single rank holds every DTensor completely."""
        if everything.names is not self._names_looked_at:
            self._names_looked_at = everything.names
            self._has_dtensors = any(isinstance(tensor, DTensor) for tensor in everything.tensors)
        if not self._has_dtensors:
            return everything
        return replace(everything, tensors=list(map(local_of, everything.tensors)))

    def make_plan(self, part: Walk) -> CapturePlan:
        """Return a new plan for captures of ``part``. Raises: StateError."""
        partition = self._partition
        if partition is None:
            return make_plan(part, self._source)
        plan = make_plan(part, self._source, lazy=self._lazy, frozen=self._frozen, tied=partition.aliases)
        for name, facts in partition.facts.items():
            logical = {**plan.logical.get(name, {}), **facts}
            if name in partition.shared_rows:
                logical["shared_rows"] = list(partition.shared_rows[name])
            if name in partition.nodes:
                logical["nodes"] = partition.nodes[name]
            plan.logical[name] = logical
        return replace(plan, replicas=partition.replicas)
