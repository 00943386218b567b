"""The part of a keeper that has to do with other nodes: links, reads of this node's memory, and parity.

What it needs is imported with the first start that has several nodes: a keeper of one node starts without it.
"""

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lazysnap.core.actions import Job, JobEnded
from lazysnap.core.messages import JobSettings, Order, PeerSettings, Report
from lazysnap.keeper.questions import HeldParity
from lazysnap.keeper.slot_table import SlotTable
from lazysnap.keeper.worker import JobControl
from lazysnap.memory.slots import Slot

if TYPE_CHECKING:
    from lazysnap.keeper.parity import ParityStore
    from lazysnap.peers.links import Handler
    from lazysnap.peers.server import Peers


class OtherNodes:
    """Connections to the keepers of other nodes, and the parity held for them. Used on the loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, handler: "Handler", slots: SlotTable) -> None:
        self._loop = loop
        self._handler = handler
        self._slots = slots
        self._peers: Peers | None = None
        self._parity: ParityStore | None = None
        self._settings: PeerSettings | None = None

    def set_peers(self, settings: PeerSettings) -> None:
        """Serve, and link to, the keepers of this start."""
        self._settings = settings
        if self._peers is None:
            self._peers = self._make_peers()
        self._peers.begin(settings, settings.node)

    def _make_peers(self) -> "Peers":
        from lazysnap.keeper.parity import ParityStore
        from lazysnap.keeper.peer_sources import PeerSources
        from lazysnap.peers.server import Peers

        self._parity = ParityStore()
        return Peers(self._loop, self._handler, PeerSources(self._slots, self._parity))

    def send(self, node: int, message: Report | Order) -> None:
        """Send a message to another node, if there is a link."""
        if self._peers is not None:
            self._peers.send(node, message)

    # Parity

    @property
    def parity_bytes(self) -> int:
        """Bytes of memory of this node that protect other nodes."""
        return 0 if self._parity is None else self._parity.size_bytes

    def held_parity(self) -> list[HeldParity]:
        """Return the parity that the node holds."""
        return [] if self._parity is None else self._parity.inventory()

    def run_parity_job(
        self, settings: JobSettings, job: Job, slots: Mapping[int, Mapping[int, Slot]], control: JobControl
    ) -> JobEnded:
        """Do a job of the redundancy level. On its thread. Blocks."""
        from lazysnap.keeper.parity import ParityContext, run_parity_job

        assert self._parity is not None, "redundancy needs other nodes"
        assert self._settings is not None, "redundancy needs other nodes"
        context = ParityContext(settings, self._settings, self._parity)
        return run_parity_job(job, context, slots, control)

    def close(self) -> None:
        """End all connections."""
        if self._peers is not None:
            self._peers.close()
