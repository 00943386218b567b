"""The contents of this node's memory: captures of this rank's last trainer, and of ranks that no longer exist."""

from collections.abc import Callable

from lazysnap.errors import FormatError, JobBusy, LazySnapError
from lazysnap.keeper.asking import NeighbourMemory
from lazysnap.keeper.client import KeeperClient
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.memory_inventory import MemoryEntry, MemoryInventory
from lazysnap.levels.blocks import MemoryBlocks
from lazysnap.ranks.world import Place
from lazysnap.resolver import MEMORY, Entry, Inventory
from lazysnap.shard.manifest import CaptureMeta
from lazysnap.snapshots.reader import OpenShard, open_shard


class NodeMemory:
    """The keeper of this node as a source of one restart, asked once for each local rank. Not thread-safe.

    See ``restore.sources.Source``.
    """

    def __init__(
        self,
        client: KeeperClient | None,
        identity: JobIdentity,
        place: Place,
        timeout_s: float,
        note: Callable[[str], None],
    ) -> None:
        """Prepare the questions, without asking.

        Args:
            client: the connection of this rank's trainer; ``None`` if memory is not searched.
            identity: names the keeper.
            place: the place of this rank.
            timeout_s: deadline of each question.
            note: receives a text for everything that is skipped.
        """
        self.node = place.node
        self._client = client
        self._identity = identity
        self._place = place
        self._timeout_s = timeout_s
        self._note = note
        self._inventories: dict[int, MemoryInventory] = {}
        self._neighbours: list[NeighbourMemory] = []
        self._unreachable = ""
        """The reason why this rank's memory is unavailable."""

    @property
    def of_this_rank(self) -> MemoryInventory | None:
        """The keeper's captures of this rank, once it was asked."""
        return self._inventories.get(self._place.local_rank)

    def inventories(self) -> list[Inventory]:
        """Return the keeper's captures of this rank; on the first rank of a node also those of ranks that no longer
        exist.

        Blocks. Raises: JobBusy.
        """
        client = self._client
        if client is None:
            return []
        if not self._unreachable:  # asked once, to wait only at one listing
            self._ask(client)
        if self._unreachable:
            self._note(self._unreachable)
            return []
        numbers = [self._place.local_rank]
        if self._place.local_rank == 0:
            for number in self._inventories[0].local_ranks:
                if number >= self._place.local_world_size:
                    numbers.append(number)
        return list(map(self._entries_of, numbers))

    def _ask(self, client: KeeperClient) -> None:
        try:
            client.connect(self._timeout_s)
            self._inventories[self._place.local_rank] = client.memory(self._timeout_s)
        except JobBusy:
            raise
        except LazySnapError as error:
            self._unreachable = f"no snapshot in this rank's memory can be used: {error}"

    def _entries_of(self, number: int) -> Inventory:
        entries = []
        for capture in self._inventory(number).entries:
            is_own = number == self._place.local_rank and capture.rank == self._place.rank
            is_repeatable = None
            if is_own:
                is_repeatable = capture.is_repeatable
            entry = Entry(
                MEMORY,
                capture.run_id,
                capture.start,
                capture.step,
                capture.rank,
                capture.world_size,
                (number, capture.sequence),
                node=self.node,
                is_repeatable=is_repeatable,
            )
            entries.append(entry)
        return Inventory(f"{MEMORY} of local rank {number} of {self.node}", tuple(entries))

    def open(self, entry: Entry, where: str) -> OpenShard:
        """See ``Source``."""
        capture, image_bytes = self._capture(entry, where)
        image = capture.slot.read(0, image_bytes)
        meta = CaptureMeta.from_bytes(capture.slot.read_meta(), where)
        # Without checksums nothing can be verified: the keeper has not computed them yet.
        checksums = capture.checksums
        if checksums is not None and checksums.size_bytes != len(image):
            raise FormatError(f"{where}: {len(image)} bytes, the keeper said {checksums.size_bytes}")
        return open_shard(meta, MemoryBlocks(image, checksums, where), 0, len(image))

    def _capture(self, entry: Entry, where: str) -> tuple[MemoryEntry, int]:
        """Return the listed capture, and the bytes of its image. Raises: FormatError, if its slot has another one
        now.
        """
        number, sequence = entry.location
        for capture in self._inventory(number).entries:
            view = capture.slot.view()
            if capture.sequence == sequence == view.sequence and view.is_whole:
                return capture, view.image_bytes
        raise FormatError(f"{where}: it no longer exists")

    def _inventory(self, number: int) -> MemoryInventory:
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
        """Unmap the memory now, not at the next garbage collection."""
        self._inventories.clear()
        for neighbour in self._neighbours:
            neighbour.close()
