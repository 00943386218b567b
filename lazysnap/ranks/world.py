"""The ranks of one training, and their exchanges when planning and resuming, never per snapshot.

Exchanges use a separate gloo group, in host memory, and not the training's collectives. They carry JSON, because
the object collectives of ``torch.distributed`` unpickle what arrives. Every exchange has a deadline.
"""

import datetime
import json
import logging
import os
import socket
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import xxhash

from lazysnap.capture.plan import Key
from lazysnap.errors import WaitTimeout
from lazysnap.ranks.partition import Partition
from lazysnap.state.walk import Walk

logger = logging.getLogger("lazysnap.engine")

_HEARTBEAT_S = 2.0


def node_name() -> str:
    """Return the name of this machine: ranks with equal names share memory. Each container on a host has its own."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:
        boot = ""
    # The network namespace decides which keepers are reachable.
    try:
        space = os.readlink("/proc/self/ns/net")
    except OSError:
        space = ""
    return f"{socket.gethostname()}/{boot}/{space}"


@dataclass(frozen=True)
class Place:
    """The place where one rank runs."""

    rank: int
    node: str
    """Equal for ranks that share memory."""
    local_rank: int
    """Number among the ranks of the node, from 0."""
    local_world_size: int


def places(nodes: Sequence[str]) -> list[Place]:
    """Return the place of every rank, from the node of every rank (``nodes[rank]``)."""
    local_world_sizes = Counter(nodes)
    ranks_so_far = Counter[str]()
    all_places = []
    for rank, node in enumerate(nodes):
        all_places.append(Place(rank, node, ranks_so_far[node], local_world_sizes[node]))
        ranks_so_far[node] += 1
    return all_places


class World:
    """All ranks of this training, or this process alone if ``torch.distributed`` is not initialised."""

    def __init__(self, timeout_s: float = 60.0, optimizers: Iterable[torch.optim.Optimizer] = ()) -> None:
        """``optimizers``: of the training of this rank.

        Collective with several ranks: all of them make it at the same point. Blocks.
        Raises: WaitTimeout, if one of them is missing.
        """
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self.rank = 0
        self.size = 1
        self._group: Any = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.rank = dist.get_rank()
            self.size = dist.get_world_size()
            self._group = self._new_group()
        self._shares: tuple[bool, bool] | None = None
        self._lost: WaitTimeout | None = None
        self.nodes: list[str] = []
        """The node of each rank."""
        self.runs_ahead = False
        """True if some rank trains parameters on a device, which its host runs ahead of."""
        for node, trains_on_device in self.exchange("making the engine", [node_name(), _trains_on_device(optimizers)]):
            self.nodes.append(node)
            self.runs_ahead = self.runs_ahead or trains_on_device
        self.places = places(self.nodes)
        """The places of all ranks."""
        self.place = self.places[self.rank]
        """The place of this rank."""
        self.node_ranks = [place.rank for place in self.places if place.node == self.place.node]
        """The ranks of this node, in order."""

    def _new_group(self) -> Any:
        try:
            return dist.new_group(backend="gloo", timeout=self._timeout)
        except RuntimeError as error:
            raise self._missing("making the engine", error) from error

    def _missing(self, activity: str, error: Exception) -> WaitTimeout:
        return WaitTimeout(
            f"rank {self.rank} of {self.size}, {activity}: the other ranks did not answer within "
            f"{self._timeout.total_seconds():g} s: {error}; is a rank dead, or do not all of them call this? "
            "Snapshots are as they were; start all ranks again"
        )

    @property
    def is_alone(self) -> bool:
        """Return True with one rank."""
        return self.size == 1

    def exchange(self, activity: str, value: Any) -> list[Any]:
        """Return every rank's ``value`` (plain JSON), in the order of the ranks. Collective. Blocks.

        ``activity``: the purpose of the exchange, for messages; the same on all ranks.
        Raises: WaitTimeout, if a rank is missing at the deadline, died, or is at another activity.
        """
        if self._group is None:
            return [value]
        text = _encode(value)
        return self._gather(activity, text, self._gather_sizes(activity, len(text)))

    def _gather_sizes(self, activity: str, size_bytes: int) -> list[int]:
        """Return every rank's ``size_bytes``. Raises: WaitTimeout, if a rank is at another activity."""
        sizes = []
        for head in self._all_gather(activity, [size_bytes, _topic_of(activity)]):
            size, topic = head.tolist()
            if topic != _topic_of(activity):
                raise self._out_of_order(activity)
            sizes.append(size)
        return sizes

    def _out_of_order(self, activity: str) -> WaitTimeout:
        """Return an error with the activities of the other ranks. All ranks call this at the same time."""
        text = _encode(activity)
        lengths = self._all_gather(activity, [len(text)])
        activities = self._gather(activity, text, [int(length) for length in lengths])
        differing = {rank: name for rank, name in enumerate(activities) if name != activity}
        return WaitTimeout(
            f"rank {self.rank} of {self.size} is at {activity!r}, but {differing}: all ranks must make the engine, "
            "fetch or restore, take snapshots and close in the same order. Snapshots are as they were"
        )

    def _gather(self, activity: str, text: bytes, sizes: Sequence[int]) -> list[Any]:
        """Return every rank's value; ``text`` is that of this rank, as JSON. Raises: WaitTimeout.

        Each rank receives the bytes of all texts, while ``all_gather`` would pad each to the longest.
        """
        received = bytearray(sum(sizes))
        start = sum(sizes[: self.rank])
        received[start : start + len(text)] = text
        # The tensor is a view of these bytes, so numpy is not needed. Other ranks have zeros in this place.
        joined = torch.frombuffer(received, dtype=torch.uint8)
        try:
            dist.all_reduce(joined, group=self._group)
        except (RuntimeError, ValueError) as error:
            raise self._missing(activity, error) from error
        values = []
        start = 0
        for size in sizes:
            values.append(json.loads(received[start : start + size]))
            start += size
        return values

    def _all_gather(self, activity: str, numbers: Sequence[int]) -> list[torch.Tensor]:
        """Return every rank's numbers. Raises: WaitTimeout. An error of any other call is not caught."""
        # On the CPU, which gloo exchanges, whatever torch.set_default_device() says.
        received = [torch.zeros(len(numbers), dtype=torch.int32, device="cpu") for _ in range(self.size)]
        sent = torch.tensor(numbers, dtype=torch.int32, device="cpu")
        try:
            dist.all_gather(received, sent, group=self._group)
        except (RuntimeError, ValueError) as error:  # ValueError: the program destroyed all groups
            raise self._missing(activity, error) from error
        return received

    def exchange_after(self, activity: str, work: Callable[[], Any]) -> list[Any]:
        """Return every rank's result of ``work`` (plain JSON) when all are done. Collective. Blocks.

        One rank may read quickly from memory, while another reads from a distant storage. Working ranks exchange
        heartbeats, so the deadline only applies to a dead or silent rank. Raises: as ``exchange``, after its own work.
        """
        if self._group is None:
            return [work()]
        results: list[bytes] = []
        """This rank's result, once ``work`` returned."""
        work_ended = threading.Event()
        outcome: list[Any] = []
        """The result of the thread: every rank's result, or its error."""

        def exchange_heartbeats() -> None:
            try:
                sizes = [0]
                while not all(sizes):  # 0: that rank is still working
                    work_ended.wait(min(_HEARTBEAT_S, self._timeout.total_seconds() / 4))
                    if work_ended.is_set() and not results:
                        return  # interrupted: the other ranks will time out
                    size_bytes = 0
                    if results:
                        size_bytes = len(results[0])
                    sizes = self._gather_sizes(activity, size_bytes)
                outcome.append(self._gather(activity, results[0], sizes))
            except WaitTimeout as error:
                outcome.append(error)

        heartbeats = threading.Thread(target=exchange_heartbeats, name="lazysnap-heartbeats", daemon=True)
        heartbeats.start()
        try:
            results.append(_encode(work()))
        finally:
            work_ended.set()
            heartbeats.join()
        if isinstance(outcome[0], WaitTimeout):
            raise outcome[0]
        return list(outcome[0])

    def agree_partition(self, walked: Walk, replicated: Collection[Key]) -> Partition:
        """Return the part of the state that this rank captures. Collective at its first call, later ones are not.

        If ranks of a node differ in tensors that they should share, each captures all of them. If ranks of several
        nodes differ, each node stores all of them. Later calls may have fewer shared tensors, but no new ones.
        Raises: WaitTimeout, and then at once in every later call: there are no snapshots without a common plan.
        """
        if self._lost is not None:
            raise self._lost  # ranks exchange this once, so missing ranks will not answer later
        partition = Partition(walked, replicated, self.rank, self.nodes)
        if self._shares is None:
            try:
                commons = self.exchange("the first boundary", partition.common)
            except WaitTimeout as error:
                self._lost = error
                raise
            self._shares = agree(commons, self.node_ranks)
        in_node, among_nodes = self._shares
        if not in_node:
            each_rank_alone = list(map(str, range(self.size)))
            partition = Partition(walked, (), self.rank, each_rank_alone)
            partition.nodes.clear()  # these are ranks: the number of nodes is not known
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
        """Release the group. Does not block."""
        group = self._group
        self._group = None
        if group is not None and dist.is_initialized():
            dist.destroy_process_group(group)


