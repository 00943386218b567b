"""Nodes in this process that protect each other's captures: ``node_rig`` with parity, and reads between the nodes."""

from typing import Any

import msgspec

from lazysnap.config import PersistentLevel
from lazysnap.events import Protected
from lazysnap.keeper.parity import ParityStore
from lazysnap.keeper.protocol import Parity, Run
from support.node_rig import Rank, Rig
from support.waiting import until

SLOTS = 5
"""Kept, being written, read by storage, protected, about to be."""


class ParityRig(Rig):
    """All nodes are one group."""

    def __init__(self, *levels: PersistentLevel, nodes: int = 3, ranks: int = 1, parity: int = 1) -> None:
        self.stores = [ParityStore() for _ in range(nodes)]
        super().__init__(*levels, nodes=nodes, ranks=ranks)
        self.nodes = [
            [Rank(node * ranks + rank, nodes * ranks, SLOTS) for rank in range(ranks)] for node in range(nodes)
        ]
        self.addresses = [self._serve(node) for node in range(nodes)]
        self.settings: dict[str, Any] = {}
        """Fields of ``Parity`` that differ from the usual ones."""
        self.parity: int | None = parity
        """``None``: no start from now on has any."""
        self.every = 2
        """Steps from one capture to the next."""

    def _serve(self, node: int, port: int | None = None) -> tuple[str, int]:
        assert self._peers is not None
        if port is None and node == 0:
            port = self._peers.port  # where its links are served, too
        elif port is None:
            port = self._reserve()
        self.reads[node].serve(("127.0.0.1", port), self._peers.secret)
        return "127.0.0.1", port

    def _parity_of(self, node: int) -> ParityStore:
        return self.stores[node]

    def _protected(self, run: Run, node: int) -> Run:
        if self.parity is None:
            return run
        members = [(number, *address) for number, address in enumerate(self.addresses)]
        parity = Parity(
            members, self.parity, self.parity, SLOTS, every_n_steps=1, max_bytes_per_s=None, block_bytes=1 << 16
        )
        run = msgspec.structs.replace(run, every_n_steps=self.every)
        return msgspec.structs.replace(run, parity=msgspec.structs.replace(parity, **self.settings))

    def replace(self, node: int = 0) -> None:
        """Its keeper dies, and its parity with it."""
        self.storages[node].close()
        self.reads[node].close()
        self.stores[node] = ParityStore()
        self.reads[node] = self._served(node)
        self._serve(node, self.addresses[node][1])
        super().replace(node)

    def protected(self, node: int = 0, start: str = "") -> int | None:
        """The newest step of which trainers of a node know that it is protected; of the present start by default."""
        told = [event for event in list(self.told_to[node]) if isinstance(event, Protected)]
        return next((event.step for event in reversed(told) if event.start == (start or self.start)), None)

    def protect(self) -> int:
        """Train until another step is protected, and all nodes know it; that step."""
        before = [self.protected(node) or 0 for node in range(len(self.nodes))]

        def goes_on() -> bool:
            now = [self.protected(node) or 0 for node in range(len(self.nodes))]
            if all(new > max(before) for new in now):
                return True
            self.capture(self.step + self.every)
            return False

        until(goes_on)
        return min(self.protected(node) or 0 for node in range(len(self.nodes)))

    def held(self, node: int) -> set[int]:
        """Steps that parity counts on in the slots of that node."""
        statuses = [slot.status() for rank in self.nodes[node] for slot in rank.slots()]
        return {status.step for status in statuses if status.held and status.step is not None}
