"""Killed for real, resumed from memory and from storage: it ends as if not, whatever the state is made of."""

import pytest
from odd_cases import CASES

STEPS = 7


@pytest.mark.parametrize("case", CASES)
def test_killed_twice_it_ends_as_if_never_killed(trainings, case):
    whole = trainings.run(case, STEPS, engine=False)

    trainings.run(case, STEPS, death="trainer:3")
    assert "resumed 3 memory" in trainings.run(case, STEPS, death="both:5", restarted=3)
    resumed = trainings.run(case, STEPS, restarted=5)

    assert resumed["resumed"] == [5, str(trainings.root / "snapshots")]
    assert resumed["facts"] == whole["facts"]
    assert resumed["text"] == whole["text"]
    assert resumed["is_right"]
    assert resumed["problems"][:2] == [0, 0]


@pytest.mark.parametrize(("first", "then"), [("Compiled", "Uncompiled"), ("Uncompiled", "Compiled")])
def test_a_run_goes_on_with_and_without_torch_compile(trainings, first, then):
    whole = trainings.run("Uncompiled", STEPS, engine=False)

    trainings.run(first, STEPS, death="trainer:3")
    resumed = trainings.run(then, STEPS, restarted=3)

    assert resumed["resumed"] == [3, "memory"]
    assert resumed["facts"] == whole["facts"]
