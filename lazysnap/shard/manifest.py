"""The manifest beside a node's file: it describes the bytes and commits them, because it is written last.

A file is ``{"digest":"xxh3-128:<hex>","manifest":<body>}`` and a newline. The digest covers the exact bytes of the
body, so a flipped byte anywhere in the file is detected (docs/format.md).
"""

import json
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from lazysnap.errors import FormatError
from lazysnap.shard.checksum import ALGORITHM, Checksums, digest
from lazysnap.shard.layout import PAGE, Layout
from lazysnap.shard.limits import (
    MAX_BLOCK_BYTES,
    MAX_COUNT,
    MAX_DIMS,
    MAX_HEADER_BYTES,
    MAX_MANIFEST_BYTES,
    MAX_NAME,
    MAX_NESTING,
    MAX_RANKS,
    MAX_TENSORS,
    check_values,
    load_json,
)
from lazysnap.shard.names import NodeName, SnapshotName

FORMAT = "lazysnap"
TAG = "$"
"""The key in the encoded state that holds the type of a value which plain JSON lacks (docs/format.md)."""
EXTRAS = "lazysnap"
"""The key in a state for the additions of lazysnap."""
PRETRAINED = "pretrained"
"""A key below ``EXTRAS``. Its value is JSON: for each object of the state by name, ``files`` (name → text), and for
adapters ``weights`` (name in the file → name in the model).
"""
FORMAT_VERSION = 1
"""The only supported version."""
_OPTIONAL = ("parameters", "replicas")
"""Optional keys: absent if their value is unknown."""
_FACTS = ("dtype", "order", "scope", "global_shape", "offsets", "shared_rows", "nodes", "frozen")
"""The keys of a tensor's entry."""
_HEAD = f'{{"digest":"{ALGORITHM}:'.encode()
_MIDDLE = b'","manifest":'
_TAIL = b"}\n"
_BODY_START = len(_HEAD) + 32 + len(_MIDDLE)


Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Id = Annotated[str, Meta(pattern=r"\A[0-9a-f]{16}\Z")]
Digest = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
Text = Annotated[str, Meta(max_length=MAX_NAME)]


@dataclass(frozen=True)
class CaptureMeta:
    """The metadata of a capture, known before its first byte is copied: a manifest without checksums and sizes."""

    run_id: Id
    """The id that a training gets at its first start, and keeps at every restart (``shard.names``)."""
    start: Id
    """The id of one launch of the ranks. After a restart the same step is another snapshot."""
    step: Count
    rank: Count
    world_size: Annotated[int, Meta(ge=1, le=MAX_RANKS)]
    captured_ns: Count
    tensors: dict[Text, dict[str, Any]] = field(default_factory=dict)
    """Facts that safetensors cannot express, by name of a tensor: logical dtype, memory order, scope, place in the
    whole."""
    aliases: dict[Text, Text] = field(default_factory=dict)
    """Names of tied tensors, each with the name under which the bytes are stored."""
    state: Any = None
    """The small state in the safe JSON encoding (lazysnap.state.codec)."""
    packages: dict[Text, Text] = field(default_factory=dict)
    """Versions of the packages that wrote it."""
    parameters: dict[str, list[str]] | None = None
    """The parameter names of each optimizer in its own order, by its path in the state. Absent if unknown."""
    replicas: Annotated[list[Count], Meta(max_length=MAX_RANKS)] | None = None
    """The ranks of the nodes that store, at shared levels, what several nodes hold. Absent if there is none."""

    @property
    def name(self) -> SnapshotName:
        """The snapshot of this capture."""
        return SnapshotName(self.run_id, self.step, self.start)

    def to_fields(self) -> dict[str, Any]:
        """Return plain values, the keys in the order of this class."""
        return {name: value for name, value in vars(self).items() if value is not None or name not in _OPTIONAL}

    def to_bytes(self) -> bytes:
        """Return one JSON object with the fields of this class as keys."""
        return _dump(self.to_fields())

    @classmethod
    def from_bytes(cls, data: bytes, where: str = "capture") -> "CaptureMeta":
        """Raises: FormatError, if a key is missing, unknown or of the wrong type."""
        return cls.from_fields(_load(data, where), where)

    @classmethod
    def from_fields(cls, fields: dict[str, Any], where: str) -> "CaptureMeta":
        """Check parsed JSON. Raises: FormatError."""
        missing = set(cls.__dataclass_fields__) ^ {*fields, *_OPTIONAL}
        if missing:
            raise FormatError(f"{where}: keys missing or unknown: {sorted(missing)!s:.500}")
        meta: CaptureMeta = _checked(fields, cls, where)
        if meta.rank >= meta.world_size:
            raise FormatError(f"{where}: rank {meta.rank} of {meta.world_size}")
        num_names = len(meta.tensors) + len(meta.aliases)
        if num_names > MAX_TENSORS:
            raise FormatError(f"{where}: {num_names} tensors and further names, the limit is {MAX_TENSORS}")
        for name, facts in meta.tensors.items():
            if not _is_facts(facts):
                raise FormatError(f"{where}: tensor {name!r:.100}: expected {', '.join(_FACTS)}, got {facts!r:.200}")
        return meta


