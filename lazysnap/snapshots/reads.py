"""Reads of boxes of tensors: collected first, then each block of a shard is read once. Needs no torch."""

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lazysnap.levels.blocks import WantedBytes
from lazysnap.levels.source import Progress, no_progress
from lazysnap.shard.pieces import Extent
from lazysnap.shard.strides import strides_of
from lazysnap.snapshots.assembly import JoinedTensor
from lazysnap.snapshots.reader import OpenShard, read

_LEAST_UNIT = 1 << 20


@dataclass(frozen=True)
class Span:
    """Bytes ``[start, stop)`` of a file that hold a part of a box."""

    start: int
    stop: int
    offsets: Extent
    """The place of the part in the box."""
    shape: Extent
    strides: Extent
    """Strides in elements, from ``start``."""


def spans(
    place: tuple[int, int], whole: Sequence[int], box: Sequence[slice], unit: int, origin: Extent | None = None
) -> Iterator[Span]:
    """Yield the parts of ``box`` of a row-major tensor of shape ``whole``, in file order; together they cover it once.

    ``origin``: the offsets of the box in what is wanted; default: zeros.

    ``place``: offset of the tensor in the file, and bytes of one element. Parts end at multiples of ``unit`` bytes
    where rows allow; a part that crosses such a multiple is a single row (or element) of some dimension.
    """
    offset, itemsize = place
    strides = [itemsize] * len(whole)
    for dim in range(len(whole) - 2, -1, -1):
        strides[dim] = strides[dim + 1] * whole[dim + 1]
    shape = [part.stop - part.start for part in box]
    if 0 in shape:
        return
    start = offset + sum(part.start * stride for part, stride in zip(box, strides, strict=True))
    elements = tuple(stride // itemsize for stride in strides)

    def cut(at: int, offsets: Extent, sizes: Extent, dim: int) -> Iterator[Span]:
        stop = at + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True)) + itemsize
        if at // unit == (stop - 1) // unit or dim == len(sizes):
            yield Span(at, stop, offsets, sizes, elements)
            return
        stride = strides[dim]
        done = 0
        row = stop - at - (sizes[dim] - 1) * stride
        while done < sizes[dim]:
            begin = at + done * stride
            # As many whole rows as end before the next multiple of unit.
            room = unit - begin % unit
            count = min(sizes[dim] - done, (room - row) // stride + 1) if row <= room else 0
            part = (*offsets[:dim], offsets[dim] + done, *offsets[dim + 1 :])
            if count:
                yield Span(
                    begin,
                    begin + (count - 1) * stride + row,
                    part,
                    (*sizes[:dim], count, *sizes[dim + 1 :]),
                    elements,
                )
            elif row <= unit:
                # It crosses one boundary; cutting it further would cost more.
                yield Span(begin, begin + row, part, (*sizes[:dim], 1, *sizes[dim + 1 :]), elements)
            else:
                yield from cut(begin, part, (*sizes[:dim], 1, *sizes[dim + 1 :]), dim + 1)
            done += max(count, 1)

    yield from cut(start, (0,) * len(shape) if origin is None else origin, tuple(shape), 0)


Use = Callable[[Span, memoryview], None]
"""Receives a part of a box, with its place there, and the bytes of it. Called in several threads."""
Write = Callable[[int, memoryview], None]
"""Receives bytes of a tensor, and their offset in it (row-major). Called in several threads, for each byte once."""


def written(tensor: JoinedTensor, write: Write) -> Use:
    """Return a ``Use`` that writes a whole tensor, row by row where its rows are apart."""
    item = tensor.item_bytes
    steps = [stride * item for stride in strides_of(tensor.shape, None)]

    def use(span: Span, data: memoryview) -> None:
        start = sum(at * step for at, step in zip(span.offsets, steps, strict=True))
        for source, target, length in _runs(span.shape, [stride * item for stride in span.strides], steps, item):
            write(start + target, data[source : source + length])

    return use


def _runs(shape: Extent, source: Sequence[int], target: Sequence[int], item: int) -> Iterator[tuple[int, int, int]]:
    """Yield the bytes of a box that follow each other in both places: offset here, offset there, and their number.

    ``source``, ``target``: the bytes from one element to the next in each dimension.
    """
    outer = len(shape)
    length = item
    while outer and (shape[outer - 1] == 1 or source[outer - 1] == target[outer - 1] == length):
        outer -= 1
        length *= shape[outer]

    def walk(dim: int, here: int, there: int) -> Iterator[tuple[int, int, int]]:
        if dim == outer:
            yield here, there, length
            return
        for at in range(shape[dim]):
            yield from walk(dim + 1, here + at * source[dim], there + at * target[dim])

    yield from walk(0, 0, 0)


class Reads:
    """Boxes to be read, by the shard that holds them."""

    def __init__(self) -> None:
        self._parts: list[tuple[OpenShard, _PendingSpan]] = []

    def add(self, tensor: JoinedTensor, use: Use) -> None:
        """Have the wanted box of a tensor read. Nothing is read yet."""
        item_bytes = tensor.item_bytes
        for tile in tensor.tiles:
            stored = tile.stored
            block = stored.shard.blocks.block_bytes
            unit = block * -(-_LEAST_UNIT // block)
            for span in spans((stored.offset, item_bytes), tile.box.piece.shape, tile.box.source, unit, tile.offsets):
                self._parts.append((stored.shard, _PendingSpan(span, use, item_bytes * math.prod(span.shape))))

    @property
    def size_bytes(self) -> int:
        """Bytes that are wanted."""
        return sum(part.size_bytes for _, part in self._parts)

    def jobs(self, progress: Progress = no_progress) -> dict[OpenShard, list[WantedBytes]]:
        """Return what is to be read of each shard. ``progress`` receives numbers of bytes that were used."""
        jobs: dict[OpenShard, list[WantedBytes]] = defaultdict(list)
        for shard, part in self._parts:
            jobs[shard].append(part.wanted(progress))
        return jobs

    def run(self, progress: Progress = no_progress) -> None:
        """Read everything, with checksums; ``progress`` as for ``jobs``. Call it once.

        Blocks. Raises: FormatError; LevelError; FileNotFoundError; what a ``Use`` raises.
        """
        read(self.jobs(progress))


class _PendingSpan:
    """One span on its way. It is used when all its bytes are there, which may lie in several blocks."""

    def __init__(self, span: Span, use: Use, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._span, self._use = span, use
        self._lock = threading.Lock()
        self._left = span.stop - span.start
        self._buffer: bytearray | None = None

    def wanted(self, progress: Progress) -> WantedBytes:
        """Return the bytes to read."""
        span = self._span

        def put(at: int, data: memoryview) -> None:
            whole: memoryview | None = data
            if len(data) < span.stop - span.start:
                whole = self._collected(at, data)
            if whole is not None:
                self._use(span, whole)
                progress(self.size_bytes)

        return WantedBytes(span.start, span.stop, put)

    def _collected(self, at: int, data: memoryview) -> memoryview | None:
        """Add some bytes; all of them, if these were the last."""
        with self._lock:
            if self._buffer is None:
                self._buffer = bytearray(self._span.stop - self._span.start)
            buffer = memoryview(self._buffer)
        buffer[at : at + len(data)] = data
        with self._lock:
            self._left -= len(data)
            if self._left:
                return None
            self._buffer = None
        return buffer
