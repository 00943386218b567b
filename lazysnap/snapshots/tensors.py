"""Boxes of tensors, filled from the shards that hold parts of them: for a restart."""

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from lazysnap.capture.dtypes import DTYPES, logical_facts
from lazysnap.errors import ShardCorrupt
from lazysnap.levels.blocks import Wanted
from lazysnap.shard.pieces import Extent, Piece, overlaps
from lazysnap.shard.strides import Order, strides_of
from lazysnap.snapshots.reader import OpenShard, Stored

_LEAST_UNIT = 1 << 20
Facts = tuple[torch.dtype, Extent]
"""Dtype and shape."""


def facts_of(stored: Stored) -> Facts:
    """Dtype and shape in the program. Raises: ShardCorrupt, if torch has no such dtype."""
    where, logical = f"{stored.shard.where}: tensor {stored.name}", stored.logical
    if stored.spec.dtype not in DTYPES:
        raise ShardCorrupt(f"{where}: torch has no dtype for {stored.spec.dtype}")
    try:
        return logical_facts(DTYPES[stored.spec.dtype], stored.spec.shape, logical)
    except ValueError as error:
        raise ShardCorrupt(f"{where}: {error}") from error


@dataclass
class Whole:
    """One tensor over all shards."""

    dtype: torch.dtype
    shape: Extent
    order: Order | None = None
    """See ``Stored``. Ranks may differ in it; that of the part that was found first counts."""
    pieces: list[Piece] = field(default_factory=list)
    stored: dict[tuple[int, str], Stored] = field(default_factory=dict)
    """Where each piece is stored, by rank and name of the piece."""

    def add(self, stored: Stored, rank: int) -> Piece:
        """Add a part. Raises: ShardCorrupt, if it does not fit the others."""
        (dtype, shape), (whole, offsets) = facts_of(stored), stored.extent()
        if (dtype, whole) != (self.dtype, self.shape):
            raise ShardCorrupt(
                f"{stored.shard.where}: tensor {stored.name} is {dtype} {list(whole)}, elsewhere {self.dtype} "
                f"{list(self.shape)}"
            )
        piece = Piece(rank, stored.name, offsets, shape)
        self.pieces.append(piece)
        self.stored[rank, stored.name] = stored
        return piece

    @classmethod
    def of(cls, stored: Stored) -> "Whole":
        """The tensor that ``stored`` is a part of; no part is added yet."""
        return cls(facts_of(stored)[0], stored.extent()[0], stored.order)

    def room(self, shape: Extent, device: torch.device | None = None) -> torch.Tensor:
        """Return a new tensor for a box of this one, with its dtype and memory order."""
        return torch.empty_strided(shape, strides_of(shape, self.order), dtype=self.dtype, device=device)


@dataclass(frozen=True)
class Span:
    """Bytes ``[start, stop)`` of a file that hold a part of a box."""

    start: int
    stop: int
    offsets: Extent
    """The offsets of the part in the box."""
    shape: Extent
    strides: Extent
    """Strides in elements, from ``start``."""


def spans(place: tuple[int, int], whole: Sequence[int], box: Sequence[slice], unit: int) -> Iterator[Span]:
    """The parts of ``box`` of a row-major tensor of shape ``whole``, in file order; together they cover it once.

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
        stride, done = strides[dim], 0
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

    yield from cut(start, (0,) * len(shape), tuple(shape), 0)


class _SpanCopy:
    """Copies one span of a shard into its part of a tensor."""

    def __init__(self, span: Span, dtype: torch.dtype, target: torch.Tensor) -> None:
        self._span, self._dtype, self._target = span, dtype, target
        self._lock = threading.Lock()
        self._left = span.stop - span.start
        self._buffer: torch.Tensor | None = None

    def put(self, at: int, data: memoryview) -> None:
        """See ``Wanted``."""
        # Inference tensors can be written only in inference mode, which is set per thread.
        with torch.inference_mode(self._target.is_inference()):
            self._put(at, data)

    def _put(self, at: int, data: memoryview) -> None:
        found = torch.frombuffer(data, dtype=torch.uint8)
        if len(data) == self._span.stop - self._span.start and found.data_ptr() % self._dtype.itemsize == 0:
            self._copy(found)
            return
        # The span crosses blocks, or is not aligned for its dtype: collect it in a buffer.
        with self._lock:
            if self._buffer is None:
                self._buffer = torch.empty(self._span.stop - self._span.start, dtype=torch.uint8)
            buffer = self._buffer
        buffer[at : at + len(data)].copy_(found)
        with self._lock:
            self._left -= len(data)
            is_whole = not self._left
        if is_whole:
            self._copy(buffer)
            self._buffer = None

    def _copy(self, data: torch.Tensor) -> None:
        span = self._span
        source = data.view(self._dtype).as_strided(span.shape, span.strides)
        box = tuple(slice(at, at + size) for at, size in zip(span.offsets, span.shape, strict=True))
        self._target[box].copy_(source)


class Boxes:
    """Boxes of tensors to fill: collected first, then read together."""

    def __init__(self) -> None:
        self._jobs: dict[OpenShard, list[Wanted]] = defaultdict(list)

    def add(self, whole: Whole, pieces: Sequence[Piece], offsets: Extent, target: torch.Tensor) -> None:
        """Fill ``target`` with the box of its shape at ``offsets``, from these pieces. Nothing is read yet."""
        for overlap in overlaps(pieces, offsets, tuple(target.shape)):
            stored = whole.stored[overlap.piece.rank, overlap.piece.stored]
            box = target[overlap.target]
            block = stored.shard.blocks.block_bytes
            place = (stored.offset, whole.dtype.itemsize)
            self._jobs[stored.shard] += [
                Wanted(span.start, span.stop, _SpanCopy(span, whole.dtype, box).put)
                for span in spans(place, overlap.piece.shape, overlap.source, block * -(-_LEAST_UNIT // block))
            ]

    def take(self) -> dict[OpenShard, list[Wanted]]:
        """The collected reads, for ``reader.read``; the collection is empty afterwards."""
        jobs, self._jobs = self._jobs, defaultdict(list)
        return jobs
