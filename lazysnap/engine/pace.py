"""Steps from one capture to the next: given, or with ``every_n_steps="auto"`` as many as keep captures cheap.

At a few boundaries, the same on all ranks, each rank says what a step took and how long training waited for a capture.
All of them take the least interval that holds the budget on the slowest rank. So at any moment the steps that are due
follow from the step and that number alone (docs/architecture.md, *How many slots*). A restart begins at 1 again.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lazysnap.config import SnapshotConfig, least_interval
from lazysnap.engine.messages import Event, Messages
from lazysnap.errors import WaitTimeout
from lazysnap.intervals import BUDGET, allowed_intervals, steps_within
from lazysnap.ranks.world import World

_FROM, _MARKS, _THEN_EVERY = 10, (20, 100, 1000), 10_000
"""Boundaries of a start: measuring begins behind the first captures, which are slower; decisions are made at these."""
Cost = tuple[float, float] | None
"""Seconds that a step took on a rank without its waits, and that one capture made it wait; ``None``: there was none."""


def next_mark(passed: int) -> int:
    """Return the boundary of the next decision after so many. Pure."""
    return next((mark for mark in _MARKS if mark > passed), (passed // _THEN_EVERY + 1) * _THEN_EVERY)


def decide(costs: Sequence[Cost], allowed: Sequence[int], present: int) -> int:
    """Return the interval for all ranks, of those that are allowed, ascending. Pure.

    If none holds the budget, the longest one. If no rank captured anything, the present one.
    """
    needed = [steps_within(BUDGET, *cost) for cost in costs if cost is not None]
    if not needed:
        return present
    return next((every for every in allowed if every >= max(needed)), allowed[-1])


@dataclass(frozen=True)
class _Figures:
    """Counters at one boundary."""

    passed: int
    time_s: float
    waited_s: float
    captures: int

    def cost_since(self, before: "_Figures") -> Cost:
        steps, captures = self.passed - before.passed, self.captures - before.captures
        if captures < 1:
            return None
        waited_s = self.waited_s - before.waited_s
        # A rank that only waited has no time of its own to measure: at least something counts as its step.
        return max((self.time_s - before.time_s - waited_s) / steps, 1e-6), waited_s / captures


class Pace:
    """Used on the training thread."""

    def __init__(
        self,
        config: SnapshotConfig,
        world: World,
        messages: Messages,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._world, self._messages, self._clock = world, messages, clock
        self.every = least_interval(config)
        """Steps from one capture to the next, now; the same on all ranks."""
        self._is_auto = config.every_n_steps == "auto"
        intervals = [every for level in config.levels for every in (level.every_n_steps, level.keep_every_n_steps or 1)]
        redundancy = getattr(config.redundancy, "every_n_steps", 1)
        self._allowed = allowed_intervals([*intervals, redundancy])
        self._passed, self._next = 0, _FROM
        self._before: _Figures | None = None

    def passed(self) -> bool:
        """Count a boundary, before it is decided if that is due. True if ``every`` is another one from it on.

        Collective at the boundaries of decisions, at most as many as the digits of the steps. Blocks there.
        """
        self._passed += 1
        if not self._is_auto or self._passed < self._next:
            return False
        statistics = self._messages.statistics
        waited_s = statistics.waited_s + statistics.device_wait_s
        now, before = _Figures(self._passed, self._clock(), waited_s, statistics.began), self._before
        self._before, self._next = now, next_mark(self._passed)
        return before is not None and self._agree(now.cost_since(before))

    def _agree(self, own: Cost) -> bool:
        try:
            told = self._world.exchange("every_n_steps", own)
        except WaitTimeout as error:  # the others fail, too, as soon as they ask
            self._is_auto = False
            self._messages.tell(Event.NO_PACE, text=error, every=self.every)
            return False
        costs: list[Cost] = [None if cost is None else (float(cost[0]), float(cost[1])) for cost in told]
        before, self.every = self.every, decide(costs, self._allowed, self.every)
        if self.every == before:
            return False
        step_s, stall_s = max((cost for cost in costs if cost is not None), key=lambda cost: cost[1] / cost[0])
        share = stall_s / (self.every * step_s + stall_s)
        values = {"stall_ms": 1e3 * stall_s, "step_ms": 1e3 * step_s, "share": 100 * share, "budget": 100 * BUDGET}
        limit = "; what levels are to store allows no more steps" if share > BUDGET and self.every > 1 else ""
        self._messages.tell(Event.PACE, every=self.every, before=before, limit=limit, **values)
        return True
