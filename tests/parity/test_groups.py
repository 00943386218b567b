"""Groups are of one size, and load every node alike."""

import itertools
import time
from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lazysnap.errors import ConfigError
from lazysnap.parity.groups import Group, Pieces, groups_of

SCHEMES = [(2, 1), (8, 1), (8, 2), (8, 4), (5, 4), (16, 3)]
"""(size, parity)"""


@pytest.mark.parametrize(("nodes", "parity"), [(n, m) for n in (2, 3, 5, 8, 12) for m in range(1, min(4, n - 1) + 1)])
def test_each_member_holds_as_much_parity_and_computes_as_much_as_each_other(nodes, parity):
    group = Group(tuple(range(nodes)), parity)
    assert group.pieces == nodes - parity
    for position in range(nodes):
        held = group.parities(position)
        assert [row for _, row in held] == [*range(parity)]
        assert all(group.holders(stripe)[row] == position for stripe, row in held)
        stripes = group.stripes(position)
        assert len(stripes) == group.pieces
        assert [*stripes] == sorted(stripes)
        assert all(position in group.data(stripe) for stripe in stripes)
        assert {*stripes}.isdisjoint(stripe for stripe, _ in held)
    for stripe in range(nodes):
        assert sorted(group.data(stripe) + group.holders(stripe)) == [*range(nodes)]
        assert [*group.data(stripe)] == sorted(group.data(stripe))


def test_the_pieces_of_all_parts_fill_each_place_of_each_stripe_once():
    group = Group((4, 7, 9, 12, 30), 2)
    places = Counter(
        (stripe, group.data(stripe).index(position)) for position in range(5) for stripe in group.stripes(position)
    )
    assert places == Counter(itertools.product(range(5), range(3)))


@pytest.mark.slow
@given(st.lists(st.integers(0, 1 << 40), min_size=4, max_size=4), st.integers(1, 3))
def test_pieces_are_aligned_and_hold_the_largest_part(sizes, parity):
    group = Group((0, 1, 2, 3), parity)
    piece_bytes = Pieces(group, tuple(sizes), 1 << 41).piece_bytes
    assert piece_bytes % 64 == 0
    assert max(sizes) <= piece_bytes * group.pieces <= max(sizes) + 64 * group.pieces


@given(st.integers(2, 300), st.sampled_from(SCHEMES))
def test_groups_are_balanced_and_every_node_is_in_one(nodes, scheme):
    size, parity = scheme
    assume(nodes > parity)
    groups = groups_of(nodes, size, parity)
    sizes = [len(group.members) for group in groups]

    assert sorted(node for group in groups for node in group.members) == [*range(nodes)]
    assert max(sizes) - min(sizes) <= 1
    assert parity < min(sizes)
    assert max(sizes) <= size or nodes // (parity + 1) < -(-nodes // size)
    assert all(group.parity == parity for group in groups)


def test_a_mirror_of_an_odd_number_of_nodes_has_one_group_of_three():
    assert sorted(len(group.members) for group in groups_of(7, 2, 1)) == [2, 2, 3]


def test_thousands_of_nodes_take_no_time():
    """CPU time, as other work may run beside."""
    began = time.process_time()
    groups = groups_of(2048, 8, 2)
    assert time.process_time() - began < 0.5
    assert len(groups) == 256


@pytest.mark.parametrize(("nodes", "size", "parity"), [(2, 8, 2), (0, 8, 2), (8, 2, 2), (8, 8, 0), (300, 300, 1)])
def test_groups_that_cannot_be_are_refused(nodes, size, parity):
    with pytest.raises(ConfigError):
        groups_of(nodes, size, parity)


@pytest.mark.parametrize("members", [(0,), (1, 0), (0, 0, 1), (0, 1)])
def test_a_group_has_more_members_than_parities_in_order(members):
    with pytest.raises(ConfigError, match="more members than parities"):
        Group(members, 2)
