"""Waiting until a step is stored: what a trainer asks for, and when it gives up."""

import time
from collections.abc import Callable
from functools import partial

from lazysnap.core.messages import KeeperState, StepKey
from lazysnap.keeper.client import KeeperClient

_GIVE_UP_S = 5.0
"""A level that fails for so long is not waited for at the end: it may be away for hours."""
_LOOK_S = 0.1
"""Seconds between two looks at the time."""


def wait_stored(
    client: KeeperClient, key: StepKey, num_levels: int, timeout_s: float, show: Callable[[KeeperState], None]
) -> bool:
    """Block until all levels have a step of this start, or a later one.

    Args:
        client: the connection to the keeper, which is asked to store the step.
        key: the step.
        num_levels: the number of levels.
        timeout_s: seconds to wait at most.
        show: called with each state of the keeper meanwhile.

    Returns: False after the deadline, or once there is no hope: each level that lacks the step gave it up, or fails for
        ``_GIVE_UP_S``.
    """
    if not _lacking(client, key, num_levels):
        return True
    client.require(key.step)
    deadline_s = time.monotonic() + timeout_s
    failing_since_s: dict[int, float] = {}
    while True:
        state = client.state
        show(state)
        lacking = _lacking(client, key, num_levels)
        left_s = deadline_s - time.monotonic()
        if not lacking:
            return True
        if left_s <= 0 or all(_is_hopeless(state, key, level, failing_since_s) for level in lacking):
            return False
        if not client.is_connected and client.failure():
            return False  # no keeper could be reached, and none is sought
        client.wait(partial(_is_other, state), min(left_s, _LOOK_S))


def _is_other(seen: KeeperState, state: KeeperState) -> bool:
    """True if the keeper sent a state since ``seen``."""
    return state is not seen


def _lacking(client: KeeperClient, key: StepKey, num_levels: int) -> list[int]:
    return [level for level in range(num_levels) if not client.is_complete(key.step, level)]


def _is_hopeless(state: KeeperState, key: StepKey, level: int, failing_since_s: dict[int, float]) -> bool:
    """True if a level will not have the step in time. ``failing_since_s``: by level; it is changed."""
    if key in state.lost:
        return True
    if level >= len(state.levels):
        return False  # the keeper does not know this start yet
    if key in state.levels[level].given_up:
        return True
    if not state.levels[level].is_failing:
        failing_since_s.pop(level, None)
        return False
    now_s = time.monotonic()
    return now_s - failing_since_s.setdefault(level, now_s) >= _GIVE_UP_S


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
