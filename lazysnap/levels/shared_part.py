"""Part of a shard as a separate shard: the part that a node stores at shared levels, or that parity protects.

The capture plan chose the rows of each tensor. At shared levels a node stores the tensors that only this node holds,
and its share of those that other nodes hold, too (``shared_rows``). Parity protects tensors that few nodes hold
(``nodes``).
"""

import bisect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lazysnap.errors import FormatError
from lazysnap.levels.source import BlockSource, header_of, map_anonymous
from lazysnap.shard.checksum import BLOCK_BYTES
from lazysnap.shard.layout import PAGE, Layout, TensorSpec
from lazysnap.shard.manifest import CaptureMeta


@dataclass(frozen=True)
class _Segment:
    """Bytes that are consecutive in the source and in the part."""

    start: int
    """The offset in the part."""
    source_offset: int
    length: int


Cut = Callable[[TensorSpec, Mapping[str, Any], int], tuple[TensorSpec | None, int]]
"""A function of a tensor, its manifest entry and its rank. It returns the tensor with the rows that are in the part
(``None``: no row), and the first of these rows."""


class SharedPart:
    """Part of a shard as a separate shard. See ``levels.source.BlockSource``."""

    def __init__(
        self,
        meta: CaptureMeta,
        source: BlockSource,
        offset: int = 0,
        size_bytes: int | None = None,
        cut: Cut | None = None,
    ) -> None:
        """Read the header of the shard and plan the part.

        Blocks: until the header is written. Raises: CaptureAborted; FormatError, if there is no header.

        Args:
            meta: the manifest's entry of the whole shard.
            source: the bytes that contain the shard.
            offset: offset of the shard in ``source``.
            size_bytes: bytes of the shard; by default all of ``source``.
            cut: the rows of the part; by default those that this node stores at shared levels.
        """
        if size_bytes is None:
            size_bytes = source.size_bytes
        layout = Layout.parse(header_of(source, offset, size_bytes), size_bytes, f"rank {meta.rank}")
        specs = {}
        first_rows = {}
        for whole in layout.specs:
            spec, first_row = (cut or _cut)(whole, meta.tensors.get(whole.name, {}), meta.rank)
            if spec is not None:
                specs[spec.name] = spec
                first_rows[spec.name] = first_row
        part = Layout.plan(specs.values(), _of_tensors(layout.metadata, specs))
        tensors = {}
        for name, facts in meta.tensors.items():
            if name in specs:
                tensors[name] = _facts(facts, first_rows[name])
        self.meta = replace(meta, tensors=tensors, aliases=_of_tensors(meta.aliases, specs))
        self.size_bytes = part.size_bytes
        self._source = source
        self._header = map_anonymous(len(part.header))
        self._header[:] = part.header
        self._segments: list[_Segment] = []
        for spec, start in zip(part.specs, part.offsets, strict=True):
            whole, offset_in_shard = layout.find(spec.name)
            row_bytes = 0
            if whole.shape:
                row_bytes = whole.nbytes // max(1, whole.shape[0])
            source_offset = offset + offset_in_shard + first_rows[spec.name] * row_bytes
            self._segments.append(_Segment(start, source_offset, spec.nbytes))
        self._starts = [segment.start for segment in self._segments]

    def view(self, offset: int, length: int) -> memoryview:
        """See ``BlockSource.view``. Return a copy."""
        out = map_anonymous(length)
        stop = offset + length
        header = self._header[offset:stop]
        out[: len(header)] = header
        index = -1
        block = memoryview(b"")
        first_segment = max(0, bisect.bisect_right(self._starts, offset) - 1)
        for segment in self._segments[first_segment:]:
            if segment.start >= stop:
                break
            position = max(offset, segment.start)
            segment_stop = min(stop, segment.start + segment.length)
            while position < segment_stop:
                source_offset = segment.source_offset + position - segment.start
                if source_offset // BLOCK_BYTES != index:
                    index = source_offset // BLOCK_BYTES
                    block = self._block(index)
                piece = block[source_offset - index * BLOCK_BYTES :][: segment_stop - position]
                out[position - offset : position - offset + len(piece)] = piece
                position += len(piece)
        return out

    def _block(self, index: int) -> memoryview:
        """Return a whole block of the source: files are read and compared by blocks."""
        start = index * BLOCK_BYTES
        return self._source.view(start, min(BLOCK_BYTES, -(-(self._source.size_bytes - start) // PAGE) * PAGE))

    def finish(self) -> None:
        """See ``BlockSource.finish``."""
        self._source.finish()


def _of_tensors(names: Mapping[str, str], specs: Mapping[str, TensorSpec]) -> dict[str, str]:
    """Return the names that belong to tensors of the part."""
    return {name: tensor for name, tensor in names.items() if tensor in specs}


def held_by_few(max_nodes: int) -> Cut:
    """Return a cut to the tensors that at most ``max_nodes`` nodes hold in memory."""

    def cut(spec: TensorSpec, facts: Mapping[str, Any], rank: int) -> tuple[TensorSpec | None, int]:
        if _num_nodes(facts) > max_nodes:
            return None, 0
        return spec, 0

    return cut


def is_held_by_few(meta: CaptureMeta, max_nodes: int) -> bool:
    """True if at most this many nodes hold each of its tensors."""
    return all(_num_nodes(facts) <= max_nodes for facts in meta.tensors.values())


def _num_nodes(facts: Mapping[str, Any]) -> int:
    num_nodes = facts.get("nodes")
    if isinstance(num_nodes, int):
        return num_nodes
    return 1


def has_shared_rows(meta: CaptureMeta) -> bool:
    """True if other nodes store a part of this shard, too."""
    return any(facts.get("shared_rows") is not None for facts in meta.tensors.values())


def _cut(spec: TensorSpec, facts: Mapping[str, Any], rank: int) -> tuple[TensorSpec | None, int]:
    """Return the rows of a tensor that are in the part, and its first row there. Raises: FormatError."""
    rows = facts.get("shared_rows")
    if rows is None:
        return spec, 0
    num_rows = 1
    if spec.shape:
        num_rows = spec.shape[0]
    is_pair = isinstance(rows, list) and len(rows) == 2 and all(type(row) is int for row in rows)
    if not is_pair or not 0 <= rows[0] <= rows[1] <= num_rows or (rows[0] and not facts.get("offsets")):
        raise FormatError(f"rank {rank}: tensor {spec.name!r}: bad shared_rows {rows!r:.50}")
    start, stop = rows
    if start == stop:
        return None, 0
    return TensorSpec(spec.name, spec.dtype, (stop - start, *spec.shape[1:])), start


def _facts(facts: dict[str, Any], start: int) -> dict[str, Any]:
    """Return the manifest entry of the stored rows, of which ``start`` is the first."""
    stored = dict(facts)
    stored.pop("shared_rows", None)
    if start:
        first_offset, *other_offsets = stored["offsets"]
        stored["offsets"] = [first_offset + start, *other_offsets]
    return stored
