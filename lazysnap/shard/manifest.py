"""The manifest beside a shard: what the bytes are, and the commit, because it is written last.

A file is ``{"digest":"xxh3-128:<hex>","manifest":<body>}`` and a newline; the digest is over the exact bytes of the
body, so that a flipped byte anywhere in the file is found (docs/format.md).
"""

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from lazysnap.errors import FormatTooNew, ShardCorrupt
from lazysnap.shard.checksum import ALGORITHM, Checksums, digest
from lazysnap.shard.layout import Layout
from lazysnap.shard.members import member_layout, whole_layout
from lazysnap.shard.stem import Stem

FORMAT = "lazysnap"
FORMAT_VERSION = 3
"""The newest version that is read. Written is the oldest that can say what is to be said: 3 for the file of a node, 2
with one of the keys below, else 1."""
_SINCE_2 = ("frozen", "generation", "parameters")
"""Keys that are absent where they say nothing, and that version 1 does not have."""
_SHARED = ("run_id", "run_started_ns", "step", "world_size", "generation")
"""What the members of a node's file have in common."""
_HEAD = f'{{"digest":"{ALGORITHM}:'.encode()
_MIDDLE = b'","manifest":'
_TAIL = b"}\n"
_BODY_START = len(_HEAD) + 32 + len(_MIDDLE)
_RUN_ID = re.compile(r"[0-9a-f]{16}")
_DIRECTORY = re.compile(r"step-(\d{8,})(?:\.([0-9a-f]{8}))?")
_FROZEN_DIRECTORY = re.compile(r"frozen-([0-9a-f]{16})-([0-9a-f]{32})")
_KEEP_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
KEEP_PREFIX = "keep-"
"""What the names of ``keep-…`` objects begin with."""
_KEEP_FILE = re.compile(r"keep-([A-Za-z0-9][A-Za-z0-9._-]{0,63})")


def directory_name(step: int, run_id: str | None = None) -> str:
    """``step-00001000``; with ``run_id`` the name to use when another run's snapshot of that step is in the way."""
    return f"step-{step:08d}" + (f".{run_id[:8]}" if run_id else "")


def parse_directory_name(name: str) -> int | None:
    """The step of a snapshot directory's name, ``None`` for any other name."""
    match = _DIRECTORY.fullmatch(name)
    return int(match[1]) if match else None


def directory_names(meta: "CaptureMeta") -> Iterator[str]:
    """Names for a snapshot's directory, the first that is free is taken: two runs, or one that passes a step again."""
    yield directory_name(meta.step)
    yield directory_name(meta.step, meta.run_id[:8])
    yield directory_name(meta.step, meta.run_id[8:])
    for number in itertools.count():
        yield directory_name(meta.step, digest(f"{meta.run_id} {number}".encode()))


def frozen_directory_name(run_id: str, digest: str) -> str:
    """``frozen-<run id>-<digest>``: where a run's immutable tensors of that content are."""
    return f"frozen-{run_id}-{digest}"


def parse_frozen_directory_name(name: str) -> tuple[str, str] | None:
    """Run id and digest, ``None`` for any other name."""
    match = _FROZEN_DIRECTORY.fullmatch(name)
    return (match[1], match[2]) if match else None


def is_keep_name(name: object) -> bool:
    """Whether a snapshot may be called so: 1 to 64 of ``A-Z a-z 0-9 . _ -``, the first a letter or digit."""
    return isinstance(name, str) and _KEEP_NAME.fullmatch(name) is not None


def is_run_id(text: object) -> bool:
    """Whether this is a run's id, or a generation: 16 hexadecimal digits."""
    return isinstance(text, str) and _RUN_ID.fullmatch(text) is not None


def is_count(value: object) -> bool:
    """Whether this is an integer >= 0, such as a step."""
    return type(value) is int and 0 <= value < 1 << 63


def keep_file_name(name: str) -> str:
    """``keep-before-anneal``: an object in a snapshot's directory that names it, and so keeps it."""
    return f"keep-{name}"


def parse_keep_file_name(file: str) -> str | None:
    """The name that a ``keep-…`` object gives, ``None`` for any other file."""
    match = _KEEP_FILE.fullmatch(file)
    return match[1] if match else None


def shard_name(rank: int, world_size: int) -> str:
    """``rank-00003-of-00008.safetensors``."""
    return Stem.of_rank(rank, world_size).shard


def manifest_name(rank: int, world_size: int) -> str:
    """``rank-00003-of-00008.json``."""
    return Stem.of_rank(rank, world_size).manifest


