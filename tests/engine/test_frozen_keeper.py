"""A keeper that is stopped ends no connection: it is noticed, named once, worked round, and serves again."""

import os
import signal

import pytest
from small_training import TIMEOUT_S
from support.waiting import until

pytestmark = pytest.mark.slow


def said(training, caplog, text):
    training.engine.statistics()  # takes what was heard
    return [record for record in caplog.records if text in record.getMessage()]


def test_one_rank_trains_and_captures_on_beside_a_frozen_keeper(job, tmp_path, caplog):
    training = job.start(tmp_path)
    training.run(1, 2)
    keeper = training.engine._client.keeper_pid
    training.engine._client._heartbeat._timeout_s = 3  # only now: it had as long as it took to start
    os.kill(keeper, signal.SIGSTOP)
    try:
        until(lambda: said(training, caplog, f"(process {keeper} on "))

        training.run(3, 100)

        assert training.began == [True] * 100
        assert training.engine.statistics().slot_waits.count <= 2  # of the first two, whose storage is alive
        assert len(said(training, caplog, "does not answer")) == 1
        assert training.engine.wait(100, until="captured", timeout_s=TIMEOUT_S)
    finally:
        os.kill(keeper, signal.SIGCONT)
    until(lambda: said(training, caplog, "answers again"))
    assert training.engine._flush(TIMEOUT_S)
    training.run(101, 110)
    assert training.engine.wait(until="durable", timeout_s=TIMEOUT_S)
    assert training.engine.statistics().last_durable_step[str(tmp_path)] == 110
    assert len(said(training, caplog, "answers again")) == 1
