"""Waits until a step is safe: the requests of a trainer to its keeper, and when it gives up."""

import time
from functools import partial

from lazysnap.core.messages import KeeperState, StepKey
from lazysnap.engine.report import Resumed
from lazysnap.engine.run import Run
from lazysnap.keeper.client import KeeperClient

_GIVE_UP_S = 5.0
"""Seconds after which the end does not wait for a failing level: it may not answer for hours."""
_LOOK_S = 0.1
"""Seconds between two checks of the deadline."""


def wait_durable(run: Run, step: int, timeout_s: float) -> bool:
    """Block until that step, or a later one, is durable at the first level; ``False`` after the deadline.

    All ranks request the newest step, because the level stores captures only when it is idle.
    """
    client = run.client
    newest = run.recorder.captures.newest_whole_step()
    if newest is None and run.resumed is not None and run.resumed.step == step:
        return _wait_resumed(run, run.resumed, timeout_s)
    if newest is not None and newest >= step:
        key = StepKey(run.meta.start_number, newest)

        def is_decided(state: KeeperState) -> bool:
            # An older capture that becomes complete is enough, if it is of ``step`` or later.
            return client.is_complete(step, 0) or _is_given_up(state, key)

        is_durable = run.restart.world.is_alone and client.is_complete(step, 0)
        if not is_durable:
            client.require(newest)
            client.wait(is_decided, timeout_s)
    run.recorder.memory.follow_keeper()
    return client.is_complete(step, 0)


def _wait_resumed(run: Run, resumed: Resumed, timeout_s: float) -> bool:
    """Block until the first level has the newest snapshot that the restart found; ``False`` after the deadline.

    Memory alone may have had it then, or a level behind the first one.
    """
    if resumed.durable_at == run.restart.config.levels[0].url:
        return True

    key = StepKey(resumed.start, resumed.newest_step)

    def is_decided(state: KeeperState) -> bool:
        return run.is_stored(resumed, 0) or _is_given_up(state, key)

    run.client.wait(is_decided, timeout_s)
    return run.is_stored(resumed, 0)


def _is_given_up(state: KeeperState, key: StepKey) -> bool:
    """True if the first level will never have exactly that snapshot."""
    return key in state.lost or (bool(state.levels) and key in state.levels[0].given_up)


def is_itself_durable(run: Run, step: int) -> bool:
    """True if the first level has exactly that step of this start, not only a later one."""
    levels = run.client.state.levels
    return bool(levels) and StepKey(run.meta.start_number, step) in levels[0].complete


def wait_held_or_stored(run: Run, step: int, timeout_s: float) -> bool:
    """Block until the first level has exactly that step, or the keeper holds it; ``False`` after the deadline."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        if is_itself_durable(run, step) or run.recorder.captures.is_held(step):
            return True
        time.sleep(0.001)
    return False


def wait_protected(run: Run, step: int, timeout_s: float) -> bool:
    """Block until that step, or a later one, survives the loss of a node.

    Returns: False after the deadline; at once if no capture of it is left. Of a resumed step it is known at once.
    """
    client = run.client
    newest = run.recorder.captures.newest_whole_step()
    key = StepKey(run.meta.start_number, step)
    if newest is None and run.resumed is not None and run.resumed.step == step:
        key = StepKey(run.resumed.start, step)

    def is_protected(state: KeeperState) -> bool:
        return state.protected is not None and state.protected >= key

    if newest is not None and newest >= step:
        if not is_protected(client.state):
            client.protect(newest)
        client.wait(is_protected, timeout_s)
    return is_protected(client.state)


def store_everywhere(run: Run, step: int | None, timeout_s: float) -> bool:
    """Block until every level has that step; without levels until a keeper has it. ``None``: return at once.

    Returns: False after the deadline, or if a level can no longer store it.
    """
    if step is None:
        return True
    client = run.client
    num_levels = len(run.restart.config.levels)
    if not num_levels:

        def has_keeper(_: KeeperState) -> bool:
            return client.is_connected

        return client.wait(has_keeper, timeout_s)
    return _wait_stored(client, StepKey(run.meta.start_number, step), num_levels, timeout_s)


def _wait_stored(client: KeeperClient, key: StepKey, num_levels: int, timeout_s: float) -> bool:
    """Ask the keeper to store a step of this start, and block until all levels have it, or a later one.

    Returns: False after the deadline, or once each level that lacks the step gave it up or failed for ``_GIVE_UP_S``.
    """
    if not _lacking(client, key, num_levels):
        return True
    client.require(key.step)
    deadline_s = time.monotonic() + timeout_s
    failing_since_s: dict[int, float] = {}
    while True:
        state = client.state
        lacking = _lacking(client, key, num_levels)
        left_s = deadline_s - time.monotonic()
        if not lacking:
            return True
        if left_s <= 0 or all(_is_hopeless(state, key, level, failing_since_s) for level in lacking):
            return False
        if not client.is_connected and client.error is not None:
            return False  # no keeper could be reached, and nothing reconnects
        client.wait(partial(_is_other, state), min(left_s, _LOOK_S))


def _is_other(seen: KeeperState, state: KeeperState) -> bool:
    """True if the keeper sent a state since ``seen``."""
    return state is not seen


def _lacking(client: KeeperClient, key: StepKey, num_levels: int) -> list[int]:
    return [level for level in range(num_levels) if not client.is_complete(key.step, level)]


def _is_hopeless(state: KeeperState, key: StepKey, level: int, failing_since_s: dict[int, float]) -> bool:
    """True if a level will not have the step in time. ``failing_since_s``: by level; updated here."""
    if key in state.lost:
        return True
    if level >= len(state.levels):
        return False  # the keeper does not have this start yet
    if key in state.levels[level].given_up:
        return True
    if not state.levels[level].is_failing:
        failing_since_s.pop(level, None)
        return False
    now_s = time.monotonic()
    return now_s - failing_since_s.setdefault(level, now_s) >= _GIVE_UP_S
