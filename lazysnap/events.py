"""The events of a run, which its keepers write into a file at the first level (docs/format.md).

Each line of the file is a JSON object. It is only for reports: a run is restored even if its file is missing or
damaged.
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
"""Maximum bytes of an event file. It then becomes the older one, and another one begins."""
MAX_TEXT = 2000
"""Maximum characters of a text."""
_MAX_LINE_BYTES = 64 << 10
"""Maximum bytes of a line. A longer line is no event."""

Time = Annotated[float, msgspec.Meta(ge=0, le=250e9)]
"""Unix time in seconds, before the year 9892."""
Seconds = Annotated[float, msgspec.Meta(ge=0, le=250e9)]
Count = Annotated[int, msgspec.Meta(ge=-1, le=1 << 53)]
"""Maximum of a step, a rank or a size, so that reports never compute with larger numbers from a file."""


class Event(msgspec.Struct, frozen=True, kw_only=True, tag_field="event"):
    """An event of any kind."""

    t: Time
    """Unix time in seconds, by the clock of the node."""


class KeeperStarted(Event, frozen=True, kw_only=True, tag="keeper"):
    """A keeper writes this file from now on."""

    nodes: Count
    """The number of nodes of the job."""


class TrainerStarted(Event, frozen=True, kw_only=True, tag="start"):
    """A trainer reported its run."""

    rank: Count
    start: str
    step: Count
    """The step after which it continues; 0: the beginning."""
    world_size: Count
    every_n_steps: Count
    """Steps between captures."""
    began: Time
    """Unix time of the start of its process; ``t`` if its earlier lines were in a deleted file."""
    source: str | None = None
    """The source from which ``step`` was restored: ``memory``, or the URL of a level."""


class Progress(Event, frozen=True, kw_only=True, tag="progress"):
    """The progress of a trainer, the first one of its node: after its first boundary, then from time to time."""

    rank: Count
    start: str
    step: Count
    """Its newest boundary."""
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
    """The seconds from the beginning of the write until it is committed and read back."""


class Complete(Event, frozen=True, kw_only=True, tag="complete"):
    """Snapshots are durable at a level, the parts of all nodes."""

    level: str
    steps: list[Count]


class Protected(Event, frozen=True, kw_only=True, tag="protected"):
    """A snapshot survives the loss of nodes: all its parity exists."""

    step: Count | None
    """The step; ``None`` if parity was lost with a keeper."""


class LevelFailed(Event, frozen=True, kw_only=True, tag="failed"):
    """A level could not store a snapshot; it is retried with the next one."""

    level: str
    step: Count
    """The step; -1 if the level failed otherwise, such as when it was listed."""
    text: str


class Alert(Event, frozen=True, kw_only=True, tag="alert"):
    """Snapshots are not safe. Repeated while the problem lasts; without text it is over."""

    about: str
    """``links``: keepers of nodes do not reach each other, so nothing is stored. ``protection``: nothing was protected
    for a while. ``keeper``: an error that nothing else shows; it comes once."""
    text: str


class Preempted(Event, frozen=True, kw_only=True, tag="preempted"):
    """The processes are about to be killed."""


class TrainerEnded(Event, frozen=True, kw_only=True, tag="end"):
    """A trainer ended."""

    rank: Count
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
