"""Whether captures go into memory that outlives the training process, and what the user is told while they do not."""

import logging
import math
import time
from collections.abc import Callable

from lazysnap.config import SnapshotConfig
from lazysnap.engine.statistics import Statistics
from lazysnap.errors import KeeperError
from lazysnap.levels.redaction import shown

logger = logging.getLogger("lazysnap.engine")

FIRST_REMINDER_S = 60.0
"""From the first warning that captures are not in memory to the second."""
REMINDER_S = 600.0
"""From each later one to the next."""
_TIMEOUTS_PER_RETRY = 3
"""Memory is asked for again after so many ``keeper_timeout_s``."""


class Protection:
    """Used on the training thread. PROTECTED (``cause`` is ``None``) -> UNPROTECTED (``lost``) -> PROTECTED again."""

    def __init__(
        self, config: SnapshotConfig, statistics: Statistics, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._statistics = statistics
        self._clock = clock
        self.error: KeeperError | None = None
        """Why nothing can be captured into memory."""
        self.losses = 0
        """How often memory was asked for in vain."""
        self._last = ""
        self._since = 0.0
        self._next_reminder = 0.0
        self._next_retry = 0.0

    @property
    def cause(self) -> str | None:
        """Why nothing can be captured into memory; ``None`` if it can, or it is not known yet."""
        return None if self.error is None else str(self.error)

    def lost(self, error: KeeperError, *, is_told: bool = False) -> None:
        """Memory cannot be had. Warns, unless it is known already, or ``is_told``: training ends with that error."""
        is_new, self._last = self.error is None, str(error)
        self.error, self.losses, now = error, self.losses + 1, self._clock()
        self._next_retry = now + _TIMEOUTS_PER_RETRY * self._config.keeper_timeout_s
        self._statistics.unprotected = str(error)
        if is_new:
            self._since, self._next_reminder = now, now + FIRST_REMINDER_S
            if not is_told:
                logger.warning("NOT protected in memory: %s; %s", error, self.what_is_done())

    def regained(self) -> None:
        """Captures are in memory again."""
        if self.error is not None:
            self.error, self._statistics.unprotected = None, None
            logger.warning("protected in memory again, after %.0f s without", self._clock() - self._since)

    def may_retry(self) -> bool:
        """Whether it is time to ask for memory once more."""
        now = self._clock()
        if self.error is None or now < self._next_retry:
            return False
        self._next_retry = now + _TIMEOUTS_PER_RETRY * self._config.keeper_timeout_s
        return True

    def remind(self) -> None:
        """At a boundary: warn again, rarely, as long as training goes on without."""
        now = self._clock()
        if self.error is None or now < self._next_reminder:
            return
        self._next_reminder = now + REMINDER_S
        minutes = (now - self._since) / 60
        logger.warning("still NOT protected in memory, for %.0f min: %s; %s", minutes, self.error, self.what_is_done())

    def sum_up(self) -> None:
        """At the end: say what was not protected, if anything."""
        statistics = self._statistics
        if statistics.unprotected_steps:
            logger.warning(
                "%d steps of this training were NOT protected in memory: %s; training waited %.1f s for blocking "
                "writes; newest snapshot on storage: %s",
                statistics.unprotected_steps,
                self._last,
                statistics.direct.total_s,
                ", ".join(f"{shown(url)}: step {step}" for url, step in statistics.last_durable_step.items()) or "none",
            )

    def what_is_done(self) -> str:
        """What becomes of snapshots meanwhile, for a message."""
        levels, writes, every = self._config.levels, self._statistics.direct, self._config.every_n_steps
        if not levels:
            return "nothing is captured or stored, a crash loses all: name a place with SnapshotConfig(levels=...)"
        places = ", ".join(f"{shown(level.url)} every {math.lcm(level.every_n_steps, every)} steps" for level in levels)
        cost = f" (the last one took {writes.last_s:.1f} s)" if writes.count else ""
        return (
            f"stored at {places} by blocking writes: training waits for each{cost}, and a crash loses the steps since "
            "the last one"
        )
