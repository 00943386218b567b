"""The contents of this node's memory: captures of this rank's last trainer, and of ranks that are no more."""

from collections.abc import Callable

from lazysnap.errors import JobBusy, LazySnapError
from lazysnap.keeper.client import KeeperClient
from lazysnap.keeper.events import MemoryInventory
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.neighbour import NeighbourMemory
from lazysnap.resolver import Entry, FrozenEntry, Inventory
from lazysnap.restore.snapshot import MEMORY
from lazysnap.topology import Place


class NodeMemory:
    """The keeper of this node, as one restart reads it: asked once for each local rank. Not thread-safe."""

    def __init__(
        self,
        client: KeeperClient | None,
        identity: JobIdentity,
        place: Place,
        timeout_s: float,
        note: Callable[[str], None],
    ) -> None:
        """``client``: ``None``, if memory is not looked at; ``note`` receives what is passed over, in words."""
        self.node = place.node
        self._client = client
        self._identity = identity
        self._place = place
        self._timeout_s = timeout_s
        self._note = note
        self._inventories: dict[int, MemoryInventory] = {}
        self._neighbours: list[NeighbourMemory] = []
        self._unreachable = ""
        """Why this rank's memory is out of reach."""

    @property
    def own(self) -> MemoryInventory | None:
        """The keeper's captures of this rank, as far as it was asked."""
        return self._inventories.get(self._place.local_rank)

    def inventories(self) -> list[Inventory]:
        """Return the keeper's captures of this rank; on the first rank of a node also for ranks that are no more.
        Blocks.

        Raises: JobBusy.
        """
        client, place = self._client, self._place
        if client is None:
            return []
        found = []
        try:
            if not self._unreachable:  # asked once: it would be waited for at every listing
                client.connect(self._timeout_s)
                self._inventories[place.local_rank] = client.inventory(self._timeout_s)
                found.append(place.local_rank)
        except JobBusy:
            raise
        except LazySnapError as error:
            self._unreachable = f"no snapshot in this rank's memory can be used: {error}"
        if self._unreachable:
            self._note(self._unreachable)
        if place.local_rank == 0 and found:
            known = self._inventories[0].local_ranks
            found += [number for number in known if number >= place.local_world_size]
        return [self._inventory(number) for number in found]

    def _inventory(self, number: int) -> Inventory:
        held = self.held(number)
        entries = tuple(
            Entry(
                MEMORY,
                0,
                item.run_id,
                item.start,
                item.step,
                item.rank,
                item.world_size,
                f"{number}/{item.sequence}",
                item.frozen,
                node=self.node,
            )
            for item in held.entries
        )
        images = tuple(FrozenEntry(MEMORY, 0, str(digest), f"{number}/{digest}", self.node) for digest in held.frozen)
        return Inventory(f"{MEMORY} of local rank {number} of {self.node}", entries, images)

    def held(self, number: int) -> MemoryInventory:
        """Return the keeper's captures of a local rank. Blocks, the first time."""
        if number not in self._inventories:
            try:
                neighbour = NeighbourMemory(self._identity, number, self._timeout_s)
            except LazySnapError as error:
                self._note(str(error))
                self._inventories[number] = MemoryInventory()
            else:
                self._neighbours.append(neighbour)
                self._inventories[number] = neighbour.inventory
        return self._inventories[number]

    def close(self) -> None:
        """Mapped memory goes now, and not when garbage is collected."""
        self._inventories.clear()
        for neighbour in self._neighbours:
            neighbour.close()
