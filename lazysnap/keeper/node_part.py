"""A node's part of a snapshot: what it alone holds, and what parity on other nodes protects. One byte string.

It begins with the length of an index (8 bytes, little-endian) and the index, JSON: of each rank ``[rank, bytes of its
metadata, bytes of its shard, digest of the frozen tensors that it refers to, or null]``. Then follow, rank by rank, the
metadata of the capture and the shard. Of a shard only the tensors are there that no more nodes hold than may be lost:
of others there will be a copy.
"""

import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from lazysnap.errors import FormatError
from lazysnap.keeper.node_slots import NodeSlots
from lazysnap.levels.shared_part import SharedPart, held_by_few, is_held_by_few
from lazysnap.levels.source import BlockSource, MemorySource
from lazysnap.memory.arena import Slot
from lazysnap.memory.failures import CaptureAborted
from lazysnap.memory.slot_source import SlotSource, open_slot
from lazysnap.shard.limits import MAX_RANKS

AHEAD_S = 10.0
"""A node that reads a part may be so far ahead of the ranks that capture it."""
_POLL_S = 0.002
_LENGTH_BYTES = 8
_MAX_INDEX_BYTES = 8 << 20


class NodePart:
    """See ``levels.source.BlockSource``."""

    def __init__(self, sources: Sequence[SlotSource], most_lost: int) -> None:
        """``sources``: of all ranks of the node, in order. Blocks: until headers are there. Raises: CaptureAborted."""
        self._whole = sources
        shards = []
        for source in sources:
            shard: SharedPart | SlotSource = source
            if not is_held_by_few(source.meta, most_lost):
                shard = SharedPart(source.meta, source, cut=held_by_few(most_lost))
            shards.append((shard.meta.to_bytes(), shard))
        index = [
            [shard.meta.rank, len(meta), shard.size_bytes, shard.meta.frozen and shard.meta.frozen.digest]
            for meta, shard in shards
        ]
        text = json.dumps(index, separators=(",", ":")).encode()
        self._parts: list[tuple[int, BlockSource]] = []
        self.size_bytes = 0
        self._add(_memory(len(text).to_bytes(_LENGTH_BYTES, "little") + text))
        for meta, shard in shards:
            self._add(_memory(meta))
            self._add(shard)

    def _add(self, source: BlockSource) -> None:
        self._parts.append((self.size_bytes, source))
        self.size_bytes += source.size_bytes

    def view(self, offset: int, length: int) -> memoryview:
        """See ``BlockSource.view``. What lies in several shards is put together."""
        stop, found = min(offset + length, self.size_bytes), []
        for start, source in self._parts:
            first, last = max(offset, start), min(stop, start + source.size_bytes)
            if first < last:
                found.append(source.view(first - start, last - first)[: last - first])
        return found[0] if len(found) == 1 else memoryview(b"".join(found))

    def finish(self) -> None:
        """See ``BlockSource.finish``."""
        for source in self._whole:
            source.finish()


def _memory(data: bytes) -> MemorySource:
    return MemorySource(memoryview(data), len(data))


def open_part(slots: NodeSlots, step: int, most_lost: int, while_waiting: Callable[[], None]) -> NodePart:
    """Return the node's part of that step, which its ranks captured, or are about to.

    Blocks: until they have begun, at most ``AHEAD_S``. Raises: CaptureAborted; FormatError; what ``while_waiting``
    raises. The part calls that, too, while bytes are missing.
    """
    deadline = time.monotonic() + AHEAD_S
    while None in (found := slots.of_step(step)) or not found:
        if any(view.begun > step and view.holding(step) is None for view in slots.views()):
            raise CaptureAborted(f"step {step} is not in memory any more")
        if time.monotonic() > deadline:
            raise CaptureAborted(f"step {step} is not captured by all ranks of this node")
        while_waiting()
        time.sleep(_POLL_S)
    opened = [open_slot(partial(_slot, slots, step, number), step, while_waiting) for number in range(len(found))]
    return NodePart([source for _, source in opened], most_lost)


def _slot(slots: NodeSlots, step: int, number: int) -> Slot | None:
    return slots.of_step(step)[number]


def read_index(read: Callable[[int, int], memoryview], size_bytes: int) -> list[tuple[int, int, int, str | None]]:
    """The index of a part; ``read`` gives bytes of it, from an offset. Blocks. Raises: FormatError."""
    length = int.from_bytes(read(0, _LENGTH_BYTES), "little")
    if not 0 < length <= min(_MAX_INDEX_BYTES, size_bytes - _LENGTH_BYTES):
        raise FormatError(f"a node's part: an index of {length} bytes in {size_bytes}")
    try:
        index = json.loads(bytes(read(_LENGTH_BYTES, length)))
    except ValueError as error:
        raise FormatError(f"a node's part: its index is no JSON: {error}") from error
    is_index = isinstance(index, list) and len(index) <= MAX_RANKS
    if not is_index or not all(_is_entry(entry) for entry in index):
        raise FormatError("a node's part: its index is no list of ranks and sizes")
    if sum(meta_bytes + shard_bytes for _, meta_bytes, shard_bytes, _ in index) + _LENGTH_BYTES + length != size_bytes:
        raise FormatError(f"a node's part: its shards do not end with it, at byte {size_bytes}")
    return [(rank, meta_bytes, shard_bytes, frozen) for rank, meta_bytes, shard_bytes, frozen in index]


def find_shard(read: Callable[[int, int], memoryview], size_bytes: int, rank: int) -> tuple[bytes, int, int]:
    """Metadata of a rank's shard, and offset and bytes of the shard itself. Blocks. Raises: FormatError."""
    index = read_index(read, size_bytes)
    at = size_bytes - sum(meta_bytes + shard_bytes for _, meta_bytes, shard_bytes, _ in index)
    for other, meta_bytes, shard_bytes, _ in index:
        if other == rank:
            return bytes(read(at, meta_bytes)), at + meta_bytes, shard_bytes
        at += meta_bytes + shard_bytes
    raise FormatError(f"a node's part: nothing of rank {rank} is in it")


def _is_entry(entry: Any) -> bool:
    if not isinstance(entry, list) or len(entry) != 4:
        return False
    *numbers, frozen = entry
    return all(type(number) is int and number >= 0 for number in numbers) and isinstance(frozen, (str, type(None)))
