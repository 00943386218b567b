"""Collects the state of this rank at a boundary from the live objects, and plans its capture."""

import logging
import time
from dataclasses import replace

from torch.distributed.tensor import DTensor

from lazysnap.capture.plan import (
    CapturePlan,
    Key,
    check_walk,
    frozen_keys,
    lazy_keys,
    make_plan,
    optimizer_signature,
    storage_of,
)
from lazysnap.engine.messages import MessageKind, Messages
from lazysnap.ranks.partition import Partition, replicated_keys
from lazysnap.ranks.world import World
from lazysnap.state.sharding import local_of
from lazysnap.state.source import StateSource
from lazysnap.state.walk import StateWalker, Walk

logger = logging.getLogger(__name__)

_SLOW_S = 0.1


class LocalState:
    """Collects the state, selects the part that this rank captures, and plans it. Used on the training thread.

    Keeps the last walk, to compare the next one with, the partition that all ranks agreed on, and the last plan.
    """

    def __init__(self, source: StateSource, world: World, messages: Messages) -> None:
        self._source = source
        self._world = world
        self._messages = messages
        self._walker = StateWalker()
        self.plan: CapturePlan | None = None
        """The plan of the last capture. It is valid as long as the structure of the state stays the same."""
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

    def forget_plan(self) -> None:
        """Compute plan and part of this rank again at the next capture, within the agreement of the first one."""
        self.plan = None
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

    def plan_for(self, part: Walk, everything: Walk) -> CapturePlan:
        """Return the plan for a capture of ``part``: the last plan, unless the structure of the state changed.

        Raises: StateError.
        """
        if self.plan is not None:
            cause = self.plan.mismatch(part, optimizer_signature(self._source))
            if cause is None:
                return self.plan
            # Loading a checkpoint causes this, too. Nothing is lost.
            logger.info("the capture plan is made again: %s", cause)
        check_walk(everything)
        self.plan = replace(self._make_plan(part), parameters=self._names_of_parameters(everything))
        return self.plan

    def _make_plan(self, part: Walk) -> CapturePlan:
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

    def _names_of_parameters(self, everything: Walk) -> dict[str, list[str]] | None:
        """Return ``CapturePlan.parameters``: an optimizer's own state only has numbers for parameters.

        Optimizers of which one parameter has no name are skipped. Warns of parameters whose values are in no part of
        the state.
        """
        names = self._source.parameter_names()
        optimizers = self._source.optimizer_parameters()
        listed = {}
        for path, parameters in optimizers.items():
            listed[path] = [names.get(id(parameter), "") for parameter in parameters]
        complete = {path: listed_names for path, listed_names in listed.items() if all(listed_names)}
        if len(complete) < len(listed):
            captured = {storage_of(tensor) for tensor in everything.tensors}
            for path, listed_names in listed.items():
                num_missing = 0
                for name, parameter in zip(listed_names, optimizers[path], strict=True):
                    if not name and parameter.numel() > 0 and storage_of(parameter) not in captured:
                        num_missing += 1
                if num_missing:
                    self._messages.tell(MessageKind.VALUES_MISSING, count=num_missing, path=path)
        return complete or None
