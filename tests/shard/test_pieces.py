"""Tensors in pieces: any box is put together exactly, and what is missing or doubled is said."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lazysnap.errors import ShardCorrupt
from lazysnap.shard.pieces import Piece, check_coverage, extent_of, overlaps


def cuts(size, parts):
    return [(size * part // parts, size * (part + 1) // parts) for part in range(parts)]


def grid(shape, parts):
    """Pieces that cut each dimension ``d`` into ``parts[d]``."""
    boxes = itertools.product(*(cuts(size, count) for size, count in zip(shape, parts, strict=True)))
    return [Piece(rank, "x", tuple(a for a, _ in box), tuple(b - a for a, b in box)) for rank, box in enumerate(boxes)]


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
    check_coverage("x", pieces, shape)

    for wanted in grid(shape, others):
        out = np.full(wanted.shape, -1)
        for overlap in overlaps(pieces, wanted.offsets, wanted.shape):
            out[overlap.target] = held[overlap.piece.rank][overlap.source]
        box = tuple(slice(a, a + n) for a, n in zip(wanted.offsets, wanted.shape, strict=True))
        assert (out == whole[box]).all()


def test_a_missing_piece_is_found():
    pieces = grid((8, 4), (4, 1))

    with pytest.raises(ShardCorrupt, match=r"cover 24 of 32 elements of \[8, 4\]"):
        check_coverage("x", pieces[:2] + pieces[3:], (8, 4))


def test_pieces_that_overlap_are_found():
    with pytest.raises(ShardCorrupt, match="overlap"):
        check_coverage("x", [Piece(0, "x", (0,), (6,)), Piece(1, "x", (4,), (2,))], (8,))


def test_replicas_count_once():
    pieces = grid((8,), (2,))

    check_coverage("x", [*pieces, Piece(7, "x", (0,), (4,))], (8,))


@pytest.mark.parametrize(
    "facts",
    [
        {},
        {"global_shape": [8], "offsets": [0, 0]},
        {"global_shape": [8], "offsets": [6]},
        {"global_shape": [-1], "offsets": [0]},
        {"global_shape": ["8"], "offsets": [0]},
        {"global_shape": [8], "offsets": [True]},
    ],
)
def test_places_that_cannot_be_are_refused(facts):
    with pytest.raises(ShardCorrupt, match="there"):
        extent_of(facts, (4,), "there")
