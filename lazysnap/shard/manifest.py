"""The manifest beside a shard: it describes the bytes, and it is the commit, because it is written last.

A file is ``{"digest":"xxh3-128:<hex>","manifest":<body>}`` and a newline; the digest is over the exact bytes of the
body, so that a flipped byte anywhere in the file is found (docs/format.md).
"""

import json
import re
from dataclasses import dataclass, field
from typing import Any

from lazysnap.errors import FormatError, FormatTooNew, ShardCorrupt
from lazysnap.shard.checksum import ALGORITHM, Checksums, digest
from lazysnap.shard.layout import Layout
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
    load_json,
)
from lazysnap.shard.names import ShardName, SnapshotName, is_id

FORMAT = "lazysnap"
TAG = "$"
"""In the encoded state: the key of the type of a value that plain JSON does not have (docs/format.md)."""
FORMAT_VERSION = 1
"""The version that is written, and the newest one that is read."""
_OPTIONAL = ("frozen", "parameters")
"""Keys that are absent if there is nothing to say."""
_FACTS = ("dtype", "scope", "global_shape", "offsets")
"""The keys of a tensor's entry."""
_HEAD = f'{{"digest":"{ALGORITHM}:'.encode()
_MIDDLE = b'","manifest":'
_TAIL = b"}\n"
_BODY_START = len(_HEAD) + 32 + len(_MIDDLE)


def is_count(value: object) -> bool:
    """Whether this is an integer >= 0, such as a step."""
    return type(value) is int and 0 <= value <= MAX_COUNT


@dataclass(frozen=True)
class FrozenReference:
    """The frozen tensors of a capture: a file of their own, stored once per level."""

    digest: str
    """``Checksums.whole`` of that file, 32 hexadecimal digits: its content decides its name."""
    size_bytes: int

    @classmethod
    def from_fields(cls, fields: Any, where: str) -> "FrozenReference":
        """Check parsed JSON. Raises: ShardCorrupt."""
        if not isinstance(fields, dict) or set(fields) != {"digest", "size_bytes"}:
            raise ShardCorrupt(f"{where}: frozen must hold digest and size_bytes, got {fields!r:.100}")
        if not isinstance(fields["digest"], str) or not re.fullmatch(r"[0-9a-f]{32}", fields["digest"]):
            raise ShardCorrupt(f"{where}: frozen.digest must be 32 hexadecimal digits, got {fields['digest']!r:.50}")
        return cls(fields["digest"], _count(fields, "size_bytes", where))


@dataclass(frozen=True)
class CaptureMeta:
    """The metadata of a capture, known before its first byte is copied: a manifest without checksums and sizes."""

    run_id: str
    """Made at the first start of a training, kept by every restart (``shard.names``)."""
    start: str
    """The id of one launch of the ranks. After a restart the same step is another snapshot."""
    step: int
    rank: int
    world_size: int
    captured_ns: int
    tensors: dict[str, Any] = field(default_factory=dict)
    """By name of a tensor, what safetensors cannot express: logical dtype, scope, global shape and offsets."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Names of tied tensors, each with the name under which the bytes are stored."""
    state: Any = None
    """The small state in the safe JSON encoding (lazysnap.state.codec)."""
    packages: dict[str, str] = field(default_factory=dict)
    """Versions of the packages that wrote it."""
    frozen: FrozenReference | None = None
    """The frozen tensors that ``state`` refers to; absent in JSON if there are none."""
    parameters: dict[str, list[str]] | None = None
    """By path of an optimizer in the state: the names of its parameters, as it numbers them. Absent if unknown."""

    @property
    def name(self) -> SnapshotName:
        """The snapshot of this capture."""
        return SnapshotName(self.run_id, self.step, self.start)

    def to_fields(self) -> dict[str, Any]:
        """As plain values, the keys in the order of this class."""
        fields = {name: value for name, value in vars(self).items() if value is not None or name not in _OPTIONAL}
        return fields if self.frozen is None else {**fields, "frozen": vars(self.frozen)}

    def to_bytes(self) -> bytes:
        """As one JSON object with the fields of this class as keys."""
        return _dump(self.to_fields())

    @classmethod
    def from_bytes(cls, data: bytes, where: str = "capture") -> "CaptureMeta":
        """Raises: ShardCorrupt, if a key is missing, unknown or of the wrong type."""
        return cls.from_fields(_load(data, where), where)

    @classmethod
    def from_fields(cls, fields: dict[str, Any], where: str) -> "CaptureMeta":
        """Check parsed JSON. Raises: ShardCorrupt."""
        missing = set(cls.__dataclass_fields__) ^ {*fields, *_OPTIONAL}
        if missing:
            raise ShardCorrupt(f"{where}: keys missing or unknown: {sorted(missing)!s:.500}")
        if "frozen" in fields:
            fields = {**fields, "frozen": FrozenReference.from_fields(fields["frozen"], where)}
        _check_optional(fields, where)
        meta = cls(**fields)
        for name in ("run_id", "start"):
            if not is_id(getattr(meta, name)):
                raise ShardCorrupt(f"{where}: {name} must be 16 hexadecimal digits, got {getattr(meta, name)!r:.50}")
        for name in ("step", "rank", "world_size", "captured_ns"):
            _check_count(name, getattr(meta, name), where)
        if not meta.rank < meta.world_size <= MAX_RANKS:
            raise ShardCorrupt(f"{where}: rank {meta.rank} of {meta.world_size}; the limit is {MAX_RANKS} ranks")
        for name in ("tensors", "aliases", "packages"):
            if not isinstance(getattr(meta, name), dict):
                raise ShardCorrupt(f"{where}: {name} must be an object")
        if len(meta.tensors) + len(meta.aliases) > MAX_TENSORS or not all(map(_is_facts, meta.tensors.values())):
            raise ShardCorrupt(f"{where}: tensors must be at most {MAX_TENSORS} objects of {', '.join(_FACTS)}")
        texts = [*meta.aliases.items(), *meta.packages.items()]
        if not all(isinstance(text, str) and len(text) <= MAX_NAME for pair in texts for text in pair):
            raise ShardCorrupt(f"{where}: aliases and packages must map strings to strings of {MAX_NAME} characters")
        return meta


