"""A node's part of a snapshot: the bytes that only this node holds, and that parity on other nodes protects.

It begins with the length of an index (8 bytes, little-endian) and the index, JSON: of each rank ``[rank, bytes of its
metadata, bytes of its shard]``. The metadata of the capture and the shard follow, rank by rank. A shard contains only
tensors that no more nodes hold than may be lost: of other tensors a copy survives.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from lazysnap.errors import FormatError
from lazysnap.levels.shared_part import SharedPart, held_by_few, is_held_by_few
from lazysnap.levels.source import BlockSource, MemorySource
from lazysnap.memory.capture_reader import CaptureAborted, CaptureReader
from lazysnap.memory.slot_choice import SlotPhase, SlotView
from lazysnap.memory.slots import Slot
from lazysnap.shard.limits import MAX_RANKS

_LENGTH_BYTES = 8
_MAX_INDEX_BYTES = 8 << 20
ReadBytes = Callable[[int, int], memoryview]
"""Returns the given number of bytes from an offset."""


class NodePart:
    """The bytes of a part, readable while the captures fill. See ``levels.source.BlockSource``."""

    def __init__(self, captures: Sequence[CaptureReader], most_lost: int) -> None:
        """Read the headers of the captures.

        Args:
            captures: the captures of all ranks of the node, in order.
            most_lost: number of nodes that may be lost. Tensors that more nodes hold are omitted.

        Blocks: until the headers are copied. Raises: CaptureAborted; errors of a capture that would have to wait.
        """
        self._captures = captures
        shards: list[CaptureReader | SharedPart] = []
        for capture in captures:
            if is_held_by_few(capture.meta, most_lost):
                shards.append(capture)
            else:
                shards.append(SharedPart(capture.meta, capture, cut=held_by_few(most_lost)))
        metas = [shard.meta.to_bytes() for shard in shards]
        self.index: list[tuple[int, int, int]] = []
        """For each rank: its number, the bytes of its metadata, and those of its shard."""
        for shard, meta in zip(shards, metas, strict=True):
            self.index.append((shard.meta.rank, len(meta), shard.size_bytes))
        text = json.dumps(self.index, separators=(",", ":")).encode()
        self.size_bytes = 0
        self._pieces: list[tuple[int, BlockSource]] = []
        """Offset and source of each piece."""
        self._append(_memory(len(text).to_bytes(_LENGTH_BYTES, "little") + text))
        for shard, meta in zip(shards, metas, strict=True):
            self._append(_memory(meta))
            self._append(shard)

    def _append(self, source: BlockSource) -> None:
        self._pieces.append((self.size_bytes, source))
        self.size_bytes += source.size_bytes

    def view(self, offset: int, length: int) -> memoryview:
        """See ``BlockSource.view``. Bytes from several pieces are joined."""
        stop = min(offset + length, self.size_bytes)
        views = []
        for start, source in self._pieces:
            first = max(offset, start)
            last = min(stop, start + source.size_bytes)
            if first < last:
                views.append(source.view(first - start, last - first)[: last - first])
        if len(views) == 1:
            return views[0]
        return memoryview(b"".join(views))

    def check(self) -> None:
        """Check that all viewed bytes are of these captures. Raises: CaptureAborted."""
        for capture in self._captures:
            capture.check()

    def finish(self) -> None:
        """See ``BlockSource.finish``."""
        for capture in self._captures:
            capture.finish()


def _memory(data: bytes) -> MemorySource:
    return MemorySource(memoryview(data), len(data))


def find_capture(slots: Iterable[Slot], start: int, step: int) -> tuple[Slot, SlotView] | None:
    """Return the slot of a rank with that step of that start, and its words. None: not captured yet.

    Of several captures of the step the newest counts. Raises: CaptureAborted, if the rank captured a later step.
    """
    newest: tuple[Slot, SlotView] | None = None
    is_passed = False
    for slot in slots:
        view = slot.view()
        if view.step is None or view.phase is SlotPhase.VOID:
            continue
        if (view.start, view.step) > (start, step):
            is_passed = True
        is_same = (view.start, view.step) == (start, step)
        if is_same and (newest is None or view.sequence > newest[1].sequence):
            newest = (slot, view)
    if newest is None and is_passed:
        raise CaptureAborted(f"step {step} is not in memory any more")
    return newest


def read_index(read: ReadBytes, size_bytes: int) -> list[tuple[int, int, int]]:
    """Return the index of a part. Blocks. Raises: FormatError."""
    length = int.from_bytes(read(0, _LENGTH_BYTES), "little")
    if not 0 < length <= min(_MAX_INDEX_BYTES, size_bytes - _LENGTH_BYTES):
        raise FormatError(f"a node's part: an index of {length} bytes in {size_bytes}")
    try:
        index = json.loads(bytes(read(_LENGTH_BYTES, length)))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"a node's part: its index is no JSON: {error}") from error
    is_list = isinstance(index, list) and len(index) <= MAX_RANKS
    if not is_list or not all(_is_entry(entry) for entry in index):
        raise FormatError("a node's part: its index is no list of ranks and sizes")
    shards_bytes = sum(meta_bytes + shard_bytes for _, meta_bytes, shard_bytes in index)
    if _LENGTH_BYTES + length + shards_bytes != size_bytes:
        raise FormatError(f"a node's part: its shards do not end with it, at byte {size_bytes}")
    return [(rank, meta_bytes, shard_bytes) for rank, meta_bytes, shard_bytes in index]


def find_shard(read: ReadBytes, size_bytes: int, rank: int) -> tuple[bytes, int, int]:
    """Return the metadata of a rank's shard, and offset and bytes of the shard itself. Blocks. Raises: FormatError."""
    index = read_index(read, size_bytes)
    offset = size_bytes - sum(meta_bytes + shard_bytes for _, meta_bytes, shard_bytes in index)
    for other_rank, meta_bytes, shard_bytes in index:
        if other_rank == rank:
            return bytes(read(offset, meta_bytes)), offset + meta_bytes, shard_bytes
        offset += meta_bytes + shard_bytes
    raise FormatError(f"a node's part: nothing of rank {rank} is in it")


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, list) or len(entry) != 3:
        return False
    return all(type(number) is int and number >= 0 for number in entry)
