"""Who captures what: shares cover everything once and are equal; who sits where."""

from hypothesis import given
from hypothesis import strategies as st

from lazysnap.ranks.partition import share
from lazysnap.ranks.world import places

SIZES = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 40)), max_size=30)


@given(SIZES, st.integers(1, 9))
def test_shares_cover_every_row_exactly_once(sizes, parts):
    seen = [
        (rows.index, row)
        for part in range(parts)
        for rows in share(sizes, part, parts)
        for row in range(rows.start, rows.stop)
    ]

    assert sorted(seen) == [(index, row) for index, (rows, _) in enumerate(sizes) for row in range(rows)]


@given(SIZES, st.integers(1, 9))
def test_shares_differ_by_less_than_two_rows(sizes, parts):
    total = sum(rows * width for rows, width in sizes)
    widest = max((width for rows, width in sizes if rows), default=0)

    for part in range(parts):
        held = sum((rows.stop - rows.start) * sizes[rows.index][1] for rows in share(sizes, part, parts))
        assert abs(held - total / parts) <= widest + 1


def test_a_share_is_contiguous_and_in_order():
    assert [(r.index, r.start, r.stop) for r in share([(10, 4), (10, 4)], 1, 4)] == [(0, 5, 10)]
    assert [(r.index, r.start, r.stop) for r in share([(3, 4), (3, 4), (0, 4)], 0, 2)] == [(0, 0, 3), (2, 0, 0)]


def test_ranks_are_numbered_within_their_node():
    found = places(["a", "a", "b", "a", "b"])

    assert [(place.local_rank, place.local_world_size) for place in found] == [(0, 3), (1, 3), (0, 2), (2, 3), (1, 2)]
