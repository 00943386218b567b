"""Rollback in place: the state goes back, the process and the keeper go on."""

import math
import os
import signal

import pytest
import torch
from small_training import TIMEOUT_S
from support.stored import runs_at, snapshots_at
from support.waiting import until
from support.watching import Watch

from lazysnap import ResumableLoader
from lazysnap.engine.rollback import first_not_finite
from lazysnap.errors import ConfigError, SnapshotNotFound
from lazysnap.state.objects import ObjectState


def batches_of(count, bad=()):
    """A fixed list of batches; each of the ``bad`` ones makes the loss NaN."""
    drawn = [torch.randn(8, 6, generator=torch.Generator().manual_seed(100 + index)) for index in range(count)]
    return [batch * float("nan") if index in bad else batch for index, batch in enumerate(drawn)]


def learn(training, batch):
    """One step on a batch; the loss."""
    loss = (training.model(batch) - batch).square().mean()
    training.optimizer.zero_grad()
    loss.backward()
    training.optimizer.step()
    training.scheduler.step()
    training.counters["seen"] += len(batch)
    return loss


def run_watched(training, batches):
    """Go back where the loss is not finite; the step it came to."""
    watch = Watch(training.engine)
    for batch in batches:
        loss = learn(training, batch)
        if not watch.see(loss):
            training.engine.boundary()
    training.engine.gate()
    return training.engine.step


def captured(training, first, last):
    """Train, each step whole in memory. With a level and a name that is not stored yet, a step may be left out."""
    for step in range(first, last + 1):
        training.run(step, step)
        assert training.engine.wait(step, until="captured", timeout_s=TIMEOUT_S)


@pytest.mark.slow
def test_a_run_with_a_nan_batch_ends_with_the_weights_of_a_run_that_never_saw_it(job, caplog):
    """And the user sees one line."""
    batches = batches_of(51, bad=[25])
    plain = job.start()
    assert run_watched(plain, batches[:25] + batches[26:]) == 50
    wanted = plain.facts()
    plain.engine.close(drain=False)

    training = job.start()
    keeper = training.engine._client.keeper_pid
    with caplog.at_level("INFO", "lazysnap"):
        assert run_watched(training, batches) == 50

    assert training.facts() == wanted
    [line] = [message for message in caplog.messages if "rolled back" in message]
    assert "rolled back from step 26 to step 25 (the loss is not finite): restored from memory in " in line
    assert "the batches since step 25 are skipped" in line
    statistics = training.engine.statistics()
    assert (statistics.rollbacks, statistics.keepers_lost) == (1, 0)
    assert training.engine._client.keeper_pid == keeper


@pytest.mark.slow
def test_what_is_in_the_place_of_a_boundary_is_undone_and_steps_count_from_there(job):
    training = job.start()
    training.run(1, 3)
    before = training.facts()
    training.run(4, 4)
    training.train()
    (training.model(torch.randn(8, 6)) * float("nan")).sum().backward()

    done = training.engine.rollback()
    assert all(parameter.grad is None for parameter in training.model.parameters())
    assert (done.step, done.from_step, done.level, training.engine.step) == (4, 5, "memory", 4)
    done = training.engine.rollback(steps=2)
    assert (done.step, done.from_step, training.engine.step) == (3, 5, 3)
    assert training.facts() == before


@pytest.mark.slow
def test_latest_means_the_way_back_from_the_moment_rollback_returns(job, tmp_path):
    """Newer snapshots of the run that was left, in memory and on storage, are not offered any more."""
    training = job.start(tmp_path)
    captured(training, 1, 5)
    wanted = training.facts()
    captured(training, 6, 6)
    assert training.engine.wait(timeout_s=TIMEOUT_S)
    old = training.engine._recorder.meta.run_id

    assert training.engine.rollback(steps=2).step == 5
    job.crash(training)

    second = job.start(tmp_path, ready=False)
    snapshot = second.engine.restore("latest")
    assert (snapshot.step, snapshot.level, snapshot.run_id == old) == (5, "memory", False)
    assert second.facts() == wanted


@pytest.mark.slow
def test_storage_gets_the_state_that_was_gone_back_to(job, tmp_path):
    """Also where the level takes few steps: without trainer and keeper the bad branch would be the newest."""
    training = job.start(tmp_path)
    captured(training, 1, 6)
    assert training.engine.wait(timeout_s=TIMEOUT_S)
    assert training.engine.rollback(steps=2).step == 5
    assert training.engine.wait(timeout_s=TIMEOUT_S)
    newest = snapshots_at(tmp_path)[0]
    assert (newest.step, newest.run_id) == (5, training.engine._recorder.meta.run_id)


@pytest.mark.slow
def test_a_training_that_ends_where_it_went_back_to_is_durable_and_says_so(job, tmp_path, caplog):
    training = job.start(tmp_path)
    captured(training, 1, 5)

    with caplog.at_level("INFO", "lazysnap"):
        assert training.engine.rollback(steps=2).step == 4
        assert training.engine.close()

    assert list(training.engine.statistics().last_durable_step.values()) == [4]
    assert "NOT DURABLE" not in caplog.text
    assert "(newest: step 4" in caplog.text


@pytest.mark.slow
def test_what_was_durable_of_the_run_that_was_left_does_not_count_for_the_new_one(job, tmp_path, caplog):
    training = job.start(tmp_path)
    captured(training, 1, 6)
    training.engine._client.require(6)
    assert until(lambda: training.engine._client.is_complete(6, 0))  # the engine took no note of that yet
    step = training.engine.rollback(steps=3).step
    assert step < 5
    statistics = training.engine.statistics()
    assert statistics.last_durable_step.get(str(tmp_path)) in (None, step)

    captured(training, step + 1, step + 1)

    assert training.engine.close()
    assert training.engine.statistics().last_durable_step == {str(tmp_path): step + 1}
    assert "NOT DURABLE" not in caplog.text


