"""The status of a node, which its keeper sends to trainers: whole each time, so losing a message does no harm.

What happens in the keeper is an event, which any thread adds to the board. The main loop sends the newest status to
each trainer that does not have it. One that takes nothing for a while gets the newest later.
"""

import threading
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from lazysnap.events import Alert, Complete, Event, LevelFailed, NameFailed, Notice, Protected, Stored
from lazysnap.keeper.held import MAX_COMPLETE, LevelStatus
from lazysnap.keeper.protocol import Status

_MAX_NAMES, _MAX_TROUBLES = 64, 8
"""Names that could not be given, and errors of the keeper; older ones are in the log alone."""


class StatusBoard:
    """The newest status of a node. Thread-safe; nothing here blocks."""

    def __init__(self, note: Callable[[Event], None], wake: Callable[[], None] = lambda: None) -> None:
        """``note`` gets each event, on the thread that adds it; ``wake`` has the main loop look at everything again."""
        self._note, self.wake = note, wake
        self._lock = threading.Lock()
        self.status = Status()
        """Replaced as a whole."""

    def begin(self, start: str) -> None:
        """Report this start from now on."""
        with self._lock:
            troubles = [alert for alert in self.status.alerts if alert.about == "keeper"]
            self.status = Status(start, alerts=troubles)
        self.wake()

    def forget_troubles(self) -> None:
        """Drop errors that trainers know: the next one need not see them."""
        with self._lock:
            alerts = [alert for alert in self.status.alerts if alert.about != "keeper"]
            self.status = replace(self.status, alerts=alerts)

    def add(self, event: Event) -> None:
        """Take an event."""
        with self._lock:
            self.status = _with(self.status, event)
        self._note(event)
        self.wake()


def _with(status: Status, event: Event) -> Status:
    """Return the status after an event. What concerns another start changes nothing."""
    match event:
        case Stored(level=url):
            return _with_level(status, url, stored=event)
        case LevelFailed(level=url):
            return _with_level(status, url, failed=event)
        case Complete(level=url, steps=steps, start=status.start):
            before = status.levels.get(url, LevelStatus())
            news = [step for step in steps if step not in before.complete]
            known = [*before.complete, *news][-MAX_COMPLETE:]
            return _with_level(status, url, complete=known, complete_at=event.t if news else before.complete_at)
        case Protected(step=step, start=status.start):
            return replace(status, protected=step)
        case NameFailed():
            return replace(status, names=[*status.names, event][-_MAX_NAMES:])
        case Alert():
            others = [alert for alert in status.alerts if alert.about != event.about]
            same = [alert for alert in status.alerts if alert.about == event.about == "keeper"]
            return replace(status, alerts=[*others, *[*same, event][-_MAX_TROUBLES:]])
        case Notice():
            return replace(status, is_ending=True)
    return status


def _with_level(status: Status, url: str, **changes: Any) -> Status:
    level = replace(status.levels.get(url, LevelStatus()), **changes)
    return replace(status, levels={**status.levels, url: level})
