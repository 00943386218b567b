"""The shard of a node, put together while it is written from what its ranks hold: slots that still fill, or files."""

from collections.abc import Sequence
from typing import Protocol

from lazysnap.errors import FormatError
from lazysnap.levels.memory import map_anonymous
from lazysnap.levels.verified import VerifiedReader
from lazysnap.shard.layout import PAGE, Layout
from lazysnap.shard.manifest import CaptureMeta
from lazysnap.shard.members import plan_node


class Part(Protocol):
    """One rank's shard; see ``levels.source.BlockSource``."""

    meta: CaptureMeta
    size_bytes: int

    def wait(self, upto: int) -> None:
        """Block until bytes below ``upto`` have landed. Raises: CaptureAborted, if they do not count any more."""
        ...

    def view(self, offset: int, length: int) -> memoryview:
        """Bytes ``[offset, offset + length)``. Raises: ShardCorrupt."""
        ...

    def finish(self) -> None:
        """Every byte was read. Raises: CaptureAborted, if they do not count."""
        ...


class FilePart:
    """A shard that was committed at a faster level, every block compared when it is read."""

    def __init__(self, reader: VerifiedReader) -> None:
        self.meta = reader.manifest.meta
        self.size_bytes = reader.manifest.size_bytes
        self._reader = reader
        self._block = reader.manifest.checksums.block_bytes

    def wait(self, upto: int) -> None:
        """Nothing to wait for: the file is whole."""

    def view(self, offset: int, length: int) -> memoryview:
        """See ``Part.view``. Each block is read once, as long as they are asked for in order."""
        end = offset + length
        if offset // self._block == (end - 1) // self._block:
            return self._reader.read(offset, length)
        room = map_anonymous(-(-length // PAGE) * PAGE)
        at = offset
        while at < end:
            stop = min(end, (at // self._block + 1) * self._block)
            room[at - offset : stop - offset] = self._reader.read(at, stop - at)
            at = stop
        return room[:length]

    def finish(self) -> None:
        """Every block was compared when it was read."""


class NodeSource:
    """See ``levels.source.BlockSource``. What lies in one part alone is handed out as it stands there."""

    def __init__(self, parts: Sequence[Part]) -> None:
        """``parts``: in the order of their ranks. Blocks: until their headers are there.

        Raises: CaptureAborted; FormatError, if they do not belong together.
        """
        check_alike([part.meta for part in parts])
        layouts = [_layout(part) for part in parts]
        self._parts = list(parts)
        self._heads = [len(layout.header) for layout in layouts]
        self._plan = plan_node([(part.meta.rank, layout) for part, layout in zip(parts, layouts, strict=True)])
        self.size_bytes = self._plan.size_bytes

    def _spans(self) -> list[tuple[int, int]]:
        """Where each part begins and ends in the node's file."""
        ends = [
            start + part.size_bytes - head
            for start, part, head in zip(self._plan.starts, self._parts, self._heads, strict=True)
        ]
        return list(zip(self._plan.starts, ends, strict=True))

    def wait(self, upto: int) -> None:
        """See ``BlockSource.wait``."""
        for part, head, (start, end) in zip(self._parts, self._heads, self._spans(), strict=True):
            if start < upto:
                part.wait(head + min(upto, end) - start)

    def view(self, offset: int, length: int) -> memoryview:
        """See ``BlockSource.view``."""
        last = offset + length
        spans = list(zip(self._parts, self._heads, self._spans(), strict=True))
        for part, head, (start, end) in spans:
            if start <= offset and last <= end:
                return part.view(head + offset - start, length)
        room = map_anonymous(length)
        header = self._plan.header[offset:last]
        room[: len(header)] = header
        for part, head, (start, end) in spans:
            first, stop = max(start, offset), min(end, last)
            if first < stop:
                room[first - offset : stop - offset] = part.view(head + first - start, stop - first)
        return room

    def finish(self) -> None:
        """See ``BlockSource.finish``."""
        for part in self._parts:
            part.finish()


def _layout(part: Part) -> Layout:
    part.wait(min(PAGE, part.size_bytes))
    length = min(8 + int.from_bytes(part.view(0, 8), "little"), part.size_bytes)
    head = bytes(part.view(0, length))
    part.wait(length)  # else it may be of another capture
    return Layout.parse(head, part.size_bytes, f"step {part.meta.step} of rank {part.meta.rank}")


def check_alike(metas: Sequence[CaptureMeta]) -> None:
    """Whether these are parts of one snapshot. Raises: FormatError."""
    facts = {(meta.run_id, meta.run_started_ns, meta.generation, meta.step, meta.world_size) for meta in metas}
    ranks = [meta.rank for meta in metas]
    if len(facts) != 1 or ranks != sorted(set(ranks)):
        raise FormatError(f"not the ranks of one snapshot: {sorted(map(str, facts))}, ranks {ranks}")