def _encode(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _topic_of(activity: str) -> int:
    """Return a number below 2**31 that differs between activities."""
    return xxhash.xxh32_intdigest(activity.encode()) >> 1


def _trains_on_device(optimizers: Iterable[torch.optim.Optimizer]) -> bool:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.device.type not in ("cpu", "meta"):
                    return True
    return False


def agree(commons: Sequence[Sequence[Sequence[Any]]], node_ranks: Collection[int]) -> tuple[bool, bool]:
    """True if ranks that hold the same tensors all reported the same facts about them: those of ``node_ranks``, and
    all. Pure.

    ``commons``: by rank, see ``Partition.common``. The first is the same on all ranks of a node, the second on all.
    """
    return _node_agrees(commons, node_ranks), _all_agree(commons)


def _node_agrees(commons: Sequence[Sequence[Sequence[Any]]], node_ranks: Collection[int]) -> bool:
    for rank in node_ranks:
        for common in commons[rank]:
            for holder in common[0]:
                if common not in commons[holder]:
                    return False
    return True


def _all_agree(commons: Sequence[Sequence[Sequence[Any]]]) -> bool:
    digests: dict[tuple[str, int], list[str]] = defaultdict(list)
    for commons_of_rank in commons:
        for _, holders, count, tensors in commons_of_rank:
            digests[holders, count].append(tensors)
    for (_, count), digests_of_holders in digests.items():
        if len(digests_of_holders) != count or len(set(digests_of_holders)) != 1:
            return False
    return True
