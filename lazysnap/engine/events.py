"""Events of the keeper as log lines and counters; only ever handled on the training thread."""

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.filesize import decimal

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
from lazysnap.keeper.protocol import (
    Complete,
    Durable,
    KeeperFailed,
    LevelFailed,
    MemoryRefused,
    NameFailed,
    Protected,
    Unlinked,
    Unprotected,
)
from lazysnap.levels.redaction import shown

logger = logging.getLogger("lazysnap.engine")


class EventLog:
    """One log line per kind of trouble until it is over; every occurrence is counted."""

    def __init__(self, config: SnapshotConfig, statistics: Statistics) -> None:
        self.statistics = statistics
        self.protection = Protection(config, statistics)
        self.is_training = True
        """Whether training goes on; ``close`` says that it does not."""
        self.speaks_for_node = True
        """Whether this rank warns of what all ranks of the node receive: one of them does."""
        self._due = {level.url: math.lcm(level.every_n_steps, config.every_n_steps) for level in config.levels}
        self._from_step = 0
        self._timed: set[str] = set()
        self._noted: set[str] = set()
        self.lost_names: dict[str, str] = {}
        """Names whose snapshot the first level will never have, and why."""
        self.first_level_has: set[int] = set()
        """Steps of this start that are complete there."""
        self.takes_less: Callable[[str], bool] = lambda text: False
        """Called when memory was refused: asks for less, and returns whether captures can do with that."""

    def begin(self, step: int) -> None:
        """Captures from now on are of another start, which goes on from ``step``: nothing of it is durable yet."""
        self._from_step = step
        self.first_level_has.clear()
        self.statistics.last_durable_step.clear()
        self.statistics.last_protected_step = None

    def note_once(self, topic: str, message: str, *values: Any) -> None:
        """Warn, unless there was a warning on ``topic`` already that nothing has ended."""
        level = logging.DEBUG if topic in self._noted else logging.WARNING
        self._noted.add(topic)
        logger.log(level, message, *values)

    def _note_of_node(self, topic: str, message: str, *values: Any) -> None:
        """``note_once``, of what all ranks of the node receive: one of them warns."""
        if self.speaks_for_node or topic in self._noted:
            self.note_once(topic, message, *values)
        else:
            self._noted.add(topic)
            logger.info(message, *values)

    def _warn_of_node(self, message: str, *values: Any) -> None:
        logger.log(logging.WARNING if self.speaks_for_node else logging.INFO, message, *values)

    def _end(self, topic: str, message: str, *values: Any) -> None:
        """Say that what the node was warned of is over."""
        if topic in self._noted:
            self._noted.discard(topic)
            self._warn_of_node(message, *values)

    def drain(self, events: Iterable[KeeperEvent]) -> None:
        """Count and log what happened."""
        for event in events:
            if isinstance(event, Durable):
                self._time(event)
            elif isinstance(event, Complete):
                self._count(event.level, event.steps)
                self._end(event.level, "%s works again: step %d is durable there", shown(event.level), event.steps[-1])
            elif isinstance(event, Protected):
                is_news = event.step is not None and event.step > (self.statistics.last_protected_step or -1)
                self.statistics.protected += is_news
                self.statistics.last_protected_step = event.step
            elif isinstance(event, Unprotected) and event.text:
                self._noted.add("nodes")
                self._warn_of_node("NOT protected against the loss of a node: %s", event.text)
            elif isinstance(event, Unprotected):
                self._end("nodes", "protected against the loss of a node again")
            elif isinstance(event, LevelFailed):
                self.statistics.level_failures[event.level] += 1
                what_next = ", training goes on and the next snapshot is tried again" if self.is_training else ""
                self._note_of_node(event.level, f"step %d is not persisted{what_next}: %s", event.step, event.text)
            elif isinstance(event, KeeperFailed):
                self._warn_of_node("%s", event.text)
            elif isinstance(event, Unlinked) and event.text:
                self._noted.add("links")
                self._warn_of_node("nothing new is stored, or protected on other nodes: %s", event.text)
            elif isinstance(event, Unlinked):
                self._end("links", "the keepers of all nodes reach each other again: storage and protection go on")
            elif isinstance(event, NameFailed):
                what = "is lost" if event.is_lost else "is not as asked for"
                self._warn_of_node(f"%s: the name %r {what}: %s", shown(event.level), event.name, event.text)
                if event.is_lost and event.level == next(iter(self._due)):
                    self.lost_names[event.name] = event.text
            elif isinstance(event, KeeperLost):
                self.statistics.keepers_lost += 1
                self.statistics.last_protected_step = None  # its parity is gone; if it lives, it tells again
                self._note_of_node("keeper", "the keeper is gone, a new one is being started")
            elif isinstance(event, KeeperUnreachable):
                self.statistics.keepers_lost += 1
                self.protection.lost(KeeperUnavailable(event.text), is_told=event.is_refusal)
            elif isinstance(event, KeeperReady):
                self._noted -= {"keeper", "silent"}
            elif isinstance(event, KeeperSilent):
                self.note_once("silent", "%s", event.text)
            elif isinstance(event, KeeperAnswers):
                self._noted.discard("silent")
                logger.warning("the keeper (process %d) answers again: snapshots are stored again", event.pid)
            elif isinstance(event, MemoryRefused) and not self.takes_less(event.text):
                self.protection.lost(MemoryBoundExceeded(event.text))

    def _time(self, event: Durable) -> None:
        """Log how long the first snapshot took at a level."""
        if self.speaks_for_node and event.level not in self._timed:
            self._timed.add(event.level)
            size, rate = decimal(event.num_bytes), decimal(int(event.num_bytes / max(event.seconds, 1e-9)))
            logger.info("%s: a snapshot of %s takes %.1f s (%s/s)", shown(event.level), size, event.seconds, rate)

    def _count(self, level: str, steps: Sequence[int]) -> None:
        """``steps``: complete since the last time, oldest first."""
        statistics, every = self.statistics, self._due.get(level, 1)
        statistics.persisted[level] += len(steps)
        if level == next(iter(self._due), None):
            self.first_level_has.update(steps)
        for step in steps:
            before = statistics.last_durable_step.get(level, self._from_step)
            if step > before:
                statistics.dropped[level] += max(0, (step - 1) // every - before // every)
                statistics.last_durable_step[level] = step
