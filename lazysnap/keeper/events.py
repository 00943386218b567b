"""What a keeper tells its trainer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lazysnap.arena import Slot
from lazysnap.shard.checksum import Checksums


@dataclass(frozen=True)
class MemoryEntry:
    """A whole capture that the keeper holds."""

    slot: Slot
    step: int
    run_id: str
    run_started_ns: int
    sequence: int
    frozen: str | None
    """Digest of the immutable tensors that belong with it."""
    rank: int
    world_size: int
    generation: str | None
    checksums: Checksums | None
    """Known once the keeper persisted the capture or rested without a trainer."""

    @classmethod
    def of(cls, item: dict[str, Any], slot: Slot) -> "MemoryEntry":
        """From an answer of the keeper."""
        checksums = None
        if item["blocks"] is not None:
            checksums = Checksums(slot.status().image_bytes, item["block_bytes"], tuple(item["blocks"]))
        facts = (item["step"], item["run_id"], item["run_started_ns"], item["sequence"], item["frozen"])
        return cls(slot, *facts, item["rank"], item["world_size"], item["generation"], checksums)


@dataclass(frozen=True)
class MemoryHoldings:
    """What the keeper holds: whole captures, and whole images of immutable tensors by their digest."""

    entries: tuple[MemoryEntry, ...] = ()
    frozen: Mapping[str, Slot] = field(default_factory=dict)


@dataclass(frozen=True)
class Durable:
    """A snapshot was committed at a level."""

    level: str
    step: int
    num_bytes: int
    """Of this rank's part, also where one file holds those of several ranks."""
    seconds: float
    sequence: int


@dataclass(frozen=True)
class Sound:
    """With several ranks: a snapshot that became durable was read back, too, where the level does that."""

    level: str
    step: int
    run_id: str
    generation: str
    ranks: int
    """How many ranks it counts for: those in the file; 0 if another keeper wrote it."""


@dataclass(frozen=True)
class Surplus:
    """A level has more snapshots of this rank than there may be whose other parts are missing: this one may go."""

    level: str
    step: int
    run_id: str
    generation: str


@dataclass(frozen=True)
class Complete:
    """With several ranks: one more snapshot is durable, and sound, on all of them. Told by a thread of the trainer."""

    level: str
    step: int
    count: int
    """Snapshots that became complete there since the last time."""


@dataclass(frozen=True)
class LevelFailed:
    """A level could not take a snapshot; it is tried again with the next one."""

    level: str
    step: int
    text: str


@dataclass(frozen=True)
class LevelDropped:
    """A level left a snapshot out because a newer one was there before it came to it."""

    level: str
    step: int


@dataclass(frozen=True)
class NameFailed:
    """A level could not write, or take away, the name of a snapshot."""

    level: str
    name: str
    text: str


@dataclass(frozen=True)
class KeeperLost:
    """The keeper died or hangs; another one is being started."""

    text: str


@dataclass(frozen=True)
class KeeperReady:
    """A keeper is attached."""

    pid: int


@dataclass(frozen=True)
class MemoryRefused:
    """There is no room for the slots."""

    text: str


KeeperEvent = (
    Durable
    | Sound
    | Surplus
    | Complete
    | LevelFailed
    | LevelDropped
    | NameFailed
    | KeeperLost
    | KeeperReady
    | MemoryRefused
)


def event_of(message: dict[str, Any]) -> KeeperEvent | None:
    """The event that a message of the keeper tells of, ``None`` for any other message."""
    kind = message["type"]
    if kind == "durable":
        return Durable(message["level"], message["step"], message["bytes"], message["seconds"], message["sequence"])
    if kind == "sound":
        return Sound(*(message[name] for name in ("level", "step", "run_id", "generation", "ranks")))
    if kind == "surplus":
        return Surplus(*(message[name] for name in ("level", "step", "run_id", "generation")))
    if kind == "level_failed":
        return LevelFailed(message["level"], message["step"], message["text"])
    if kind == "level_dropped":
        return LevelDropped(message["level"], message["step"])
    if kind == "name_failed":
        return NameFailed(message["level"], message["name"], message["text"])
    if kind == "memory_refused":
        return MemoryRefused(message["text"])
    return None
