"""The ranks of one training, and their exchanges when planning and resuming, never per snapshot.

Exchanges use a gloo group of their own, in host memory, apart from the training's collectives. They carry JSON, because
the object collectives of ``torch.distributed`` unpickle what arrives. Every exchange has a deadline.
"""

import datetime
import json
import logging
import os
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from lazysnap.capture.plan import Key
from lazysnap.errors import WaitTimeout
from lazysnap.ranks.partition import Partition
from lazysnap.state.walk import Walk
from lazysnap.topology import places

logger = logging.getLogger("lazysnap.engine")

_HEARTBEAT_S = 2.0


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

    def __init__(self, timeout_s: float = 60.0, optimizers: Iterable[torch.optim.Optimizer] = ()) -> None:
        """``optimizers``: of the training of this rank.

        Collective if there are several ranks: all of them make it at the same point. Blocks.
        Raises: WaitTimeout, if one of them is missing.
        """
        self._timeout = datetime.timedelta(seconds=timeout_s)
        is_many = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.rank = dist.get_rank() if is_many else 0
        self.size = dist.get_world_size() if is_many else 1
        self._group: Any = self._new_group() if is_many else None
        self._shares: tuple[bool, bool] | None = None
        self._lost: WaitTimeout | None = None
        groups = (group for optimizer in optimizers for group in optimizer.param_groups)
        is_on_device = any(one.device.type not in ("cpu", "meta") for group in groups for one in group["params"])
        told = self.exchange("making the engine", [node_name(), is_on_device])
        self.places = places([name for name, _ in told])
        """The places of all ranks."""
        self.place = self.places[self.rank]
        """The place of this rank."""
        self.node_ranks = [place.rank for place in self.places if place.node == self.place.node]
        """The ranks of this node, in order."""
        self.runs_ahead = any(is_ahead for _, is_ahead in told)
        """True if some rank trains parameters on a device, whose host runs ahead of it."""

    def _new_group(self) -> Any:
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

    @property
    def is_alone(self) -> bool:
        """True if there is one rank only."""
        return self.size == 1

    def exchange(self, what: str, value: Any) -> list[Any]:
        """Every rank's ``value`` (plain JSON), in the order of the ranks; ``what`` they do. Collective. Blocks.

        Raises: WaitTimeout, if a rank is missing at the deadline, died, or came to do something else.
        """
        if self._group is None:
            return [value]
        text = _encode(value)
        return self._gather(what, text, self._gather_sizes(what, len(text)))

    def _gather_sizes(self, what: str, size_bytes: int) -> list[int]:
        """Return what every rank gave as ``size_bytes``. Raises: WaitTimeout, if a rank came to do something else."""
        heads = [torch.zeros(2, dtype=torch.int32) for _ in range(self.size)]
        topic = xxhash.xxh32_intdigest(what.encode()) >> 1
        self._all_gather(what, heads, torch.tensor([size_bytes, topic], dtype=torch.int32))
        if all(int(head[1]) == topic for head in heads):
            return [int(head[0]) for head in heads]
        # All ranks see that, and tell what they do.
        own = _encode(what)
        lengths = [torch.zeros(1, dtype=torch.int32) for _ in range(self.size)]
        self._all_gather(what, lengths, torch.tensor([len(own)], dtype=torch.int32))
        theirs = self._gather(what, own, [int(length) for length in lengths])
        others = {rank: name for rank, name in enumerate(theirs) if name != what}
        raise WaitTimeout(
            f"rank {self.rank} of {self.size} is at {what!r}, but {others}: all ranks must make the engine, fetch "
            "or restore, take snapshots and close in the same order. Snapshots are as they were"
        )

    def _gather(self, what: str, own: bytes, sizes: Sequence[int]) -> list[Any]:
        """Return every rank's value, of which this one sends ``own``. Raises: WaitTimeout.

        Each rank receives as many bytes as all texts have: ``all_gather`` would pad each to the longest.
        """
        received = bytearray(sum(sizes))
        start = sum(sizes[: self.rank])
        received[start : start + len(own)] = own
        # The tensor is a view of these bytes: no numpy is needed to get at them. Other ranks have zeros in this place.
        joined = torch.frombuffer(received, dtype=torch.uint8)
        try:
            dist.all_reduce(joined, group=self._group)
        except (RuntimeError, ValueError) as error:
            raise self._missing(what, error) from error
        values = []
        start = 0
        for size in sizes:
            values.append(json.loads(received[start : start + size]))
            start += size
        return values

    def _all_gather(self, what: str, found: list[torch.Tensor], own: torch.Tensor) -> None:
        """Fill ``found`` with every rank's tensor. Raises: WaitTimeout. An error of any other call is not caught."""
        try:
            dist.all_gather(found, own, group=self._group)
        except (RuntimeError, ValueError) as error:  # ValueError: the program destroyed all groups
            raise self._missing(what, error) from error

    def exchange_after(self, what: str, work: Callable[[], Any]) -> list[Any]:
        """Return every rank's result of ``work`` (plain JSON) when all are done. Collective. Blocks.

        One rank may read from memory in a moment what another one fetches from far away. While they work they exchange
        heartbeats, so the deadline is for a rank that is dead or silent. Raises: as ``exchange``, after its own work.
        """
        if self._group is None:
            return [work()]
        results: list[bytes] = []
        over = threading.Event()
        outcome: list[Any] = []

        def exchange_heartbeats() -> None:
            try:
                sizes = [0]
                while not all(sizes):  # 0: that rank still works
                    over.wait(min(_HEARTBEAT_S, self._timeout.total_seconds() / 4))
                    if over.is_set() and not results:
                        return  # interrupted: the others will miss this rank
                    sizes = self._gather_sizes(what, len(results[0]) if results else 0)
                outcome.append(self._gather(what, results[0], sizes))
            except WaitTimeout as error:
                outcome.append(error)

        heartbeats = threading.Thread(target=exchange_heartbeats, name="lazysnap-heartbeats", daemon=True)
        heartbeats.start()
        try:
            results.append(_encode(work()))
        finally:
            over.set()
            heartbeats.join()
        if isinstance(outcome[0], WaitTimeout):
            raise outcome[0]
        return list(outcome[0])

    def agree_partition(self, walked: Walk, replicated: Collection[Key]) -> Partition:
        """Return the part of the state that this rank captures. Collective at its first call, later ones are not.

        If ranks of a node differ in tensors that they should share, each captures its own whole. If ranks of several
        nodes differ, each node stores its own whole.
        Raises: WaitTimeout, and at once from then on: no snapshots without a common plan.
        """
        if self._lost is not None:
            raise self._lost  # asked once: the others will not answer later either
        partition = Partition(walked, replicated, self.rank, [place.node for place in self.places])
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


def _encode(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def agree(commons: Sequence[Sequence[Sequence[Any]]], node_ranks: Collection[int]) -> tuple[bool, bool]:
    """True if ranks that hold the same tensors all reported the same facts about them: those of ``node_ranks``, and
    all. Pure.

    ``commons``: by rank, see ``Partition.common``. The first is the same on all ranks of a node, the second on all.
    """
    in_node = all(common in commons[other] for rank in node_ranks for common in commons[rank] for other in common[0])
    seen: dict[tuple[str, int], list[str]] = defaultdict(list)
    for _, holders, count, tensors in (common for ones in commons for common in ones):
        seen[holders, count].append(tensors)
    return in_node, all(len(found) == count and len(set(found)) == 1 for (_, count), found in seen.items())
