"""Tensors whose pieces are in several shards: which piece covers which part. Pure."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lazysnap.errors import ShardCorrupt

Extent = tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """A box of one tensor, as one shard holds it: ``offsets[d]`` to ``offsets[d] + shape[d]`` in dimension ``d``."""

    rank: int
    stored: str
    """Its name in that shard."""
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
    """Global shape and offsets that a manifest's ``tensors`` entry gives for a stored tensor of ``shape``.

    Raises: ShardCorrupt, if they do not fit each other.
    """
    whole, offsets = facts.get("global_shape"), facts.get("offsets")
    if not _are_sizes(whole, len(shape)) or not _are_sizes(offsets, len(shape)):
        raise ShardCorrupt(f"{where}: bad global_shape {whole!r:.80} or offsets {offsets!r:.80}")
    assert whole is not None
    assert offsets is not None
    if any(at + size > bound for at, size, bound in zip(offsets, shape, whole, strict=True)):
        raise ShardCorrupt(f"{where}: a piece of shape {list(shape)} at {offsets} lies outside {whole}")
    return tuple(whole), tuple(offsets)


def _are_sizes(value: Any, length: int) -> bool:
    return isinstance(value, list) and len(value) == length and all(type(v) is int and 0 <= v < 1 << 62 for v in value)


def volume(shape: Sequence[int]) -> int:
    """Number of elements; 1 for a tensor without dimensions."""
    count = 1
    for size in shape:
        count *= size
    return count


def distinct(pieces: Sequence[Piece]) -> list[Piece]:
    """One of each box: replicas hold the same bytes. Empty boxes are left out."""
    found: dict[tuple[Extent, Extent], Piece] = {}
    for piece in pieces:
        if volume(piece.shape):
            found.setdefault((piece.offsets, piece.shape), piece)
    return list(found.values())


def overlaps(pieces: Sequence[Piece], offsets: Extent, shape: Extent) -> Iterator[Overlap]:
    """The parts of ``pieces`` that lie in the box at ``offsets`` of ``shape``."""
    for piece in pieces:
        starts = [max(a, b) for a, b in zip(piece.offsets, offsets, strict=True)]
        stops = [min(a + m, b + n) for a, m, b, n in zip(piece.offsets, piece.shape, offsets, shape, strict=True)]
        if all(start < stop for start, stop in zip(starts, stops, strict=True)):
            yield Overlap(
                piece,
                tuple(slice(a - at, b - at) for a, b, at in zip(starts, stops, piece.offsets, strict=True)),
                tuple(slice(a - at, b - at) for a, b, at in zip(starts, stops, offsets, strict=True)),
            )


class Cover:
    """How much of one wanted box the pieces added so far fill. Pieces that overlap are not counted twice."""

    def __init__(self, offsets: Extent, shape: Extent) -> None:
        self._box = (offsets, shape)
        self._needed = volume(shape)
        self._parts: dict[tuple[Extent, Extent], None] = {}
        self._seen = 0
        self.is_whole = self._needed == 0

    def add(self, piece: Piece) -> None:
        """Add a piece."""
        for overlap in overlaps([piece], *self._box) if not self.is_whole else ():
            part = (tuple(p.start for p in overlap.target), tuple(p.stop - p.start for p in overlap.target))
            if part not in self._parts:
                self._parts[part] = None
                self._seen += volume(part[1])
                # Only now can they fill the box, so only now compare how they overlap.
                self.is_whole = self._seen >= self._needed and self._filled() == self._needed

    def _filled(self) -> int:
        """Elements in parts that do not overlap."""
        chosen = apart([Piece(0, "", *part) for part in self._parts])
        return sum(volume(piece.shape) for piece in chosen)


def apart(boxes: Sequence[Piece]) -> list[Piece]:
    """A choice of ``boxes`` without overlap, along the dimension that is cut most.

    Boxes overlap if replicas were cut at different places (nodes with different numbers of ranks). Each replica alone
    has no holes.
    """
    axis = _most_cut(boxes)
    if axis is None:
        return list(boxes[:1])
    taken: list[Piece] = []
    reaching: list[Piece] = []
    # A piece is compared only with those that extend beyond its start in this dimension.
    for piece in sorted(boxes, key=lambda piece: (piece.offsets[axis], piece.offsets)):
        reaching = [other for other in reaching if other.offsets[axis] + other.shape[axis] > piece.offsets[axis]]
        if not any(overlaps(reaching, piece.offsets, piece.shape)):
            taken.append(piece)
            reaching.append(piece)
    return taken


def _most_cut(boxes: Sequence[Piece]) -> int | None:
    dims = range(len(boxes[0].offsets)) if boxes else range(0)
    return max(dims, key=lambda d: len({piece.offsets[d] for piece in boxes}), default=None)


def tiles(name: str, pieces: Sequence[Piece], whole: Extent) -> list[Piece]:
    """A choice of the pieces that fills the tensor without overlap. Raises: ShardCorrupt, naming how much is missing.

    Neither DCP nor safetensors check this when they load: a lost shard would leave garbage, silently.
    """
    found = apart(distinct(pieces))
    covered = sum(volume(piece.shape) for piece in found)
    if covered != volume(whole):
        raise ShardCorrupt(f"tensor {name}: its pieces cover {covered} of {volume(whole)} elements of {list(whole)}")
    return found
