"""Shards in the memory of other nodes."""

import contextlib
import threading
from collections import defaultdict
from collections.abc import Iterator
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

from lazysnap.errors import KeeperError
from lazysnap.levels.blocks import Blocks, Buffers
from lazysnap.peers.messages import SlotOf, Subject
from lazysnap.peers.reader import PeerReader
from lazysnap.resolver import Entry
from lazysnap.shard.manifest import CaptureMeta
from lazysnap.snapshots.reader import OpenShard, open_shard

if TYPE_CHECKING:
    from lazysnap.ranks.discovery import Discovery

_BLOCK_BYTES = 4 << 20
_PATIENCE_S = 60.0
"""Seconds that a read waits for a keeper. A restart reads complete captures: a keeper that lacks one is busy."""


class PeerMemory:
    """The memory of other nodes, for one restart: see ``restore.sources.Source``. Idle readers are reused."""

    def __init__(self, discovery: "Discovery") -> None:
        self.discovery = discovery
        """The addresses of the other nodes."""
        self._lock = threading.Lock()
        self._idle: dict[str, list[PeerReader]] = defaultdict(list)
        """Idle readers by node."""

    @contextlib.contextmanager
    def reader(self, node: str) -> Iterator[PeerReader]:
        """Yield a reader of that node, for one thread. A failed reader is not reused."""
        with self._lock:
            reader = None
            if self._idle[node]:
                reader = self._idle[node].pop()
        if reader is None:
            reader = PeerReader(self.discovery.secret, self.discovery.reads[node], patience_s=_PATIENCE_S)
        try:
            yield reader
        except BaseException:
            reader.close()
            raise
        with self._lock:
            self._idle[node].append(reader)

    def reaches(self, node: str | None) -> bool:
        """Return True if the keeper of that node serves this process."""
        return node in self.discovery.reads

    def file(self, node: str, subject: Subject) -> "PeerFile":
        """Return a slot, part or parity of that node. Raises: KeeperError."""
        if not self.reaches(node):
            raise KeeperError(f"the keeper of {node.split('/')[0]} cannot be reached")
        return PeerFile(self, node, subject)

    def open(self, entry: Entry, where: str) -> OpenShard:
        """See ``Source``."""
        assert entry.node is not None
        local_rank, sequence = entry.location
        meta = self.file(entry.node, SlotOf(local_rank, sequence, "meta"))
        text = bytes(meta.read(0, meta.size_bytes))
        blocks = PeerBlocks(self.file(entry.node, SlotOf(local_rank, sequence, "image")), where)
        return open_shard(CaptureMeta.from_bytes(text, where), blocks, 0, blocks.size_bytes)

    def close(self) -> None:
        """Close the idle readers; the next read makes new ones."""
        with self._lock:
            idle = list(chain.from_iterable(self._idle.values()))
            self._idle.clear()
        for reader in idle:
            reader.close()


class PeerFile:
    """A slot, part or parity that the keeper of another node serves. Thread-safe."""

    def __init__(self, memory: PeerMemory, node: str, subject: Subject) -> None:
        self._memory = memory
        self._node = node
        self._subject = subject

    @cached_property
    def size_bytes(self) -> int:
        """Return the size. Blocks the first time. Raises: KeeperError; PeerRefused."""
        with self._memory.reader(self._node) as reader:
            return reader.size(self._subject)

    def read_into(self, offset: int, out: memoryview) -> int:
        """See ``PeerReader.read_into``."""
        with self._memory.reader(self._node) as reader:
            return reader.read_into(self._subject, offset, out)

    def read(self, offset: int, length: int) -> memoryview:
        """Return some bytes. Blocks. Raises: as ``read_into``."""
        out = memoryview(bytearray(length))
        for start in range(0, length, _BLOCK_BYTES):
            self.read_into(offset + start, out[start : start + _BLOCK_BYTES])
        return out


class PeerBlocks(Blocks):
    """See ``levels.blocks.Blocks``. Received bytes are compared with those of the other keeper."""

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
