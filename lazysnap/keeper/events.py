"""What a keeper tells its trainer."""

from dataclasses import dataclass
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
    checksums: Checksums | None
    """Known once the keeper persisted the capture or rested without a trainer."""

    @classmethod
    def of(cls, item: dict[str, Any], slot: Slot) -> "MemoryEntry":
        """From an answer of the keeper."""
        checksums = None
        if item["blocks"] is not None:
            checksums = Checksums(slot.status().image_bytes, item["block_bytes"], tuple(item["blocks"]))
        return cls(slot, item["step"], item["run_id"], item["run_started_ns"], item["sequence"], checksums)


@dataclass(frozen=True)
class Durable:
    """A snapshot was committed at a level."""

    level: str
    step: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True)
class LevelFailed:
    """A level could not take a snapshot; it is tried again with the next one."""

    level: str
    step: int
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


KeeperEvent = Durable | LevelFailed | KeeperLost | KeeperReady | MemoryRefused
