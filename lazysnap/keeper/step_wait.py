"""Somebody waits for a step at every level."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

_FAILING_S = 5.0
"""A level that fails for so long counts as tried, for those who wait for it."""


@dataclass(frozen=True)
class AtLevel:
    """The state of a step at one level. Times are by the monotonic clock."""

    is_complete: bool
    is_lost: bool
    is_cancelled: bool
    """True if it was granted, and the grant cancelled."""
    stopped_at: float | None
    """The time since when the level does not work on all nodes; ``None``: it does."""
    failed_at: float | None
    """When the last try of this node began that failed; ``None``: the level works here."""
    moved_bytes: int
    """The progress of this node, by a write under way."""


class Wait:
    """The wait for one step. Looked at now and then, on one thread."""

    def __init__(self, look: Callable[[], Sequence[AtLevel]], size: Callable[[], int]) -> None:
        """``look``: how it is at each level; ``size``: bytes of the step on this node."""
        self._look, self._size = look, size
        self._since = time.monotonic()
        there = look()
        self._done = [0] * len(there)
        self._was_granted = [not one.is_cancelled for one in there]
        """True if a cancelled grant of the step is a new one, by level."""

    def result(self) -> bool | None:
        """True if the step is at every level; ``None``: not known yet. ``False``, once every other level was tried."""
        outcomes = [self._outcome(index, one) for index, one in enumerate(self._look())]
        return None if None in outcomes else all(outcomes)

    def _outcome(self, index: int, one: AtLevel) -> bool | None:
        if one.is_complete or one.is_lost:
            return one.is_complete
        if not one.is_cancelled:
            self._was_granted[index] = True
        elif self._was_granted[index]:
            return False
        if one.stopped_at is None or time.monotonic() - max(one.stopped_at, self._since) <= _FAILING_S:
            return None
        # A level that may be back by now is tried once more.
        return False if one.failed_at is None or one.failed_at >= self._since else None

    def progress(self) -> tuple[int, int]:
        """Bytes that levels have, and bytes that all of them together are to have, of this node."""
        size = self._size()
        for index, one in enumerate(self._look()):
            self._done[index] = max(self._done[index], size if one.is_complete else min(size, one.moved_bytes))
        return sum(self._done), size * len(self._done)
