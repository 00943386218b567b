"""Reads boxes of tensors: requests are collected first, then each block of a shard is read once. Needs no torch."""

import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from lazysnap.levels.blocks import WantedBytes
from lazysnap.levels.source import ByteCounter, no_progress
from lazysnap.shard.pieces import Extent
from lazysnap.shard.strides import strides_of
from lazysnap.snapshots.assembly import JoinedTensor
from lazysnap.snapshots.reader import OpenShard, read

_LEAST_UNIT = 1 << 20


@dataclass(frozen=True)
class Span:
    """Bytes ``[start, stop)`` of a file with a part of a box."""

    start: int
    stop: int
    offsets: Extent
    """The place of the part in the box."""
    shape: Extent
    strides: Extent
    """Strides in elements, from ``start``."""


def spans(
    place: tuple[int, int], whole: Sequence[int], box: Sequence[slice], unit: int, origin: Extent
) -> Iterator[Span]:
    """Yield the parts of ``box`` of a row-major tensor, in file order; together they cover it once.

    Parts end at multiples of ``unit`` bytes where rows allow. A part that crosses such a multiple is a single row (or
    element) of some dimension.

    Args:
        place: offset of the tensor in the file, and bytes of one element.
        whole: shape of the tensor.
        box: the part of the tensor.
        unit: see above.
        origin: the place of the box in the box that the caller fills.
    """
    offset, item_bytes = place
    strides = strides_of(whole, None)
    starts = []
    shape = []
    for part in box:
        starts.append(part.start)
        shape.append(part.stop - part.start)
    if 0 in shape:
        return
    cutter = _Cutter(unit, item_bytes, strides)
    yield from cutter.cut(offset + _element_at(starts, strides) * item_bytes, origin, tuple(shape), 0)


def _element_at(indexes: Sequence[int], strides: Sequence[int]) -> int:
    """Return the offset, in elements, of the element at these indexes."""
    return sum(index * stride for index, stride in zip(indexes, strides, strict=True))