@dataclass(frozen=True)
class FrozenReference:
    """The immutable tensors that a capture belongs with: an image of their own, stored once per run and level."""

    digest: str
    """``Checksums.whole`` of that image, 32 hexadecimal digits: its content decides its name."""
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
    """What is known of a capture before its first byte is copied: the manifest without checksums and sizes."""

    run_id: str
    """16 hexadecimal digits, made at the first start of a training and kept by every restart."""
    run_started_ns: int
    """Unix time in nanoseconds when ``run_id`` was made; the newest run wins."""
    step: int
    rank: int
    world_size: int
    captured_ns: int
    tensors: dict[str, Any] = field(default_factory=dict)
    """Per tensor name what safetensors cannot say: logical dtype, scope, global shape and offsets."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Names of tied tensors, each with the name under which the bytes are stored."""
    state: Any = None
    """The small state in the safe JSON encoding (lazysnap.state.codec)."""
    packages: dict[str, str] = field(default_factory=dict)
    """Versions of the packages that wrote it."""
    frozen: FrozenReference | None = None
    """Where the tensors are that ``state`` refers to and the shard does not hold; absent in JSON if there are none."""
    generation: str | None = None
    """With several ranks: what they drew together when they started, 16 hexadecimal digits. Shards of one snapshot have
    the same one: a run that passes a step again makes another snapshot of it. Absent with one rank."""
    parameters: dict[str, list[str]] | None = None
    """By path of an optimizer in the state: the names of its parameters in the model, in the order in which the
    optimizer numbers them. Absent if they are not known."""

    def to_fields(self) -> dict[str, Any]:
        """As plain values, the keys in the order of this class."""
        fields = {name: value for name, value in vars(self).items() if value is not None or name not in _SINCE_2}
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
        missing = set(cls.__dataclass_fields__) ^ {*fields, *_SINCE_2}
        if missing:
            raise ShardCorrupt(f"{where}: keys missing or unknown: {sorted(missing)}")
        if "frozen" in fields:
            fields = {**fields, "frozen": FrozenReference.from_fields(fields["frozen"], where)}
        _check_since_2(fields, where)
        meta = cls(**fields)
        if not isinstance(meta.run_id, str) or not _RUN_ID.fullmatch(meta.run_id):
            raise ShardCorrupt(f"{where}: run_id must be 16 hexadecimal digits, got {meta.run_id!r:.50}")
        for name in ("run_started_ns", "step", "rank", "world_size", "captured_ns"):
            _check_count(name, getattr(meta, name), where)
        if meta.rank >= meta.world_size:
            raise ShardCorrupt(f"{where}: rank {meta.rank} of {meta.world_size}")
        for name in ("tensors", "aliases", "packages"):
            if not isinstance(getattr(meta, name), dict):
                raise ShardCorrupt(f"{where}: {name} must be an object")
        texts = [*meta.aliases.values(), *meta.packages.values()]
        if not all(isinstance(text, str) for text in texts):
            raise ShardCorrupt(f"{where}: aliases and packages must map strings to strings")
        return meta


