"""Snapshots that were given a name stay until it is taken from them."""

import os
import signal

import pytest
import torch
from small_training import TIMEOUT_S, Training, end
from support.stored import names_at, steps_at
from support.waiting import stop, until

from lazysnap import PersistentLevel, SnapshotConfig
from lazysnap.engine.stored import wait_held_or_stored
from lazysnap.errors import ConfigError, SnapshotNotFound


def durable(training, first, last):
    for step in range(first, last + 1):
        training.run(step, step)
        assert training.engine.wait(step, until="durable", timeout_s=TIMEOUT_S)


def test_a_kept_snapshot_outlives_all_others_at_every_level_and_is_restored_by_its_name(job, tmp_path):
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    training = job.start(fast, slow)
    durable(training, 1, 2)
    assert training.engine.keep("before-anneal") == 2
    facts = {name: value.clone() for name, value in training.model.state_dict().items()}
    durable(training, 3, 7)
    assert training.engine.close()

    until(lambda: steps_at(fast) == [2, 6, 7])  # a keeper deletes after close, too
    until(lambda: len(steps_at(slow)) <= 3)  # it may have left out steps while it copied others
    assert {2, 7} <= {*steps_at(slow)}
    assert names_at(fast) == names_at(slow) == [("before-anneal", 2)]
    other = job.start(fast, slow, ready=False)
    snapshot = other.engine.restore("before-anneal")
    assert snapshot.step == 2
    assert all(value.equal(facts[name]) for name, value in other.model.state_dict().items())


@pytest.mark.slow
def test_a_released_snapshot_goes_as_any_other(job, tmp_path):
    training = job.start(tmp_path)
    durable(training, 1, 1)
    training.engine.keep("a")
    training.engine.keep("b")
    durable(training, 2, 5)
    assert names_at(tmp_path) == [("a", 1), ("b", 1)]
    training.engine.release("a")
    until(lambda: names_at(tmp_path) == [("b", 1)])
    training.engine.release("b")
    until(lambda: names_at(tmp_path) == [])

    durable(training, 6, 7)

    assert training.engine.close()
    until(lambda: steps_at(tmp_path) == [6, 7])
    with pytest.raises(SnapshotNotFound, match=r"called 'a'; there are the steps 6, 7"):
        job.start(tmp_path, ready=False).engine._fetch("a")


@pytest.mark.slow
def test_the_next_boundary_is_captured_and_named_where_the_last_was_not(job, tmp_path):
    training = job.start(tmp_path, every_n_steps=5)
    assert training.engine.keep("first") == 1
    training.run(1, 2)
    training.train()  # the weights are those of step 3, whose boundary comes
    assert training.engine.keep("third") == 3
    training.began.append(training.engine.boundary(3))
    # Steps this short would overtake what the keeper hears of them.
    assert training.engine.wait(3, until="durable", timeout_s=TIMEOUT_S)
    training.run(4, 5)

    assert training.began == [True, False, True, False, True]
    assert training.engine.close()
    assert names_at(tmp_path) == [("first", 1), ("third", 3)]


@pytest.mark.slow
def test_a_name_is_given_though_no_level_would_take_that_step(job, tmp_path):
    level = PersistentLevel(str(tmp_path), every_n_steps=1000)
    memory = job.config().memory
    config = SnapshotConfig(job_id=job.job_id, levels=(level,), memory=memory, io_timeout_s=TIMEOUT_S)
    training = Training(config)
    job.trainings.append(training)
    assert training.engine._wait_ready(TIMEOUT_S)
    training.run(1, 6)

    assert training.engine.keep("six") == 6

    until(lambda: names_at(tmp_path) == [("six", 6)])
    training.run(7, 8)
    assert training.engine.close()
    assert names_at(tmp_path) == [("six", 6)]


@pytest.mark.slow
def test_a_name_that_was_asked_for_just_before_the_keeper_died_is_given(job, tmp_path):
    training = job.start(tmp_path)
    durable(training, 1, 3)
    keeper = training.engine._client.keeper_pid
    stop(keeper)
    training.run(4, 4)
    assert training.began[-1]
    os.kill(keeper, signal.SIGKILL)
    until(lambda: training.engine.statistics().keepers_lost == 1)
    assert training.engine.keep("kept") == 4
    assert wait_held_or_stored(training.engine._run, 4, TIMEOUT_S)  # the next keeper knows the name
    assert training.engine._wait_ready(TIMEOUT_S)
    durable(training, 5, 8)

    assert training.engine.close()
    assert names_at(tmp_path) == [("kept", 4)]


def test_a_name_that_is_released_and_moved_while_there_is_no_keeper_goes(job, tmp_path):
    fast, slow = tmp_path / "fast", tmp_path / "slow"
    training = job.start(fast, slow)
    durable(training, 1, 3)
    for name in ("old", "moved"):
        assert training.engine.keep(name) == 3
    until(lambda: names_at(fast) == names_at(slow) == [("moved", 3), ("old", 3)])
    durable(training, 4, 4)
    keeper = training.engine._client.keeper_pid
    stop(keeper)
    training.engine.release("old")
    training.engine.release("moved")
    assert training.engine.keep("moved") == 4
    os.kill(keeper, signal.SIGKILL)

    assert training.engine.close()
    until(lambda: names_at(fast) == names_at(slow) == [("moved", 4)])


