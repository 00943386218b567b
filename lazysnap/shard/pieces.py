"""Tensors whose pieces are in several shards: the parts of a box that each piece fills. Pure."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lazysnap.errors import FormatError

Extent = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A box of one tensor, as one shard holds it: ``offsets[d]`` to ``offsets[d] + shape[d]`` in dimension ``d``."""

    rank: int
    offsets: Extent
    shape: Extent


@dataclass(frozen=True)
class Overlap:
    """The part of a wanted box that one piece provides."""

    piece: Piece
    source: tuple[slice, ...]
    """The part of the piece."""
    target: tuple[slice, ...]
    """Its place in the wanted box."""


def extent_of(facts: dict[str, Any], shape: Sequence[int], where: str) -> tuple[Extent, Extent]:
    """Return global shape and offsets in a manifest's ``tensors`` entry for a stored tensor of ``shape``.

    Raises: FormatError, if they do not fit each other.
    """
    whole = facts.get("global_shape")
    offsets = facts.get("offsets")
    if not _are_sizes(whole, len(shape)) or not _are_sizes(offsets, len(shape)):
        raise FormatError(f"{where}: bad global_shape {whole!r:.80} or offsets {offsets!r:.80}")
    assert whole is not None
    assert offsets is not None
    if any(start + size > bound for start, size, bound in zip(offsets, shape, whole, strict=True)):
        raise FormatError(f"{where}: a piece of shape {list(shape)} at {offsets} lies outside {whole}")
    return tuple(whole), tuple(offsets)


def _are_sizes(value: Any, length: int) -> bool:
    return isinstance(value, list) and len(value) == length and all(type(v) is int and 0 <= v < 1 << 62 for v in value)


def overlap(piece: Piece, offsets: Extent, shape: Extent) -> Overlap | None:
    """Return the part of a piece inside the box at ``offsets`` of ``shape``; ``None`` if there is none."""
    source = []
    target = []
    # A list, so that different numbers of dimensions are always an error, also for disjoint boxes.
    dimensions = list(zip(piece.offsets, piece.shape, offsets, shape, strict=True))
    for piece_start, piece_size, box_start, box_size in dimensions:
        start = max(piece_start, box_start)
        stop = min(piece_start + piece_size, box_start + box_size)
        if start >= stop:
            return None
        source.append(slice(start - piece_start, stop - piece_start))
        target.append(slice(start - box_start, stop - box_start))
    return Overlap(piece, tuple(source), tuple(target))


class Cover:
    """A wanted box and the pieces added so far. Each element comes from the first piece that has it.

    Pieces may overlap: replicas are cut at different places on nodes with different numbers of ranks.
    """

    def __init__(self, offsets: Extent, shape: Extent) -> None:
        self._offsets = offsets
        self._holes: list[tuple[Extent, Extent]] = []
        """Boxes that no piece fills yet: offsets and shape."""
        if 0 not in shape:
            self._holes.append((offsets, shape))
        self.tiles: list[Overlap] = []
        """Boxes that do not overlap. Together they are the filled part."""

    @property
    def missing(self) -> int:
        """Elements that no piece fills."""
        return sum(math.prod(shape) for _, shape in self._holes)

    def add(self, piece: Piece) -> None:
        """Add a piece. It fills elements that were missing until now."""
        holes: list[tuple[Extent, Extent]] = []
        for hole in self._holes:
            part = overlap(piece, *hole)
            if part is None:
                holes.append(hole)
                continue
            target = []
            for span, hole_start, box_start in zip(part.target, hole[0], self._offsets, strict=True):
                shift = hole_start - box_start
                target.append(slice(span.start + shift, span.stop + shift))
            self.tiles.append(Overlap(piece, part.source, tuple(target)))
            holes += _without(hole, part)
        self._holes = holes


def _without(hole: tuple[Extent, Extent], part: Overlap) -> Iterator[tuple[Extent, Extent]]:
    """Yield the rest of a box without a part of it: up to two boxes for each dimension."""
    offsets, shape = hole
    for dim, filled in enumerate(part.target):
        for start, stop in ((0, filled.start), (filled.stop, shape[dim])):
            if start < stop:
                yield _cut(offsets, shape, dim, start, stop)
        offsets, shape = _cut(offsets, shape, dim, filled.start, filled.stop)


def _cut(offsets: Extent, shape: Extent, dim: int, start: int, stop: int) -> tuple[Extent, Extent]:
    """Return a slice of a box in one dimension."""
    return (
        (*offsets[:dim], offsets[dim] + start, *offsets[dim + 1 :]),
        (*shape[:dim], stop - start, *shape[dim + 1 :]),
    )
