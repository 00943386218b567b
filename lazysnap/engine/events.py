"""Events of the keeper as counters and messages; only ever handled on the training thread."""

from collections.abc import Iterable, Sequence

from rich.filesize import decimal

from lazysnap.config import SnapshotConfig, due_every
from lazysnap.engine.messages import Event, Messages
from lazysnap.engine.protection import Protection
from lazysnap.errors import KeeperError
from lazysnap.events import Alert, Complete, LevelFailed, NameFailed, Protected, Stored
from lazysnap.keeper.events import (
    KeeperAnswers,
    KeeperEvent,
    KeeperLost,
    KeeperReady,
    KeeperSilent,
    KeeperUnreachable,
)
from lazysnap.keeper.protocol import MemoryRefused

_ALERTS = {
    "links": (Event.UNLINKED, Event.LINKED),
    "protection": (Event.NODE_UNPROTECTED, Event.NODE_PROTECTED),
    "keeper": (Event.KEEPER_TROUBLE, Event.KEEPER_TROUBLE),
}
"""Messages of an alert to the user, and of its end."""


class KeeperEvents:
    """Follows keeper and levels. Every occurrence is counted; trouble is reported once until it is over."""

    def __init__(self, config: SnapshotConfig, messages: Messages, protection: Protection) -> None:
        self._messages = messages
        self._statistics = messages.statistics
        self._protection = protection
        self.is_training = True
        """True while training goes on."""
        self._levels = config.levels
        self._due = {level.url: due_every(level.every_n_steps, config.every_n_steps) for level in config.levels}
        """Steps from one snapshot that is due to the next, by level."""
        self._from_step = 0
        self.lost_names: dict[str, str] = {}
        """Names whose snapshot the first level will never have, and why."""

    def begin(self, step: int) -> None:
        """Captures from now on are of another start, which resumes at ``step``: nothing of it is durable yet."""
        self._from_step = step
        self._statistics.last_durable_step.clear()
        self._statistics.last_protected_step = None

    def take(self, events: Iterable[KeeperEvent]) -> list[str]:
        """Count and report ``events``. Returns the reasons for which memory was refused."""
        tell, refused = self._messages.tell, list[str]()
        for event in events:
            match event:
                case Stored():
                    rate = decimal(int(event.bytes / max(event.seconds, 1e-9)))
                    size, where = decimal(event.bytes), event.level
                    tell(Event.FIRST_STORED, level=where, size=size, seconds=event.seconds, rate=rate)
                case Complete():
                    self._count(event.level, event.steps)
                    where = event.level
                    tell(Event.LEVEL_WORKS, level=event.level, step=event.steps[-1])
                case LevelFailed():
                    kind = Event.LEVEL_FAILED if self.is_training else Event.LEVEL_FAILED_AT_END
                    tell(kind, level=event.level, step=event.step, text=event.text)
                case NameFailed():
                    if event.is_lost:
                        tell(Event.NAME_LOST, name=event.name, text=event.text)
                        self.lost_names[event.name] = event.text
                    else:
                        tell(Event.NAME_NOT_AS_ASKED, level=event.level, name=event.name, text=event.text)
                case Protected():
                    last = self._statistics.last_protected_step
                    self._statistics.protected += event.step is not None and event.step > (last or -1)
                    self._statistics.last_protected_step = event.step
                case Alert():
                    trouble, over = _ALERTS.get(event.about, _ALERTS["keeper"])
                    tell(trouble if event.text else over, text=event.text)
                case KeeperLost():
                    tell(Event.KEEPER_LOST)
                    self._statistics.last_protected_step = None  # its parity is gone; if it lives, it reports again
                case KeeperUnreachable():
                    self._statistics.keepers_lost += 1
                    self._protection.lost(KeeperError(event.text), is_told=event.is_refusal)
                case KeeperReady():
                    self._messages.over("keeper", "silent")
                case KeeperSilent():
                    tell(Event.KEEPER_SILENT, text=event.text)
                case KeeperAnswers():
                    tell(Event.KEEPER_ANSWERS, pid=event.pid)
                case MemoryRefused():
                    refused.append(event.text)
        return refused

    def _count(self, level: str, steps: Sequence[int]) -> None:
        """``steps``: complete since the last time, oldest first."""
        statistics, every = self._statistics, self._due.get(level, 1)
        statistics.persisted[level] += len(steps)
        for step in steps:
            last = statistics.last_durable_step.get(level)
            before = self._from_step if last is None else last
            # A rollback captures the step that it went back to.
            if step > before or (last is None and step == before):
                statistics.dropped[level] += max(0, (step - 1) // every - before // every)
                statistics.last_durable_step[level] = step
