"""Part of a shard, as a shard of its own: the part that a node stores at shared levels, or that parity protects.

The capture plan chose the rows of each tensor: at shared levels a node stores its own
tensors, and its share of what other nodes hold, too (``shared_rows``). Parity protects what few nodes hold (``nodes``).
"""

import bisect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from lazysnap.errors import FormatError
from lazysnap.levels.source import BlockSource, header_of, map_anonymous
from lazysnap.shard.checksum import BLOCK_BYTES
from lazysnap.shard.layout import PAGE, Layout, TensorSpec
from lazysnap.shard.manifest import CaptureMeta


@dataclass(frozen=True)
class _Run:
    """Bytes that follow each other in the source and in the part."""

    start: int
    source: int
    length: int


Cut = Callable[[TensorSpec, Any, int], tuple[TensorSpec | None, int]]
"""A function of a tensor, its manifest entry and its rank. It returns the tensor with the rows that are in the part
(``None``: no row), and the first of these rows."""


class SharedPart:
    """Part of a shard, as a shard of its own. See ``levels.source.BlockSource``."""

    def __init__(
        self,
        meta: CaptureMeta,
        source: BlockSource,
        offset: int = 0,
        size_bytes: int | None = None,
        cut: Cut | None = None,
    ) -> None:
        """``offset`` and ``size_bytes``: the place of the shard in ``source``; default: all of it. ``cut``: default: to
        the rows that this node stores at shared levels.

        Blocks: until the header is written. Raises: CaptureAborted; FormatError, if there is no header.
        """
        size = source.size_bytes if size_bytes is None else size_bytes
        layout = Layout.parse(header_of(source, offset, size), size, f"rank {meta.rank}")
        parts = {spec.name: (cut or _cut)(spec, meta.tensors.get(spec.name), meta.rank) for spec in layout.specs}
        specs = {name: one for name, (one, _) in parts.items() if one is not None}
        stored = {name: primary for name, primary in meta.aliases.items() if primary in specs}
        part = Layout.plan(specs.values(), {name: to for name, to in layout.metadata.items() if to in specs})
        tensors = {name: _facts(meta.tensors[name], parts[name][1]) for name in meta.tensors if name in specs}
        self.meta = replace(meta, tensors=tensors, aliases=stored)
        self.size_bytes = part.size_bytes
        self._source = source
        self._header = map_anonymous(len(part.header))
        self._header[:] = part.header
        self._runs: list[_Run] = []
        for spec, start in zip(part.specs, part.offsets, strict=True):
            whole, at = layout.find(spec.name)
            row_bytes = whole.nbytes // max(1, whole.shape[0]) if whole.shape else 0
            self._runs.append(_Run(start, offset + at + parts[spec.name][1] * row_bytes, spec.nbytes))
        self._starts = [run.start for run in self._runs]

    def view(self, offset: int, length: int) -> memoryview:
        """See ``BlockSource.view``. Return a copy."""
        out, stop = map_anonymous(length), offset + length
        head = self._header[offset:stop]
        out[: len(head)] = head
        index, block = -1, memoryview(b"")
        for run in self._runs[max(0, bisect.bisect_right(self._starts, offset) - 1) :]:
            if run.start >= stop:
                break
            first, last = max(offset, run.start), min(stop, run.start + run.length)
            while first < last:
                at = run.source + first - run.start
                if at // BLOCK_BYTES != index:
                    index = at // BLOCK_BYTES
                    block = self._block(index)
                found = block[at - index * BLOCK_BYTES :][: last - first]
                out[first - offset : first - offset + len(found)] = found
                first += len(found)
        return out

    def _block(self, index: int) -> memoryview:
        """Return a whole block of the source: files are read and compared by blocks."""
        start = index * BLOCK_BYTES
        return self._source.view(start, min(BLOCK_BYTES, -(-(self._source.size_bytes - start) // PAGE) * PAGE))

    def finish(self) -> None:
        """See ``BlockSource.finish``."""
        self._source.finish()


def held_by_few(most: int) -> Cut:
    """Return a cut to the tensors that at most ``most`` nodes hold in memory."""

    def cut(spec: TensorSpec, facts: Any, rank: int) -> tuple[TensorSpec | None, int]:
        return (spec, 0) if _num_nodes(facts) <= most else (None, 0)

    return cut


def is_held_by_few(meta: CaptureMeta, most: int) -> bool:
    """True if at most this many nodes hold each of its tensors."""
    return all(_num_nodes(facts) <= most for facts in meta.tensors.values())


def _num_nodes(facts: Any) -> int:
    found = facts.get("nodes", 1) if isinstance(facts, dict) else 1
    return found if isinstance(found, int) else 1


def has_shared_rows(meta: CaptureMeta) -> bool:
    """True if other nodes store a part of this shard, too."""
    return any(_rows(facts) is not None for facts in meta.tensors.values())


def _rows(facts: Any) -> Any:
    return facts.get("shared_rows") if isinstance(facts, dict) else None


def _cut(spec: TensorSpec, facts: Any, rank: int) -> tuple[TensorSpec | None, int]:
    """Return the rows of a tensor that are in the part, and its first row there. Raises: FormatError."""
    rows = _rows(facts)
    if rows is None:
        return spec, 0
    bound = spec.shape[0] if spec.shape else 1
    is_pair = isinstance(rows, list) and len(rows) == 2 and all(type(row) is int for row in rows)
    if not is_pair or not 0 <= rows[0] <= rows[1] <= bound or (rows[0] and not facts.get("offsets")):
        raise FormatError(f"rank {rank}: tensor {spec.name!r}: bad shared_rows {rows!r:.50}")
    start, stop = rows
    if start == stop:
        return None, 0
    return TensorSpec(spec.name, spec.dtype, (stop - start, *spec.shape[1:])), start


def _facts(facts: dict[str, Any], start: int) -> dict[str, Any]:
    """Return the manifest entry of the stored rows, of which ``start`` is the first."""
    kept = {name: value for name, value in facts.items() if name != "shared_rows"}
    if start:
        kept["offsets"] = [kept["offsets"][0] + start, *kept["offsets"][1:]]
    return kept
