"""The byte ranges of a box of a stored tensor, cut so that few of them need two blocks. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Extent = tuple[int, ...]


@dataclass(frozen=True)
class Span:
    """Bytes ``[start, stop)`` of a file that hold a part of a box."""

    start: int
    stop: int
    offsets: Extent
    """Of the part in the box."""
    shape: Extent
    strides: Extent
    """In elements, from ``start``."""


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
