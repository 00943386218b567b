"""Formulas of intervals, goodput and survival, against published figures and a simulation of each step."""

import itertools

import pytest

from benchmarks.failures import bound, compare, compare_blocking, facts_of
from lazysnap.config import Redundancy
from lazysnap.intervals import Loss, daly_goodput, daly_s, goodput, survival, unprotected_share, young_s

DAY_S = 86_400.0


def test_young_and_daly_at_known_points():
    assert young_s(300, 86_400) == pytest.approx(7200)  # 5 minutes at one failure a day: every 2 hours
    assert daly_s(300, 86_400) < young_s(300, 86_400)
    assert daly_s(1e-6, 86_400) == pytest.approx(young_s(1e-6, 86_400), rel=1e-4)
    assert daly_s(500, 100) == 100


def test_the_interval_of_daly_is_the_best_one_of_his_model():
    for cost_s, mtbf_s in ((300, 86_400), (60, 11_000), (600, 3600)):
        best = daly_s(cost_s, mtbf_s)
        reached = daly_goodput(best, cost_s, 100, mtbf_s)
        others = [daly_goodput(best * factor, cost_s, 100, mtbf_s) for factor in (0.5, 0.8, 1.25, 2)]
        assert reached > max(others)


def test_survival_is_what_counting_all_sets_gives():
    sizes = [(3, 1), (4, 2)]
    nodes = [(group, node) for group, (size, _) in enumerate(sizes) for node in range(size)]
    for lost in range(1, 6):
        sets = [*itertools.combinations(nodes, lost)]
        good = sum(all(sum(g == group for g, _ in some) <= sizes[group][1] for group in (0, 1)) for some in sets)
        assert survival(sizes, lost) == pytest.approx(good / len(sets))


def test_more_failures_and_a_longer_window_need_storage_more_often():
    groups = [(8, 2)] * 256
    shares = [unprotected_share(groups, rate, 300) for rate in (1e-5, 1e-4, 1e-3, 1e-2)]
    assert shares == sorted(shares)
    assert unprotected_share([(1, 0)] * 4, 1e-4, 300) == 1.0
    assert unprotected_share([(2, 1)], 1e-9, 300) == pytest.approx(3e-7, rel=1e-3)


def test_goodput_without_failures_is_what_captures_leave():
    assert goodput(0.02, []) == 0.98
    assert goodput(0.0, [Loss(1.0, 1.0, 1.0, restart_s=1e5)]) == 0.0  # it never comes to a step


LONG = {"step_s": 30.0}
CASES = {
    "one node": facts_of(1, None, rate=40 / DAY_S, node_share=0.3, **LONG),
    "16 nodes alone": facts_of(16, None, rate=60 / DAY_S, **LONG),
    "16 nodes in pairs": facts_of(16, Redundancy(group_size=2), rate=100 / DAY_S, **LONG),
    "64 nodes": facts_of(64, Redundancy(parity=2), rate=40 / DAY_S, **LONG),
    "slow captures": facts_of(64, Redundancy(parity=2), rate=30 / DAY_S, stall_s=2.0, **LONG),
}


@pytest.mark.sampled
@pytest.mark.parametrize("facts", CASES.values(), ids=CASES)
def test_goodput_is_what_a_simulation_of_every_step_gives(facts):
    """Ten seeded runs of six days: within three standard errors of their mean, and 0.1 % of the time."""
    found = compare(facts, 6 * DAY_S, range(10))

    assert found["failures"] > 1000
    assert bound(found) < 0.012  # else the test would say nothing
    assert abs(found["formula"] - found["simulated"]) < bound(found)
    assert found["lost_per_week"] == pytest.approx(found["lost_per_week_simulated"], rel=0.15)


def test_goodput_of_blocking_checkpoints_is_what_daly_says():
    found = compare_blocking(facts_of(64, None, rate=30 / DAY_S, **LONG), 10 * DAY_S, range(10))
    assert bound(found) < 0.015
    assert abs(found["formula"] - found["simulated"]) < bound(found)
