"""The first boundary waits for the memory of one snapshot, as long as there may be some; later ones do not."""

import os
import signal

import pytest
from small_training import TIMEOUT_S
from support.waiting import stop, until
from tuning import Tuning

from lazysnap import MemoryLevel

pytestmark = pytest.mark.slow


def test_the_first_capture_waits_for_its_memory(job):
    training = job.start(ready=False)
    training.run(1, 1)
    statistics = training.engine.statistics()

    assert training.began == [True]
    assert not statistics.skipped
    assert 0 < statistics.memory_wait_s <= statistics.waited_s
    assert statistics.boundary.total_s < statistics.waited_s


def test_the_first_capture_waits_for_one_slot_alone(job, monkeypatch):
    monkeypatch.setenv("LAZYSNAP_FAULT", "keeper.memory.make:2:hang")
    training = job.start(ready=False)
    training.run(1, 2)

    assert training.began == [True, False]
    assert training.engine.statistics().skipped == {"memory was being prepared": 1}
    assert training.engine.wait(1, until="captured", timeout_s=TIMEOUT_S)


def test_the_first_capture_after_a_restore_waits_as_well(job):
    first = job.start(ready=False)
    first.run(1, 2)
    job.crash(first)

    second = job.start(ready=False)
    snapshot = second.engine.restore("latest")
    second.run(snapshot.step + 1, snapshot.step + 1)

    assert second.began == [True]


def test_memory_that_was_prepared_before_the_first_boundary_is_waited_for(job):
    """An optimizer of a kind that is not known: its state is larger than was estimated."""
    training = job.start(ready=False, extra={"large": {"table": list(range(200_000))}})
    training.engine._prepare()
    training.run(1, 1)

    assert training.began == [True]


def test_a_state_that_does_not_fit_ends_the_wait(job, tmp_path):
    tuning = Tuning(job.config(tmp_path, memory=MemoryLevel(max_bytes=4 << 20, linger_s=60, spill_dir="")))
    job.trainings.append(tuning)
    tuning.run(1, 1)

    assert tuning.began == [False]
    assert "MemoryLevel.max_bytes leaves 4194304" in tuning.engine.statistics().unprotected


def test_a_keeper_that_stops_before_it_has_memory_is_waited_for_once(job, monkeypatch, caplog):
    monkeypatch.setenv("LAZYSNAP_FAULT", "keeper.memory.make:1:hang")
    training = job.start(ready=False, io_timeout_s=5)
    client = training.engine._client
    training.engine._prepare()
    until(lambda: client.keeper_pid is not None)
    keeper = client.keeper_pid
    stop(keeper)
    try:
        training.run(1, 1)
        waited_s = training.engine.statistics().memory_wait_s
        training.run(2, 20)

        assert training.began == [False] * 20
        assert 0 < waited_s < TIMEOUT_S
        assert training.engine.statistics().memory_wait_s == waited_s
        assert sum("does not answer" in record.getMessage() for record in caplog.records) == 1
    finally:
        os.kill(keeper, signal.SIGCONT)


def test_a_deadline_ends_the_wait(job, monkeypatch):
    monkeypatch.setenv("LAZYSNAP_FAULT", "keeper.memory.make:1:hang")
    training = job.start(ready=False)
    training.wait_for_io(0.5)
    training.run(1, 3)

    statistics = training.engine.statistics()
    assert training.began == [False] * 3
    assert statistics.skipped == {"memory was being prepared": 3}
    # At most the deadline: it is set a moment before the wait begins, and how long that moment is, nobody knows.
    assert 0 < statistics.memory_wait_s < TIMEOUT_S


def test_nobody_waits_after_a_keepers_death_later_on(job, monkeypatch):
    training = job.start(ready=False)
    training.run(1, 3)
    waited_s = training.engine.statistics().memory_wait_s
    os.kill(training.engine._client.keeper_pid, signal.SIGKILL)
    until(lambda: training.engine.statistics().keepers_lost == 1)
    training.run(4, 10)

    assert training.engine.statistics().memory_wait_s == waited_s
