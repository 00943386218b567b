"""Waiting until a step is stored: what a trainer asks for, and when it gives up."""

import time
from collections.abc import Callable, Collection

from lazysnap.core.messages import KeeperState, StepKey
from lazysnap.keeper.client import KeeperClient

GIVE_UP_S = 5.0
"""A level that fails for so long is not waited for at the end: it may be away for hours."""
_LOOK_S = 0.1
"""Seconds between two looks at the time."""

Show = Callable[[KeeperState], None]
"""Called with each state while something is waited for."""


class StoredStep:
    """A step of this start that must be stored at some levels.

    Example::

        wanted = StoredStep(client, StepKey(start, 7), levels=range(2))
        wanted.wait(timeout_s=600.0)  # True: level 0 and level 1 have it
    """

    def __init__(self, client: KeeperClient, key: StepKey, levels: Collection[int]) -> None:
        self._client = client
        self._key = key
        self._levels = levels
        self._failing_since_s: dict[int, float] = {}

    @property
    def lacking(self) -> list[int]:
        """Levels that do not have that step, or a later one."""
        return [level for level in self._levels if not self._client.is_complete(self._key.step, level)]

    def wait(self, timeout_s: float, *, give_up_s: float = GIVE_UP_S, show: Show | None = None) -> bool:
        """Block until all levels have the step; ``False`` after the deadline, or once there is no hope for it.

        There is no hope if each level that lacks the step gave it up, or fails for ``give_up_s``.
        """
        if not self.lacking:
            return True
        self._client.require(self._key.step)
        deadline_s = time.monotonic() + timeout_s
        while True:
            state = self._client.state
            if show is not None:
                show(state)
            lacking = self.lacking
            left_s = deadline_s - time.monotonic()
            if not lacking:
                return True
            if left_s <= 0 or all(self._is_hopeless(state, level, give_up_s) for level in lacking):
                return False
            if not self._client.is_connected and self._client.failure():
                return False  # no keeper could be reached, and none is sought
            self._client.wait(self._has_news(state, lacking), min(left_s, _LOOK_S))

    def _has_news(self, state: KeeperState, lacking: list[int]) -> Callable[[KeeperState], bool]:
        def is_news(now: KeeperState) -> bool:
            return now is not state or self.lacking != lacking

        return is_news

    def _is_hopeless(self, state: KeeperState, level: int, give_up_s: float) -> bool:
        if self._key in state.lost:
            return True
        if level >= len(state.levels):
            return False  # the keeper does not know this start yet
        if self._key in state.levels[level].given_up:
            return True
        if not state.levels[level].is_failing:
            self._failing_since_s.pop(level, None)
            return False
        now_s = time.monotonic()
        return now_s - self._failing_since_s.setdefault(level, now_s) >= give_up_s


def stored_bytes(state: KeeperState, key: StepKey, size_bytes: int) -> int:
    """Return how many bytes of a step all levels have together.

    Args:
        state: the last state of the keeper.
        key: the step in question.
        size_bytes: bytes of the step at each level.
    """
    total = 0
    for level in state.levels:
        newest = max(level.complete, default=None)
        if newest is not None and newest >= key:
            total += size_bytes
        elif level.writing is not None and level.writing >= key:
            total += min(level.moved_bytes, size_bytes)
    return total
