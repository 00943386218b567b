"""The formula of goodput, against a simulation of each failure."""

import math
import random
import statistics

import pytest

from lazysnap.cli.advise import goodput, rework_s, steps_within

DAY_S = 86_400.0


def simulated_goodput(seed, *, step_s, stall_s, every, delay_s, restart_s, mtbf_s, days=60):
    """Share of time of a training whose failures come at random, event by event."""
    dice = random.Random(seed)
    interval_s = every * step_s + stall_s
    now_s = kept_s = 0.0
    while now_s < days * DAY_S:
        life_s = dice.expovariate(1 / mtbf_s)
        whole = max(0, math.floor((life_s - delay_s) / interval_s))  # snapshots that are complete at the failure
        kept_s += whole * every * step_s
        now_s += life_s
        while (until_failure_s := dice.expovariate(1 / mtbf_s)) < restart_s:
            now_s += until_failure_s
        now_s += restart_s
    return kept_s / now_s


@pytest.mark.parametrize(
    ("stall_s", "every", "delay_s", "mtbf_s"),
    [(0.05, 1, 2.0, 3600.0), (2.0, 7, 2.0, 7200.0), (0.05, 120, 60.0, 10_800.0)],
    ids=["memory", "slow captures", "storage"],
)
def test_goodput_is_what_a_simulation_gives(stall_s, every, delay_s, mtbf_s):
    figures = {"step_s": 10.0, "stall_s": stall_s, "every": every, "delay_s": delay_s, "mtbf_s": mtbf_s}
    runs = [simulated_goodput(seed, **figures, restart_s=240.0) for seed in range(10)]
    error = statistics.stdev(runs) / math.sqrt(len(runs))
    step_s = 10.0 + stall_s / every

    expected = goodput(1 - 10.0 / step_s, rework_s(every * step_s, delay_s), 240.0, mtbf_s)

    assert error < 0.004  # else the test would say nothing
    # To the formula an interval follows on another; after a failure it begins anew.
    assert abs(statistics.fmean(runs) - expected) < 3 * error + 0.003


def test_goodput_at_its_ends():
    assert goodput(0.02, 0.0, 0.0, DAY_S) == pytest.approx(0.98)
    assert goodput(0.0, 1.0, 1e6, 1.0) == 0.0  # it never comes to a step


def test_captures_take_at_most_their_share():
    assert steps_within(0.01, 1.0, 0.001) == 1
    assert steps_within(0.01, 2.0, 0.06) == 3


def test_with_the_steps_named_captures_take_at_most_the_budget_and_with_less_they_take_more():
    for stall_s in (1e-4, 3e-3, 0.2, 7.0):
        every = steps_within(0.01, 0.05, stall_s)
        assert stall_s / (every * 0.05 + stall_s) <= 0.01 * (1 + 1e-6)
        if every > 1:
            assert stall_s / ((every - 1) * 0.05 + stall_s) > 0.01
