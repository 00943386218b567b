"""What the keeper told, as log lines and counters; only ever handled on the training thread."""

import logging
import math
from collections.abc import Iterable, Sequence
from typing import Any

from lazysnap.config import SnapshotConfig
from lazysnap.engine.protection import Protection
from lazysnap.engine.statistics import Statistics
from lazysnap.errors import KeeperUnavailable, MemoryBoundExceeded
from lazysnap.keeper.events import (
    KeeperAnswers,
    KeeperEvent,
    KeeperLost,
    KeeperReady,
    KeeperSilent,
    KeeperUnreachable,
)
from lazysnap.keeper.protocol import Complete, Durable, LeftRun, LevelFailed, MemoryRefused, NameFailed, Unlinked
from lazysnap.keeper.room import readable
from lazysnap.levels.redaction import shown

logger = logging.getLogger("lazysnap.engine")


class EventLog:
    """One log line per kind of trouble until it is over; every occurrence is counted."""

    def __init__(self, config: SnapshotConfig, statistics: Statistics, protection: Protection | None = None) -> None:
        self.statistics = statistics
        self.protection = protection or Protection(config, statistics)
        self.tells_rates = True
        """Whether the first snapshot at each level is worth a line: on one rank it is."""
        self._due = {level.url: math.lcm(level.every_n_steps, config.every_n_steps) for level in config.levels}
        self._from_step = 0
        self._timed: set[str] = set()
        self._noted: set[str] = set()

    def begin(self, step: int) -> None:
        """Captures from now on are of another start, which goes on from ``step``: nothing of it is durable yet."""
        self._from_step = step
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
            elif isinstance(event, Complete):
                self._count(event.level, event.steps)
                self._works(event.level, event.steps[-1])
            elif isinstance(event, LevelFailed):
                self.statistics.level_failures[event.level] += 1
                message = "step %d is not persisted, training goes on and the next snapshot is tried again: %s"
                self.note_once(event.level, message, event.step, event.text)
            elif isinstance(event, Unlinked) and event.text:
                self._noted.add("links")
                logger.warning("nothing is stored, memory alone protects: %s", event.text)
            elif isinstance(event, Unlinked):
                self.end("links", "the keepers of all nodes reach each other again: snapshots are stored again")
            elif isinstance(event, NameFailed):
                logger.warning("%s: the name %r is not as asked for: %s", shown(event.level), event.name, event.text)
            elif isinstance(event, KeeperLost):
                self.statistics.keepers_lost += 1
                self.note_once("keeper", "the keeper is gone, a new one is being started: %s", event.text)
            elif isinstance(event, KeeperUnreachable):
                self.statistics.keepers_lost += 1
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

    def _count(self, level: str, steps: Sequence[int]) -> None:
        """``steps``: complete since the last time, oldest first."""
        statistics, every = self.statistics, self._due.get(level, 1)
        statistics.persisted[level] += len(steps)
        for step in steps:
            before = statistics.last_durable_step.get(level, self._from_step)
            if step > before:
                statistics.dropped[level] += max(0, (step - 1) // every - before // every)
                statistics.last_durable_step[level] = step
