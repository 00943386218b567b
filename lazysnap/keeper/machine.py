"""What the keeper decides. Pure: values in, decisions out.

::

    WAITING ──hello──> ATTACHED ──goodbye──> DRAINING ──all durable──> GONE
       │                 ▲  │                    ▲
       │ grace over      │  │ trainer dead       │ SIGTERM
       ▼                 │  ▼                    │
      GONE <──linger── LINGERING ────────────────┘

A trainer that dies without a whole capture in memory leads from ATTACHED to DRAINING, as SIGTERM does.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lazysnap.arena import SlotPhase, SlotStatus
from lazysnap.config import PersistentLevel
from lazysnap.policy import is_due

START_GRACE_S = 30.0
"""How long a keeper waits for its first trainer."""


class Phase(enum.Enum):
    """See the module's drawing."""

    WAITING = "waiting"
    ATTACHED = "attached"
    LINGERING = "lingering"
    DRAINING = "draining"
    GONE = "gone"


class Event(enum.Enum):
    """What can happen to a keeper."""

    HELLO = "hello"
    GOODBYE = "goodbye"
    TRAINER_DEAD = "trainer dead"
    NOTHING_KEPT = "trainer dead, no whole capture"
    TERMINATE = "terminate"
    TIME_UP = "time up"
    DRAINED = "drained"


_NEXT: Mapping[tuple[Phase, Event], Phase] = {
    (Phase.WAITING, Event.HELLO): Phase.ATTACHED,
    (Phase.WAITING, Event.TIME_UP): Phase.GONE,
    (Phase.WAITING, Event.TERMINATE): Phase.GONE,
    (Phase.ATTACHED, Event.GOODBYE): Phase.DRAINING,
    (Phase.ATTACHED, Event.TRAINER_DEAD): Phase.LINGERING,
    (Phase.ATTACHED, Event.NOTHING_KEPT): Phase.DRAINING,
    (Phase.ATTACHED, Event.TERMINATE): Phase.DRAINING,
    (Phase.LINGERING, Event.HELLO): Phase.ATTACHED,
    (Phase.LINGERING, Event.TIME_UP): Phase.DRAINING,
    (Phase.LINGERING, Event.TERMINATE): Phase.DRAINING,
    (Phase.DRAINING, Event.DRAINED): Phase.GONE,
    (Phase.DRAINING, Event.TIME_UP): Phase.GONE,
}


def next_phase(phase: Phase, event: Event) -> Phase:
    """The phase after ``event``; events that do not concern a phase leave it."""
    return _NEXT.get((phase, event), phase)


@dataclass(frozen=True)
class LevelProgress:
    """How far one level has come with this run."""

    durable: int | None = None
    """Newest step committed there."""
    sequence: int = 0
    """Sequence number of the newest capture that was tried there, with whatever result."""
    durable_sequence: int = 0
    """Sequence number of the newest capture committed there: steps repeat when a run resumes, these do not."""


def newest_whole(statuses: Sequence[SlotStatus]) -> int | None:
    """Index of the slot with the newest whole capture."""
    whole = [index for index, status in enumerate(statuses) if status.phase is SlotPhase.WHOLE]
    return max(whole, key=lambda index: statuses[index].sequence, default=None)


def slot_to_persist(statuses: Sequence[SlotStatus], tried: int, *, force: bool) -> int | None:
    """Which slot to write to the first level next: pinned ones, newest first; with ``force`` the newest whole one.

    ``tried`` is the sequence number of the newest capture that was tried before. A pin is cleared after every try, so
    a pinned capture was never tried, whatever its number.
    """
    pinned = [
        index
        for index, status in enumerate(statuses)
        if status.pinned and status.phase in (SlotPhase.CAPTURING, SlotPhase.WHOLE)
    ]
    if pinned:
        return max(pinned, key=lambda index: statuses[index].sequence)
    newest = newest_whole(statuses)
    if force and newest is not None and statuses[newest].sequence > tried:
        return newest
    return None


def stale_pins(statuses: Sequence[SlotStatus]) -> list[int]:
    """Slots that are pinned for a capture that will never be whole: the pin would hold them for ever."""
    return [
        index
        for index, status in enumerate(statuses)
        if status.pinned and status.phase in (SlotPhase.EMPTY, SlotPhase.VOID)
    ]


def cascades(level: PersistentLevel, step: int, progress: LevelProgress, *, force: bool) -> bool:
    """Whether a later level copies the snapshot of ``step`` that an earlier one has and this one was not given yet."""
    return force or is_due(level, step, progress.durable)


def may_drop(statuses: Sequence[SlotStatus], index: int) -> bool:
    """Whether a slot of an earlier plan can go: not pinned, and not the newest whole capture."""
    return not statuses[index].pinned and index != newest_whole(statuses)
