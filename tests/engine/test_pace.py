"""``every_n_steps="auto"``: the interval of captures is decided from figures, and by the state that is captured."""

import hashlib

import pytest
from small_training import Training

from lazysnap import LazySnapshotCallback, LazyTrainerCallback, PersistentLevel, SnapshotConfig
from lazysnap.engine.pace import decide, next_mark
from lazysnap.errors import ConfigError
from lazysnap.intervals import allowed_intervals, steps_within

ALL = range(1, 1001)


@pytest.mark.parametrize(
    ("costs", "allowed", "every"),
    [
        ([(1.0, 0.0)], ALL, 1),
        ([(1.0, 0.01)], ALL, 1),  # 1 % of the step, less than 1 % of all time
        ([(1.0, 0.0102)], ALL, 2),
        ([(0.1, 0.05)], ALL, 50),
        ([(0.1, 0.05), (1.0, 0.001)], ALL, 50),  # the rank that waits most
        ([(0.1, 0.05), None], ALL, 50),
        ([(1.0, 0.03)], (1, 2, 5, 10, 50, 100), 5),
        ([(1.0, 0.011)], (1, 2, 5, 10, 50, 100), 2),
        ([(0.001, 10.0)], (1, 2, 5, 10, 50, 100), 100),  # no more than a level's own interval
        ([None, None], ALL, 7),  # nothing was captured: as it is
    ],
)
def test_the_least_interval_that_holds_the_budget_on_every_rank(costs, allowed, every):
    assert decide(costs, allowed, present=7) == every


def test_with_the_interval_captures_take_at_most_the_budget_and_with_less_they_take_more():
    for stall_s in (1e-4, 3e-3, 0.2, 7.0):
        every = steps_within(0.01, 0.05, stall_s)
        assert stall_s / (every * 0.05 + stall_s) <= 0.01 * (1 + 1e-6)
        if every > 1:
            assert stall_s / ((every - 1) * 0.05 + stall_s) > 0.01


def test_intervals_leave_each_level_its_own():
    assert allowed_intervals([100, 1000]) == [1, 2, 4, 5, 10, 20, 25, 50, 100]
    assert allowed_intervals([1, 64]) == [1, 2, 4, 8, 16, 32, 64]
    assert allowed_intervals([97, 100]) == [1]
    assert allowed_intervals([1]) == allowed_intervals([]) == [*ALL]


def test_decisions_are_few_and_the_same_wherever_one_is_asked():
    marks, passed = [], 0
    while passed < 60_000:
        passed = next_mark(passed)
        marks.append(passed)
    assert marks == [20, 100, 1000, 10_000, 20_000, 30_000, 40_000, 50_000, 60_000]
    assert all(
        next_mark(passed) == mark
        for mark, before in zip(marks[1:], marks, strict=False)
        for passed in (before, mark - 1)
    )


def test_the_doors_hand_it_on():
    pytest.importorskip("lightning")
    for door in (LazySnapshotCallback, LazyTrainerCallback):
        assert door("runs/a", every_n_steps="auto")._arguments.config_for("x").every_n_steps == "auto"
        with pytest.raises(ConfigError, match="contradicts config"):
            door(every_n_steps="auto", config=SnapshotConfig(every_n_steps=7))


class Slow:
    """State that takes long to collect, as a hook of a program may."""

    def state_dict(self):
        digest = b""
        for _ in range(4):
            digest = hashlib.sha512(digest + bytes(1 << 20)).digest()
        return {"digest": digest.hex()}

    def load_state_dict(self, state):
        pass


def test_a_state_that_is_dear_to_collect_is_captured_at_fewer_steps_and_all_else_is_as_before(job, tmp_path):
    """Here a step takes a millisecond and its capture many: no machine makes that less than 1 %."""
    levels = (PersistentLevel(str(tmp_path), every_n_steps=10),)
    config = SnapshotConfig(every_n_steps="auto", levels=levels, job_id=job.job_id, io_timeout_s=60)
    training = Training(config, slow=Slow())
    job.trainings.append(training)
    assert training.engine._wait_ready(60)
    training.run(1, 45)

    assert training.began[:19] == [True] * 19
    due = [step for step, began in enumerate(training.began, 1) if began and step > 19]
    assert due == [20, 30, 40]
    assert training.engine._flush(60)
    assert training.engine.close()
    assert training.engine.statistics().last_durable_step == {str(tmp_path): 45}

    again = Training(config, slow=Slow())
    job.trainings.append(again)
    assert again.engine.restore("latest").step == 45
    again.run(46, 47)
    assert again.began == [True, True]  # decided anew


def test_fixed_intervals_never_change(job):
    training = job.start(every_n_steps=1, extra={"slow": Slow()})
    training.run(1, 25)
    assert training.began == [True] * 25
