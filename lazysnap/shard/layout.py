"""The place of each tensor in a shard: a safetensors header that is known before any data is copied.

The header is padded with spaces so that the data starts on a page. Tensors follow each other without holes, as the
safetensors format requires. They are ordered by item size, so each one stays aligned to its elements.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import itemgetter
from typing import Any

from lazysnap.errors import FormatError
from lazysnap.shard.limits import MAX_DIMS, MAX_HEADER_BYTES, MAX_HEADER_NESTING, MAX_NAME, MAX_TENSORS, load_json

PAGE = 4096

ITEM_BITS: Mapping[str, int] = {
    "F64": 64, "I64": 64, "U64": 64, "C64": 64,
    "F32": 32, "I32": 32, "U32": 32,
    "F16": 16, "BF16": 16, "I16": 16, "U16": 16,
    "I8": 8, "U8": 8, "BOOL": 8,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
}  # fmt: skip
"""Bits per element of every dtype name in format version 1."""


@dataclass(frozen=True)
class TensorSpec:
    """Name, safetensors dtype and shape (elements per dimension) of one tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the tensor, row-major and dense."""
        return math.prod(self.shape) * ITEM_BITS[self.dtype] // 8


@dataclass(frozen=True)
class Layout:
    """All tensors of a shard in file order, with absolute offsets in bytes from the start of the file."""

    specs: tuple[TensorSpec, ...]
    offsets: tuple[int, ...]
    header: bytes = field(repr=False)
    size_bytes: int
    metadata: dict[str, str]

    @classmethod
    def plan(cls, specs: Iterable[TensorSpec], metadata: Mapping[str, str] | None = None) -> "Layout":
        """Lay out ``specs``, widest elements first and otherwise in the given order.

        Raises: FormatError, for a dtype that the format does not have, a name used twice or a header over the limit.
        """
        chosen = list(specs)
        for spec in chosen:
            if len(spec.name) > MAX_NAME or len(spec.shape) > MAX_DIMS:
                raise FormatError(
                    f"tensor {spec.name!r:.100}: a name of {len(spec.name)} characters and {len(spec.shape)} "
                    f"dimensions; the limits are {MAX_NAME} and {MAX_DIMS}"
                )
            if spec.dtype not in ITEM_BITS:
                raise FormatError(f"tensor {spec.name!r}: dtype {spec.dtype!r} is not one of {sorted(ITEM_BITS)}")
        chosen.sort(key=lambda spec: -ITEM_BITS[spec.dtype])
        entries: dict[str, Any] = {}
        if metadata:
            entries["__metadata__"] = dict(metadata)
        starts = []
        position = 0
        for spec in chosen:
            if spec.name in entries or spec.name == "__metadata__":
                raise FormatError(f"tensor name {spec.name!r} is used twice in one shard")
            end = position + spec.nbytes
            entries[spec.name] = _entry(spec.dtype, spec.shape, position, end)
            starts.append(position)
            position = end
        header = _header(entries, "shard")
        offsets = tuple(len(header) + start for start in starts)
        return cls(tuple(chosen), offsets, header, len(header) + position, dict(metadata or {}))

    @classmethod
    def parse(cls, head: "bytes | memoryview", size_bytes: int, where: str = "shard") -> "Layout":
        """Parse the untrusted header at the start of a shard of ``size_bytes``.

        Raises: FormatError, naming ``where``, if it is not exactly what ``plan`` may write.
        """
        length = int.from_bytes(bytes(head[:8]), "little")
        if length > MAX_HEADER_BYTES or 8 + length > size_bytes or 8 + length > len(head):
            raise FormatError(
                f"{where}: the header claims {length} bytes, the file has {size_bytes} (of which {len(head)} read)"
            )
        header = bytes(head[: 8 + length])
        try:
            entries = load_json(header[8:], MAX_HEADER_NESTING, _no_duplicates)
        except ValueError as error:
            raise FormatError(f"{where}: the header is no JSON: {error}") from error
        if not isinstance(entries, dict):
            raise FormatError(f"{where}: the header is no JSON object")
        metadata = _checked_metadata(entries.pop("__metadata__", {}), where)
        if len(entries) > MAX_TENSORS:
            raise FormatError(f"{where}: {len(entries)} tensors, the limit is {MAX_TENSORS}")
        placed = [_checked_entry(name, entry, where) for name, entry in entries.items()]
        placed.sort(key=itemgetter(1, 2))
        specs = []
        offsets = []
        position = 0
        for spec, start, end in placed:
            if start != position or end - start != spec.nbytes:
                raise FormatError(
                    f"{where}: tensor {spec.name!r} lies at [{start}, {end}), expected "
                    f"[{position}, {position + spec.nbytes}): tensors must neither overlap nor leave holes"
                )
            specs.append(spec)
            offsets.append(len(header) + start)
            position = end
        if len(header) + position != size_bytes:
            raise FormatError(
                f"{where}: header and tensors take {len(header) + position} bytes, the file has {size_bytes}"
            )
        return cls(tuple(specs), tuple(offsets), header, size_bytes, metadata)

    @cached_property
    def _index(self) -> dict[str, int]:
        return {spec.name: index for index, spec in enumerate(self.specs)}

    def __contains__(self, name: object) -> bool:
        return name in self._index

    def find(self, name: str) -> tuple[TensorSpec, int]:
        """Return the tensor called ``name`` and its absolute offset.

        Raises: FormatError, if there is none (the manifest refers to it, so the two do not belong together).
        """
        if name not in self._index:
            raise FormatError(f"the shard has no tensor {name!r}")
        index = self._index[name]
        return self.specs[index], self.offsets[index]


def join(shards: Sequence[tuple[int, Layout]]) -> tuple[bytes, tuple[int, ...]]:
    """Return the header of a node's file, and the offset of each shard in it. ``shards``: rank and layout, in order.

    The file is this header with all shards after it, byte for byte and each on a page. It is valid safetensors. Its
    tensors are called ``rank-00003/<name>``. Because each byte must belong to a tensor, the bytes between two shards
    and the header of the second are a tensor ``lazysnap/rank-00003``. A file with one shard is that shard.

    Raises: FormatError, if the header exceeds the limits of the format.
    """
    entries: dict[str, Any] = {}
    metadata: dict[str, str] = {}
    position = 0
    starts = []
    for rank, layout in shards:
        prefix = f"rank-{rank:05d}/"
        start = -(-position // PAGE) * PAGE
        starts.append(start)
        data = start + len(layout.header)
        entries[f"lazysnap/rank-{rank:05d}"] = _entry("U8", [data - position], position, data)
        for spec, offset in zip(layout.specs, layout.offsets, strict=True):
            entries[prefix + spec.name] = _entry(spec.dtype, spec.shape, start + offset, start + offset + spec.nbytes)
        for name, stored in layout.metadata.items():
            metadata[prefix + name] = prefix + stored
        position = start + layout.size_bytes
    if metadata:
        entries["__metadata__"] = metadata
    header = _header(entries, "node's file")
    return header, tuple(len(header) + start for start in starts)


def _entry(dtype: str, shape: Sequence[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


def _header(entries: Mapping[str, Any], file: str) -> bytes:
    """Return the length and the entries as JSON, padded up to a page. Raises: FormatError, over a limit."""
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    length = -(-(8 + len(text)) // PAGE) * PAGE - 8
    count = len(entries.keys() - {"__metadata__"})
    if length > MAX_HEADER_BYTES or count > MAX_TENSORS:
        raise FormatError(
            f"{count} tensors with a header of {length} bytes in one {file}; the limits are {MAX_TENSORS} and "
            f"{MAX_HEADER_BYTES}"
        )
    return length.to_bytes(8, "little") + text.ljust(length)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs twice")
    return result


def _checked_metadata(metadata: Any, where: str) -> dict[str, str]:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FormatError(f"{where}: __metadata__ must map strings to strings")
    return metadata


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 62


def _checked_entry(name: str, entry: Any, where: str) -> tuple[TensorSpec, int, int]:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise FormatError(f"{where}: tensor {name!r}: expected dtype, shape and data_offsets, got {entry!r:.200}")
    dtype = entry["dtype"]
    shape = entry["shape"]
    span = entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BITS:
        raise FormatError(f"{where}: tensor {name!r}: unknown dtype {dtype!r:.50}")
    if len(name) > MAX_NAME:
        raise FormatError(f"{where}: a tensor's name of {len(name)} characters, the limit is {MAX_NAME}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(map(_is_size, shape)):
        raise FormatError(f"{where}: tensor {name!r}: bad shape {shape!r:.100}")
    if not isinstance(span, list) or len(span) != 2 or not all(map(_is_size, span)):
        raise FormatError(f"{where}: tensor {name!r}: bad data_offsets {span!r:.100}")
    return TensorSpec(name, dtype, tuple(shape)), span[0], span[1]
