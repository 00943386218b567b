"""What a keeper tells its trainer."""

from dataclasses import dataclass


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
