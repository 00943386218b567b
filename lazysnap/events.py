"""The events of a run, which its keepers report: to trainers (``keeper.protocol.Status``), and in a file at the first
level (docs/events.md).

The file has one JSON object per line. It is for people and their reports alone: a run whose file is missing or damaged
is restored all the same.
"""

import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from lazysnap.levels.storage import Storage
from lazysnap.levels.store import open_store
from lazysnap.shard.names import parse_events_file_name

Phase = Literal["import", "rendezvous", "search", "read", "load", "first_step"]
PHASES: tuple[Phase, ...] = ("import", "rendezvous", "search", "read", "load", "first_step")
"""Parts of a start in their order; a start without a restore has no ``search``, ``read`` and ``load``."""


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """Any of them."""

    t: float
    """Unix time in seconds, by the clock of the node."""


class KeeperStarted(Event, frozen=True, kw_only=True, tag="keeper"):
    """A keeper writes this file from now on."""

    pid: int
    host: str
    node: int
    nodes: int
    version: str


class TrainerStarted(Event, frozen=True, kw_only=True, tag="start"):
    """A trainer reported its run."""

    rank: int
    pid: int
    start: str
    step: int
    """The step after which it continues; 0: the beginning."""
    world_size: int
    every_n_steps: int
    began: float
    """Unix time when its process was started."""
    source: str | None = None
    """The place from which ``step`` was restored: ``memory``, or the URL of a level."""


class PhaseEnded(Event, frozen=True, kw_only=True, tag="phase"):
    """A part of a start is over: it began when the one before it ended."""

    rank: int
    start: str
    phase: Phase
    waited_s: float = 0.0
    """The seconds, with ``first_step``, of ``Progress.waited_s`` that passed before it."""


class Progress(Event, frozen=True, kw_only=True, tag="progress"):
    """The progress of a trainer; not more often than about once a second."""

    rank: int
    start: str
    step: int
    """The newest boundary that it passed."""
    every: int
    """Steps from one capture to the next, now."""
    waited_s: float
    """The seconds that training waited for captures in all, in this start, when the newest capture began."""
    captured: int
    """The step of the newest whole capture; with ``taken``, its Unix time, and ``copy_s``, the seconds it took."""
    taken: float
    copy_s: float


class Stored(Event, frozen=True, kw_only=True, tag="stored"):
    """The node's part of a snapshot is durable at a level."""

    level: str
    step: int
    bytes: int
    seconds: float
    """The seconds from the beginning of the write until it is durable."""
    checksum_s: float
    """The part of ``seconds`` that checksums took, of all writing threads together."""
    read_back_s: float
    """The seconds after that in which it was read and compared; 0: the level is not read back."""


class Complete(Event, frozen=True, kw_only=True, tag="complete"):
    """Snapshots are durable at a level, the parts of all nodes."""

    level: str
    steps: list[int]
    start: str
    """The start that captured them."""


class Protected(Event, frozen=True, kw_only=True, tag="protected"):
    """A snapshot survives the loss of nodes: all parity of it is there."""

    step: int | None
    """``None``: none does any more, parity was lost with a keeper."""
    start: str
    """The start that captured it."""


class LevelFailed(Event, frozen=True, kw_only=True, tag="failed"):
    """A level could not take a snapshot; it is tried again with the next one."""

    level: str
    step: int
    text: str


class NameFailed(Event, frozen=True, kw_only=True, tag="name"):
    """A level could not write, or take away, the name of a snapshot."""

    level: str
    name: str
    text: str
    is_lost: bool = False
    """True if the snapshot itself will never be there; said of the first level."""


class Alert(Event, frozen=True, kw_only=True, tag="alert"):
    """Something keeps snapshots from being safe. It comes again while that lasts; without text it is over."""

    about: str
    """``links``: keepers of nodes do not reach each other, so nothing is stored. ``protection``: nothing was protected
    for a while. ``keeper``: an error that nothing else shows; it comes once."""
    text: str


class Notice(Event, frozen=True, kw_only=True, tag="notice"):
    """The processes are about to be killed."""


class TrainerEnded(Event, frozen=True, kw_only=True, tag="end"):
    """A trainer is gone."""

    rank: int
    pid: int
    start: str
    step: int
    """The last boundary that it passed."""
    how: Literal["goodbye", "left", "died"]
    """``goodbye``: the training was over; ``left``: it ended as after a crash, with an exception or a notice."""


_ANY: Any = functools.reduce(operator.or_, Event.__subclasses__())
_decoder = msgspec.json.Decoder(_ANY)
_encoder = msgspec.json.Encoder()


def encode(event: Event) -> bytes:
    """Return one line, with its end."""
    return _encoder.encode(event) + b"\n"


def decode(data: bytes) -> list[Event]:
    """Return the events of a file in their order. Lines that are none, and kinds that are not known, are left out."""
    found = []
    for line in data.splitlines():
        try:
            found.append(_decoder.decode(line))
        except (msgspec.MsgspecError, RecursionError):  # cut by a crash, or of a later version
            continue
    return found


@dataclass(frozen=True)
class EventFile:
    """The events that keepers of one node saw in one run."""

    run_id: str
    node: int
    events: tuple[Event, ...]
    """Sorted by time."""


def read(url: str, options: Mapping[str, Any] | None = None) -> list[EventFile]:
    """Return all files of events at a level, sorted by run, the newest last, and node.

    Blocks. Raises: LevelError, if the level does not answer; ConfigError, for a bad URL.
    """
    storage = open_store(url, options=options).storage
    names = sorted((parsed, name) for name in storage.list() if (parsed := parse_events_file_name(name)) is not None)
    files = [EventFile(run_id, node, _events(storage, name)) for (run_id, node), name in names]
    return [file for file in files if file.events]


def _events(storage: Storage, name: str) -> tuple[Event, ...]:
    found = decode(storage.get(name))
    return tuple(sorted(found, key=lambda event: event.t))
