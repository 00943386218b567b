"""The events of a run, which its keepers write down in a file at the first level (docs/format.md).

Each line of the file is a JSON object. It is for people and their reports alone: a run whose file is missing or damaged
is restored all the same.
"""

import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec

from lazysnap.errors import FormatError
from lazysnap.levels.storage import Storage
from lazysnap.levels.store import open_storage
from lazysnap.shard.names import parse_events_file_name

MAX_FILE_BYTES = 4 << 20
"""A file of events that would be larger becomes the older one, and another one is begun."""
MAX_TEXT = 2000
"""Characters of a text that are written down."""
_MAX_LINE_BYTES = 64 << 10
"""A longer line is no event."""

Time = Annotated[float, msgspec.Meta(ge=0, le=250e9)]
"""Unix time in seconds, before the year 9892."""
Seconds = Annotated[float, msgspec.Meta(ge=0, le=250e9)]
Count = Annotated[int, msgspec.Meta(ge=-1, le=1 << 53)]
"""A step, a rank, a size: nothing that is read from a file makes a report compute with larger numbers."""


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """An event of any kind."""

    t: Time
    """Unix time in seconds, by the clock of the node."""


class KeeperStarted(Event, frozen=True, kw_only=True, tag="keeper"):
    """A keeper writes this file from now on."""

    pid: Count
    host: str
    node: Count
    nodes: Count
    version: str


class TrainerStarted(Event, frozen=True, kw_only=True, tag="start"):
    """A trainer reported its run."""

    rank: Count
    pid: Count
    start: str
    step: Count
    """The step after which it continues; 0: the beginning."""
    world_size: Count
    every_n_steps: Count
    began: Time
    """Unix time when its process was started; of one whose earlier lines went with an older file, ``t``."""
    source: str | None = None
    """The place from which ``step`` was restored: ``memory``, or the URL of a level."""


class Progress(Event, frozen=True, kw_only=True, tag="progress"):
    """The progress of a trainer, the first one of its node: after its first boundary, then from time to time."""

    rank: Count
    start: str
    step: Count
    """The newest boundary that it passed."""
    every: Count
    """Steps from one capture to the next, now."""
    waited_s: Seconds
    """The seconds that training waited for captures in all, in this start, when the newest capture began."""
    captured: Count
    """The step of the newest whole capture; with ``taken``, its Unix time, and ``copy_s``, the seconds it took."""
    taken: Time
    copy_s: Seconds


class Stored(Event, frozen=True, kw_only=True, tag="stored"):
    """The node's part of a snapshot is durable at a level."""

    level: str
    step: Count
    bytes: Count
    seconds: Seconds
    """The seconds from the beginning of the write until it is durable."""
    checksum_s: Seconds
    """The part of ``seconds`` that checksums took, of all writing threads together."""
    read_back_s: Seconds
    """The seconds after that in which it was read and compared; 0: the level is not read back."""


class Complete(Event, frozen=True, kw_only=True, tag="complete"):
    """Snapshots are durable at a level, the parts of all nodes."""

    level: str
    steps: list[Count]
    start: str
    """The start that captured them."""


class Protected(Event, frozen=True, kw_only=True, tag="protected"):
    """A snapshot survives the loss of nodes: all parity of it is there."""

    step: Count | None
    """``None``: none does any more, parity was lost with a keeper."""
    start: str
    """The start that captured it."""


class LevelFailed(Event, frozen=True, kw_only=True, tag="failed"):
    """A level could not take a snapshot; it is tried again with the next one."""

    level: str
    step: Count
    """-1: it failed before it was to take one, as when it is listed."""
    text: str


class Alert(Event, frozen=True, kw_only=True, tag="alert"):
    """Something keeps snapshots from being safe. It comes again while that lasts; without text it is over."""

    about: str
    """``links``: keepers of nodes do not reach each other, so nothing is stored. ``protection``: nothing was protected
    for a while. ``keeper``: an error that nothing else shows; it comes once."""
    text: str


class Preempted(Event, frozen=True, kw_only=True, tag="preempted"):
    """The processes are about to be killed."""


class TrainerEnded(Event, frozen=True, kw_only=True, tag="end"):
    """A trainer ended."""

    rank: Count
    pid: Count
    start: str
    step: Count
    """The last boundary that it passed."""
    how: Literal["goodbye", "left", "died"]
    """``goodbye``: the training was over; ``left``: it ended as after a crash, with an exception or by preemption."""


FILED = (
    KeeperStarted,
    TrainerStarted,
    Progress,
    Stored,
    Complete,
    Protected,
    LevelFailed,
    Alert,
    Preempted,
    TrainerEnded,
)
"""The kinds that are in files."""
_ANY: Any = functools.reduce(operator.or_, FILED)
_decoder = msgspec.json.Decoder(_ANY)
_encoder = msgspec.json.Encoder()


def encode(event: Event) -> bytes:
    """Return one line, with its end."""
    return _encoder.encode(event) + b"\n"


def decode(data: bytes) -> list[Event]:
    """Return the events of a file in their order. The file is not trusted: a line that is no event of a known kind, has
    values out of any reason, or was cut by a crash, is skipped.
    """
    events = []
    for line in data.splitlines():
        if len(line) > _MAX_LINE_BYTES:
            continue
        try:
            events.append(_decoder.decode(line))
        except (msgspec.MsgspecError, RecursionError):
            continue
    return events


@dataclass(frozen=True)
class EventFile:
    """The events that keepers of one node saw in one run."""

    run_id: str
    node: int
    events: tuple[Event, ...]
    """Sorted by time."""


def read(url: str, options: Mapping[str, Any] | None = None) -> list[EventFile]:
    """Return the events at a level: one item for each run and node, sorted by run, the newest last, and node.

    Blocks. Raises: LevelError, if the level does not answer; ConfigError, for a bad URL.
    """
    storage = open_storage(url, options=options)
    events_by_source: dict[tuple[str, int], list[Event]] = {}
    for name in storage.list():
        parsed = parse_events_file_name(name)
        if parsed is not None:
            events_by_source.setdefault(parsed, []).extend(_events(storage, name))
    files = []
    for run_id, node in sorted(events_by_source):
        events = sorted(events_by_source[run_id, node], key=operator.attrgetter("t"))
        if events:
            files.append(EventFile(run_id, node, tuple(events)))
    return files


def _events(storage: Storage, name: str) -> list[Event]:
    """Return the events of one file; of a file that is too large to be ours, the last ones."""
    try:
        data = storage.get(name)
    except (FileNotFoundError, FormatError):  # it was rotated since, or is no small file
        return []
    return decode(data[-2 * MAX_FILE_BYTES :])
