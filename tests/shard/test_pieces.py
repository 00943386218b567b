"""Tensors in pieces: any box is put together exactly, and what is missing or doubled is said."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazysnap.errors import FormatError
from lazysnap.shard.pieces import Cover, Piece, extent_of, overlap


def cuts(size, parts):
    return [(size * part // parts, size * (part + 1) // parts) for part in range(parts)]


def grid(shape, parts):
    """Pieces that cut each dimension ``d`` into ``parts[d]``."""
    boxes = itertools.product(*(cuts(size, count) for size, count in zip(shape, parts, strict=True)))
    return [Piece(rank, tuple(a for a, _ in box), tuple(b - a for a, b in box)) for rank, box in enumerate(boxes)]


def covered(pieces, offsets, shape):
    cover = Cover(offsets, shape)
    for piece in pieces:
        cover.add(piece)
    return cover


SHAPES = st.lists(st.integers(0, 7), max_size=3).map(tuple)


@given(SHAPES, st.data())
def test_any_cut_gives_any_other_cut(shape, data):
    parts = data.draw(st.tuples(*(st.integers(1, 4) for _ in shape)))
    others = data.draw(st.tuples(*(st.integers(1, 4) for _ in shape)))
    whole = np.arange(int(np.prod(shape))).reshape(shape)
    pieces = grid(shape, parts)
    held = {
        piece.rank: whole[tuple(slice(a, a + n) for a, n in zip(piece.offsets, piece.shape, strict=True))]
        for piece in pieces
    }
    for wanted in [Piece(-1, (0,) * len(shape), shape), *grid(shape, others)]:
        out = np.full(wanted.shape, -1)
        for tile in covered(pieces, wanted.offsets, wanted.shape).tiles:
            out[tile.target] = held[tile.piece.rank][tile.source]
        box = tuple(slice(a, a + n) for a, n in zip(wanted.offsets, wanted.shape, strict=True))
        assert (out == whole[box]).all()


def test_a_missing_piece_is_found():
    pieces = grid((8, 4), (4, 1))

    assert covered(pieces[:2] + pieces[3:], (0, 0), (8, 4)).missing == 8


def test_pieces_that_overlap_are_not_counted_twice():
    assert covered([Piece(0, (0,), (6,)), Piece(1, (4,), (2,))], (0,), (8,)).missing == 2


def test_replicas_count_once():
    pieces = grid((8,), (2,))

    assert [tile.piece for tile in covered([*pieces, Piece(7, (0,), (4,))], (0,), (8,)).tiles] == pieces


@given(st.tuples(st.integers(1, 9), st.integers(1, 9)), st.integers(1, 4), st.data())
def test_nodes_that_cut_the_same_shards_at_other_rows_hold_replicas(shape, columns, data):
    """Each node has every shard of a mesh, and cuts its rows into as many parts as it has ranks for it."""
    nodes = [grid(shape, (data.draw(st.integers(1, 4)), columns)) for _ in range(data.draw(st.integers(1, 3)))]
    pieces = [replace(piece, rank=rank) for rank, piece in enumerate(itertools.chain(*nodes))]

    found = covered(data.draw(st.permutations(pieces)), (0, 0), shape).tiles

    seen = np.zeros(shape, dtype=int)
    for tile in found:
        seen[tile.target] += 1
        inner = zip(tile.source, tile.target, tile.piece.offsets, strict=True)
        assert all(a.start + at == b.start and a.stop + at == b.stop for a, b, at in inner)
    assert (seen == 1).all()


@pytest.mark.parametrize(
    ("facts", "said"),
    [
        ({}, "bad global_shape None or offsets None"),
        ({"global_shape": [8]}, r"bad global_shape \[8\] or offsets None"),
        ({"global_shape": [8], "offsets": [0, 0]}, r"bad global_shape \[8\] or offsets \[0, 0\]"),
        ({"global_shape": [8, 8], "offsets": [0]}, r"bad global_shape \[8, 8\] or"),
        ({"global_shape": [-1], "offsets": [0]}, r"bad global_shape \[-1\] or"),
        ({"global_shape": [1 << 62], "offsets": [0]}, r"bad global_shape \[4611686018427387904\] or"),
        ({"global_shape": ["8"], "offsets": [0]}, r"bad global_shape \['8'\] or"),
        ({"global_shape": {"8": 8}, "offsets": [0]}, "bad global_shape {'8': 8} or"),
        ({"global_shape": [8], "offsets": [True]}, r"bad global_shape \[8\] or offsets \[True\]"),
        ({"global_shape": [8], "offsets": [6]}, r"a piece of shape \[4\] at \[6\] lies outside \[8\]"),
    ],
)
def test_places_that_cannot_be_are_refused(facts, said):
    assert extent_of({"global_shape": [8], "offsets": [4]}, (4,), "there") == ((8,), (4,))
    with pytest.raises(FormatError, match=f"there: {said}"):
        extent_of(facts, (4,), "there")


def filled_by(pieces, wanted):
    """Which elements of the wanted box are in some piece, counted one by one."""
    seen = np.zeros(wanted.shape, dtype=bool)
    for piece in pieces:
        if (part := overlap(piece, wanted.offsets, wanted.shape)) is not None:
            seen[part.target] = True
    return bool(seen.all())


@given(SHAPES.filter(lambda shape: 0 not in shape), st.data())
def test_a_box_is_whole_exactly_when_the_last_piece_of_it_came(shape, data):
    parts, others = (data.draw(st.tuples(*(st.integers(1, 4) for _ in shape))) for _ in range(2))
    pieces = data.draw(st.permutations(grid(shape, parts) * 2))  # replicas
    wanted = data.draw(st.sampled_from(grid(shape, others)))
    cover = Cover(wanted.offsets, wanted.shape)

    for number, piece in enumerate(pieces, start=1):
        cover.add(piece)
        assert (cover.missing == 0) == filled_by(pieces[:number], wanted)


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4), st.integers(0, 9), st.integers(0, 4)), max_size=12))
def test_pieces_that_overlap_make_a_box_whole_exactly_when_it_has_no_hole(boxes):
    pieces = [Piece(rank, (a, c), (b, d)) for rank, (a, b, c, d) in enumerate(boxes)]
    wanted = Piece(-1, (2, 3), (4, 5))
    cover = Cover(wanted.offsets, wanted.shape)
    for piece in pieces:
        cover.add(piece)

    assert (cover.missing == 0) == filled_by(pieces, wanted)
