"""Where the parts of a group lie in its stripes: every byte once, and any lost members can be computed."""

import itertools
import random

import pytest

from lazysnap.parity.codes import Code, multiply_add
from lazysnap.parity.groups import Group, Pieces, can_rebuild

SHAPES = [(2, 1), (3, 1), (3, 2), (5, 2), (8, 1), (8, 3)]


def pieces_of(members, parity, sizes, block_bytes=1 << 16):
    return Pieces(Group(tuple(range(members)), parity), tuple(sizes), block_bytes)


def sizes_of(members, seed=0):
    draw = random.Random(seed)
    return [draw.choice([0, 1, 63, 4096, draw.randrange(1, 300_000)]) for _ in range(members)]


@pytest.mark.parametrize(("members", "parity"), SHAPES)
def test_the_blocks_of_a_member_are_its_part_each_byte_once(members, parity):
    pieces = pieces_of(members, parity, sizes_of(members, members), block_bytes=1 << 12)
    for position, size in enumerate(pieces.sizes):
        spans = [
            pieces.span(position, stripe, block)
            for stripe in pieces.group.stripes(position)
            for block in range(pieces.num_blocks)
        ]
        covered = [byte for offset, length in spans for byte in range(offset, offset + length)]
        assert covered == list(range(size))


@pytest.mark.parametrize(("members", "parity"), SHAPES)
def test_a_block_of_a_part_is_found_in_its_stripe(members, parity):
    pieces = pieces_of(members, parity, sizes_of(members, 7 * members), block_bytes=1 << 12)
    for position, size in enumerate(pieces.sizes):
        for index in range(-(-size // pieces.block_bytes)):
            stripe, block = pieces.locate(position, index)
            offset, length = pieces.span(position, stripe, block)
            assert offset == index * pieces.block_bytes
            assert length == min(pieces.block_bytes, size - offset)


def test_checksums_stand_behind_the_parity_and_do_not_overlap():
    pieces = pieces_of(5, 2, [100_000] * 5, block_bytes=1 << 12)
    places = [pieces.checksum_at(column, block) for column in range(4) for block in range(pieces.num_blocks)]
    assert places == [pieces.piece_bytes + 8 * number for number in range(len(places))]
    assert pieces.stripe_bytes == places[-1] + 8


def test_small_parts_take_small_blocks():
    assert pieces_of(3, 1, [100, 0, 3]).block_bytes == 64
    assert pieces_of(3, 1, [0, 0, 0]).stripe_bytes < 200


@pytest.mark.slow
@pytest.mark.parametrize(("members", "parity"), SHAPES)
def test_any_members_that_may_be_lost_are_computed_from_the_others(members, parity):
    sizes = sizes_of(members, 3 * members + parity)
    pieces = pieces_of(members, parity, sizes, block_bytes=1 << 12)
    group, code = pieces.group, Code(members - parity, parity)
    draw = random.Random(members * 10 + parity)
    parts = [draw.randbytes(size) for size in sizes]

    def block_of(position, stripe, block):
        offset, length = pieces.span(position, stripe, block)
        return parts[position][offset : offset + length].ljust(pieces.block_bytes, b"\0")

    def parity_of(stripe, row, block):
        out = bytearray(pieces.block_bytes)
        for column, position in enumerate(group.data(stripe)):
            multiply_add(code.weight(row, column), block_of(position, stripe, block), out)
        return bytes(out)

    for lost in itertools.combinations(range(members), parity):
        there = [position for position in range(members) if position not in lost]
        assert can_rebuild(group, there, there)
        for position in lost:
            for stripe, block in itertools.product(group.stripes(position), range(pieces.num_blocks)):
                data, holders = group.data(stripe), group.holders(stripe)
                left = [(column, block_of(one, stripe, block)) for column, one in enumerate(data) if one in there]
                rows = [row for row, one in enumerate(holders) if one in there]
                left += [(group.pieces + row, parity_of(stripe, row, block)) for row in rows]
                left = left[: group.pieces]
                out = bytearray(pieces.block_bytes)
                weights = code.recovery(data.index(position), tuple(piece for piece, _ in left))
                for weight, (_, held) in zip(weights, left, strict=True):
                    multiply_add(weight, held, out)
                assert bytes(out) == block_of(position, stripe, block)


@pytest.mark.parametrize(("members", "parity"), SHAPES)
def test_one_more_lost_than_may_be_cannot_be_computed(members, parity):
    if parity + 1 > members:
        pytest.skip("nobody would be left")
    group = Group(tuple(range(members)), parity)
    for lost in itertools.combinations(range(members), parity + 1):
        there = [position for position in range(members) if position not in lost]
        assert not can_rebuild(group, there, there)


def test_a_keeper_that_lost_its_parity_alone_counts_as_data():
    group = Group((0, 1, 2, 3), 2)
    assert can_rebuild(group, [0, 1, 2], [1, 2])
    assert not can_rebuild(group, [1, 2], [1])
