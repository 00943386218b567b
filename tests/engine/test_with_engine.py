"""The plain loop: an engine over a path, steps that it counts itself, and a block that ends it well or as a crash."""

import contextlib
import os
import signal
import threading

import pytest
import torch
from small_training import TIMEOUT_S, Training
from support.stored import steps_at
from support.waiting import stop, until
from torch.utils.data import DataLoader, TensorDataset

from lazysnap import PersistentLevel, ResumableLoader, SnapshotConfig
from lazysnap.errors import ConfigError, StateError
from lazysnap.memory.words import SlotWord


@pytest.fixture
def start(job):
    def make(*levels, **settings):
        training = Training(job.config(*levels, **settings))
        job.trainings.append(training)
        return training

    return make


def train(training, last, error=None):
    """Go on up to step ``last``, with memory for every step; then raise ``error``, if there is one."""
    while training.engine.step < last:
        training.train()
        # The first boundary waits for one slot alone, and steps this short are over before there is another.
        assert training.engine._wait_ready(TIMEOUT_S)
        training.engine.boundary()
    if error is not None:
        raise error


class CountsStates:
    """A part of the state that counts how often it was collected."""

    def __init__(self):
        self.num_collected = 0

    def state_dict(self):
        self.num_collected += 1
        return {}

    def load_state_dict(self, state):
        assert state == {}


def test_the_last_boundary_collects_the_state_once_while_a_stopped_keeper_holds_every_copy(job, tmp_path):
    counts = CountsStates()
    training = job.start(tmp_path, extra={"counts": counts}, io_timeout_s=4)
    client = training.engine._client
    training.run(1, 3)
    assert training.began == [True] * 3
    keeper = client.keeper_pid
    stop(keeper)
    try:
        for slot in client.mapped():
            slot.store(SlotWord.HELD, slot.view().sequence)  # as the keeper does
        until(lambda: client.is_silent)
        num_collected = counts.num_collected
        training.train()

        assert not training.engine._last_boundary(4)

        assert counts.num_collected == num_collected + 1
        assert training.engine.statistics().skipped == {"all copies in memory were in use": 1}
    finally:
        os.kill(keeper, signal.SIGCONT)


@pytest.mark.slow
def test_steps_are_counted_from_what_was_restored(start, job):
    first = start()
    assert first.engine.step == 0
    assert first.engine.restore("latest") is None
    with pytest.raises(KeyboardInterrupt), first.engine:
        train(first, 3, KeyboardInterrupt())
    assert first.engine.step == 3

    second = start()
    second.engine.restore("latest")
    assert second.engine.step == 3
    assert second.engine._wait_ready(TIMEOUT_S)
    second.train()
    assert second.engine.boundary()
    assert second.engine.step == 4
    second.train()
    second.engine.boundary(10)
    assert second.engine.step == 10
    second.train()
    assert second.engine.boundary()
    assert second.engine.wait(until="captured", timeout_s=60)
    assert second.engine._fetch("latest").step == 11


@pytest.mark.slow
def test_steps_that_are_not_due_count_as_well(start):
    training = start(every_n_steps=4)
    train(training, 6)

    assert training.engine.step == 6
    assert training.engine._fetch("latest").step == 4


@pytest.mark.slow
def test_at_the_end_of_the_block_the_last_step_is_stored(start, tmp_path):
    training = start(tmp_path)
    with training.engine as engine:
        assert engine is training.engine
        engine.restore("latest")
        train(training, 5)

    assert steps_at(tmp_path)[-1] == 5
    assert training.engine.close()  # says what it said at the end of the block


@pytest.mark.slow
def test_at_the_end_the_last_step_is_captured_though_it_is_not_due(start, tmp_path):
    training = start(tmp_path, every_n_steps=4)
    with training.engine:
        train(training, 6)
    facts = training.facts()

    assert steps_at(tmp_path)[-1] == 6
    again = start(tmp_path, every_n_steps=4)
    assert again.engine.restore("latest").step == 6
    assert again.facts() == facts


@pytest.mark.slow
def test_a_training_that_ends_before_there_is_memory_for_its_last_step_is_stored(start, tmp_path):
    training = start(tmp_path)
    with training.engine as engine:
        train(training, 2)
        training.model[0].weight = torch.nn.Parameter(torch.zeros(1 << 12, 1 << 12))  # more than a slot holds
        assert not engine.boundary()
        assert engine.statistics().skipped == {"memory was being prepared": 1}

    assert steps_at(tmp_path)[-1] == 3
    assert training.engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("fetches_one_more", [False, True])
