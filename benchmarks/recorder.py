"""When each training step and each snapshot happened, and what they cost."""

import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass
class Cycle:
    """One snapshot and the steps up to the next one."""

    boundary_s: float = 0.0
    longest_boundary_s: float = 0.0
    gate_s: float = 0.0
    waited_s: float = 0.0
    steps_s: list[float] = field(default_factory=list)


class Recorder:
    """Measures a training loop: ``step_done`` after each step, ``snapshot`` round each save.

    Steps before the first ``snapshot_phase`` call are the base: the same process without snapshots.
    A step's time holds what it waited at the gate, not what it waited at the boundary.
    """

    def __init__(self, warm_up: int, cuda: bool) -> None:
        self.warm_up, self.cuda = warm_up, cuda
        self.base_s: list[float] = []
        self.cycles: list[Cycle] = []
        self.phase_start = 0.0
        self.end = self.drain_s = 0.0
        self.attempts = self.taken = 0
        self._waited_s = 0.0
        self._mark = self._now()

    def _now(self) -> float:
        if self.cuda:
            # The compute stream only: a device-wide wait would also wait for copies beside it.
            torch.cuda.current_stream().synchronize()
        return time.perf_counter()

    def step_done(self) -> None:
        """A step is over."""
        now = self._now()
        elapsed, self._mark = now - self._mark, now
        if self.cycles:
            self.cycles[-1].steps_s.append(elapsed)
        elif self.warm_up:
            self.warm_up -= 1
        else:
            self.base_s.append(elapsed)

    def snapshot_phase(self) -> None:
        """From here on snapshots are taken; setting up belongs to the first one."""
        self.phase_start = self._mark = self._now()
        self.cycles.append(Cycle())

    def boundary(self, elapsed_s: float, *, taken: bool = True) -> None:
        """A save call took so long. One that took no snapshot belongs to the cycle that runs."""
        self.attempts += 1
        if taken and self.taken:
            self.cycles.append(Cycle())
        self.taken += taken
        cycle = self.cycles[-1]
        cycle.waited_s, self._waited_s = cycle.waited_s + self._waited_s, 0.0
        cycle.boundary_s += elapsed_s
        cycle.longest_boundary_s = max(cycle.longest_boundary_s, elapsed_s)
        self._mark = self._now()

    def waited(self, elapsed_s: float) -> None:
        """The snapshot before was not done: training waited so long before the next save call."""
        self._waited_s = elapsed_s

    def gate(self, elapsed_s: float) -> None:
        """The next update waited so long for an unfinished copy."""
        if self.cycles:
            self.cycles[-1].gate_s += elapsed_s

    def drained(self, start: float) -> None:
        """Training is over since ``start`` and all pending work is done now."""
        self.end = self._now()
        self.drain_s = self.end - start

    def report(self) -> dict[str, Any]:
        """All figures in seconds; ``first`` and ``later`` are means per snapshot."""
        base = statistics.median(self.base_s)
        steps = [step for cycle in self.cycles for step in cycle.steps_s]
        return {
            "base_step_s": base,
            "mean_step_s": statistics.fmean(steps) + sum(c.boundary_s + c.waited_s for c in self.cycles) / len(steps),
            "snapshots": self.taken,
            "snapshots_not_taken": self.attempts - self.taken,
            "steps": len(steps),
            "end_to_end_s": self.end - self.phase_start,
            "drain_s": self.drain_s,
            "first": _summary(self.cycles[:1], base),
            "later": _summary(self.cycles[1:], base),
        }


def _summary(cycles: list[Cycle], base_s: float) -> dict[str, float]:
    if not cycles:
        return {}
    count = len(cycles)
    return {
        "boundary_s": sum(c.boundary_s for c in cycles) / count,
        "longest_boundary_s": max(c.longest_boundary_s for c in cycles),
        "gate_s": sum(c.gate_s for c in cycles) / count,
        # Waiting for the snapshot before is back-pressure, not the cost of this save: kept apart, in the
        # peers' favour.
        "waited_s": sum(c.waited_s for c in cycles) / count,
        "blocked_s": sum(c.boundary_s + c.gate_s for c in cycles) / count,
        # Everything that training took longer than without snapshots, interference by the copy included.
        "lost_s": sum(c.boundary_s + c.waited_s + sum(s - base_s for s in c.steps_s) for c in cycles) / count,
    }
