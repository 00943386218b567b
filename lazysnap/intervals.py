"""Formulas: how often to capture and to store, and what a training then gets done. Pure.

docs/tuning.md derives them, names their assumptions, and has their check by a simulation.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

BUDGET = 0.01
"""Share of the time of training that captures may take."""
_LONGEST = 1000
"""Most steps from one capture to the next where no level limits them."""
_MOST_AT_ONCE = 8
"""Further nodes lost in one window that are counted; more than these are as rare as nothing."""


def young_s(cost_s: float, mtbf_s: float) -> float:
    """Return the best interval between checkpoints that stop training for ``cost_s`` (Young 1974)."""
    return math.sqrt(2 * cost_s * mtbf_s)


def daly_s(cost_s: float, mtbf_s: float) -> float:
    """Return the same with the higher-order terms (Daly 2006, equation 37)."""
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return young_s(cost_s, mtbf_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def daly_goodput(interval_s: float, cost_s: float, restart_s: float, mtbf_s: float) -> float:
    """Return the share of time that makes progress with such checkpoints (Daly 2006, equation 20)."""
    try:
        took = mtbf_s * math.exp(restart_s / mtbf_s) * math.expm1((interval_s + cost_s) / mtbf_s)
    except OverflowError:
        return 0.0
    return interval_s / took


def steps_within(budget: float, step_s: float, stall_s: float) -> int:
    """Return the least n for which a stall at each n-th step takes no more than ``budget`` of all time."""
    if step_s <= 0:
        return 1
    return max(1, math.ceil(stall_s * (1 - budget) / (budget * step_s) - 1e-9))


def allowed_intervals(levels: Iterable[int]) -> list[int]:
    """Return the steps from one capture to the next that leave each level its own interval; these are ``levels``.

    A level stores steps that are captured: so they divide all of these. A level at each step takes what comes.
    """
    common = math.gcd(*(every for every in levels if every > 1))
    return [n for n in range(1, common + 1) if common % n == 0] if common else [*range(1, _LONGEST + 1)]


@dataclass(frozen=True)
class Loss:
    """One kind of failure."""

    rate: float
    """Failures per second of training."""
    interval_s: float
    """Seconds of training from one restart point to the next."""
    delay_s: float
    """Seconds until a state that was taken is a restart point."""
    restart_s: float
    """Seconds from the failure until training goes on."""

    @property
    def rework_s(self) -> float:
        """Seconds of training that such a failure loses, on average."""
        return self.interval_s / 2 + self.delay_s


def goodput(overhead: float, losses: Sequence[Loss]) -> float:
    """Return the share of time that makes steps which are not lost. ``overhead``: the share that captures take.

    ``losses``: the mildest kind first.
    """
    reworked = sum(loss.rate * loss.rework_s for loss in losses)
    return max(0.0, (1 - overhead) * (1 - reworked)) * up_share(losses)


def up_share(losses: Sequence[Loss]) -> float:
    """Return the share of time in which training runs. ``losses``: the mildest kind first.

    A failure during a restart begins it again, as one of the worse kind of the two.
    """
    total = milder = sum(loss.rate for loss in losses)
    down = 0.0
    for loss in reversed(losses):
        within_s = -math.expm1(-total * loss.restart_s) / total if total else 0.0
        if within_s * milder >= 1:
            return 0.0
        down += loss.rate * within_s * (1 + down) / (1 - within_s * milder)
        milder -= loss.rate
    return 1 / (1 + down)


def survival(groups: Sequence[tuple[int, int]], lost: int) -> float:
    """Return the probability that any ``lost`` nodes at once take no more than its parity from each group.

    ``groups``: size and parity of each.
    """
    ways = [1] + [0] * lost
    for size, parity in groups:
        some = [math.comb(size, count) for count in range(parity + 1)]
        ways = [sum(some[j] * ways[k - j] for j in range(min(parity, k) + 1)) for k in range(lost + 1)]
    nodes = sum(size for size, _ in groups)
    return ways[lost] / math.comb(nodes, lost) if lost <= nodes else 0.0


def unprotected_share(groups: Sequence[tuple[int, int]], rate: float, window_s: float) -> float:
    """Return the share of node losses after which only storage is left.

    ``rate``: losses of any node per second. Nodes that are lost within ``window_s`` of each other count as at once:
    until training goes on and is protected again.
    """
    further = rate * window_s
    survived = 0.0
    for more in range(min(_MOST_AT_ONCE, sum(size for size, _ in groups) - 1) + 1):
        survived += math.exp(-further) * further**more / math.factorial(more) * survival(groups, more + 1)
    return 1 - survived
