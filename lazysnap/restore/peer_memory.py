"""Shards in the memory of other nodes."""

import contextlib
import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property

from lazysnap.errors import KeeperError
from lazysnap.levels.blocks import Blocks, Buffers, VerifiedSource
from lazysnap.levels.source import header_of
from lazysnap.links.client import PeerReader
from lazysnap.links.messages import FrozenOf, SlotOf, What
from lazysnap.ranks.discovery import Discovery
from lazysnap.resolver import FrozenEntry, Item
from lazysnap.shard.layout import Layout
from lazysnap.shard.manifest import CaptureMeta
from lazysnap.snapshots.reader import OpenShard

_BLOCK_BYTES = 4 << 20
_FRESH_S = 60.0
"""A connection that was idle for longer is not used again: the other side closes it sooner or later."""


class Connections:
    """Connections to the keepers of other nodes, for one restart. An idle one is used again, whatever is read there
    next."""

    def __init__(self, discovery: Discovery) -> None:
        self.discovery = discovery
        """The addresses of the other nodes."""
        self._lock = threading.Lock()
        self._idle: dict[str, list[tuple[float, PeerReader]]] = defaultdict(list)
        """Idle connections by node, each with the time since when."""

    @contextlib.contextmanager
    def reader(self, node: str, what: What) -> Iterator[PeerReader]:
        """A connection by which this is read, for one thread. Blocks. Raises: KeeperError; PeerRefused."""
        reader = self._taken(node, what) or PeerReader(self.discovery.secret, self.discovery.reads[node])
        try:
            reader.read_from(what)
            yield reader
        except BaseException:
            reader.close()
            raise
        with self._lock:
            self._idle[node].append((time.monotonic(), reader))

    def _taken(self, node: str, what: What) -> PeerReader | None:
        """An idle connection; if there is one, that by which the same was read."""
        with self._lock:
            fresh = [one for one in self._idle[node] if time.monotonic() - one[0] < _FRESH_S]
            stale = [one for one in self._idle[node] if one not in fresh]
            taken = next((one for one in fresh if one[1].what == what), fresh[-1] if fresh else None)
            self._idle[node] = [one for one in fresh if one is not taken]
        for _, reader in stale:
            reader.close()
        return None if taken is None else taken[1]

    def reaches(self, node: str | None) -> bool:
        """True if the keeper of that node lets this process read."""
        return node in self.discovery.reads

    def file(self, node: str, what: What) -> "PeerFile":
        """Return what that node has. Raises: KeeperError."""
        if not self.reaches(node):
            raise KeeperError(f"the keeper of {node.split('/')[0]} cannot be reached")
        return PeerFile(self, node, what)

    def close(self) -> None:
        """End those that are idle; the next read makes others."""
        with self._lock:
            idle = [reader for readers in self._idle.values() for _, reader in readers]
            self._idle.clear()
        for reader in idle:
            reader.close()


class PeerFile:
    """One thing that the keeper of another node lets others read. Thread-safe."""

    def __init__(self, connections: Connections, node: str, what: What) -> None:
        self._connections, self._node, self._what = connections, node, what

    @cached_property
    def size_bytes(self) -> int:
        """Blocks the first time. Raises: KeeperError; PeerRefused."""
        with self._connections.reader(self._node, self._what) as reader:
            return reader.size_bytes

    def read_into(self, offset: int, out: memoryview) -> int:
        """See ``PeerReader.read_into``."""
        with self._connections.reader(self._node, self._what) as reader:
            return reader.read_into(offset, out)

    def read(self, offset: int, length: int) -> memoryview:
        """Some bytes. Blocks. Raises: as ``read_into``."""
        out = memoryview(bytearray(length))
        for at in range(0, length, _BLOCK_BYTES):
            self.read_into(offset + at, out[at : at + _BLOCK_BYTES])
        return out


class PeerBlocks(Blocks):
    """See ``levels.blocks.Blocks``. What arrives is compared with what the other keeper has."""

    threads = 2
    block_bytes = _BLOCK_BYTES

    def __init__(self, file: PeerFile, where: str) -> None:
        self.where = where
        self.size_bytes = file.size_bytes
        self._file = file

    @contextlib.contextmanager
    def block(self, index: int, buffers: Buffers) -> Iterator[memoryview]:
        """See ``Blocks``."""
        start = index * self.block_bytes
        with buffers.buffer(min(self.block_bytes, self.size_bytes - start)) as data:
            self._file.read_into(start, data)
            yield data


class PeerMemory:
    """The memory of other nodes. See ``restore.sources.Source``."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    def open(self, item: Item, where: str) -> OpenShard:
        """See ``Source``."""
        assert item.node is not None
        number, of_item = item.location.split("/")
        meta: What
        image: What
        if isinstance(item, FrozenEntry):
            meta, image = FrozenOf(of_item, "meta"), FrozenOf(of_item, "image")
        else:
            meta, image = SlotOf(int(number), int(of_item), "meta"), SlotOf(int(number), int(of_item), "image")
        file = self._connections.file(item.node, meta)
        text = bytes(file.read(0, file.size_bytes))
        blocks = PeerBlocks(self._connections.file(item.node, image), where)
        whole = VerifiedSource(blocks)
        return open_at(CaptureMeta.from_bytes(text, where), blocks, whole, (0, blocks.size_bytes))


def open_at(meta: CaptureMeta, blocks: Blocks, whole: VerifiedSource, place: tuple[int, int]) -> OpenShard:
    """Return the shard at a place: offset and bytes. ``whole``: reads these blocks. Blocks. Raises: LazySnapError."""
    offset, size_bytes = place
    header = header_of(whole, offset, size_bytes)
    return OpenShard(meta.rank, meta, Layout.parse(header, size_bytes, blocks.where), blocks, offset)
