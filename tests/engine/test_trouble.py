"""Whatever fails beside training, training goes on: logged once, counted, tried again."""

import copy
import itertools
import os
import pathlib
import re
import time

import pytest
import torch
from small_training import TIMEOUT_S
from support.stored import steps_at
from support.waiting import until

from lazysnap.errors import ConfigError


def warnings(caplog, text):
    return [record for record in caplog.records if record.levelname == "WARNING" and text in record.getMessage()]


@pytest.mark.slow
def test_an_error_in_the_keeper_reaches_the_console_of_the_training_with_the_log_that_has_its_traceback(
    job, monkeypatch, caplog
):
    """In the thread that makes memory ready: nothing else tells of it."""
    monkeypatch.setenv("LAZYSNAP_FAULT", "keeper.memory.make:1:raise")
    training = job.start(ready=False)
    training.wait_for_io(2)
    training.engine._prepare()
    steps = itertools.count(1)

    def told():
        step = next(steps)
        training.run(step, step)
        return warnings(caplog, "an error in the keeper")

    [warning] = until(told)

    text = warning.getMessage()
    log = pathlib.Path(re.search(r"its log is (\S+)", text)[1])
    assert "memory: OSError" in text
    assert "Traceback" in log.read_text()
    assert (log.stat().st_mode & 0o777, log.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    log.unlink()


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() == 0 and not os.path.exists("/proc/version"), reason="needs /proc")
def test_a_level_that_refuses_is_said_once_and_memory_still_protects(job, caplog):
    training = job.start("/proc/lazysnap-cannot-write-here")
    training.run(1, 4)

    assert training.began == [True] * 4
    assert training.engine._fetch("latest").step == 4
    assert not training.engine.wait(timeout_s=TIMEOUT_S)  # the level was tried again meanwhile, with what is small
    assert sum(training.engine.statistics().level_failures.values()) >= 1
    assert len(warnings(caplog, "/proc/lazysnap-cannot-write-here cannot store ")) == 1


@pytest.mark.slow
def test_statistics_count_a_state_that_grows(job, caplog):
    training = job.start()
    training.run(1, 1)
    training.counters["more"] = list(range(400_000))  # more small state than the slot has room for
    step = 2
    deadline = time.monotonic() + TIMEOUT_S
    while not training.engine.boundary(step):
        assert time.monotonic() < deadline
        step += 1
        training.train()
        training.engine._wait_ready(TIMEOUT_S)
    training.engine.gate()

    held = training.engine._fetch("latest")
    assert held.step == step
    assert held.state["counters"]["more"][-1] == 399_999


def test_an_engine_that_captured_nothing_has_nothing_to_lose(job, tmp_path, caplog):
    engine = job.start(tmp_path, ready=False).engine
    with pytest.raises(ConfigError):
        engine.restore("..")
    assert engine.close()
    assert warnings(caplog, "not durable") == []


@pytest.mark.slow
def test_what_could_not_be_made_durable_at_the_end_stays_in_memory_and_is_written_when_the_level_is_back(
    job, tmp_path, caplog
):
    level = tmp_path / "level"
    training = job.start(level)
    training.run(1, 2)
    assert training.engine.wait(until="durable", timeout_s=TIMEOUT_S)
    level.rename(tmp_path / "aside")
    level.write_text("no directory any more")
    training.run(3, 4)

    assert not training.engine.close()

    [warning] = [record for record in caplog.records if "not durable" in record.getMessage().lower()]
    assert (warning.levelname, "linger_s" in warning.getMessage()) == ("WARNING", True)
    assert warning.getMessage().startswith("NOT DURABLE: step 4, ")
    facts = training.facts()
    level.unlink()
    second = job.start(level, ready=False)
    snapshot = second.engine.restore("latest")
    assert (snapshot.step, snapshot.level) == (4, "memory")
    assert second.facts() == facts
    assert not second.engine.close()  # no level had it when it was resumed; the keeper stores it now
    until(lambda: 4 in steps_at(level))


@pytest.mark.slow
def test_a_last_step_that_was_left_out_is_told_at_the_end(job, tmp_path, caplog):
    caplog.set_level("INFO", "lazysnap")
    training = job.start(tmp_path)
    training.run(1, 2)
    training.model[0].weight = torch.nn.Parameter(torch.zeros(1 << 12, 1 << 12))  # more than a slot holds
    training.engine.boundary(3)
    with torch.no_grad():
        training.model[3].weight.add_(1)  # else it would be captured at the end

    assert not training.engine.close()

    [warning] = warnings(caplog, "step 3, the last that was due, is not captured")
    assert "the newest snapshot of this training is that of step 2." in warning.getMessage()
    assert "; 1 step not captured: memory was being prepared; " in caplog.text
    assert steps_at(tmp_path)[-1] == 2


@pytest.mark.slow
def test_a_last_step_that_is_torn_is_counted_at_the_end(job, caplog):
    caplog.set_level("INFO", "lazysnap")
    training = job.start(width=300_000, ready=False)
    training.run(1, 1)
    assert training.engine._wait_ready(TIMEOUT_S)
    for step in range(2, 200):
        training.engine.boundary(step)
        with torch.no_grad():
            training.model[0].weight.add_(1)  # beside the copy, which may have won the race
        training.engine.gate()
        if training.engine.statistics().torn:
            break

    assert not training.engine.close()

    assert len(warnings(caplog, f"step {step}, the last that was due, is not captured")) == 1
    assert "; 1 step not captured: the state changed while it was copied; " in caplog.text


@pytest.mark.slow
def test_loading_a_checkpoint_in_a_running_training_warns_of_nothing(job, caplog):
    caplog.set_level("INFO", "lazysnap")
    training = job.start()
    training.run(1, 2)
    training.optimizer.load_state_dict(copy.deepcopy(training.optimizer.state_dict()))
    training.run(3, 3)

    assert [record.levelname for record in caplog.records if "made again" in record.message] == ["INFO"]
    assert not warnings(caplog, "")
    assert training.engine._fetch("latest").step == 3


@pytest.mark.slow
def test_a_training_of_one_step_is_stored(job, tmp_path, caplog):
    training = job.start(tmp_path, ready=False)
    training.run(1, 1)

    assert training.engine.close()

    assert not warnings(caplog, "not captured")
    assert steps_at(tmp_path) == [1]
