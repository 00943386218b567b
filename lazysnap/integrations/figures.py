"""Values of ``statistics()`` for the loggers of a framework."""

import time
from collections.abc import Sequence

from lazysnap.config import PersistentLevel
from lazysnap.engine.statistics import Statistics

PREFIX = "lazysnap/"
_MOST_STEPS = 10_000


class Figures:
    """Counters and timings under ``lazysnap/…``, and how far each level lags behind training."""

    def __init__(self) -> None:
        self._passed_s: dict[int, float] = {}
        """When training passed a step, on the monotonic clock."""

    def note(self, step: int) -> None:
        """Training passed ``step`` now."""
        self._passed_s[step] = time.monotonic()
        if len(self._passed_s) > _MOST_STEPS:
            del self._passed_s[next(iter(self._passed_s))]

    def values(self, statistics: Statistics, levels: Sequence[PersistentLevel]) -> dict[str, float]:
        """Return the current figures; none before the first capture.

        ``stall_ms``: the training thread waited at the last capture. ``device_wait_s``: devices stood still at gates so
        far (only on devices). ``copy_gb_per_s``: mean of all. ``skipped``, ``torn``: so far. ``lag_steps/…``,
        ``lag_s/…``: behind the last step, in memory, on other nodes, and at storage level 0, 1, …
        of ``levels``.
        """
        if not statistics.began:
            return {}
        stall_s, copy_s = statistics.boundary.last_s + statistics.gate.last_s, statistics.copy.total_s
        values = {
            "stall_ms": stall_s * 1e3,
            "skipped": float(statistics.skipped.total()),
            "torn": float(statistics.torn),
        }
        if statistics.device_wait_s:
            values["device_wait_s"] = statistics.device_wait_s
        if copy_s:
            values["copy_gb_per_s"] = statistics.shard_bytes * statistics.copy.count / copy_s / 1e9
        newest = max(self._passed_s, default=0)
        there = {"memory": statistics.last_whole_step}
        if statistics.last_protected_step is not None:
            there["other_nodes"] = statistics.last_protected_step
        # Not in the order of the statistics: there a level stands when it has its first snapshot.
        there |= {f"storage_{n}": statistics.last_durable_step.get(level.url) for n, level in enumerate(levels)}
        for place, step in there.items():
            if step is not None:
                values[f"lag_steps/{place}"] = float(newest - step)
                if step in self._passed_s:
                    values[f"lag_s/{place}"] = time.monotonic() - self._passed_s[step]
        return {PREFIX + name: value for name, value in values.items()}
