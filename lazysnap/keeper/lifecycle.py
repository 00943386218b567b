"""The life of a rank that a keeper serves. Pure: values in, decisions out.

::

    WAITING ──hello──> ATTACHED ──goodbye──> DRAINING ──all durable──> GONE
       │                 ▲  │                    ▲
       │ grace over      │  │ trainer dead       │ SIGTERM, linger over,
       ▼                 │  ▼                    │ superseded
      GONE             LINGERING ────────────────┘

DRAINING goes back to ATTACHED with a hello, as LINGERING does: what is still there serves the next trainer.

AWAY lies between ATTACHED and LINGERING: the connection ended, but the trainer's process lives. It may reconnect
(ATTACHED) or die (LINGERING). A trainer that dies without a whole capture in memory leads to DRAINING, as SIGTERM does.
The time of LINGERING begins anew as long as another rank of the node has a trainer. The process ends when all ranks are
GONE, or when none came for ``START_GRACE_S``.
"""

import enum
from collections.abc import Mapping

START_GRACE_S = 30.0
"""Seconds that a keeper waits for its first trainer."""


class Phase(enum.Enum):
    """See the module's drawing."""

    WAITING = "waiting"
    ATTACHED = "attached"
    AWAY = "away"
    LINGERING = "lingering"
    DRAINING = "draining"
    GONE = "gone"


class Event(enum.Enum):
    """Events in the life of a keeper."""

    HELLO = "hello"
    GOODBYE = "goodbye"
    CONNECTION_LOST = "connection lost, trainer alive"
    TRAINER_DEAD = "trainer dead"
    NOTHING_KEPT = "trainer dead, no whole capture"
    TERMINATE = "terminate"
    SUPERSEDED = "another world has newer snapshots"
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
    (Phase.ATTACHED, Event.CONNECTION_LOST): Phase.AWAY,
    (Phase.AWAY, Event.HELLO): Phase.ATTACHED,
    (Phase.AWAY, Event.TRAINER_DEAD): Phase.LINGERING,
    (Phase.AWAY, Event.NOTHING_KEPT): Phase.DRAINING,
    (Phase.AWAY, Event.TERMINATE): Phase.DRAINING,
    (Phase.AWAY, Event.TIME_UP): Phase.DRAINING,
    (Phase.LINGERING, Event.HELLO): Phase.ATTACHED,
    (Phase.LINGERING, Event.TIME_UP): Phase.DRAINING,
    (Phase.LINGERING, Event.TERMINATE): Phase.DRAINING,
    (Phase.LINGERING, Event.SUPERSEDED): Phase.DRAINING,
    (Phase.DRAINING, Event.HELLO): Phase.ATTACHED,
    (Phase.DRAINING, Event.DRAINED): Phase.GONE,
    (Phase.DRAINING, Event.TIME_UP): Phase.GONE,
}


def next_phase(phase: Phase, event: Event) -> Phase:
    """The phase after ``event``; events that do not concern a phase leave it."""
    return _NEXT.get((phase, event), phase)
