"""What is reported as captured or durable is so, whatever happens to the connection to a keeper that lives."""

import os
import signal
import socket

import pytest
from small_training import TIMEOUT_S
from support.stored import snapshots_at, steps_at
from support.waiting import stop, until

from lazysnap.memory.slot_choice import SlotPhase

pytestmark = pytest.mark.slow

LARGE = {"width": 400_000}
"""A state of 70 MB: copying it takes tens of milliseconds."""


def large(job, *levels):
    training = job.start(*levels, **LARGE)
    training.run(1, 3)
    return training


def cut(training):
    training.engine._client._link._channel._socket.shutdown(socket.SHUT_RDWR)


def slot_of(training, step):
    [slot] = [slot for slot in training.engine._client.slots() if slot.view().step == step]
    return slot


def begin_and_cut(training, share):
    """``share``: so much of the capture has landed when the connection ends."""
    training.train()
    assert training.engine.boundary(4)
    slot = slot_of(training, 4)
    assert until(lambda: slot.view().watermark_bytes >= share * slot.view().image_bytes)
    cut(training)


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_close_is_true_only_if_the_last_capture_is_on_storage(job, tmp_path, share):
    training = large(job, tmp_path)
    begin_and_cut(training, share)

    assert training.engine.close()

    assert 4 in steps_at(tmp_path)


def test_wait_tells_of_a_capture_that_the_keeper_has(job, tmp_path):
    training = large(job, tmp_path)
    begin_and_cut(training, 0.0)

    assert training.engine.wait(4, until="captured", timeout_s=TIMEOUT_S)
    assert training.engine.wait(timeout_s=TIMEOUT_S)

    assert training.engine.statistics().last_whole_step == 4
    job.crash(training)
    assert job.start(ready=False, **LARGE).engine._fetch("latest").step == 4


def test_what_was_voided_behind_the_trainers_back_is_claimed_by_nobody(job, tmp_path):
    """As a keeper does that cannot see whether its trainer lives (in another container)."""
    training = large(job, tmp_path)
    training.train()
    assert training.engine.boundary(4)
    slot = slot_of(training, 4)
    slot.discard(slot.view().sequence)
    training.engine.gate()

    assert slot.view().phase is SlotPhase.EMPTY
    assert training.engine.statistics().last_whole_step == 3
    assert not training.engine.wait(4, until="captured", timeout_s=TIMEOUT_S)
    assert not training.engine.wait(timeout_s=TIMEOUT_S)
    assert not training.engine.close()
    assert 4 not in steps_at(tmp_path)


def named(path):
    return [found.step for found in snapshots_at(path) if "best" in found.names]


def test_a_keeper_that_is_stopped_for_a_moment_costs_no_capture_and_no_name(job, tmp_path):
    training = job.start(tmp_path)
    training.run(1, 2)
    assert training.engine.wait(timeout_s=TIMEOUT_S)
    pid = training.engine._client.keeper_pid
    stop(pid)
    try:
        # More notes than the socket takes.
        for number in range(3000):
            training.engine.release(f"never-given-{number}")
        training.run(3, 4)
        training.engine.keep("best")
        assert training.engine.statistics().last_whole_step == 4
    finally:
        os.kill(pid, signal.SIGCONT)

    until(lambda: named(tmp_path) == [4], lambda: str(named(tmp_path)))
    training.run(5, 5)
    assert training.engine.wait(timeout_s=TIMEOUT_S)
    assert training.engine.statistics().keepers_lost == 0
    assert training.engine.close()