@dataclass(frozen=True)
class _Cutter:
    """Cuts boxes of one tensor into spans."""

    unit: int
    item_bytes: int
    strides: Extent
    """Strides of the tensor, in elements."""

    def cut(self, start: int, offsets: Extent, shape: Extent, dim: int) -> Iterator[Span]:
        """Yield a box as one span if it crosses no multiple of ``unit``; else cut it in dimension ``dim``.

        ``start``: the byte at which the box begins; ``offsets``: its place in the box that the caller fills. Its
        dimensions before ``dim`` have the size 1.
        """
        stop = start + self._num_bytes(shape)
        if start // self.unit == (stop - 1) // self.unit or dim == len(shape):
            yield Span(start, stop, offsets, shape, self.strides)
            return
        stride = self.strides[dim] * self.item_bytes
        row_shape = _with_size(shape, dim, 1)
        row_bytes = self._num_bytes(row_shape)
        done = 0
        while done < shape[dim]:
            begin = start + done * stride
            place = _with_size(offsets, dim, offsets[dim] + done)
            room = self.unit - begin % self.unit
            if row_bytes <= room:
                # As many whole rows as end before the next multiple of unit.
                count = min(shape[dim] - done, (room - row_bytes) // stride + 1)
                end = begin + (count - 1) * stride + row_bytes
                yield Span(begin, end, place, _with_size(shape, dim, count), self.strides)
                done += count
                continue
            if row_bytes <= self.unit:
                # The row crosses one multiple; cutting it further would cost more.
                yield Span(begin, begin + row_bytes, place, row_shape, self.strides)
            else:
                yield from self.cut(begin, place, row_shape, dim + 1)
            done += 1

    def _num_bytes(self, shape: Extent) -> int:
        """Return the number of bytes from the first element of a box to the end of its last one."""
        last = _element_at([size - 1 for size in shape], self.strides)
        return (last + 1) * self.item_bytes


def _with_size(extent: Extent, dim: int, size: int) -> Extent:
    return (*extent[:dim], size, *extent[dim + 1 :])


Use = Callable[[Span, memoryview], None]
"""Receives a part of a box, with its place there, and the bytes of it. Called in several threads."""
Write = Callable[[int, memoryview], None]
"""Receives bytes of a tensor, and their offset in it (row-major). Called in several threads, for each byte once."""


def written(tensor: JoinedTensor, write: Write) -> Use:
    """Return a ``Use`` that writes a whole tensor, row by row where its rows are not adjacent."""
    item_bytes = tensor.item_bytes
    strides = strides_of(tensor.shape, None)

    def use(span: Span, data: memoryview) -> None:
        first = _element_at(span.offsets, strides)
        for source, target, count in _runs(span.shape, span.strides, strides):
            begin = source * item_bytes
            write((first + target) * item_bytes, data[begin : begin + count * item_bytes])

    return use


def _runs(shape: Extent, source: Extent, target: Extent) -> Iterator[tuple[int, int, int]]:
    """Yield the elements of a box that follow each other in both places: offset here, offset there, and their number.

    ``source``, ``target``: the elements from one element of the box to the next in each dimension.
    """
    outer = len(shape)
    length = 1
    while outer and (shape[outer - 1] == 1 or source[outer - 1] == target[outer - 1] == length):
        outer -= 1
        length *= shape[outer]

    def walk(dim: int, source_offset: int, target_offset: int) -> Iterator[tuple[int, int, int]]:
        if dim == outer:
            yield source_offset, target_offset, length
            return
        for index in range(shape[dim]):
            yield from walk(dim + 1, source_offset + index * source[dim], target_offset + index * target[dim])

    yield from walk(0, 0, 0)


class Reads:
    """Boxes to be read, by the shard that holds them."""

    def __init__(self) -> None:
        self.size_bytes = 0
        """Bytes of the boxes."""
        self._parts: list[tuple[OpenShard, _PendingSpan]] = []

    def add(self, tensor: JoinedTensor, use: Use) -> None:
        """Request the wanted box of a tensor. Nothing is read yet."""
        item_bytes = tensor.item_bytes
        for stored, overlap in tensor.tiles:
            shard = stored.shard
            block_bytes = shard.blocks.block_bytes
            unit = block_bytes * -(-_LEAST_UNIT // block_bytes)
            place = (stored.offset, item_bytes)
            origin = tuple(part.start for part in overlap.target)
            for span in spans(place, overlap.piece.shape, overlap.source, unit, origin):
                size_bytes = item_bytes * math.prod(span.shape)
                self._parts.append((shard, _PendingSpan(span, use, size_bytes)))
                self.size_bytes += size_bytes

    def jobs(self, progress: ByteCounter = no_progress) -> dict[OpenShard, list[WantedBytes]]:
        """Return the bytes to read of each shard. ``progress`` receives numbers of bytes that were used."""
        jobs: dict[OpenShard, list[WantedBytes]] = defaultdict(list)
        for shard, part in self._parts:
            jobs[shard].append(part.job(progress))
        return jobs

    def run(self, progress: ByteCounter = no_progress) -> None:
        """Read everything, with checksums; ``progress`` as for ``jobs``. Call it once.

        Blocks. Raises: FormatError; LevelError; FileNotFoundError; what a ``Use`` raises.
        """
        read(self.jobs(progress))


class _PendingSpan:
    """A span that is being read. It is used when all its bytes have arrived, possibly from several blocks."""

    def __init__(self, span: Span, use: Use, size_bytes: int) -> None:
        self.size_bytes = size_bytes
        self._span = span
        self._use = use
        self._lock = threading.Lock()
        self._missing_bytes = span.stop - span.start
        self._buffer: bytearray | None = None

    def job(self, progress: ByteCounter) -> WantedBytes:
        """Return the bytes to read."""
        span = self._span

        def put(offset: int, data: memoryview) -> None:
            whole: memoryview | None = data
            if len(data) < span.stop - span.start:
                whole = self._collect(offset, data)
            if whole is not None:
                self._use(span, whole)
                progress(self.size_bytes)

        return WantedBytes(span.start, span.stop, put)

    def _collect(self, offset: int, data: memoryview) -> memoryview | None:
        """Add some bytes; return all of them if these were the last, else ``None``."""
        with self._lock:
            if self._buffer is None:
                self._buffer = bytearray(self._span.stop - self._span.start)
            buffer = memoryview(self._buffer)
        buffer[offset : offset + len(data)] = data
        with self._lock:
            self._missing_bytes -= len(data)
            if self._missing_bytes:
                return None
            self._buffer = None
        return buffer
