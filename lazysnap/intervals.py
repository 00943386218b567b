"""Formulas: how often to capture, and the goodput of a training. Pure. docs/tuning.md names the assumptions."""

import math

BUDGET = 0.01
"""Share of the time of training that captures may take."""


def steps_within(budget: float, step_s: float, stall_s: float) -> int:
    """Return the least n for which a stall at each n-th step takes no more than ``budget`` of all time."""
    if step_s <= 0:
        return 1
    return max(1, math.ceil(stall_s * (1 - budget) / (budget * step_s) - 1e-9))


def rework_s(interval_s: float, delay_s: float) -> float:
    """Return the seconds of training that a failure loses, on average.

    ``interval_s``: training from one snapshot to the next. ``delay_s``: time until a snapshot is complete.
    """
    return interval_s / 2 + delay_s


def goodput(overhead: float, lost_s: float, restart_s: float, mtbf_s: float) -> float:
    """Return the share of time that makes steps which are not lost.

    ``overhead``: the share that captures take. ``lost_s``: training that a failure loses. A failure during a restart
    begins the restart again.
    """
    try:
        down = math.expm1(restart_s / mtbf_s)
    except OverflowError:
        return 0.0
    return max(0.0, (1 - overhead) * (1 - lost_s / mtbf_s)) / (1 + down)
