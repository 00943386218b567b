"""Where boxes lie in files: every byte of a box once, and hardly anything across two blocks."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lazysnap.snapshots.reads import spans


@st.composite
def cases(draw):
    shape = draw(st.lists(st.integers(0, 6), max_size=4))
    box = []
    for size in shape:
        start = draw(st.integers(0, size))
        box.append(slice(start, draw(st.integers(start, size))))
    return draw(st.integers(0, 90)), shape, box, draw(st.integers(1, 200)), draw(st.sampled_from([1, 2, 4, 8, 16]))


@pytest.mark.slow
@settings(max_examples=400)
@given(cases())
def test_the_spans_of_a_box_are_the_box(case):
    offset, shape, box, unit, itemsize = case
    whole = torch.arange(1, 1 + torch.Size(shape).numel()).view(shape)
    flat = whole.reshape(-1)
    expected = whole[tuple(box)]
    found = torch.zeros_like(expected)

    parts = list(spans((offset, itemsize), shape, box, unit, (0,) * len(shape)))

    for part in parts:
        first, last = (part.start - offset) // itemsize, (part.stop - offset) // itemsize
        assert (part.start - offset) % itemsize == 0
        source = flat[first:last].as_strided(part.shape, part.strides)
        assert 1 + sum((n - 1) * s for n, s in zip(part.shape, part.strides, strict=True)) == last - first
        place = tuple(slice(at, at + n) for at, n in zip(part.offsets, part.shape, strict=True))
        assert not found[place].any()
        found[place] = source
    assert found.equal(expected)
    assert [part.start for part in parts] == sorted(part.start for part in parts)


@pytest.mark.slow
@settings(max_examples=200)
@given(cases())
def test_what_crosses_a_unit_is_one_row_no_longer_than_a_unit_or_one_element(case):
    offset, shape, box, unit, itemsize = case

    for part in spans((offset, itemsize), shape, box, unit, (0,) * len(shape)):
        if part.start // unit != (part.stop - 1) // unit:
            assert part.stop - part.start <= max(unit, itemsize)


def test_a_large_tensor_makes_as_many_spans_as_it_has_blocks():
    parts = list(spans((4096, 4), [1 << 28], [slice(0, 1 << 28)], 16 << 20, (0,)))

    assert len(parts) == 65
    assert parts[0].start == 4096
    assert all(part.start % (16 << 20) == 0 for part in parts[1:])


def test_few_columns_of_long_rows_do_not_make_all_rows_read():
    parts = list(spans((0, 4), [3, 1 << 26], [slice(0, 3), slice(5, 15)], 16 << 20, (0, 0)))

    assert [(part.start, part.stop) for part in parts] == [(n * (4 << 26) + 20, n * (4 << 26) + 60) for n in range(3)]
