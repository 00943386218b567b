"""The part of a keeper for other nodes: links, reads of this node's memory, and parity.

Its modules are imported with the first start that has several nodes, so a keeper of one node starts without them.
"""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

from lazysnap.core.actions import Event, Failed, Task, TaskEnded
from lazysnap.core.messages import JobSettings, Order, PeerSettings, Report
from lazysnap.keeper.questions import HeldParity
from lazysnap.keeper.slot_table import NodeSlots, SlotTable
from lazysnap.keeper.tasks import TaskControl
from lazysnap.levels.watched import RateLimiter

if TYPE_CHECKING:
    from lazysnap.keeper.parity import ParityContext, ParityStore
    from lazysnap.keeper.peer_sources import KeeperSources
    from lazysnap.peers.server import Peers


class OtherNodes:
    """Connections to the keepers of other nodes, and the parity held for them. Used on the loop's thread."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        handle: Callable[[Event], None],
        slots: SlotTable,
        num_ranks: Callable[[int], int],
    ) -> None:
        """Begin without connections.

        Args:
            loop: the loop of the keeper.
            handle: receives an event, on the loop.
            slots: all slots of the node.
            num_ranks: see ``KeeperSources``.
        """
        self._loop = loop
        self._handle = handle
        self._slots = slots
        self._num_ranks = num_ranks
        self._peers: Peers | None = None
        self._sources: KeeperSources | None = None
        self._parity: ParityStore | None = None
        self._job: JobSettings | None = None
        self._settings: PeerSettings | None = None
        self._context: ParityContext | None = None
        """Context of the parity tasks of the current start; None: it is made with the next task."""

    def begin_job(self, settings: JobSettings) -> None:
        """Use these settings of protection from now on."""
        self._job = settings
        self._context = None

    def set_peers(self, settings: PeerSettings) -> None:
        """Serve and connect to the keepers of this start."""
        self._settings = settings
        self._context = None
        if self._peers is None:
            self._peers = self._make_peers()
        self._peers.begin(settings)

    def _make_peers(self) -> "Peers":
        from lazysnap.keeper.parity import ParityStore
        from lazysnap.keeper.peer_sources import KeeperSources
        from lazysnap.peers.server import Peers

        self._parity = ParityStore()
        self._sources = KeeperSources(self._slots.snapshot, self._num_ranks, self._parity)
        return Peers(self._loop, self._handle, self._sources)

    def send(self, node: int, message: Report | Order) -> None:
        """Send a message to another node, if there is a link."""
        if self._peers is not None:
            self._peers.send(node, message)

    def slot_freed(self) -> None:
        """Release slots that other nodes read, so that the memory of a freed slot is returned."""
        if self._sources is not None:
            self._sources.clear()

    # Parity

    @property
    def parity_bytes(self) -> int:
        """Return the bytes of memory of this node that protect other nodes."""
        return 0 if self._parity is None else self._parity.size_bytes

    def held_parity(self) -> list[HeldParity]:
        """Return the parity that the node holds."""
        return [] if self._parity is None else self._parity.inventory()

    def free_parity(self) -> None:
        """Free all parity that the node holds."""
        if self._parity is not None:
            self._parity.clear()

    def parity_task(self, task: Task, slots: NodeSlots, control: TaskControl) -> Callable[[], TaskEnded]:
        """Return the work of a task of redundancy, for its thread."""
        from lazysnap.keeper.parity import run_parity_task

        context = self._parity_context()

        def work() -> TaskEnded:
            if context is None:
                return Failed(task.number, "the other nodes of this start are not known yet")
            return run_parity_task(task, context, slots, control)

        return work

    def _parity_context(self) -> "ParityContext | None":
        from lazysnap.keeper.parity import ParityContext

        is_known = self._job is not None and self._job.redundancy is not None
        if self._context is None and is_known and self._settings is not None and self._parity is not None:
            assert self._job is not None
            assert self._job.redundancy is not None
            pace = RateLimiter(self._job.redundancy.max_bytes_per_s)
            self._context = ParityContext(self._job, self._settings, self._parity, pace)
        return self._context

    def close(self) -> None:
        """End all connections."""
        if self._peers is not None:
            self._peers.close()
