"""Where nothing can be captured into memory that outlives the training, it goes on, and the user is told: at the start,
rarely again, and at the end."""

import contextlib
import dataclasses
import logging
import os
import re
import signal
import stat
import subprocess
import sys

import pytest
from small_training import TIMEOUT_S, Training
from support.stored import steps_at
from support.waiting import until

from lazysnap import MemoryLevel, PersistentLevel
from lazysnap.engine.messages import MessageKind, Messages
from lazysnap.engine.statistics import Statistics
from lazysnap.errors import KeeperError
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.slot_maker import refusal_text
from lazysnap.memory.budget import MemoryBoundExceeded

pytestmark = pytest.mark.slow
STRANGER = """
import socket, struct, sys
listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
listener.bind(sys.argv[1])
listener.listen()
print("bound", flush=True)
while True:
    sock, _ = listener.accept()
    while sock.recv(1 << 16):
        sock.sendall(struct.pack("<IHH", 2, 1, 0) + b"{}")
"""


def warnings(caplog, text):
    messages = (record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)
    return [message for message in messages if text in message]


@contextlib.contextmanager
def at_the_keepers_name(job, script):
    """Another process listens at the path of the job's keeper."""
    path = JobIdentity.from_config(job.config()).files.socket_path
    arguments = [sys.executable, "-c", script, str(path)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"bound\n"
            yield process.pid
        finally:
            process.kill()
            path.unlink(missing_ok=True)


@contextlib.contextmanager
def no_interpreter(tmp_path, monkeypatch):
    """A Python that cannot start a keeper."""
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nexit 3\n")
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(script))
        yield


@contextlib.contextmanager
def trouble(kind, job, tmp_path, monkeypatch):
    """Settings with which, inside, no memory can be had, and a word of what is said about it."""
    if kind == "bound":
        yield {"memory": MemoryLevel(max_bytes=1 << 16, linger_s=60, spill_dir="")}, "max_bytes"
    elif kind == "interpreter":
        with no_interpreter(tmp_path, monkeypatch):
            yield {"io_timeout_s": 3}, "ended with status 3"
    else:
        with at_the_keepers_name(job, STRANGER) as pid:
            yield {}, f"process {pid}"


def start(job, directory, every=4, **settings):
    """A training that knows already that it has no memory."""
    levels = (PersistentLevel(str(directory), every_n_steps=every),)
    training = Training(dataclasses.replace(job.config(**settings), levels=levels))
    job.trainings.append(training)
    assert not training.engine._wait_ready(TIMEOUT_S)
    assert training.engine.statistics().unprotected
    return training


def train_until(training, condition, step):
    """Train on behind ``step`` until ``condition``; the last step."""

    def is_so():
        nonlocal step
        step += 1
        training.run(step, step)
        return condition(training.engine.statistics())

    until(is_so, timeout_s=3 * TIMEOUT_S)
    return step


def be_patient(training, timeout_s):
    """From now on the training waits so long for a keeper to start."""
    training.engine._client._link._io_timeout_s = timeout_s


@pytest.mark.parametrize("kind", ["bound", "interpreter", "version"])
def test_a_training_without_memory_goes_on_and_is_told_that_nothing_is_captured(
    kind, job, tmp_path, monkeypatch, caplog
):
    with trouble(kind, job, tmp_path, monkeypatch) as (settings, word):
        training = start(job, tmp_path / "level", **settings)
        training.run(1, 8)

        assert training.counters["seen"] == 64
        assert training.began == [False] * 8
        assert not training.engine.close()
        assert steps_at(tmp_path / "level") == []
        [warning, end] = warnings(caplog, "NOT protected in memory:")
        assert word in warning
        assert "nothing is captured, so nothing is stored: a crash loses every step since the beginning" in warning
        assert word in end
        assert "step 8, the last that was due, is not captured" in end
        assert len(warnings(caplog, "8 steps of this training were NOT protected in memory")) == 1
        for wrong in ("a new one is being started", "wait_ready", "what an earlier run left"):
            assert wrong not in caplog.text


def test_captures_go_into_memory_again_when_a_keeper_can_be_started(job, tmp_path, monkeypatch, caplog):
    """A plain loop without a ``with`` block: nothing asked for memory before the restart looked for a keeper."""
    training = Training(job.config(tmp_path / "level", io_timeout_s=0.5))
    job.trainings.append(training)
    with no_interpreter(tmp_path, monkeypatch):
        assert training.engine.restore("latest") is None
        until(lambda: training.engine.statistics().unprotected)
        training.run(1, 2)
    be_patient(training, TIMEOUT_S)
    last = train_until(training, lambda statistics: statistics.unprotected is None, 2)
    facts = training.facts()
    assert training.engine.wait(last, until="captured", timeout_s=TIMEOUT_S)
    assert warnings(caplog, "protected in memory again")
    job.crash(training)

    second = job.start(ready=False)
    snapshot = second.engine.restore("latest")
    assert (snapshot.step, snapshot.level) == (last, "memory")
    assert second.facts() == facts