def test_what_is_captured_at_the_end_stands_where_the_data_was_at_the_last_boundary(job, tmp_path, fetches_one_more):
    def begin():
        loader = ResumableLoader(DataLoader(TensorDataset(torch.arange(24)), 2, shuffle=True))
        job.trainings.append(training := Training(job.config(tmp_path, every_n_steps=4), loader=loader))
        torch.manual_seed(100 + len(job.trainings))
        training.engine.restore("latest")
        return training, loader, []

    training, loader, seen = begin()
    with training.engine as engine:
        for [numbers] in loader:
            if fetches_one_more and engine.step == 6:
                break
            training.train()
            engine.boundary()
            seen += numbers.tolist()
            if not fetches_one_more and engine.step == 6:
                break

    training, loader, rest = begin()
    assert training.engine.step == 6
    for [numbers] in loader:
        rest += numbers.tolist()
    assert len(seen) == len(rest) == 12
    assert sorted(seen + rest) == list(range(24))


def step_on(training):
    training.train()


def swap_in(training):
    with torch.no_grad():
        training.model[0].weight.mul_(2)


def point_elsewhere(training):
    training.model[0].weight.data = training.model[0].weight.data.clone()


@pytest.mark.slow
@pytest.mark.parametrize("change", [step_on, swap_in, point_elsewhere])
def test_weights_that_changed_after_the_last_boundary_are_not_captured_as_its_step(start, tmp_path, change):
    training = start(tmp_path, every_n_steps=4)
    train(training, 6)
    change(training)

    assert training.engine.close()
    assert steps_at(tmp_path)[-1] == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "is_clean"), [(RuntimeError("no"), False), (SystemExit("no"), False), (SystemExit(0), True)]
)
def test_after_an_exception_memory_stays_for_the_next_start(start, tmp_path, error, is_clean):
    training = start(tmp_path)
    assert training.engine._wait_ready(TIMEOUT_S)
    pid = training.engine._client.keeper_pid
    with pytest.raises(type(error)), training.engine:
        train(training, 3, error)

    facts = training.facts()
    if is_clean:
        until(lambda: not os.path.exists(f"/proc/{pid}"))  # a restart that comes before finds memory
    again = start(tmp_path)
    snapshot = again.engine.restore("latest")
    assert snapshot.step == 3
    assert snapshot.level == (str(tmp_path) if is_clean else "memory")
    assert again.facts() == facts


@pytest.mark.slow
def test_what_the_first_boundary_refuses_leaves_the_block(start):
    training = start()
    training.counters["odd"] = object()

    with pytest.raises(StateError), training.engine:
        train(training, 1)


@pytest.mark.slow
def test_a_path_is_a_config_with_one_level(job, tmp_path):
    for place in (str(tmp_path), tmp_path):
        training = Training(place)
        job.trainings.append(training)
        assert training.engine._config == SnapshotConfig(levels=(PersistentLevel(str(tmp_path)),))
    with training.engine:
        train(training, 2)
    assert steps_at(tmp_path)[-1] == 2


@pytest.mark.parametrize("wrong", [None, 3, (PersistentLevel("/a"),)])
def test_what_is_neither_config_nor_path_is_refused(wrong):
    with pytest.raises(ConfigError, match="path or URL"):
        Training(wrong)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("boundaries", "error"),
    [(0, KeyboardInterrupt()), (1, None)],
    ids=["Ctrl-C while the keeper starts", "a good end while memory is made ready"],
)
def test_no_thread_outlives_the_block(job, boundaries, error):
    before = set(threading.enumerate())
    training = Training(job.config(), width=1 << 20)
    training.engine._prepare()

    with contextlib.suppress(KeyboardInterrupt), training.engine:
        for _ in range(boundaries):
            training.train()
            training.engine.boundary()
        if error is not None:
            raise error

    assert [thread.name for thread in set(threading.enumerate()) - before] == []


@pytest.mark.slow
def test_the_steps_that_a_restart_could_go_on_from_are_listed(start, job, tmp_path):
    """Memory has the two newest captures here, the level every second one; a level that is a file has nothing."""
    (tmp_path / "file").write_text("")
    levels = [tmp_path / "level", tmp_path / "file"]
    first = start(*levels)
    assert first.engine.all_steps() == []
    for step in (2, 4, 5):
        first.train()
        assert first.engine._wait_ready(TIMEOUT_S)
        first.engine.boundary(step)
        if step < 5:
            assert first.engine.wait(step, until="durable", timeout_s=TIMEOUT_S)
    first.engine.gate()
    assert first.engine.wait(5, until="captured", timeout_s=TIMEOUT_S)
    assert first.engine.all_steps() == [2, 4, 5]
    job.crash(first)

    second = start(*levels)
    assert second.engine.all_steps()[-1] == 5
    assert second.engine.restore(2).step == 2  # a new run begins there, which has no step of its own yet
    assert second.engine.all_steps() == []
    assert second.engine.restore("latest").step == 5  # and back: names of the earlier start are of this run again
    assert second.engine.all_steps()[-1] == 5
    assert second.engine._run.first_start == 0
