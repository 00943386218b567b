"""A keeper that is stopped ends no connection: it is noticed, named once, worked round, and serves again."""

import contextlib
import dataclasses
import os
import signal

import pytest
from small_training import TIMEOUT_S
from support.waiting import until

pytestmark = pytest.mark.slow


def said(training, caplog, text):
    training.engine.statistics()  # takes what was heard
    return [record for record in caplog.records if text in record.getMessage()]


@contextlib.contextmanager
def beside_frozen(job, tmp_path, caplog):
    """A training that goes on beside a keeper that is stopped, up to step 100; and that keeper."""
    training = job.start(tmp_path)
    training.run(1, 2)
    client = training.engine._client
    client._config = dataclasses.replace(client._config, io_timeout_s=3)  # only now: it had as long as it took to start
    keeper = client.keeper_pid
    os.kill(keeper, signal.SIGSTOP)
    try:
        until(lambda: said(training, caplog, f"(process {keeper} on "))
        training.run(3, 100)
        yield training, keeper
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(keeper, signal.SIGCONT)


def test_one_rank_trains_and_captures_on_beside_a_frozen_keeper(job, tmp_path, caplog):
    with beside_frozen(job, tmp_path, caplog) as (training, _):
        assert training.began == [True] * 100
        assert training.engine.statistics().slot_waits.count <= 2  # of the first two, whose storage is alive
        assert len(said(training, caplog, "does not answer")) == 1
        assert training.engine.wait(100, until="captured", timeout_s=TIMEOUT_S)

    until(lambda: said(training, caplog, "answers again"))
    assert training.engine._flush(TIMEOUT_S)
    training.run(101, 110)
    assert training.engine.wait(until="durable", timeout_s=TIMEOUT_S)
    assert training.engine.statistics().last_durable_step[str(tmp_path)] == 110
    assert len(said(training, caplog, "answers again")) == 1


def test_a_frozen_keeper_that_is_killed_is_replaced_and_its_memory_is_stored(job, tmp_path, caplog):
    with beside_frozen(job, tmp_path, caplog) as (training, keeper):
        os.kill(keeper, signal.SIGKILL)

        until(lambda: training.engine.statistics().keepers_lost == 1)
        assert training.engine.wait(100, until="durable", timeout_s=TIMEOUT_S)
    assert training.engine._client.keeper_pid != keeper
    assert training.engine.statistics().last_durable_step[str(tmp_path)] == 100
