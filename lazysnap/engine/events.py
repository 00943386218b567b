"""What the keeper told, as log lines and counters; only ever handled on the training thread."""

import logging
from collections.abc import Iterable
from typing import Any

from lazysnap.config import SnapshotConfig
from lazysnap.engine.protection import Protection
from lazysnap.engine.statistics import Statistics
from lazysnap.errors import KeeperUnavailable, MemoryBoundExceeded
from lazysnap.keeper.events import (
    Complete,
    KeeperAnswers,
    KeeperEvent,
    KeeperLost,
    KeeperReady,
    KeeperSilent,
    KeeperUnreachable,
)
from lazysnap.keeper.protocol import Durable, LeftRun, LevelDropped, LevelFailed, MemoryRefused, NameFailed
from lazysnap.keeper.room import readable
from lazysnap.levels.redaction import shown

logger = logging.getLogger("lazysnap.engine")

_REMEMBERED = 64


class EventLog:
    """One log line per kind of trouble until it is over; every occurrence is counted."""

    def __init__(self, statistics: Statistics, protection: Protection | None = None, *, is_alone: bool = True) -> None:
        """``is_alone``: one rank; of several, a snapshot is durable when it is on all of them."""
        self.statistics = statistics
        self.protection = protection or Protection(SnapshotConfig(), statistics)
        self._is_alone = is_alone
        self.tells_rates = True
        """Whether the first snapshot at each level is worth a line: on one rank it is."""
        self._timed: set[str] = set()
        self._noted: set[str] = set()
        self._newest: dict[str, int] = {}
        self._floor = 0
        self._durable: dict[str, int] = {}
        """By level: the newest step that is durable of this rank."""
        self.durable_at_loss: dict[str, int] = {}
        """By level: the newest durable step when the last keeper was lost. What its successor made durable since then
        has not the names that the dead one was told."""
        self.stored: dict[int, Durable] = {}
        """By sequence number: what this rank's keeper committed at some level, and that nobody took from here yet; the
        last few."""

    def begin_run(self, newest_sequence: int) -> None:
        """A new run begins: no capture up to ``newest_sequence`` is of it, and nothing of it is durable yet."""
        self._floor = newest_sequence
        self._durable.clear()
        self.durable_at_loss = {}
        self.statistics.last_durable_step.clear()

    def note_once(self, topic: str, message: str, *values: Any) -> None:
        """Warn, unless there was a warning on ``topic`` already that nothing has ended."""
        level = logging.DEBUG if topic in self._noted else logging.WARNING
        self._noted.add(topic)
        logger.log(level, message, *values)

    def end(self, topic: str, message: str, *values: Any) -> None:
        """What there was a warning about is over: say so, if there was one."""
        if topic in self._noted:
            self._noted.discard(topic)
            logger.warning(message, *values)

    def drain(self, events: Iterable[KeeperEvent]) -> None:
        """Count and log what happened."""
        for event in events:
            if isinstance(event, Durable):
                self._time(event)
                if event.sequence <= self._floor:
                    self.statistics.persisted[event.level] += self._is_alone
                    continue
                # A milestone may come after newer ones.
                if event.sequence >= self._newest.get(event.level, 0):
                    self._newest[event.level] = event.sequence
                    self._durable[event.level] = event.step
                self.stored[event.sequence] = event
                if len(self.stored) > _REMEMBERED:  # without captures into memory nobody takes them
                    del self.stored[min(self.stored)]
                if self._is_alone:
                    self._count(event.level, self._durable[event.level], 1)
                    self._works(event.level, event.step)
            elif isinstance(event, Complete):
                self._count(event.level, event.step, event.count)
                # Not before: with several ranks what one of them committed is still to be read back.
                self._works(event.level, event.step)
            elif isinstance(event, LevelFailed):
                self.statistics.level_failures[event.level] += 1
                message = "step %d is not persisted, training goes on and the next snapshot is tried again: %s"
                self.note_once(event.level, message, event.step, event.text)
            elif isinstance(event, LevelDropped):
                self.statistics.dropped[event.level] += 1
            elif isinstance(event, NameFailed):
                logger.warning("%s: the name %r is not as asked for: %s", shown(event.level), event.name, event.text)
            elif isinstance(event, KeeperLost):
                self.statistics.keepers_lost += 1
                self.durable_at_loss = dict(self._durable)
                self.note_once("keeper", "the keeper is gone, a new one is being started: %s", event.text)
            elif isinstance(event, KeeperUnreachable):
                self.statistics.keepers_lost += 1
                self.durable_at_loss = dict(self._durable)
                self.protection.lost(KeeperUnavailable(event.text), is_told=event.is_refusal)
            elif isinstance(event, KeeperReady):
                self._noted -= {"keeper", "silent"}
            elif isinstance(event, KeeperSilent):
                self.note_once("silent", "%s", event.text)
            elif isinstance(event, KeeperAnswers):
                self.end("silent", "the keeper (process %d) answers again: snapshots are stored again", event.pid)
            elif isinstance(event, LeftRun):
                self.note_once(
                    "left run",
                    "this training starts fresh, as run %s. %s holds run %s, whose newest snapshot is step %d: it "
                    'stays as it is and is not continued. To go back to it, restore("run:%s") or ckpt_path="run:%s"',
                    event.own_name,
                    shown(event.level),
                    event.name,
                    event.step,
                    event.name,
                    event.name,
                )
            elif isinstance(event, MemoryRefused):
                self.protection.lost(MemoryBoundExceeded(event.text))

    def _time(self, event: Durable) -> None:
        """What a snapshot takes at a level is known with the first one."""
        if self.tells_rates and event.level not in self._timed:
            self._timed.add(event.level)
            size, rate = readable(event.num_bytes), readable(event.num_bytes / max(event.seconds, 1e-9))
            logger.info("%s: a snapshot of %s takes %.1f s (%s/s)", shown(event.level), size, event.seconds, rate)

    def _works(self, level: str, step: int) -> None:
        self.end(level, "%s works again: step %d is durable there", shown(level), step)

    def _count(self, level: str, step: int, number: int) -> None:
        self.statistics.persisted[level] += number
        self.statistics.last_durable_step[level] = step
