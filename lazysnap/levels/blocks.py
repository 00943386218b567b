"""Reads of shards by blocks: each block is read once, compared with its checksum, and copied to its receivers.

Several threads work at a time, each on one block, so reading, comparing and copying overlap.
"""

import contextlib
import threading
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial

from lazysnap.levels.node_base import places_of
from lazysnap.levels.node_file import FilePlace
from lazysnap.levels.source import ByteCounter, map_anonymous, no_progress
from lazysnap.levels.storage import Reader
from lazysnap.levels.threads import in_threads
from lazysnap.shard.checksum import BLOCK_BYTES, Checksums
from lazysnap.shard.manifest import Manifest, Shard


@dataclass(frozen=True, eq=False)
class WantedBytes:
    """Bytes ``[start, stop)`` of a file, or of a shard in memory, and the function that receives them."""

    start: int
    stop: int
    put: Callable[[int, memoryview], None]
    """Receives some of the bytes and their offset from ``start``. Called on several threads, once for each byte."""


class Buffers:
    """Page-aligned memory to read into. It is reused: fresh memory costs more than the copy into it."""

    def __init__(self) -> None:
        self._spare: list[memoryview] = []

    @contextlib.contextmanager
    def buffer(self, size_bytes: int) -> Iterator[memoryview]:
        """Yield memory of that size, for the time of the context."""
        try:
            buffer = self._spare.pop()
        except IndexError:
            buffer = memoryview(b"")
        if len(buffer) < size_bytes:
            buffer = map_anonymous(size_bytes)
        try:
            yield buffer[:size_bytes]
        finally:
            self._spare.append(buffer)