def test_a_keeper_that_dies_and_cannot_be_replaced_leaves_what_was_stored(job, tmp_path, monkeypatch, caplog):
    training = job.start(tmp_path / "level")
    training.run(1, 2)
    facts = training.facts()
    assert training.engine.wait(2, timeout_s=TIMEOUT_S)
    be_patient(training, 2)

    with no_interpreter(tmp_path, monkeypatch):
        os.kill(training.engine._client.keeper_pid, signal.SIGKILL)
        train_until(training, lambda statistics: statistics.skipped["there was no memory"], 2)
        job.crash(training)
        second = Training(dataclasses.replace(training.engine._config, io_timeout_s=3))
        job.trainings.append(second)

        assert second.engine.restore("latest").step == 2
        assert second.facts() == facts
    [warning] = warnings(caplog, "NOT protected in memory:")
    assert "a crash loses every step since step 2, the newest one on storage" in warning


def test_memory_that_is_refused_at_first_is_asked_for_again(job, tmp_path, monkeypatch):
    """Something else on the machine had the memory."""
    training = start(job, tmp_path, every=1, memory=MemoryLevel(max_bytes=1 << 16, linger_s=60, spill_dir=""))
    training.run(1, 1)
    # As the keeper finds when another program ends.
    memory = training.engine._recorder.memory
    memory._config = dataclasses.replace(memory._config, memory=MemoryLevel(linger_s=60))
    memory.ask_again()

    step = train_until(training, lambda statistics: statistics.unprotected is None, 1)

    assert training.engine.wait(step, until="captured", timeout_s=TIMEOUT_S)
    assert training.engine.close()


def test_without_memory_or_levels_the_end_says_that_nothing_is_saved(job, caplog):
    training = job.start(ready=False, memory=MemoryLevel(max_bytes=1 << 16))
    training.engine._wait_ready(TIMEOUT_S)
    training.run(1, 3)

    assert training.began == [False] * 3
    assert not training.engine.close()

    [end] = warnings(caplog, "the last that was due, is not captured")
    assert "NOT protected in memory" in end
    assert "max_bytes" in end
    assert "wait_ready" not in end


def test_an_unprotected_training_is_reminded_rarely_but_again(caplog):
    now = 0.0
    messages = Messages(Statistics(), clock=lambda: now)
    cause = {"text": "no keeper", "lost": "every step"}
    messages.tell(MessageKind.NO_MEMORY, **cause)
    times = []
    for now in range(2000):
        caplog.clear()
        messages.tell_again(MessageKind.NO_MEMORY, **cause)
        times += [now] * len(warnings(caplog, "NOT protected in memory for "))

    assert times == [60, 660, 1260, 1860]  # after one minute and every ten, as docs/troubleshooting.md says
    messages.tell_over(MessageKind.NO_MEMORY)
    caplog.clear()
    messages.tell_again(MessageKind.NO_MEMORY, **cause)
    assert not caplog.records


def test_a_refusal_names_what_is_needed_what_there_is_and_what_helps():
    text = refusal_text(3, 100, 250, is_bound=True)

    assert "3 slots of 100 bytes need 300 bytes" in text
    assert "MemoryLevel.max_bytes leaves 250" in text
    assert "raise max_bytes to 300, name a local disk in MemoryLevel.spill_dir, or capture a smaller state" in text


# -------------------------------------------------------------------- required at the start


def test_memory_that_is_required_and_cannot_be_had_ends_the_training_at_its_start(job):
    training = job.start(ready=False, require_memory=True, memory=MemoryLevel(max_bytes=1 << 16))

    for call in (training.engine._prepare, training.engine.boundary):
        with pytest.raises(MemoryBoundExceeded, match=r"require_memory=True.*max_bytes"):
            call()


def test_a_keeper_that_is_required_and_cannot_be_started_ends_the_training_at_its_start(job, tmp_path, monkeypatch):
    with no_interpreter(tmp_path, monkeypatch):
        training = job.start(ready=False, require_memory=True, io_timeout_s=3)
        with pytest.raises(KeeperError, match="ended with status 3"):
            training.engine._prepare()


def test_with_memory_required_the_first_boundary_is_captured(job):
    training = job.start(ready=False, require_memory=True)
    training.run(1, 2)

    assert training.began == [True, True]


# -------------------------------------------------------------------- what the start says


def test_the_start_says_what_the_training_takes(job, tmp_path, caplog):
    caplog.set_level(logging.INFO, "lazysnap")
    training = job.start(tmp_path)
    training.run(1, 2)

    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("state ")]
    assert len(lines) == 1
    assert re.fullmatch(
        rf"state .* kB; uses .* MB of memory \(3 copies\); .* available; stored at {tmp_path} every step", lines[0]
    )