class _ChecksumFields(msgspec.Struct, forbid_unknown_fields=True):
    algorithm: Literal["xxh3-128"]
    block_bytes: Annotated[int, Meta(ge=1, le=MAX_BLOCK_BYTES)]
    blocks: tuple[Digest, ...]
    whole: Digest


class _FileFields(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    size_bytes: Count
    checksum: _ChecksumFields
    base: tuple[tuple[Count, Count], ...] = ()


class _PlaceFields(msgspec.Struct, forbid_unknown_fields=True):
    offset: Count
    size_bytes: Count
    header_bytes: Count


@dataclass(frozen=True)
class Shard:
    """One rank's shard, and its place in the file of its node."""

    meta: CaptureMeta
    offset: int
    """Bytes from the start of the file; a multiple of 4096."""
    size_bytes: int
    header_bytes: int

    def layout(self, head: "bytes | memoryview", where: str) -> Layout:
        """Return the places of the tensors in the shard, from the header at its start. Raises: FormatError."""
        return Layout.parse(head, self.size_bytes, where)


@dataclass(frozen=True)
class Manifest:
    """The manifest of the file that one node wrote of one snapshot."""

    name: NodeName
    shards: tuple[Shard, ...]
    """The shards in the order of the file; at least one."""
    checksums: Checksums
    created_ns: int
    base: tuple[tuple[int, int], ...] = ()
    """Ranges of blocks, each the first and the one after the last, that are in the base: see ``levels.node_base``."""
    written_bytes: int = field(default=0, compare=False)
    """Bytes that were just written for it, without an existing base. Not stored."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the file, those of its base included."""
        return self.checksums.size_bytes

    @property
    def meta(self) -> CaptureMeta:
        """The metadata of the first shard: all have the same run, step and start."""
        return self.shards[0].meta

    def of(self, rank: int) -> Shard:
        """Return the shard of a rank. Raises: FormatError, if it is not in the file."""
        for shard in self.shards:
            if shard.meta.rank == rank:
                return shard
        raise FormatError(f"{self.name.file}: holds no shard of rank {rank}")

    def encode(self) -> bytes:
        """Return the bytes of the manifest file."""
        file: dict[str, Any] = {
            "name": self.name.file,
            "size_bytes": self.checksums.size_bytes,
            "checksum": {
                "algorithm": ALGORITHM,
                "block_bytes": self.checksums.block_bytes,
                "blocks": list(self.checksums.blocks),
                "whole": self.checksums.whole,
            },
        }
        if self.base:
            file["base"] = self.base
        shards = []
        for shard in self.shards:
            fields = shard.meta.to_fields()
            fields["place"] = {
                "offset": shard.offset,
                "size_bytes": shard.size_bytes,
                "header_bytes": shard.header_bytes,
            }
            shards.append(fields)
        body = _dump(
            {
                "format": FORMAT,
                "version": FORMAT_VERSION,
                "created_ns": self.created_ns,
                "file": file,
                "shards": shards,
            }
        )
        advice = "keep large plain values (lists, NumPy arrays) out of the state, or store them as tensors"
        if len(body) > MAX_MANIFEST_BYTES - _BODY_START - len(_TAIL):
            raise FormatError(f"a manifest of {len(body)} bytes; the limit is {MAX_MANIFEST_BYTES}: {advice}")
        try:
            check_values(body)
        except ValueError as error:
            raise FormatError(f"a manifest of {error}: {advice}") from error
        return _HEAD + digest(body).encode() + _MIDDLE + body + _TAIL

    @classmethod
    def decode(cls, data: bytes, where: str) -> "Manifest":
        """Read and check a manifest file; ``where`` names it in errors.

        Raises: FormatError, if any byte was changed, or for another format version.
        """
        body = data[_BODY_START : -len(_TAIL)]
        got = digest(body).encode()
        if data != _HEAD + got + _MIDDLE + body + _TAIL:
            raise FormatError(f"{where}: the manifest is damaged: {_damage(data, got.decode())}")
        fields = _load(body, where)
        if fields.pop("format", None) != FORMAT:
            raise FormatError(f"{where}: not a lazysnap manifest")
        version = _checked(fields.pop("version", None), Count, f"{where}: version")
        if version != FORMAT_VERSION:
            raise FormatError(
                f"{where}: format version {version}, and this lazysnap reads version {FORMAT_VERSION} alone: use the "
                "lazysnap that wrote it"
            )
        created_ns = _checked(fields.pop("created_ns", None), Count, f"{where}: created_ns")
        file: _FileFields = _checked(fields.pop("file", None), _FileFields, f"{where}: file")
        name = NodeName.parse(file.name.removesuffix(".safetensors"))
        if name is None or name.file != file.name:
            raise FormatError(f"{where}: unexpected name of a file {file.name!r:.100}")
        shards = fields.pop("shards", None)
        if fields or not isinstance(shards, list) or not 1 <= len(shards) <= MAX_RANKS:
            raise FormatError(f"{where}: expected a list of shards and no other keys, got {sorted(fields)!s:.500}")
        checksums = _checksums(file, where)
        manifest = cls(name, tuple(_shard(shard, where) for shard in shards), checksums, created_ns, file.base)
        _check_places(manifest, where)
        _check_base(manifest, where)
        return manifest


def _damage(data: bytes, got: str) -> str:
    """Describe how a file differs from a valid one."""
    if not data:
        return "the file is empty"
    if not data.startswith(_HEAD):
        return f"{len(data)} bytes that begin with {data[: len(_HEAD)]!r}, not with {_HEAD.decode()}"
    stored = data[len(_HEAD) : len(_HEAD) + 32].decode("ascii", "replace")
    if stored == got:
        return f"{len(data)} bytes that do not end with the closing brace and a line's end"
    return f"{ALGORITHM} of its body is {got}, it says {stored}"


for _kind in (CaptureMeta, _FileFields, _PlaceFields):
    # msgspec (0.22) prepares a type at its first use. If two threads do that at once, the process crashes.
    msgspec.json.Decoder(_kind)


def _checked(value: Any, kind: Any, where: str) -> Any:
    """Return ``value`` as an object of that type. Raises: FormatError, naming the field that does not fit."""
    try:
        return msgspec.convert(value, kind)
    except (msgspec.ValidationError, UnicodeError) as error:  # ValueError for half of a surrogate pair
        raise FormatError(f"{where}: {error}") from error


def json_text(fields: dict[str, Any]) -> str:
    """Return fields of a manifest as text: JSON without spaces. Raises: ValueError, for a number that is not finite."""
    return json.dumps(fields, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _dump(fields: dict[str, Any]) -> bytes:
    try:
        text = json_text(fields)
    except ValueError as error:  # a number that parses as infinite, such as 1e999
        raise FormatError(f"the metadata is no JSON: {error}") from error
    return text.encode("utf-8", "surrogatepass")


def _load(data: bytes, where: str) -> dict[str, Any]:
    try:
        fields = load_json(data, MAX_NESTING)
    except ValueError as error:
        raise FormatError(f"{where}: no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise FormatError(f"{where}: expected a JSON object, got {type(fields).__name__}")
    return fields


def _is_facts(facts: dict[str, Any]) -> bool:
    """True if an entry is within the limits; its meaning is checked where it is used."""
    if not set(facts) <= set(_FACTS):
        return False
    for value in facts.values():
        if isinstance(value, str) and len(value) > MAX_NAME:
            return False
        if isinstance(value, list) and len(value) > MAX_DIMS:
            return False
    return True


def _shard(fields: Any, where: str) -> Shard:
    if not isinstance(fields, dict):
        raise FormatError(f"{where}: a shard must be an object, got {fields!r:.100}")
    place: _PlaceFields = _checked(fields.pop("place", None), _PlaceFields, f"{where}: place")
    if not 8 <= place.header_bytes <= min(place.size_bytes, 8 + MAX_HEADER_BYTES):
        raise FormatError(f"{where}: a header of {place.header_bytes} bytes in {place.size_bytes}")
    return Shard(CaptureMeta.from_fields(fields, where), place.offset, place.size_bytes, place.header_bytes)


def _check_places(manifest: Manifest, where: str) -> None:
    """Check that the shards are of one snapshot and of different ranks, and fill the file one after the other."""
    end = 0
    if len(manifest.shards) == 1 and manifest.shards[0].offset:
        raise FormatError(f"{where}: the only shard begins at byte {manifest.shards[0].offset}")
    for shard in manifest.shards:
        if (shard.meta.name, shard.meta.world_size) != (manifest.meta.name, manifest.meta.world_size):
            raise FormatError(f"{where}: shards of different snapshots: {_named(shard)}, {_named(manifest.shards[0])}")
        if shard.offset < end or shard.offset % PAGE:
            raise FormatError(f"{where}: the shard of rank {shard.meta.rank} begins at byte {shard.offset}")
        end = shard.offset + shard.size_bytes
    if end != manifest.size_bytes:
        raise FormatError(f"{where}: the shards end at byte {end}, the file has {manifest.size_bytes}")
    if len({shard.meta.rank for shard in manifest.shards}) != len(manifest.shards):
        raise FormatError(f"{where}: several shards of one rank")


def _named(shard: Shard) -> str:
    return f"{shard.meta.name.directory} of {shard.meta.world_size} ranks"


def _check_base(manifest: Manifest, where: str) -> None:
    """Check that the base is of whole blocks, in order."""
    end = 0
    for start, stop in manifest.base:
        if not end <= start < stop <= manifest.size_bytes // manifest.checksums.block_bytes:
            raise FormatError(f"{where}: base: blocks {start} to {stop} of {len(manifest.checksums.blocks)}")
        end = stop


def _checksums(file: _FileFields, where: str) -> Checksums:
    fields = file.checksum
    if len(fields.blocks) != -(-file.size_bytes // fields.block_bytes):
        raise FormatError(f"{where}: the number of block checksums does not fit {file.size_bytes} bytes")
    checksums = Checksums(file.size_bytes, fields.block_bytes, fields.blocks)
    if checksums.whole != fields.whole:
        raise FormatError(f"{where}: the checksum over the block checksums does not agree")
    return checksums