class Blocks(ABC):
    """The blocks of a node's file, or of one shard in memory. Thread-safe.

    They are a ``BlockSource``, too: a damaged block ends the write of a copy before the copy is visible.
    """

    where: str
    """The file, for messages."""
    threads: int
    """The number of blocks to read at a time."""
    size_bytes: int
    block_bytes: int
    _last: tuple[int, memoryview] | None = None
    """The block that ``view`` read last, and its number: a header is read in small parts, and then what follows it.

    Invariant: both are replaced at once, because several threads read."""

    @abstractmethod
    def block(self, index: int, buffers: Buffers) -> AbstractContextManager[memoryview]:
        """Return one block, compared. Blocks. Raises: FormatError, naming it; LevelError; FileNotFoundError."""

    def release(self) -> None:
        """Close the file, unless it must stay open. The next ``block`` opens it again. May be called twice."""
        self._last = None

    def close(self) -> None:
        """Close the file. The next ``block`` opens it again. May be called twice."""
        self._last = None

    def view(self, offset: int, length: int) -> memoryview:
        """See ``BlockSource.view``. Raises: as ``block``."""
        out = map_anonymous(length)
        stop = min(offset + length, self.size_bytes)
        for index in range(offset // self.block_bytes, -(-stop // self.block_bytes)):
            data = self._last_or_read(index)
            start = index * self.block_bytes
            if start == offset and len(data) == length:
                return data  # the usual case: both places have blocks of one size
            first = max(start, offset)
            last = min(start + len(data), stop)
            out[first - offset : last - offset] = data[first - start : last - start]
        return out

    def _last_or_read(self, index: int) -> memoryview:
        last = self._last
        if last is not None and last[0] == index:
            return last[1]
        with self.block(index, Buffers()) as data:  # in new memory, because the block is kept
            self._last = (index, data)
        return data

    def finish(self) -> None:
        """See ``BlockSource.finish``. Nothing to do: every block was compared when it was read."""
        return


class FileBlocks(Blocks):
    """The blocks of a committed file at a level. The first read opens it."""

    def __init__(self, place: FilePlace, manifest: Manifest, *, stays_open: bool = True) -> None:
        """``stays_open``: keep the file open until ``close``, so that it can be read even if it is deleted."""
        self._stays_open = stays_open
        self.where = place.where
        self.threads = place.storage.parallel_reads
        self.size_bytes = manifest.size_bytes
        self.block_bytes = manifest.checksums.block_bytes
        self.manifest = manifest
        self._place = place
        self._places = places_of(manifest)
        self._readers: tuple[Reader, ...] = ()
        """The reader of the file, and that of its base if it has one."""
        self._opening = threading.Lock()

    @contextlib.contextmanager
    def block(self, index: int, buffers: Buffers) -> Iterator[memoryview]:
        """See ``Blocks``."""
        last = self._last
        if last is not None and last[0] == index:
            self._last = None
            yield last[1]
            return
        start = index * self.block_bytes
        with buffers.buffer(min(self.block_bytes, self.size_bytes - start)) as data:
            self._read_into(start, data)
            self.manifest.checksums.verify_block(index, data, self.where)
            yield data

    def unverified(self, shard: Shard) -> memoryview:
        """Return the header of a shard without comparing it with its checksum. Raises: as ``block``."""
        header = map_anonymous(shard.header_bytes)
        self._read_into(shard.offset, header)
        return header

    def _read_into(self, start: int, out: memoryview) -> None:
        """Fill ``out`` with bytes of the file from ``start``, each block from the object that has it."""
        readers = self._opened()
        while len(out):
            index, offset_in_block = divmod(start, self.block_bytes)
            is_in_base, offset = self._places.find(index)
            length = min(len(out), self.block_bytes - offset_in_block)
            readers[is_in_base].read_into(offset + offset_in_block, out[:length])
            out = out[length:]
            start += length

    def _opened(self) -> tuple[Reader, ...]:
        with self._opening:
            if not self._readers:
                storage = self._place.storage
                readers: tuple[Reader, ...] = (storage.reader(self._place.file_path),)
                if self.manifest.base:
                    try:
                        readers = (*readers, storage.reader(self._place.base_path))
                    except BaseException:
                        readers[0].close()
                        raise
                self._readers = readers
            return self._readers

    def release(self) -> None:
        """See ``Blocks``."""
        if not self._stays_open:
            self.close()

    def close(self) -> None:
        """See ``Blocks``."""
        self._last = None
        with self._opening:
            readers = self._readers
            self._readers = ()
        for reader in readers:
            reader.close()


class MemoryBlocks(Blocks):
    """The blocks of a shard in memory; compared if there are checksums."""

    threads = 4
    """Comparing and copying both need a core."""

    def __init__(self, data: memoryview, checksums: Checksums | None, where: str) -> None:
        self.where = where
        self.size_bytes = len(data)
        self.block_bytes = BLOCK_BYTES
        if checksums is not None:
            self.block_bytes = checksums.block_bytes
        self._data = data
        self._checksums = checksums

    @contextlib.contextmanager
    def block(self, index: int, buffers: Buffers) -> Iterator[memoryview]:
        """See ``Blocks``."""
        data = self._data[index * self.block_bytes : (index + 1) * self.block_bytes]
        if self._checksums is not None:
            self._checksums.verify_block(index, data, self.where)
        yield data


def read_node_file(
    place: FilePlace, manifest: Manifest, *, skips_base: bool = False, progress: ByteCounter = no_progress
) -> None:
    """Read a committed file, and compare every block with its checksum; with ``skips_base`` not those of its base.

    Blocks. Raises: FormatError, naming file and block; FileNotFoundError; LevelError; as ``progress``.
    """
    place.check_sizes(manifest)
    ranges = _all_bytes(manifest, skips_base=skips_base)
    headers = []
    for shard in manifest.shards:
        header = bytearray(shard.header_bytes)
        ranges.append(WantedBytes(shard.offset, shard.offset + shard.header_bytes, partial(_copy_to, header)))
        headers.append(header)
    blocks = FileBlocks(place, manifest)
    with contextlib.closing(blocks):
        fill({blocks: ranges}, progress=progress)
    for shard, header in zip(manifest.shards, headers, strict=True):
        shard.layout(memoryview(header), place.where)


def verify(place: FilePlace, *, skips_base: bool = False) -> Manifest:
    """Read a manifest, then the file as ``read_node_file``; return the manifest. Blocks. Raises: as that function."""
    manifest = place.read_manifest()
    read_node_file(place, manifest, skips_base=skips_base)
    return manifest


def _all_bytes(manifest: Manifest, *, skips_base: bool) -> list[WantedBytes]:
    """Return the ranges of a whole file. Their bytes are discarded after the comparison."""
    ranges = []
    start = 0
    if skips_base:
        for first, behind_last in manifest.base:
            ranges.append(WantedBytes(start, first * manifest.checksums.block_bytes, _discard))
            start = behind_last * manifest.checksums.block_bytes
    ranges.append(WantedBytes(start, manifest.size_bytes, _discard))
    return ranges


def _discard(offset: int, data: memoryview) -> None:
    """Receive bytes that are read only to be compared. See ``WantedBytes.put``."""


def _copy_to(out: bytearray, offset: int, data: memoryview) -> None:
    """Receive bytes into ``out``. See ``WantedBytes.put``."""
    out[offset : offset + len(data)] = data


def fill(jobs: Mapping[Blocks, Sequence[WantedBytes]], *, progress: ByteCounter = no_progress) -> None:
    """Read the wanted bytes of these shards. Blocks. Files that do not stay open are closed in the end.

    Raises: FormatError, naming file and block; LevelError; FileNotFoundError; as ``put`` and ``progress``.
    """
    buffers = Buffers()
    tasks: list[Callable[[], None]] = []
    for blocks, ranges in jobs.items():
        tasks += _FileFill(blocks, ranges, buffers, progress).tasks()
    threads = max((blocks.threads for blocks in jobs), default=1)
    try:
        in_threads(tasks, min(threads, max(1, len(tasks))), "lazysnap-read")
    finally:
        for blocks in jobs:
            blocks.release()


class _FileFill:
    """The wanted bytes of one file, by the blocks that have them."""

    def __init__(self, blocks: Blocks, ranges: Sequence[WantedBytes], buffers: Buffers, progress: ByteCounter) -> None:
        self._blocks = blocks
        self._pool = buffers
        self._progress = progress
        self._ranges: dict[int, list[WantedBytes]] = defaultdict(list)
        """The ranges with bytes in a block, by its number."""
        for wanted_bytes in ranges:
            if wanted_bytes.start < wanted_bytes.stop:
                first = wanted_bytes.start // blocks.block_bytes
                behind_last = -(-wanted_bytes.stop // blocks.block_bytes)
                for index in range(first, behind_last):
                    self._ranges[index].append(wanted_bytes)
        self._num_remaining = len(self._ranges)
        """The number of blocks that are not read yet."""
        self._lock = threading.Lock()

    def tasks(self) -> list[Callable[[], None]]:
        """Return a task for each block that has wanted bytes, in order."""
        return [partial(self._read, index) for index in sorted(self._ranges)]

    def _read(self, index: int) -> None:
        """Read a block once, and give each range its part."""
        start = index * self._blocks.block_bytes
        with self._blocks.block(index, self._pool) as data:
            stop = start + len(data)
            for wanted_bytes in self._ranges[index]:
                first = max(start, wanted_bytes.start)
                last = min(stop, wanted_bytes.stop)
                wanted_bytes.put(first - wanted_bytes.start, data[first - start : last - start])
        with self._lock:
            self._num_remaining -= 1
            is_complete = self._num_remaining == 0
        if is_complete:
            self._blocks.release()  # so that few of a thousand shards are open at a time
        self._progress(stop - start)
