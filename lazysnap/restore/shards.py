"""Opening the shards of a snapshot for reading, wherever they are: mapped slots of this node, files of a level."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from lazysnap.errors import LazySnapError, ShardCorrupt
from lazysnap.levels.blocks import Blocks, MemoryBlocks, Wanted
from lazysnap.levels.redaction import shown
from lazysnap.resolver import Entry, FrozenEntry, RestartPlan
from lazysnap.restore.level_reader import LevelReader
from lazysnap.restore.lost_parts import PARITY
from lazysnap.restore.node_memory import NodeMemory
from lazysnap.restore.peer_shards import PeerShards
from lazysnap.restore.snapshot import MEMORY
from lazysnap.shard.checksum import Checksums
from lazysnap.shard.layout import Layout
from lazysnap.shard.manifest import CaptureMeta, FrozenReference
from lazysnap.snapshots.reader import OpenShard, read


class BadShard(ShardCorrupt):
    """A source of one shard that turned out to be no good."""

    def __init__(self, entry: Entry, error: Exception) -> None:
        super().__init__(str(error))
        self.entry = entry


class BadFrozen(LazySnapError):
    """A source of frozen tensors that turned out to be no good while it was read; it is not offered again."""


class ShardOpener:
    """What is opened stays open until ``stack`` ends. Not thread-safe."""

    def __init__(
        self,
        levels: Mapping[str, LevelReader],
        memory: NodeMemory,
        peers: PeerShards,
        stack: contextlib.ExitStack,
        note: Callable[[str], None],
    ) -> None:
        """``note`` receives what is passed over here, in words."""
        self._levels = levels
        self._memory = memory
        self._peers = peers
        self._stack = stack
        self._note = note
        self._refused: dict[FrozenEntry, str] = {}
        self._opened: dict[Entry | FrozenEntry, OpenShard] = {}
        self._sources: dict[Blocks, Entry | FrozenEntry] = {}

    def open(self, entry: Entry) -> OpenShard:
        """The shard of one entry. Blocks. Raises: BadShard."""
        if entry not in self._opened:
            try:
                shard = self._open(entry)
            except Exception as error:
                raise BadShard(entry, error) from error
            self._opened[entry] = shard
            self._sources[shard.blocks] = entry
        return self._opened[entry]

    def _open(self, entry: Entry) -> OpenShard:
        where = f"step {entry.step} of rank {entry.rank} at {shown(entry.level)}"
        if entry.level in (MEMORY, PARITY):
            shard = self._in_memory(entry, where)
        else:
            shard = self._levels[entry.level].open(entry, where, self._stack)
        expected = (entry.run_id, entry.step, entry.rank, entry.world_size, entry.start)
        meta = shard.meta
        if (meta.run_id, meta.step, meta.rank, meta.world_size, meta.start) != expected:
            raise ShardCorrupt(f"{where}: holds step {meta.step} of rank {meta.rank} of {meta.world_size}")
        return shard

    def _in_memory(self, entry: Entry, where: str) -> OpenShard:
        number, sequence = map(int, entry.location.split("/"))
        if entry.level == PARITY:
            return self._peers.computed(number, entry.rank, where)
        if entry.node is not None and entry.node != self._memory.node:
            return self._peers.shard(entry.node, number, sequence, where)
        item = next((one for one in self._memory.held(number).entries if one.sequence == sequence), None)
        if item is None:
            raise ShardCorrupt(f"{where}: it is not there any more")
        meta = CaptureMeta.from_bytes(item.slot.read_meta(), where)
        image = item.slot.image[: item.slot.status().image_bytes]
        return _mapped(image, meta, item.checksums, where)

    def open_frozen(self, wanted: FrozenReference, plan: RestartPlan, rank: int) -> OpenShard:
        """The frozen tensors that rank ``rank`` refers to, from the fastest place that is not known as bad. Blocks.

        Raises: ShardCorrupt, if there is none. Reading them raises BadFrozen: then ask again.
        """
        entries = plan.frozen.get(wanted.digest, ())
        for entry in entries:
            if entry in self._refused:
                continue
            try:
                if entry not in self._opened:
                    shard = self._opened[entry] = self._open_frozen(entry, wanted)
                    self._sources[shard.blocks] = entry
            except Exception as error:  # noqa: BLE001  storage packages may raise anything
                self._refuse(entry, error)
                continue
            return replace(self._opened[entry], rank=rank)
        reasons = "; ".join(self._refused[entry] for entry in entries)
        raise ShardCorrupt(f"the frozen tensors {wanted.digest} are nowhere whole: {reasons or 'they are not there'}")

    def _refuse(self, entry: FrozenEntry, error: Exception) -> BadFrozen:
        self._opened.pop(entry, None)
        self._refused[entry] = str(error)
        self._note(f"{_where(entry)} passed over: {error}")
        return BadFrozen(str(error))

    def _failure(self, source: Entry | FrozenEntry, error: Exception) -> Exception:
        return BadShard(source, error) if isinstance(source, Entry) else self._refuse(source, error)

    def read(self, shard: OpenShard, wanted: Sequence[Wanted]) -> None:
        """Read what is wanted of a shard that was opened here, verified. Blocks. Raises: BadShard, BadFrozen."""
        source = self._sources[shard.blocks]
        try:
            if source.level in (MEMORY, PARITY):
                read({shard: wanted})
            else:
                self._levels[source.level].read(shard, wanted)
        except Exception as error:
            raise self._failure(source, error) from error

    def forget(self) -> None:
        """The levels are listed again: what was no good may be there by now."""
        self._opened.clear()
        self._refused.clear()
        self._sources.clear()

    def _open_frozen(self, entry: FrozenEntry, wanted: FrozenReference) -> OpenShard:
        where = _where(entry)
        if entry.level != MEMORY:
            return self._levels[entry.level].open(entry, where, self._stack)
        number, digest = entry.location.split("/")
        if entry.node is not None and entry.node != self._memory.node:
            return self._peers.frozen(entry.node, digest, where)
        slot = self._memory.held(int(number)).frozen.get(digest)
        if slot is None:
            raise ShardCorrupt(f"{where}: not there any more")
        image = slot.image[: slot.status().image_bytes]
        found = Checksums.of(image)
        if (found.whole, len(image)) != (wanted.digest, wanted.size_bytes):
            raise ShardCorrupt(f"{where}: their checksum is {found.whole}, expected {wanted.digest}")
        return _mapped(image, CaptureMeta.from_bytes(slot.read_meta(), where), None, where)


def _where(entry: FrozenEntry) -> str:
    return f"frozen tensors {entry.digest} at {shown(entry.level)}"


def _mapped(image: memoryview, meta: CaptureMeta, checksums: Checksums | None, where: str) -> OpenShard:
    """Without checksums nothing can be compared: the keeper has not come to it yet, or it was done before."""
    if checksums is not None and checksums.size_bytes != len(image):
        raise ShardCorrupt(f"{where}: {len(image)} bytes, the keeper said {checksums.size_bytes}")
    blocks = MemoryBlocks(image, checksums, where)
    blocks.verify(8 + int.from_bytes(image[:8], "little"))  # damage is the reason, whatever the header looks like
    return OpenShard(meta.rank, meta, Layout.parse(image, len(image), where), blocks)
