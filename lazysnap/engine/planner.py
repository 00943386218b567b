"""This rank's part of the state at a boundary, and the plan of its capture."""

import time
from dataclasses import replace

from rich.filesize import decimal
from torch.distributed.tensor import DTensor
from torch.nn import Parameter

from lazysnap.capture.plan import CapturePlan, Key, check_walk, lazy_keys, make_plan, optimizer_signature, storage_of
from lazysnap.engine.messages import Event, Messages
from lazysnap.ranks.partition import Partition, replicated_keys
from lazysnap.ranks.world import World
from lazysnap.state.sharding import local_of
from lazysnap.state.source import StateSource
from lazysnap.state.walk import StateWalker, Walk

_SLOW_S = 0.1


class Planner:
    """Part and plan are worked out anew when the structure of the state changed. Used on the training thread."""

    def __init__(self, source: StateSource, world: World, messages: Messages) -> None:
        self._source = source
        self._world = world
        self._messages = messages
        self._walker = StateWalker()
        self._partition: Partition | None = None
        self._lazy: set[Key] = set()
        self._has_dtensors: tuple[list[str], bool] = ([], False)
        """Names of tensors, and True if there are DTensors among them."""
        self._collected_slowly = False
        """True if collecting the state took long at the last capture."""
        self._encoded_slowly = False
        """True if encoding the small state took long at the last capture."""
        self.plan: CapturePlan | None = None
        self.parameters: dict[str, list[str]] | None = None
        """See ``names_of_parameters``."""

    def forget(self) -> None:
        """Drop the plan: the state that all ranks share has changed, or nothing is captured any more."""
        self._partition = None
        self.plan = None

    def replicated(self) -> list[Parameter]:
        """Parameters that are equal on all ranks."""
        return list(self._source.replicated_parameters())

    # ---------------------------------------------------------------- the state

    def collect(self) -> Walk:
        """Return the whole present state. Raises: StateError."""
        started = time.perf_counter()
        state = self._source.collect()
        seconds = time.perf_counter() - started
        # Not the first one alone: a framework may import or set up something there.
        if seconds > _SLOW_S and self._collected_slowly:
            self._messages.tell(Event.SLOW_STATE, ms=seconds * 1e3)
        self._collected_slowly = seconds > _SLOW_S
        started = time.perf_counter()
        walked = self._walker.walk(state)
        seconds = time.perf_counter() - started
        if seconds > _SLOW_S and self._encoded_slowly:
            self._messages.tell(Event.SLOW_ENCODING, ms=seconds * 1e3, size=decimal(len(walked.text)))
        self._encoded_slowly = seconds > _SLOW_S
        return walked

    def own_part(self, everything: Walk) -> Walk:
        """Return this rank's part of the state. With several ranks collective the first time."""
        if self._world.is_alone:
            return self._local(everything)
        if self._partition is None or not self._partition.holds_for(everything):
            check_walk(everything)
            replicated = replicated_keys(self.replicated(), self._source.optimizers())
            self._partition = self._world.agree_partition(everything, replicated)
            self._lazy = self._partition.lazy_keys(everything, lazy_keys(self._source))
        return self._partition.apply(everything)

    def _local(self, walked: Walk) -> Walk:
        """One rank alone holds all of every DTensor (a mesh of one)."""
        if walked.names is not self._has_dtensors[0]:
            self._has_dtensors = walked.names, any(isinstance(tensor, DTensor) for tensor in walked.tensors)
        return replace(walked, tensors=list(map(local_of, walked.tensors))) if self._has_dtensors[1] else walked

    # ---------------------------------------------------------------- plans

    def for_capture(self, walked: Walk, everything: Walk) -> CapturePlan:
        """Return the plan for a capture of ``walked``, this rank's part. Raises: StateError."""
        if self.plan is not None:
            cause = self.plan.mismatch(walked, optimizer_signature(self._source))
            if cause is None:
                return self.plan
            # Loading a checkpoint does this, too: nothing is lost, and the next step is captured as any other.
            self._messages.tell(Event.REPLANNED, cause=cause)
        check_walk(everything)
        self.parameters = names_of_parameters(self._source, everything, self._messages)
        self.plan = self._make(walked)
        return self.plan

    def _make(self, walked: Walk) -> CapturePlan:
        partition = self._partition
        if partition is None:
            return make_plan(walked, self._source)
        plan = make_plan(walked, self._source, lazy=self._lazy, tied=partition.aliases)
        for name, facts in partition.facts.items():
            logical = {**plan.logical.get(name, {}), **facts}
            if name in partition.shared_rows:
                logical["shared_rows"] = list(partition.shared_rows[name])
            if name in partition.nodes:
                logical["nodes"] = partition.nodes[name]
            plan.logical[name] = logical
        return replace(plan, replicas=partition.replicas)


def names_of_parameters(source: StateSource, everything: Walk, messages: Messages) -> dict[str, list[str]] | None:
    """Return the names of each optimizer's parameters, in its order, by the optimizer's path in the state.

    An optimizer's own state knows parameters by number alone.

    Optimizers of which one parameter has no name are left out. Warns of parameters whose values are in no part of the
    state.
    """
    names, optimizers = source.parameter_names(), source.optimizer_parameters()
    found = {path: [names.get(id(one), "") for one in parameters] for path, parameters in optimizers.items()}
    known = {path: listed for path, listed in found.items() if all(listed)} or None
    if all(all(listed) for listed in found.values()):
        return known
    held = {storage_of(tensor) for tensor in everything.tensors}
    for path, listed in found.items():
        pairs = zip(listed, optimizers[path], strict=True)
        lost = sum(not name and one.numel() > 0 and storage_of(one) not in held for name, one in pairs)
        if lost:
            messages.tell(Event.VALUES_MISSING, count=lost, path=path)
    return known
