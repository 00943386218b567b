"""The names of directories and files at a level, and the ids in them. The name of a directory is its identity.

Runs and starts have ids of 16 hexadecimal digits: 11 of the milliseconds since 1970, then 5 random ones. Ids sort by
time, and no two writers ever use the same directory.
"""

import re
import secrets
import time
from dataclasses import dataclass

from lazysnap.errors import ConfigError
from lazysnap.shard.limits import MAX_COUNT, MAX_RANKS

_ID = re.compile(r"[0-9a-f]{16}")
_TIME_DIGITS = 11
_DIRECTORY = re.compile(r"step-([0-9]{8,19})-([0-9a-f]{16})-([0-9a-f]{16})")
_FILE = re.compile(r"node-([0-9]{5,7})-of-([0-9]{5,7})")
_SUFFIXES = ("safetensors", "base", "json")
_KEEP_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_EVENTS_FILE = re.compile(r"events-([0-9a-f]{16})-node-([0-9]{5,7})(\.older)?\.jsonl")
_KEEP_FILE = re.compile(r"keep-([A-Za-z0-9][A-Za-z0-9._-]{0,63})")


def new_id() -> str:
    """Return the id of a run or start that begins now."""
    return f"{time.time_ns() // 1_000_000:0{_TIME_DIGITS}x}{secrets.token_hex(3)[:5]}"


def id_after(new: str, other: str) -> str:
    """Return ``new``, or a later id if ``new`` is not greater than ``other``, because a clock may be set back."""
    if new > other:
        return new
    milliseconds = f"{int(other[:_TIME_DIGITS], 16) + 1:0{_TIME_DIGITS}x}"
    if len(milliseconds) > _TIME_DIGITS:
        return new
    return milliseconds + new[_TIME_DIGITS:]


def id_time_ns(text: str) -> int:
    """Return the time at which the run or start of an id began: nanoseconds since 1970, with millisecond precision."""
    return int(text[:_TIME_DIGITS], 16) * 1_000_000


def is_id(text: object) -> bool:
    """True if this is the id of a run or start: 16 hexadecimal digits."""
    return isinstance(text, str) and _ID.fullmatch(text) is not None


@dataclass(frozen=True, order=True)
class SnapshotName:
    """The identity of a snapshot. A newer snapshot is greater."""

    run_id: str
    step: int
    start: str

    @property
    def directory(self) -> str:
        """``step-00001000-<run>-<start>``."""
        return f"step-{self.step:08d}-{self.run_id}-{self.start}"

    @classmethod
    def parse(cls, directory: str) -> "SnapshotName | None":
        """Return the identity in a directory's name; ``None`` for any other text."""
        match = _DIRECTORY.fullmatch(directory)
        if match is None:
            return None
        name = cls(match[2], int(match[1]), match[3])
        if name.step > MAX_COUNT or name.directory != directory:
            return None
        return name


def is_directory_of_ours(name: str) -> bool:
    """True if this is the name of the directory of a snapshot."""
    return SnapshotName.parse(name) is not None


def is_keep_name(name: object) -> bool:
    """True if this can be the name of a snapshot: 1 to 64 of ``A-Z a-z 0-9 . _ -``, the first a letter or digit."""
    return isinstance(name, str) and _KEEP_NAME.fullmatch(name) is not None


def check_name(name: str) -> None:
    """Check that a snapshot can have this name. Raises: ConfigError."""
    if not is_keep_name(name) or name == "latest" or name.isdigit():
        raise ConfigError(
            f"a snapshot's name must be 1 to 64 letters, digits, points, dashes or underscores (not 'latest', "
            f"nor digits alone: those are steps), got {name!r:.100}"
        )


def keep_file_name(name: str) -> str:
    """Return ``keep-before-anneal``: the object in a snapshot's directory that gives it this name."""
    return f"keep-{name}"


def parse_keep_file_name(file: str) -> str | None:
    """Return the name that a ``keep-…`` object gives, ``None`` for any other file."""
    match = _KEEP_FILE.fullmatch(file)
    if match is None:
        return None
    return match[1]


def events_file_name(run_id: str, node: int, *, is_older: bool = False) -> str:
    """Return ``events-<run>-node-00003.jsonl``: the events that the keepers of a node recorded in a run.

    ``is_older``: return the name of the file before it, ``events-<run>-node-00003.older.jsonl``.
    """
    suffix = ".jsonl"
    if is_older:
        suffix = ".older.jsonl"
    return f"events-{run_id}-node-{node:05d}{suffix}"


def parse_events_file_name(file: str) -> tuple[str, int] | None:
    """Return run and node, ``None`` for any other file."""
    match = _EVENTS_FILE.fullmatch(file)
    if match is None:
        return None
    run_id = match[1]
    node = int(match[2])
    if events_file_name(run_id, node, is_older=match[3] is not None) != file:
        return None
    return run_id, node


@dataclass(frozen=True)
class NodeName:
    """The common part of the names of a node's file and its manifest: number of the node, and number of nodes."""

    node: int
    nodes: int

    @classmethod
    def parse(cls, text: str) -> "NodeName | None":
        """Return the number in a name; ``None`` for any other text, or above the limits of the format."""
        match = _FILE.fullmatch(text)
        if match is None:
            return None
        name = cls(int(match[1]), int(match[2]))
        if name.node >= name.nodes or name.nodes > MAX_RANKS or name.text != text:
            return None
        return name

    @property
    def text(self) -> str:
        """``node-00003-of-00008``."""
        return f"node-{self.node:05d}-of-{self.nodes:05d}"

    @property
    def file(self) -> str:
        """``node-00003-of-00008.safetensors``."""
        return f"{self.text}.safetensors"

    @property
    def base(self) -> str:
        """``node-00003-of-00008.base``: the part of the file that the snapshots of a run share."""
        return f"{self.text}.base"

    @property
    def manifest(self) -> str:
        """``node-00003-of-00008.json``."""
        return f"{self.text}.json"


def parse_file_name(file: str) -> tuple[NodeName, str] | None:
    """Return name and suffix (``safetensors``, ``base`` or ``json``) of a file of a node, ``None`` for other files."""
    text, _, suffix = file.rpartition(".")
    name = NodeName.parse(text)
    if name is None or suffix not in _SUFFIXES:
        return None
    return name, suffix