def slow_training(job, tmp_path, **settings):
    """Its level takes the first snapshot at once, and each other one seconds after the one before."""
    level = PersistentLevel(str(tmp_path), every_n_steps=1000, max_bytes_per_s=30_000)
    memory = job.config().memory
    training = Training(SnapshotConfig(job_id=job.job_id, levels=(level,), memory=memory, **settings), width=256)
    job.trainings.append(training)
    assert training.engine._wait_ready(TIMEOUT_S)
    return training


@pytest.mark.slow
def test_a_name_whose_snapshot_is_lost_is_said_to_be_and_never_goes_to_a_later_one(job, tmp_path, caplog):
    training = slow_training(job, tmp_path)
    steps = {}

    # Memory holds one capture for storage, which takes seconds for each. Where training is as slow as that, all three
    # may be stored: then three others are named. Training goes on meanwhile: what is named may stay in memory, neither
    # stored nor lost, until a later capture needs its slot.
    for step in range(1, 10_000):
        training.run(step, step)
        if step % 500 in (1, 2, 3):
            steps[f"n{step}"] = training.engine.keep(f"n{step}")
        if training.engine._lost_names():
            break

    assert training.engine.close()
    lost = training.engine._lost_names()
    assert lost
    assert names_at(tmp_path) == sorted((name, step) for name, step in steps.items() if name not in lost)
    for name in lost:
        assert f"the name '{name}' is not as you asked for: no snapshot has it: the snapshot of step" in caplog.text


@pytest.mark.slow
def test_a_name_whose_snapshot_no_level_had_before_a_restart_is_on_none(job, tmp_path):
    place = tmp_path / "level"
    place.write_text("no directory")
    training = job.start(place)
    training.run(1, 2)
    assert training.engine.keep("early") == 2
    training.engine.abandon()

    again = job.start(place, ready=False)
    assert again.engine.restore().step == 2
    again.run(3, 3)
    place.unlink()
    durable(again, 4, 6)
    assert again.engine.close()

    assert names_at(place) == []
    with pytest.raises(SnapshotNotFound, match="called 'early'"):
        job.start(place, ready=False).engine.restore("early")


@pytest.mark.slow
def test_a_name_for_a_capture_that_never_comes_is_said_to_be_unused(job, tmp_path, caplog):
    training = job.start(tmp_path)
    durable(training, 1, 1)
    training.train()
    assert training.engine.keep("next") == 2  # an optimizer stepped: step 1 is not what is meant

    training.engine.close()

    assert (
        "the name 'next' is not as you asked for: no snapshot has it: training ended before it was captured"
        in caplog.text
    )
    assert names_at(tmp_path) == []


def test_a_name_of_a_boundary_that_was_not_captured_goes_to_no_later_one(job, tmp_path, caplog):
    training = job.start(tmp_path)
    training.run(1, 1)
    training.train()
    assert training.engine.keep_best("loss", 0.5) == 2
    batch = torch.randn(8, 6)
    (training.model(batch) - batch).square().mean().backward()
    assert not training.engine.boundary(2)  # its gradients wait for the next step

    training.optimizer.step()
    training.optimizer.zero_grad()
    assert training.engine.boundary(3)

    assert training.engine.close()
    assert "no snapshot has it: step 2 was not captured" in caplog.text
    assert names_at(tmp_path) == []


def test_a_step_that_was_resumed_from_storage_is_durable_before_anything_is_captured(job, tmp_path):
    training = job.start(tmp_path)
    training.run(1, 2)
    end(training)

    engine = job.start(tmp_path, ready=False).engine

    assert engine.restore("latest").step == 2
    assert engine.wait(until="durable", timeout_s=TIMEOUT_S)


def test_a_step_that_was_resumed_is_not_durable_while_the_first_level_lacks_it(job, tmp_path):
    broken, works = tmp_path / "broken", tmp_path / "works"
    broken.write_text("in the way of the level's directory")
    training = job.start(broken, works)
    training.run(1, 1)
    until(lambda: training.engine.statistics().last_durable_step.get(str(works)) == 1)
    job.crash(training)

    engine = job.start(broken, works, ready=False).engine

    assert engine.restore("latest").durable_at == str(works)
    assert not engine.wait(until="durable", timeout_s=0.2)


def test_names_that_are_none_are_refused(job, tmp_path):
    engine = job.start(tmp_path, ready=False).engine

    for name in ("", "a/b", "..", "ä", "x" * 65, "latest", "12", 7):
        for call in (engine.keep, engine.release):
            with pytest.raises(ConfigError, match="name must be"):
                call(name)


def test_without_levels_nothing_can_be_kept(job):
    with pytest.raises(ConfigError, match="no persistent level"):
        job.start(ready=False).engine.keep("x")
