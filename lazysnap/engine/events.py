"""What the keeper told, as log lines and counters; only ever handled on the training thread."""

import logging
from collections.abc import Iterable
from typing import Any

from lazysnap.engine.statistics import Statistics
from lazysnap.keeper.events import (
    Complete,
    Durable,
    KeeperEvent,
    KeeperLost,
    KeeperReady,
    LevelDropped,
    LevelFailed,
    MemoryRefused,
    NameFailed,
)
from lazysnap.levels.redaction import shown

logger = logging.getLogger("lazysnap.engine")


class EventLog:
    """One log line per kind of trouble until it is over; every occurrence is counted."""

    def __init__(self, statistics: Statistics, *, is_alone: bool = True) -> None:
        """``is_alone``: one rank; of several, a snapshot is durable when it is on all of them."""
        self.statistics = statistics
        self._is_alone = is_alone
        self._noted: set[str] = set()
        self._newest: dict[str, int] = {}
        self._durable: dict[str, int] = {}
        """By level: the newest step that is durable of this rank."""
        self.durable_at_loss: dict[str, int] = {}
        """By level: the newest durable step when the last keeper was lost. What its successor made durable since then
        has not the names that the dead one was told."""

    def note_once(self, topic: str, message: str, *values: Any) -> None:
        """Warn, unless there was a warning on ``topic`` already that nothing has ended."""
        level = logging.DEBUG if topic in self._noted else logging.WARNING
        self._noted.add(topic)
        logger.log(level, message, *values)

    def is_open(self, topic: str) -> bool:
        """Whether there was a warning on ``topic`` that nothing has ended."""
        return topic in self._noted

    def drain(self, events: Iterable[KeeperEvent]) -> None:
        """Count and log what happened."""
        for event in events:
            if isinstance(event, Durable):
                # A milestone may come after newer ones.
                if event.sequence >= self._newest.get(event.level, 0):
                    self._newest[event.level] = event.sequence
                    self._durable[event.level] = event.step
                if self._is_alone:
                    self._count(event.level, self._durable[event.level], 1)
                    self._works(event.level, event.step)
            elif isinstance(event, Complete):
                self._count(event.level, event.step, event.count)
                # Not before: with several ranks what one of them committed is still to be read back.
                self._works(event.level, event.step)
            elif isinstance(event, LevelFailed):
                self.statistics.level_failures[event.level] += 1
                self.note_once(event.level, "step %d is not persisted, training goes on: %s", event.step, event.text)
            elif isinstance(event, LevelDropped):
                self.statistics.dropped[event.level] += 1
            elif isinstance(event, NameFailed):
                logger.warning("%s: the name %r is not as asked for: %s", shown(event.level), event.name, event.text)
            elif isinstance(event, KeeperLost):
                self.statistics.keepers_lost += 1
                self.durable_at_loss = dict(self._durable)
                self.note_once("keeper", "the keeper is gone, a new one is being started: %s", event.text)
            elif isinstance(event, KeeperReady):
                self._noted.discard("keeper")
            elif isinstance(event, MemoryRefused):
                self.note_once("memory", "no captures into memory: %s", event.text)

    def _works(self, level: str, step: int) -> None:
        if level in self._noted:
            self._noted.discard(level)
            logger.warning("%s works again: step %d is durable there", shown(level), step)

    def _count(self, level: str, step: int, number: int) -> None:
        self.statistics.persisted[level] += number
        self.statistics.last_durable_step[level] = step
