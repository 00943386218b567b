"""The shard of a node: the tensors of all its ranks in one safetensors file, each rank's together (docs/format.md).

A rank's tensors are called ``rank-00003/<name>`` there. What one rank's shard has behind its header stands in the
node's file as one piece, from a page boundary on; where the next one would not begin on a page, a tensor of zeros lies
between, as the safetensors format allows no holes.
"""

import json
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lazysnap.errors import FormatError, ShardCorrupt
from lazysnap.shard.layout import MAX_HEADER_BYTES, PAGE, Layout

_PADDING = "padding-"


def _prefix(rank: int) -> str:
    return f"rank-{rank:05d}/"


@dataclass(frozen=True)
class NodeLayout:
    """Where the members of a node's file go."""

    header: bytes
    starts: tuple[int, ...]
    """For each member, where what it has behind its own header begins in the node's file: on a page boundary."""
    size_bytes: int


def plan_node(members: Sequence[tuple[int, Layout]]) -> NodeLayout:
    """Lay out the shards of a node's ranks (rank and layout) one behind the other.

    Raises: FormatError, if the header is over the limit.
    """
    entries: dict[str, Any] = {}
    metadata: dict[str, str] = {}
    starts: list[int] = []
    position = 0
    for rank, layout in members:
        if -position % PAGE:
            end = position + -position % PAGE
            entries[f"{_PADDING}{len(starts):05d}"] = {
                "dtype": "U8",
                "shape": [end - position],
                "data_offsets": [position, end],
            }
            position = end
        starts.append(position)
        prefix, own = _prefix(rank), len(layout.header)
        for spec, offset in zip(layout.specs, layout.offsets, strict=True):
            start = position + offset - own
            entries[prefix + spec.name] = {
                "dtype": spec.dtype,
                "shape": list(spec.shape),
                "data_offsets": [start, start + spec.nbytes],
            }
        metadata.update({prefix + alias: prefix + name for alias, name in layout.metadata.items()})
        position += layout.size_bytes - own
    fields = {"__metadata__": metadata, **entries} if metadata else entries
    text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False).encode()
    length = -(-(8 + len(text)) // PAGE) * PAGE - 8
    if length > MAX_HEADER_BYTES:
        raise FormatError(f"a header of {length} bytes for {len(members)} ranks; the limit is {MAX_HEADER_BYTES}")
    header = length.to_bytes(8, "little") + text.ljust(length)
    return NodeLayout(header, tuple(len(header) + start for start in starts), len(header) + position)


_parsed: "weakref.WeakValueDictionary[tuple[bytes, int], Layout]" = weakref.WeakValueDictionary()
_parsing = threading.Lock()


def whole_layout(head: "bytes | memoryview", size_bytes: int, where: str) -> Layout:
    """As ``Layout.parse``, once for all members: as long as a layout of one of them lives, the others share it.

    Raises: ShardCorrupt.
    """
    key = bytes(head[: 8 + int.from_bytes(head[:8], "little")]), size_bytes
    with _parsing:
        found = _parsed.get(key)
        if found is None:
            found = _parsed[key] = Layout.parse(head, size_bytes, where)
    return found


def member_layout(whole: Layout, rank: int, where: str) -> Layout:
    """The tensors of one rank in a node's file, under their own names. Raises: ShardCorrupt, if they lie apart."""
    prefix = _prefix(rank)
    numbers = [index for index, spec in enumerate(whole.specs) if spec.name.startswith(prefix)]
    held = [(whole.offsets[number], whole.specs[number].nbytes) for number in numbers if whole.specs[number].nbytes]
    if held and held[-1][0] + held[-1][1] - held[0][0] != sum(size for _, size in held):
        raise ShardCorrupt(f"{where}: the tensors of rank {rank} do not stand together")
    metadata = {
        alias.removeprefix(prefix): name.removeprefix(prefix)
        for alias, name in whole.metadata.items()
        if alias.startswith(prefix)
    }
    return Layout(
        tuple(whole.specs[number].renamed(whole.specs[number].name.removeprefix(prefix)) for number in numbers),
        tuple(whole.offsets[number] for number in numbers),
        whole.header,
        whole.size_bytes,
        metadata,
        whole,
    )
