"""After a notice the newest captured step is durable and the process is gone, in every door and phase."""

import os
import random
import signal

import pytest

SEED = "LAZYSNAP_TEST_SEED"

DOORS = {
    "plain": ["before", "step", "evaluation", "save_state"],
    "lightning": ["before", "step", "evaluation", "save_state"],
    "accelerate": ["before", "step", "evaluation", "save_state"],
    "transformers": ["before", "step", "evaluation"],
}
ENDED = 143


def moments(per_phase):
    """Door, phase, step and parent of seeded moments; every second training goes on beside the notice."""
    draw = random.Random(os.environ.get(SEED, "0"))
    for door, phases in DOORS.items():
        for phase in phases:
            for number in range(per_phase):
                step = {"before": 0, "evaluation": 5 * draw.randint(1, 4)}.get(phase, draw.randint(2, 20))
                parent = ["a shell", "process 1", "an init"][number % 3]
                yield door, phase, f"{step}{'' if number % 2 == 0 else '+'}", parent


def check(trainings, run, code):
    assert code == ENDED, "\n".join(run.lines)
    assert "over" not in run.lines
    cut, durable = run.cut()
    captured = max(run.steps("boundary"), default=0)
    if captured:
        assert durable is not None
        assert captured <= durable < cut <= captured + 2, "\n".join(run.lines)
    assert (trainings.durable() or None) == (durable or None)


@pytest.mark.slow
@pytest.mark.parametrize(("door", "phase", "at", "parent"), list(moments(7)))
def test_a_notice_at_any_moment_leaves_the_newest_step_durable(door, phase, at, parent, trainings, namespaces):
    run = trainings.start(door, phase, at, parent=parent)
    run.await_line(f"{phase} {at.rstrip('+')}")
    os.kill(run.pid(), signal.SIGTERM)
    check(trainings, run, run.end())
