"""The ranks of one training, and their exchanges when planning and resuming, never per snapshot.

They run on a gloo group of its own, in host memory, so that nothing of it meets the training's collectives; what is
exchanged is JSON (``torch.distributed``'s object collectives would unpickle what arrives). Every exchange has a
deadline.
"""

import datetime
import json
import logging
import os
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from lazysnap.capture.plan import Key
from lazysnap.errors import WaitTimeout
from lazysnap.ranks.partition import Partition
from lazysnap.state.walk import Walk
from lazysnap.topology import Place, places

logger = logging.getLogger("lazysnap.engine")

_BEAT_S = 2.0


def node_name() -> str:
    """Names this machine: ranks with equal names share memory. Containers on one host have names of their own."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:
        boot = ""
    # Abstract sockets belong to a network namespace: that is what decides who reaches whose keeper.
    try:
        space = os.readlink("/proc/self/ns/net")
    except OSError:
        space = ""
    return f"{socket.gethostname()}/{boot}/{space}"


class World:
    """All ranks of this training, or this process alone if ``torch.distributed`` is not initialised."""

    def __init__(self, timeout_s: float = 60.0) -> None:
        """Collective if there are several ranks: all of them make it at the same point. Blocks.

        Raises: WaitTimeout, if one of them is missing.
        """
        self._timeout = datetime.timedelta(seconds=timeout_s)
        is_many = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if is_many else 0
        self.size = dist.get_world_size() if is_many else 1
        self._group: Any = self._meet() if is_many else None
        self._shares: tuple[bool, bool] | None = None
        self._untrained: frozenset[str] | None = None
        self._lost: WaitTimeout | None = None
        self.runs_ahead = False
        """True if some rank trains on a device, whose host runs ahead of it. See ``compare_devices``."""
        self.exchanges = 0
        """Collectives so far; a test sees to it that snapshots need none."""

    def _meet(self) -> Any:
        try:
            return dist.new_group(backend="gloo", timeout=self._timeout)
        except RuntimeError as error:
            raise self._missing("making the engine", error) from error

    def _missing(self, what: str, error: Exception) -> WaitTimeout:
        return WaitTimeout(
            f"rank {self.rank} of {self.size}, {what}: the other ranks did not answer within "
            f"{self._timeout.total_seconds():g} s: {error}; is a rank dead, or do not all of them call this? "
            "Snapshots are as they were; start all ranks again"
        )

    def compare_devices(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Learn whether any rank, this one with ``optimizers``, trains parameters on a device. Collective."""
        groups = (group for optimizer in optimizers for group in optimizer.param_groups)
        is_on_device = any(one.device.type not in ("cpu", "meta") for group in groups for one in group["params"])
        self.runs_ahead = any(self.exchange("making the engine", is_on_device))

    @property
    def is_alone(self) -> bool:
        """True if there is one rank only."""
        return self.size == 1

    @cached_property
    def places(self) -> list[Place]:
        """The places of all ranks. Collective at its first use."""
        return places([str(name) for name in self.exchange("making the engine", node_name())])

    @property
    def place(self) -> Place:
        """The place of this rank. Collective at the first use of ``places``."""
        return self.places[self.rank]

    @cached_property
    def node_ranks(self) -> list[int]:
        """The ranks of this node, in order. Collective at the first use of ``places``."""
        return [place.rank for place in self.places if place.node == self.place.node]

    def exchange(self, what: str, value: Any) -> list[Any]:
        """Every rank's ``value`` (plain JSON), in the order of the ranks; ``what`` they do. Collective. Blocks.

        Raises: WaitTimeout, if a rank is missing at the deadline, died, or came to do something else.
        """
        if self._group is None:
            return [value]
        self.exchanges += 1
        text = json.dumps([what, value], separators=(",", ":")).encode()
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._all_gather(what, sizes, torch.tensor([len(text)]))
        longest = max(int(size) for size in sizes)
        # Each tensor is a view of its bytes: no numpy is needed to get at them.
        texts = [bytearray(longest) for _ in sizes]
        found = [torch.frombuffer(received, dtype=torch.uint8) for received in texts]
        self._all_gather(what, found, torch.frombuffer(bytearray(text.ljust(longest)), dtype=torch.uint8))
        told = [json.loads(received[: int(size)]) for received, size in zip(texts, sizes, strict=True)]
        others = {rank: theirs for rank, (theirs, _) in enumerate(told) if theirs != what}
        if others:
            raise WaitTimeout(
                f"rank {self.rank} of {self.size} is at {what!r}, but {others}: all ranks must make the engine, fetch "
                "or restore, take snapshots and close in the same order. Snapshots are as they were"
            )
        return [item for _, item in told]

    def _all_gather(self, what: str, found: list[torch.Tensor], own: torch.Tensor) -> None:
        """Fill ``found`` with every rank's tensor. Raises: WaitTimeout. An error of any other call is not caught."""
        try:
            dist.all_gather(found, own, group=self._group)
        except (RuntimeError, ValueError) as error:  # ValueError: the program destroyed all groups
            raise self._missing(what, error) from error

    def exchange_after(self, what: str, work: Callable[[], Any]) -> list[Any]:
        """Return every rank's result of ``work`` (plain JSON), when all have theirs. Collective. Blocks: as long as
        they work.

        One rank may read from memory in a moment what another one fetches from far away: while they work they tell each
        other so, and the deadline is for one that is dead or silent. Raises: as ``exchange``, after its own work.
        """
        if self._group is None:
            return [work()]
        results: list[Any] = []
        over = threading.Event()
        outcome: list[Any] = []

        def tell() -> None:
            try:
                while not outcome:
                    over.wait(min(_BEAT_S, self._timeout.total_seconds() / 4))
                    if over.is_set() and not results:
                        return  # interrupted: the others will miss this rank
                    told = self.exchange(what, list(results))
                    if all(told):
                        outcome.append([answer for [answer] in told])
            except WaitTimeout as error:
                outcome.append(error)

        teller = threading.Thread(target=tell, name="lazysnap-beat", daemon=True)
        teller.start()
        try:
            results.append(work())
        finally:
            over.set()
            teller.join()
        if isinstance(outcome[0], WaitTimeout):
            raise outcome[0]
        return list(outcome[0])

    def settle(self, walked: Walk, replicated: Collection[Key], untrained: Collection[str]) -> Partition:
        """Return the part of the state that this rank captures. Collective at its first call, later ones are not.

        Where ranks of a node that should hold the same tensors do not, each of the node captures its own whole; where
        those of several nodes do not, each node stores its own whole.
        ``untrained``: see ``Partition``; of the first call, so that all ranks always cut alike.
        Raises: WaitTimeout, and at once from then on: no snapshots without a common plan.
        """
        if self._lost is not None:
            raise self._lost  # asked once: the others will not answer later either
        if self._untrained is None:
            self._untrained = frozenset(untrained)
        partition = Partition(walked, replicated, self.rank, [place.node for place in self.places], self._untrained)
        if self._shares is None:
            try:
                told = self.exchange("the first boundary", partition.common)
            except WaitTimeout as error:
                self._lost = error
                raise
            self._shares = agree(told, self.node_ranks)
        in_node, among_nodes = self._shares
        if not in_node:
            partition = Partition(walked, (), self.rank, [str(rank) for rank in range(self.size)])
            partition.nodes.clear()  # these are ranks: how many nodes hold it is not known
        if not among_nodes:
            partition.keep_all()
        return partition

    def ends(self) -> bool:
        """True if all ranks came to the end of their training. Collective. Blocks: until the deadline."""
        try:
            if self._lost is not None:
                raise self._lost
            self.exchange("closing", None)
        except WaitTimeout as error:
            logger.warning("what is in memory stays for a restart: %s", error)
            return False
        return True

    def close(self) -> None:
        """Let the group go. Does not block."""
        group, self._group = self._group, None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)


def agree(told: Sequence[Sequence[Sequence[Any]]], node_ranks: Collection[int]) -> tuple[bool, bool]:
    """True if ranks that hold the same tensors all reported the same facts about them: those of ``node_ranks``, and
    all. Pure.

    ``told``: by rank, see ``Partition.common``. The first is the same for a whole node_ranks, the second for all ranks.
    """
    in_node = all(common in told[other] for rank in node_ranks for common in told[rank] for other in common[0])
    seen: dict[tuple[str, int], list[str]] = defaultdict(list)
    for _, holders, count, tensors in (common for commons in told for common in commons):
        seen[holders, count].append(tensors)
    return in_node, all(len(found) == count and len(set(found)) == 1 for (_, count), found in seen.items())