@pytest.mark.slow
def test_without_a_newer_capture_the_run_goes_on(job, tmp_path):
    """A rollback to the last boundary leaves no run behind on storage."""
    training = job.start(tmp_path)
    run = training.engine._recorder.meta.run_id
    run_watched(training, batches_of(8, bad=[2, 5]))
    assert training.engine.wait(timeout_s=TIMEOUT_S)
    assert list(runs_at(tmp_path)) == [run]


def test_what_is_not_in_memory_comes_from_storage(job, tmp_path):
    training = job.start(tmp_path)
    captured(training, 1, 2)
    training.engine.keep("early")
    assert training.engine.wait(timeout_s=TIMEOUT_S)
    wanted = training.facts()
    for step in range(3, 9):  # storage holds no slot when the next one is chosen
        training.run(step, step)
        assert training.engine.wait(timeout_s=TIMEOUT_S)

    done = training.engine.rollback(steps=7)

    assert (done.step, done.level) == (2, str(tmp_path))
    assert training.engine.statistics().last_whole_step == 2
    assert training.facts() == wanted


@pytest.mark.slow
def test_a_keeper_that_dies_takes_no_way_back_along(job):
    training = job.start()
    captured(training, 1, 3)
    wanted = training.facts()
    os.kill(training.engine._client.keeper_pid, signal.SIGKILL)
    until(lambda: training.engine.statistics().keepers_lost == 1)
    training.train()
    assert training.engine.rollback().step == 3
    assert training.facts() == wanted


@pytest.mark.slow
def test_nothing_to_go_back_to_is_said_and_nothing_is_changed(job):
    training = job.start()
    captured(training, 1, 1)
    generator = torch.get_rng_state()
    wanted = training.facts()
    torch.set_rng_state(generator)
    with pytest.raises(SnapshotNotFound, match=r"step 2 is in progress, .* that is 2 steps older, in memory"):
        training.engine.rollback(steps=2)
    with pytest.raises(SnapshotNotFound, match=r"step 2 is in progress, .* 99 steps older") as error:
        training.engine.rollback(steps=99)
    assert "wait_ready" not in str(error.value)
    assert "-" not in str(error.value)
    assert training.facts() == wanted
    captured(training, 2, 2)


def test_wrong_arguments_are_refused(job):
    training = job.start(ready=False)
    for settings in ({"steps": 0}, {"steps": True}):
        with pytest.raises(ConfigError, match="rollback"):
            training.engine.rollback(**settings)


@pytest.mark.slow
def test_a_snapshot_with_nan_in_its_weights_is_passed_over(job):
    """The loss of step 3 was finite, its gradients were not: the snapshot after it is no way back."""
    training = job.start()
    captured(training, 1, 2)
    wanted = training.facts()
    with torch.no_grad():
        training.model[0].weight[0, 0] = float("nan")
    captured(training, 3, 3)
    assert training.engine.rollback().step == 2
    assert training.facts() == wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.complex128])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_weights_of_every_dtype_are_looked_through(dtype, bad):
    model = torch.nn.ParameterDict({"weight": torch.nn.Parameter(torch.ones(4, dtype=dtype))})
    source = ObjectState({"model": model, "optimizer": torch.optim.SGD(model.parameters())})
    assert first_not_finite(source, source.collect()) == ""

    with torch.no_grad():
        model["weight"][2] = bad
    assert first_not_finite(source, source.collect()) == "model.weight"


@pytest.mark.slow
def test_a_snapshot_of_the_run_before_is_no_way_back_beyond_the_branch(job, tmp_path):
    """After going back to step 4 and training to 6 again, steps 5 and 6 are those of the new run."""
    training = job.start(tmp_path)
    captured(training, 1, 4)
    training.engine.keep("four")
    # Else storage may hold two of the three slots, and step 6 is left out.
    assert training.engine.wait(timeout_s=TIMEOUT_S)
    captured(training, 5, 6)
    assert training.engine.wait(timeout_s=TIMEOUT_S)
    assert training.engine.rollback(steps=3).step == 4
    training.train()
    captured(training, 5, 5)
    wanted = training.facts()
    captured(training, 6, 6)
    assert training.engine.rollback(steps=2).step == 5
    assert training.facts() == wanted
    assert training.engine.rollback(steps=2).step == 4


class Loader:
    """A position in the data."""

    is_data_position = True

    def __init__(self):
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


@pytest.mark.slow
def test_a_damaged_slot_is_passed_over(job, tmp_path):
    """The keeper knows the checksums of what it stored: a flipped bit in memory is found before anything is loaded."""
    training = job.start(tmp_path)
    captured(training, 1, 2)
    wanted = training.facts()
    captured(training, 3, 3)
    assert training.engine.wait(timeout_s=TIMEOUT_S)
    [slot] = [slot for slot in training.engine._client.slots() if slot.view().step == 3]
    slot.image[slot.view().image_bytes - 5] ^= 1
    assert training.engine.rollback().step == 2
    assert training.facts() == wanted


@pytest.mark.slow
def test_loaders_go_on_and_all_else_goes_back(job):
    loader, own = ResumableLoader(torch.utils.data.DataLoader(list(range(8)), batch_size=None)), Loader()
    training = job.start(extra={"loader": loader, "own": own})
    batches = iter(loader)
    for step in (1, 2):
        own.at = next(batches)
        training.run(step, step)
    own.at = next(batches)

    training.engine.rollback()

    assert next(batches) == 3
    assert own.at == 2
    assert training.counters["seen"] == 16
