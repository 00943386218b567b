"""The header of a file that holds the shards of several ranks: it makes all of them one valid safetensors file.

Behind it stand the shards, byte for byte, each on a page. Their tensors are called ``rank-00003/<name>``; the bytes
between two shards and the header of the second, which safetensors allows nobody to leave out, are a tensor
``lazysnap/rank-00003``. A file with one shard is that shard.
"""

import json
from collections.abc import Sequence
from typing import Any

from lazysnap.errors import FormatError
from lazysnap.shard.layout import PAGE, Layout
from lazysnap.shard.limits import MAX_HEADER_BYTES, MAX_TENSORS


def join(shards: Sequence[tuple[int, Layout]]) -> tuple[bytes, tuple[int, ...]]:
    """Header of the file, and the offset of each shard in it. ``shards``: rank and layout, in the order of the file.

    Raises: FormatError, if the header exceeds the limits of the format.
    """
    entries: dict[str, Any] = {}
    metadata: dict[str, str] = {}
    position, starts = 0, []
    for rank, layout in shards:
        start, prefix = -(-position // PAGE) * PAGE, f"rank-{rank:05d}/"
        starts.append(start)
        data = start + len(layout.header)
        entries[f"lazysnap/rank-{rank:05d}"] = _entry("U8", [data - position], position, data)
        for spec, offset in zip(layout.specs, layout.offsets, strict=True):
            entries[prefix + spec.name] = _entry(
                spec.dtype, list(spec.shape), start + offset, start + offset + spec.nbytes
            )
        metadata.update({prefix + name: prefix + stored for name, stored in layout.metadata.items()})
        position = start + layout.size_bytes
    if metadata:
        entries["__metadata__"] = metadata
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    length = -(-(8 + len(text)) // PAGE) * PAGE - 8
    if length > MAX_HEADER_BYTES or len(entries) > MAX_TENSORS:
        raise FormatError(
            f"{len(entries)} tensors with a header of {length} bytes in one node's file; the limits are {MAX_TENSORS} "
            f"and {MAX_HEADER_BYTES}"
        )
    header = length.to_bytes(8, "little") + text.ljust(length)
    return header, tuple(len(header) + start for start in starts)


def _entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
