"""The memory that outlives the training process: if captures go there, and what the user reads while they do not."""

import time
from collections.abc import Callable

from lazysnap.config import SnapshotConfig
from lazysnap.engine.messages import Event, Messages
from lazysnap.errors import KeeperError

FIRST_REMINDER_S = 60.0
"""Seconds between the first and the second warning that captures are not in memory."""
REMINDER_S = 600.0
"""Seconds between later warnings."""


class Protection:
    """Used on the training thread. PROTECTED (``cause`` is ``None``) -> UNPROTECTED (``lost``) -> PROTECTED again."""

    def __init__(self, config: SnapshotConfig, messages: Messages, clock: Callable[[], float] = time.monotonic) -> None:
        self._config = config
        self._messages = messages
        self._statistics = messages.statistics
        self._clock = clock
        self.error: KeeperError | None = None
        """Why nothing can be captured into memory."""
        self.losses = 0
        """Refusals of memory so far."""
        self._last = ""
        self._since = 0.0
        self._next_reminder = 0.0
        self._next_retry = 0.0

    @property
    def cause(self) -> str | None:
        """Why nothing can be captured into memory; ``None`` if it can, or it is not known yet."""
        return None if self.error is None else str(self.error)

    def lost(self, error: KeeperError, *, is_told: bool = False) -> None:
        """Note that there is no memory. Warns, unless that is known already or ``is_told``: training ends with it."""
        is_new, self._last = self.error is None, str(error)
        self.error, self.losses, now = error, self.losses + 1, self._clock()
        self._next_retry = now + self._config.io_timeout_s
        self._statistics.unprotected = str(error)
        if is_new:
            self._since, self._next_reminder = now, now + FIRST_REMINDER_S
            if not is_told:
                self._messages.tell(Event.NO_MEMORY, text=error, lost=self.what_is_lost())

    def regained(self) -> None:
        """Captures are in memory again."""
        if self.error is not None:
            self.error, self._statistics.unprotected = None, None
            self._messages.tell(Event.MEMORY_AGAIN, seconds=self._clock() - self._since)

    def may_retry(self) -> bool:
        """True, if it is time to ask for memory once more."""
        now = self._clock()
        if self.error is None or now < self._next_retry:
            return False
        self._next_retry = now + self._config.io_timeout_s
        return True

    def remind(self) -> None:
        """Warn again, rarely, while training goes on without memory. Called at a boundary."""
        now = self._clock()
        if self.error is None or now < self._next_reminder:
            return
        self._next_reminder = now + REMINDER_S
        minutes = (now - self._since) / 60
        self._messages.tell(Event.STILL_NO_MEMORY, minutes=minutes, text=self.error, lost=self.what_is_lost())

    def sum_up(self) -> None:
        """Report the steps that were not protected, if any. Called at the end."""
        count, durable = self._statistics.skipped["no memory"], self._statistics.last_durable_step
        if count:
            stored = ", ".join(f"{url}: step {step}" for url, step in durable.items()) or "none"
            plural = "s" * (count != 1)
            self._messages.tell(Event.STEPS_WITHOUT_MEMORY, count=count, s=plural, text=self._last, stored=stored)

    def what_is_lost(self) -> str:
        """Return, for a message, what a crash loses as long as there is no memory."""
        newest = max(self._statistics.last_durable_step.values(), default=None)
        since = "the start of this training" if newest is None else f"step {newest}, the newest one on storage"
        return f"nothing is captured, so nothing is stored: a crash loses every step since {since}"
