"""Ranges of a shard, none handed out before the blocks that it lies in were compared with their checksums."""

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable

from lazysnap.levels.files import PAGE
from lazysnap.levels.memory import map_anonymous
from lazysnap.levels.shards import ShardPlace
from lazysnap.shard.manifest import Manifest

_KEPT_BLOCKS = 3


class VerifiedReader:
    """Reads ranges of one committed shard. While it is open, retention leaves the shard alone. Thread-safe."""

    def __init__(self, place: ShardPlace, manifest: Manifest) -> None:
        """Raises: FileNotFoundError, LevelUnavailable."""
        self.where = place.where
        self.parallel = place.storage.parallel_reads
        """Blocks that are best read at a time."""
        self.manifest = manifest
        self._lock = threading.Lock()
        self._blocks: OrderedDict[int, memoryview] = OrderedDict()
        with contextlib.ExitStack() as stack:
            stack.enter_context(place.storage.lease(place.shard_path))
            self._reader = stack.enter_context(contextlib.closing(place.storage.reader(place.shard_path)))
            self._stack = stack.pop_all()

    def read(self, offset: int, length: int) -> memoryview:
        """``length`` bytes from ``offset``; zeros behind the end of the shard. Not to be written to.

        Blocks. Raises: ShardCorrupt, naming file and block; LevelUnavailable.
        """
        checksums = self.manifest.checksums
        block = checksums.block_bytes
        index = offset // block
        if offset + length <= min((index + 1) * block, checksums.size_bytes):
            return self._kept(index)[offset - index * block : offset - index * block + length]
        first = index * block
        last = min(-(-(offset + length) // block) * block, checksums.size_bytes)
        return self._fresh(first, last, offset + length)[offset - first : offset - first + length]

    def read_block(self, index: int, room: memoryview) -> memoryview:
        """One block, in ``room`` (page-aligned) or kept from before. Blocks, raises: as ``read``."""
        checksums = self.manifest.checksums
        start = index * checksums.block_bytes
        data = room[: min(checksums.block_bytes, checksums.size_bytes - start)]
        with self._lock:
            if index in self._blocks:
                return self._blocks[index][: len(data)]
        self._reader.read_into(start, data)
        checksums.verify_block(index, data, self.where)
        return data

    def _fresh(self, first: int, last: int, end: int) -> memoryview:
        """Blocks from ``first`` to ``last``, compared; zeros from there to ``end``."""
        checksums = self.manifest.checksums
        block = checksums.block_bytes
        room = map_anonymous(-(-(max(last, end) - first) // PAGE) * PAGE)
        self._reader.read_into(first, room[: last - first])
        for start in range(first, last, block):
            stop = min(start + block, last)
            checksums.verify_block(start // block, room[start - first : stop - first], self.where)
        return room

    def _kept(self, index: int) -> memoryview:
        """One block; the last few are kept, for small tensors that lie in one."""
        with self._lock:
            if index in self._blocks:
                self._blocks.move_to_end(index)
                return self._blocks[index]
        start = index * self.manifest.checksums.block_bytes
        stop = min(start + self.manifest.checksums.block_bytes, self.manifest.size_bytes)
        room = self._fresh(start, stop, stop)
        with self._lock:
            self._blocks[index] = room
            while len(self._blocks) > _KEPT_BLOCKS:
                self._blocks.popitem(last=False)
        return room

    def close(self) -> None:
        """Let go of the shard; harmless twice."""
        self._stack.close()

    def __enter__(self) -> "VerifiedReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class VerifiedSource:
    """A committed shard to be written elsewhere: damage ends the writing before anything is visible there."""

    def __init__(self, reader: VerifiedReader, beat: Callable[[int], None]) -> None:
        """``beat`` is told the bytes of each piece that was read; what it raises ends the writing, too."""
        self.size_bytes = reader.manifest.size_bytes
        self._reader = reader
        self._beat = beat

    def wait(self, upto: int) -> None:
        """Nothing to wait for: the shard is whole."""

    def view(self, offset: int, length: int) -> memoryview:
        """See ``BlockSource.view``. Raises: ShardCorrupt."""
        self._beat(0)
        piece = self._reader.read(offset, length)
        self._beat(min(length, self.size_bytes - offset))
        return piece

    def finish(self) -> None:
        """Every block was compared when it was read."""