@dataclass(frozen=True)
class Manifest:
    """One rank's shard of one snapshot, as committed."""

    meta: CaptureMeta
    file: str
    """Name of the shard file, beside the manifest."""
    header_bytes: int
    checksums: Checksums
    created_ns: int

    @property
    def size_bytes(self) -> int:
        """Bytes of the shard file."""
        return self.checksums.size_bytes

    def layout(self, head: "bytes | memoryview", where: str) -> Layout:
        """Where the tensors lie in the file, from the header at its start. Raises: ShardCorrupt."""
        return Layout.parse(head, self.size_bytes, where)

    def encode(self) -> bytes:
        """The bytes of the manifest file."""
        body = _dump(
            {
                "format": FORMAT,
                "version": FORMAT_VERSION,
                **self.meta.to_fields(),
                "created_ns": self.created_ns,
                "shard": {
                    "file": self.file,
                    "size_bytes": self.checksums.size_bytes,
                    "header_bytes": self.header_bytes,
                    "checksum": {
                        "algorithm": ALGORITHM,
                        "block_bytes": self.checksums.block_bytes,
                        "blocks": list(self.checksums.blocks),
                        "whole": self.checksums.whole,
                    },
                },
            }
        )
        if len(body) > MAX_MANIFEST_BYTES - _BODY_START - len(_TAIL):
            raise FormatError(
                f"a manifest of {len(body)} bytes; the limit is {MAX_MANIFEST_BYTES}: keep large plain values (lists, "
                "NumPy arrays) out of the state, or store them as tensors"
            )
        return _HEAD + digest(body).encode() + _MIDDLE + body + _TAIL

    @classmethod
    def decode(cls, data: bytes, where: str) -> "Manifest":
        """Read and check a manifest file; ``where`` names it in errors.

        Raises: ShardCorrupt, if any byte is not as it was written; FormatTooNew, if a later version wrote it.
        """
        body = data[_BODY_START : -len(_TAIL)]
        got = digest(body).encode()
        if data != _HEAD + got + _MIDDLE + body + _TAIL:
            raise ShardCorrupt(f"{where}: the manifest is damaged: {_damage(data, got.decode())}")
        fields = _load(body, where)
        if fields.pop("format", None) != FORMAT:
            raise ShardCorrupt(f"{where}: not a lazysnap manifest")
        version = fields.pop("version", None)
        _check_count("version", version, where)
        if version > FORMAT_VERSION:
            raise FormatTooNew(
                f"{where}: format version {version}, this lazysnap reads version {FORMAT_VERSION}; upgrade lazysnap"
            )
        shard, created_ns = fields.pop("shard", None), fields.pop("created_ns", None)
        _check_count("created_ns", created_ns, where)
        meta = CaptureMeta.from_fields(fields, where)
        if not isinstance(shard, dict) or set(shard) != {"file", "size_bytes", "header_bytes", "checksum"}:
            raise ShardCorrupt(f"{where}: bad shard entry {shard!r:.200}")
        if shard["file"] != ShardName(meta.rank, meta.world_size).shard:
            raise ShardCorrupt(f"{where}: unexpected shard name {shard['file']!r:.100}")
        _check_count("header_bytes", shard["header_bytes"], where)
        most = min(_count(shard, "size_bytes", where), 8 + MAX_HEADER_BYTES)
        if not 8 <= shard["header_bytes"] <= most:
            raise ShardCorrupt(f"{where}: a header of {shard['header_bytes']} bytes in {shard['size_bytes']}")
        return cls(meta, shard["file"], shard["header_bytes"], _checksums(shard, where), created_ns)