@dataclass(frozen=True)
class Manifest:
    """One shard of one snapshot, as committed: one rank's, or that of all ranks of a node."""

    meta: CaptureMeta
    """Of a node's shard: of the member that is meant, by default the first."""
    file: str
    """Name of the shard file, beside the manifest."""
    header_bytes: int
    checksums: Checksums
    created_ns: int
    members: tuple[CaptureMeta, ...] = ()
    """The ranks in the shard of a node, in their order; empty for the shard of one rank."""

    @property
    def size_bytes(self) -> int:
        """Bytes of the shard file."""
        return self.checksums.size_bytes

    def of(self, rank: int, where: str) -> "Manifest":
        """As seen by one of the ranks that it holds. Raises: ShardCorrupt, if it does not hold it."""
        for meta in self.members or (self.meta,):
            if meta.rank == rank:
                return replace(self, meta=meta)
        raise ShardCorrupt(f"{where}: does not hold rank {rank}")

    def layout(self, head: "bytes | memoryview", where: str) -> Layout:
        """Where the tensors of ``meta.rank`` lie in the file, under their own names, from the header at its start.

        Raises: ShardCorrupt.
        """
        if not self.members:
            return Layout.parse(head, self.size_bytes, where)
        return member_layout(whole_layout(head, self.size_bytes, where), self.meta.rank, where)

    def check_header(self, head: "bytes | memoryview", where: str) -> None:
        """Whether ``layout`` can be had of every rank that is held. Raises: ShardCorrupt."""
        whole = Layout.parse(head, self.size_bytes, where)
        for meta in self.members:
            member_layout(whole, meta.rank, where)

    def encode(self) -> bytes:
        """The bytes of the manifest file."""
        version = 2 if any(vars(self.meta)[name] is not None for name in _SINCE_2) else 1
        body = _dump(
            {
                "format": FORMAT,
                "version": 3 if self.members else version,
                **(_fields_of_members(self.members) if self.members else self.meta.to_fields()),
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
                f"{where}: format version {version}, this lazysnap reads up to {FORMAT_VERSION}; upgrade lazysnap"
            )
        if version < 2 and set(_SINCE_2) & set(fields):
            raise ShardCorrupt(f"{where}: {', '.join(_SINCE_2)} are keys of version 2, the manifest says {version}")
        shard, created_ns = fields.pop("shard", None), fields.pop("created_ns", None)
        _check_count("created_ns", created_ns, where)
        members = _members(fields, where) if version == 3 else ()
        meta = members[0] if members else CaptureMeta.from_fields(fields, where)
        if not isinstance(shard, dict) or set(shard) != {"file", "size_bytes", "header_bytes", "checksum"}:
            raise ShardCorrupt(f"{where}: bad shard entry {shard!r:.200}")
        stem = Stem.parse(str(shard["file"]).removesuffix(".safetensors"))
        expected = Stem.of_rank(meta.rank, meta.world_size) if stem is None or not members else stem
        if shard["file"] != expected.shard or (members and not expected.is_node):
            raise ShardCorrupt(f"{where}: unexpected shard name {shard['file']!r:.100}")
        _check_count("header_bytes", shard["header_bytes"], where)
        if not 8 <= shard["header_bytes"] <= _count(shard, "size_bytes", where):
            raise ShardCorrupt(f"{where}: a header of {shard['header_bytes']} bytes in {shard['size_bytes']}")
        return cls(meta, shard["file"], shard["header_bytes"], _checksums(shard, where), created_ns, members)


def _fields_of_members(members: "tuple[CaptureMeta, ...]") -> dict[str, Any]:
    fields = [meta.to_fields() for meta in members]
    shared = {name: fields[0][name] for name in _SHARED if name in fields[0]}
    own = [{name: value for name, value in one.items() if name not in _SHARED} for one in fields]
    return {**shared, "members": own}


def _members(fields: dict[str, Any], where: str) -> "tuple[CaptureMeta, ...]":
    shared = {name: value for name, value in fields.items() if name in _SHARED}
    listed = fields.get("members")
    if set(fields) - {"members"} - set(shared) or not isinstance(listed, list) or not listed:
        raise ShardCorrupt(f"{where}: version 3 holds {', '.join(_SHARED)} and members, got {sorted(fields)}")
    members = []
    for own in listed:
        if not isinstance(own, dict) or set(own) & set(_SHARED):
            raise ShardCorrupt(f"{where}: bad member {own!r:.200}")
        members.append(CaptureMeta.from_fields({**shared, **own}, where))
    ranks = [meta.rank for meta in members]
    if ranks != sorted(set(ranks)):
        raise ShardCorrupt(f"{where}: members must be in the order of their ranks, got {ranks}")
    return tuple(members)


def _damage(data: bytes, got: str) -> str:
    """What is wrong with a file that is not as it was written, in words."""
    if not data:
        return "the file is empty"
    if not data.startswith(_HEAD):
        return f"{len(data)} bytes that begin with {data[: len(_HEAD)]!r}, not with {_HEAD.decode()}"
    said = data[len(_HEAD) : len(_HEAD) + 32].decode("ascii", "replace")
    if said == got:
        return f"{len(data)} bytes that do not end with the closing brace and a line's end"
    return f"{ALGORITHM} of its body is {got}, it says {said}"


def _check_since_2(fields: dict[str, Any], where: str) -> None:
    generation, parameters = fields.get("generation"), fields.get("parameters")
    if "generation" in fields and not (isinstance(generation, str) and _RUN_ID.fullmatch(generation)):
        raise ShardCorrupt(f"{where}: generation must be 16 hexadecimal digits, got {generation!r:.50}")
    if "parameters" in fields:
        lists = parameters.values() if isinstance(parameters, dict) else [None]
        if not all(isinstance(names, list) and all(isinstance(name, str) for name in names) for names in lists):
            raise ShardCorrupt(f"{where}: parameters must map paths to lists of names")


def _dump(fields: dict[str, Any]) -> bytes:
    return json.dumps(fields, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode(
        "utf-8", "surrogatepass"
    )


def _load(data: bytes, where: str) -> dict[str, Any]:
    try:
        fields = json.loads(data.decode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise ShardCorrupt(f"{where}: no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ShardCorrupt(f"{where}: expected a JSON object, got {type(fields).__name__}")
    return fields


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
    if block_bytes < 1 or not isinstance(blocks, list) or len(blocks) != -(-size_bytes // block_bytes):
        raise ShardCorrupt(f"{where}: the number of block checksums does not fit {size_bytes} bytes")
    if not all(isinstance(block, str) and re.fullmatch(r"[0-9a-f]{32}", block) for block in blocks):
        raise ShardCorrupt(f"{where}: a block checksum is not 32 hexadecimal digits")
    checksums = Checksums(size_bytes, block_bytes, tuple(blocks))
    if checksums.whole != checksum["whole"]:
        raise ShardCorrupt(f"{where}: the checksum over the block checksums does not agree")
    return checksums
