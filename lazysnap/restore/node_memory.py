"""The contents of this node's memory: captures of this rank's last trainer, and of ranks that are no more."""

from collections.abc import Callable

from lazysnap.errors import FormatError, JobBusy, LazySnapError
from lazysnap.keeper.client import KeeperClient
from lazysnap.keeper.events import MemoryInventory
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.neighbour import NeighbourMemory
from lazysnap.levels.blocks import MemoryBlocks
from lazysnap.memory.arena import Slot
from lazysnap.resolver import Entry, FrozenEntry, Inventory, Item
from lazysnap.restore.snapshot import MEMORY
from lazysnap.shard.checksum import Checksums
from lazysnap.shard.layout import Layout
from lazysnap.shard.manifest import CaptureMeta
from lazysnap.snapshots.reader import OpenShard
from lazysnap.topology import Place


class RankMemory:
    """The captures of one rank in the memory of this node, mapped. See ``restore.sources.Source``."""

    def __init__(self, held: MemoryInventory) -> None:
        self._held = held

    def open(self, item: Item, where: str) -> OpenShard:
        """See ``Source``."""
        of_item = item.location.split("/")[1]
        if isinstance(item, FrozenEntry):
            slot = self._held.frozen.get(of_item)
            checksums = None if slot is None else Checksums.of(_image(slot))
            if checksums is not None and checksums.whole != item.digest:
                raise FormatError(f"{where}: their checksum is {checksums.whole}, expected {item.digest}")
        else:
            held = next((one for one in self._held.entries if one.sequence == int(of_item)), None)
            slot, checksums = (None, None) if held is None else (held.slot, held.checksums)
        if slot is None:
            raise FormatError(f"{where}: it is not there any more")
        image, meta = _image(slot), CaptureMeta.from_bytes(slot.read_meta(), where)
        # Without checksums nothing can be compared: the keeper has not computed them yet.
        if checksums is not None and checksums.size_bytes != len(image):
            raise FormatError(f"{where}: {len(image)} bytes, the keeper said {checksums.size_bytes}")
        blocks = MemoryBlocks(image, None if isinstance(item, FrozenEntry) else checksums, where)
        blocks.verify(8 + int.from_bytes(image[:8], "little"))  # damage is the reason, whatever the header looks like
        return OpenShard(meta.rank, meta, Layout.parse(image, len(image), where), blocks)


def _image(slot: Slot) -> memoryview:
    return slot.image[: slot.status().image_bytes]


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
        held = self._held(number)
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

    def rank(self, number: int) -> RankMemory:
        """Return the memory of a local rank as a source. Blocks, the first time."""
        return RankMemory(self._held(number))

    def _held(self, number: int) -> MemoryInventory:
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