def _damage(data: bytes, got: str) -> str:
    """How a file differs from a valid one, in words."""
    if not data:
        return "the file is empty"
    if not data.startswith(_HEAD):
        return f"{len(data)} bytes that begin with {data[: len(_HEAD)]!r}, not with {_HEAD.decode()}"
    said = data[len(_HEAD) : len(_HEAD) + 32].decode("ascii", "replace")
    if said == got:
        return f"{len(data)} bytes that do not end with the closing brace and a line's end"
    return f"{ALGORITHM} of its body is {got}, it says {said}"


def _check_optional(fields: dict[str, Any], where: str) -> None:
    parameters = fields.get("parameters")
    if "parameters" in fields:
        lists = parameters.values() if isinstance(parameters, dict) else [None]
        if not all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in lists):
            raise ShardCorrupt(f"{where}: parameters must map paths to lists of names")


def _dump(fields: dict[str, Any]) -> bytes:
    try:
        text = json.dumps(fields, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    except ValueError as error:  # a number that was read as infinite, such as 1e999
        raise FormatError(f"the metadata is no JSON: {error}") from error
    return text.encode("utf-8", "surrogatepass")


def _load(data: bytes, where: str) -> dict[str, Any]:
    try:
        fields = load_json(data, MAX_NESTING)
    except ValueError as error:
        raise ShardCorrupt(f"{where}: no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ShardCorrupt(f"{where}: expected a JSON object, got {type(fields).__name__}")
    return fields


def _is_facts(facts: Any) -> bool:
    """Whether this is within the limits of an entry; its meaning is checked where it is used."""
    if not isinstance(facts, dict):
        return not isinstance(facts, (list, str))
    texts = [text for text in facts.values() if isinstance(text, str)]
    lists = [sizes for sizes in facts.values() if isinstance(sizes, list)]
    return (
        set(facts) <= set(_FACTS)
        and all(len(text) <= MAX_NAME for text in texts)
        and all(len(sizes) <= MAX_DIMS for sizes in lists)
    )


def _check_count(name: str, value: Any, where: str) -> None:
    if not is_count(value):
        raise ShardCorrupt(f"{where}: {name} must be an integer >= 0, got {value!r:.50}")


def _count(fields: dict[str, Any], name: str, where: str) -> int:
    _check_count(name, fields[name], where)
    return int(fields[name])


def _checksums(shard: dict[str, Any], where: str) -> Checksums:
    checksum = shard["checksum"]
    keys = {"algorithm", "block_bytes", "blocks", "whole"}
    if not isinstance(checksum, dict) or set(checksum) != keys or checksum["algorithm"] != ALGORITHM:
        raise ShardCorrupt(f"{where}: bad checksum entry {checksum!r:.200}")
    size_bytes, block_bytes = shard["size_bytes"], _count(checksum, "block_bytes", where)
    blocks = checksum["blocks"]
    if not 1 <= block_bytes <= MAX_BLOCK_BYTES:
        raise ShardCorrupt(f"{where}: block_bytes must be 1 to {MAX_BLOCK_BYTES}, got {block_bytes}")
    if not isinstance(blocks, list) or len(blocks) != -(-size_bytes // block_bytes):
        raise ShardCorrupt(f"{where}: the number of block checksums does not fit {size_bytes} bytes")
    if not all(isinstance(block, str) and re.fullmatch(r"[0-9a-f]{32}", block) for block in blocks):
        raise ShardCorrupt(f"{where}: a block checksum is not 32 hexadecimal digits")
    checksums = Checksums(size_bytes, block_bytes, tuple(blocks))
    if checksums.whole != checksum["whole"]:
        raise ShardCorrupt(f"{where}: the checksum over the block checksums does not agree")
    return checksums
