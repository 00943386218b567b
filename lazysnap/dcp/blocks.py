"""Blocks of shards, each read and verified once, shared by what needs them, and let go when nothing does any more."""

import contextlib
import threading
from collections import Counter
from collections.abc import Iterator

from lazysnap.dcp.snapshot import OpenShard
from lazysnap.errors import ShardCorrupt
from lazysnap.levels.memory import map_anonymous
from lazysnap.levels.storage import Reader

_MAX_SPARE = 8


class _Block:
    def __init__(self, uses: int) -> None:
        self.lock = threading.Lock()
        self.uses = uses
        self.room: memoryview | None = None
        self.data: memoryview | None = None


class BlockCache:
    """Made for a list of uses known beforehand. Thread-safe."""

    def __init__(self, uses: Counter[tuple[OpenShard, int]], *, verify: bool) -> None:
        """``uses``: how often each block of each shard will be asked for."""
        self._blocks = {key: _Block(count) for key, count in uses.items()}
        self._left = Counter(shard for shard, _ in uses)
        self._readers: dict[OpenShard, Reader] = {}
        self._spare: list[memoryview] = []
        self._lock = threading.Lock()
        self._verify = verify
        self.bytes_read = 0

    @contextlib.contextmanager
    def block(self, shard: OpenShard, index: int) -> Iterator[memoryview]:
        """Block ``index``. Blocks: reads it, if nobody did. Raises: ShardCorrupt, naming it; LevelError."""
        block = self._blocks[shard, index]
        with block.lock:
            if block.data is None:
                block.room, block.data = self._read(shard, index)
            data = block.data
        try:
            yield data
        finally:
            with block.lock:
                block.uses -= 1
                room = block.room if block.uses == 0 else None
                if room is not None:
                    block.room = block.data = None
            if room is not None:
                self._let_go(shard, room)

    def _read(self, shard: OpenShard, index: int) -> tuple[memoryview, memoryview]:
        checksums = shard.manifest.checksums
        start = index * checksums.block_bytes
        length = min(checksums.block_bytes, checksums.size_bytes - start)
        with self._lock:
            fitting = next((i for i, room in enumerate(self._spare) if len(room) >= length), None)
            room = self._spare.pop(fitting) if fitting is not None else None
            if shard not in self._readers:
                self._readers[shard] = self._open(shard)
            reader = self._readers[shard]
            self.bytes_read += length
        # Fresh memory costs more than the copy into it: buffers are used again.
        room = map_anonymous(length) if room is None else room
        data = room[:length]
        reader.read_into(start, data)
        if self._verify:
            checksums.verify_block(index, data, shard.where)
        return room, data

    @staticmethod
    def _open(shard: OpenShard) -> Reader:
        try:
            return shard.place.storage.reader(shard.place.shard_path)
        except FileNotFoundError as error:
            raise ShardCorrupt(f"{shard.where}: was deleted while it was read") from error

    def _let_go(self, shard: OpenShard, room: memoryview) -> None:
        done = None
        with self._lock:
            if len(self._spare) < _MAX_SPARE:
                self._spare.append(room)
            self._left[shard] -= 1
            if not self._left[shard]:
                # Of a thousand shards only few are open at a time.
                done = self._readers.pop(shard, None)
        if done is not None:
            done.close()

    def close(self) -> None:
        """Let go of every file; harmless twice. Nothing may be read any more."""
        with self._lock:
            readers, self._readers = list(self._readers.values()), {}
        for reader in readers:
            reader.close()
