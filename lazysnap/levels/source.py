"""Sources of a file's bytes while it is written: slots that captures still fill, or complete memory."""

import mmap
from collections.abc import Callable, Sequence
from typing import Protocol

from lazysnap.shard.layout import PAGE, Layout, join
from lazysnap.shard.limits import MAX_HEADER_BYTES
from lazysnap.shard.manifest import CaptureMeta, Shard

ByteCounter = Callable[[int], None]
"""Receives the number of bytes of a piece that was read or written, on any thread. Its errors end the work."""


def no_progress(num_bytes: int) -> None:
    """Do nothing: a ``ByteCounter`` for work that is not displayed."""


def map_anonymous(size_bytes: int) -> memoryview:
    """Return page-aligned private memory, zeroed, freed with its last view."""
    return memoryview(mmap.mmap(-1, max(size_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))[:size_bytes]


class BlockSource(Protocol):
    """The bytes of a shard, or of a file, readable block by block as they arrive."""

    size_bytes: int

    def view(self, offset: int, length: int) -> memoryview:
        """Return the bytes ``[offset, offset + length)``. They may end at the next page boundary after the source.

        Blocks: until the bytes are written, with a deadline. Thread-safe.
        Raises: CaptureAborted, if they will never be written.
        """
        ...

    def finish(self) -> None:
        """Check the capture, after its last byte was read and before anything is published.

        Raises: CaptureAborted, if the capture was torn: the bytes are discarded.
        """
        ...


def shard_of(meta: CaptureMeta, source: BlockSource) -> Shard:
    """Return the manifest's facts about a shard. Blocks: until its header is written. Raises: CaptureAborted."""
    return Shard(meta, 0, source.size_bytes, _header_bytes(source, 0))


def _header_bytes(source: BlockSource, offset: int) -> int:
    return 8 + int.from_bytes(source.view(offset, PAGE)[:8], "little")


def header_of(source: BlockSource, offset: int, size_bytes: int) -> memoryview:
    """Return the header of a shard, to be parsed. Blocks: until it is written. Raises: as ``view``."""
    length = min(_header_bytes(source, offset), 8 + MAX_HEADER_BYTES, size_bytes)
    return source.view(offset, -(-length // PAGE) * PAGE)[:length]


class NodeSource:
    """The file of a node with several ranks: a header, and the shards one behind the other."""

    def __init__(self, sources: Sequence[tuple[CaptureMeta, BlockSource]]) -> None:
        """Blocks: until the headers are written. Raises: CaptureAborted; FormatError, if one is no header."""
        layouts = []
        for meta, source in sources:
            shard_header = header_of(source, 0, source.size_bytes)
            layouts.append((meta.rank, Layout.parse(shard_header, source.size_bytes, f"rank {meta.rank}")))
        header, offsets = join(layouts)
        padded = map_anonymous(len(header))
        padded[:] = header
        self._parts: list[tuple[int, BlockSource]] = [(0, MemorySource(padded, len(header)))]
        """The header and the shards, each with its offset."""
        shards = []
        for (meta, source), (_, layout), offset in zip(sources, layouts, offsets, strict=True):
            shards.append(Shard(meta, offset, source.size_bytes, len(layout.header)))
            self._parts.append((offset, source))
        self.shards = tuple(shards)
        self.size_bytes = self.shards[-1].offset + self.shards[-1].size_bytes

    def view(self, offset: int, length: int) -> memoryview:
        """See ``BlockSource.view``. A block with bytes of several shards is assembled."""
        last_start, last_source = self._parts[-1]
        if offset >= last_start:
            return last_source.view(offset - last_start, length)
        end = offset + length
        out = map_anonymous(length)
        for start, source in self._parts:
            source_end = start + source.size_bytes
            if start <= offset and end <= source_end:
                return source.view(offset - start, length)
            first = max(offset, start)
            stop = min(end, source_end)
            if first < stop:
                # Shards and blocks begin on pages, and so does this part.
                part = source.view(first - start, -(-(stop - first) // PAGE) * PAGE)
                out[first - offset : stop - offset] = part[: stop - first]
        return out

    def finish(self) -> None:
        """See ``BlockSource.finish``."""
        for _, source in self._parts:
            source.finish()


class MemorySource:
    """A shard that is complete in memory."""

    def __init__(self, image: memoryview, size_bytes: int) -> None:
        """``image`` reaches up to the next page boundary after ``size_bytes``."""
        self.size_bytes = size_bytes
        self._image = image

    def view(self, offset: int, length: int) -> memoryview:
        """See ``BlockSource.view``."""
        return self._image[offset : offset + length]

    def finish(self) -> None:
        """Do nothing: the writer compares the digest."""
