"""Where nothing can be captured into memory that outlives the training, snapshots are stored all the same, and the
user is told: at the start, rarely again, and at the end."""

import contextlib
import dataclasses
import logging
import os
import pathlib
import signal
import socket
import stat
import subprocess
import sys
import threading

import pytest
import torch
from small_training import TIMEOUT_S, Training
from support.waiting import until

from lazysnap import MemoryLevel, PersistentLevel
from lazysnap.engine.protection import Protection
from lazysnap.engine.statistics import Statistics
from lazysnap.errors import KeeperUnavailable, LevelUnavailable, MemoryBoundExceeded
from lazysnap.keeper.identity import JobIdentity
from lazysnap.levels import open_store
from lazysnap.memory.slot_pool import refusal

SQUATTER = """
import os, socket, sys
os.setuid(65534)
listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
listener.bind(bytes.fromhex(sys.argv[1]).decode())
listener.listen()
print("bound", flush=True)
sys.stdin.read()
"""
STRANGER = """
import socket, struct, sys
listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
listener.bind(bytes.fromhex(sys.argv[1]).decode())
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
    """Another process has the name of the job's keeper."""
    address = JobIdentity.from_config(job.config()).address.encode().hex()
    arguments = [sys.executable, "-c", script, address]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"bound\n"
            yield process.pid
        finally:
            process.kill()


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
        yield {"memory": MemoryLevel(max_bytes=1 << 16, linger_s=60)}, "max_bytes"
    elif kind == "interpreter":
        with no_interpreter(tmp_path, monkeypatch):
            yield {"keeper_timeout_s": 3}, "ended with status 3"
    elif kind == "user":
        if os.geteuid():
            pytest.skip("only root can be another user")
        with at_the_keepers_name(job, SQUATTER) as pid:
            yield {}, f"is taken by process {pid} of user 65534"
    else:
        with at_the_keepers_name(job, STRANGER) as pid:
            yield {}, f"process {pid}"


def start(job, directory, every=4, **settings):
    """A training that knows already that it has no memory."""
    levels = (PersistentLevel(str(directory), every_n_steps=every),)
    training = Training(dataclasses.replace(job.config(**settings), levels=levels))
    job.trainings.append(training)
    assert not training.engine.wait_ready(TIMEOUT_S)
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
    client = training.engine._client
    client._config = dataclasses.replace(client._config, keeper_timeout_s=timeout_s)


def stored(directory):
    return sorted(entry.step for entry in open_store(str(directory)).inventory().entries)


@pytest.mark.parametrize("kind", ["bound", "interpreter", "user", "version"])
def test_a_training_without_memory_is_stored_and_told_and_resumes(kind, job, tmp_path, monkeypatch, caplog):
    with trouble(kind, job, tmp_path, monkeypatch) as (settings, word):
        training = start(job, tmp_path / "level", **settings)
        training.run(1, 8)
        facts = training.facts()

        assert [step for step, began in enumerate(training.began, 1) if began] == [4, 8]
        assert training.engine.wait(8, until="captured", timeout_s=0)
        assert training.engine.wait(8, until="durable", timeout_s=TIMEOUT_S)
        assert training.engine.close()
        assert stored(tmp_path / "level") == [4, 8]
        [warning, end] = (one for one in warnings(caplog, "NOT protected") if "still" not in one)
        assert end.startswith("8 steps of this training were NOT protected")
        assert f"{tmp_path / 'level'}: step 8" in end
        assert word in warning
        assert f"stored at {tmp_path / 'level'} every 4 steps" in warning
        for wrong in ("a new one is being started", "wait_ready", "what an earlier run left"):
            assert wrong not in caplog.text

        second = Training(dataclasses.replace(training.engine.config))
        job.trainings.append(second)
        assert second.engine.restore("latest").step == 8
        assert second.facts() == facts


def test_the_bytes_are_those_that_a_keeper_writes(job, tmp_path):
    odd = {
        "transposed": torch.arange(200_000, dtype=torch.float32).reshape(1000, 200).t(),
        "sliced": torch.arange(64.0).reshape(8, 8)[1::2, 2:5],
        "half": torch.linspace(-1, 1, 7).bfloat16(),
        "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
        "scalar": torch.tensor(3, dtype=torch.int16),
        "flags": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 3),
        "large": torch.arange(3 << 20, dtype=torch.int64),
    }
    odd["again"] = odd["large"]

    def shard(directory, **settings):
        training = Training(dataclasses.replace(job.config(str(directory)), **settings), odd=dict(odd))
        job.trainings.append(training)
        training.engine.wait_ready(TIMEOUT_S)
        training.train()
        until(lambda: training.engine.boundary(1, force=True) or training.engine.wait(1, timeout_s=1))
        assert training.engine.flush(TIMEOUT_S)
        is_direct = training.engine.statistics().direct.count > 0
        assert training.engine.close()
        [path] = pathlib.Path(directory).glob("step-*/*.safetensors")
        return is_direct, path.read_bytes()

    usual = shard(tmp_path / "usual")
    direct = shard(tmp_path / "direct", memory=MemoryLevel(max_bytes=1 << 16, linger_s=60))

    assert (usual[0], direct[0]) == (False, True)
    assert direct[1] == usual[1]


def test_captures_go_into_memory_again_when_a_keeper_can_be_started(job, tmp_path, monkeypatch, caplog):
    with no_interpreter(tmp_path, monkeypatch):
        training = start(job, tmp_path / "level", every=1, keeper_timeout_s=3)
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


def test_memory_is_asked_for_although_no_keeper_could_be_started_before_the_first_boundary(job, tmp_path, monkeypatch):
    """A plain loop without a ``with`` block: nothing asked for memory before the restart looked for a keeper."""
    training = Training(job.config(tmp_path / "level", keeper_timeout_s=0.5))
    job.trainings.append(training)
    with no_interpreter(tmp_path, monkeypatch):
        assert training.engine.restore("latest") is None
        until(lambda: training.engine.statistics().unprotected)
        training.run(1, 1)
    be_patient(training, TIMEOUT_S)

    last = train_until(training, lambda statistics: statistics.unprotected is None, 1)

    assert training.engine.wait(last, until="captured", timeout_s=TIMEOUT_S)
    assert training.engine.statistics().whole > 0


def test_a_keeper_that_dies_and_cannot_be_replaced_leaves_a_training_that_is_stored(job, tmp_path, monkeypatch, caplog):
    level = PersistentLevel(str(tmp_path / "level"), every_n_steps=3)
    training = Training(dataclasses.replace(job.config(), levels=(level,)))
    job.trainings.append(training)
    assert training.engine.wait_ready(TIMEOUT_S)
    training.run(1, 2)
    be_patient(training, 3)

    with no_interpreter(tmp_path, monkeypatch):
        os.kill(training.engine._client._connection.peer_pid, signal.SIGKILL)
        step = train_until(training, lambda statistics: statistics.direct.count, 2)
        facts = training.facts()
        assert training.engine.flush(TIMEOUT_S)
        job.crash(training)
        second = Training(dataclasses.replace(training.engine.config, keeper_timeout_s=3))
        job.trainings.append(second)

        assert second.engine.restore("latest").step == step
        assert second.facts() == facts
    assert len([one for one in warnings(caplog, "NOT protected in memory") if "still" not in one]) == 1


def test_memory_that_is_refused_at_first_is_asked_for_again(job, tmp_path, monkeypatch):
    """Something else on the machine had the memory."""
    training = start(job, tmp_path, every=1, memory=MemoryLevel(max_bytes=1 << 16, linger_s=60))
    client = training.engine._client
    training.run(1, 1)
    # As the keeper finds when another program ends: it is asked again by the same words.
    client._config = dataclasses.replace(client._config, memory=MemoryLevel(linger_s=60))
    connection = client._connection
    connection.sock.shutdown(socket.SHUT_RDWR)

    step = train_until(training, lambda statistics: statistics.unprotected is None, 1)

    assert training.engine.wait(step, until="captured", timeout_s=TIMEOUT_S)
    assert training.engine.close()


def test_a_level_that_fails_as_well_costs_snapshots_and_no_step(job, tmp_path, caplog):
    (tmp_path / "level").write_text("no directory")
    training = start(job, tmp_path / "level", every=1, memory=MemoryLevel(max_bytes=1 << 16))
    training.run(1, 4)

    statistics = training.engine.statistics()
    assert training.counters["seen"] == 32
    assert training.began == [False] * 4
    assert 1 <= sum(statistics.level_failures.values()) <= statistics.failed <= 4
    assert len(warnings(caplog, "is not persisted")) == 1
    assert not training.engine.flush(TIMEOUT_S)
    assert not training.engine.close()


def test_a_level_that_hangs_as_well_is_not_waited_for_at_every_step(job):
    with socket.socket() as listener:  # takes connections and never says a word
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        level = PersistentLevel(f"ftp://127.0.0.1:{listener.getsockname()[1]}/run", every_n_steps=1, timeout_s=1)
        config = dataclasses.replace(job.config(memory=MemoryLevel(max_bytes=1 << 16)), levels=(level,))
        training = Training(config)
        job.trainings.append(training)
        training.engine.wait_ready(TIMEOUT_S)
        training.run(1, 20)

        statistics = training.engine.statistics()
        assert training.counters["seen"] == 160
        assert 1 <= statistics.direct.count < 20
        assert statistics.skipped["storage failed just now"] > 0
        assert not training.engine.close()


def test_without_memory_or_levels_the_end_says_that_nothing_is_saved(job, caplog):
    training = job.start(ready=False, memory=MemoryLevel(max_bytes=1 << 16))
    training.engine.wait_ready(TIMEOUT_S)
    training.run(1, 3)

    assert training.began == [False] * 3
    assert not training.engine.close()

    [end] = warnings(caplog, "the last that was due, is not captured")
    assert "NOT protected in memory" in end
    assert "max_bytes" in end
    assert "wait_ready" not in end


def test_names_and_slower_levels_work_without_memory(job, tmp_path):
    fast = PersistentLevel(str(tmp_path / "fast"), every_n_steps=4, keep_last=1)
    slow = PersistentLevel(str(tmp_path / "slow"), every_n_steps=1000, keep_last=1)
    config = dataclasses.replace(job.config(memory=MemoryLevel(max_bytes=1 << 16)), levels=(fast, slow))
    training = Training(config)
    job.trainings.append(training)
    training.engine.wait_ready(TIMEOUT_S)
    training.run(1, 4)
    assert training.engine.keep("first") == 4  # just stored
    training.run(5, 5)
    assert training.engine.keep("second") == 6  # the next one, due or not
    training.run(6, 9)
    training.train()
    assert training.engine.boundary(10, force=True)

    assert training.engine.close()

    names = {entry.step: entry.names for entry in open_store(fast.url).inventory().entries}
    assert names == {4: ("first",), 6: ("second",), 10: ()}
    assert {entry.step for entry in open_store(slow.url).inventory().entries} == {4, 6, 10}


def test_a_source_that_changes_while_it_is_written_is_never_committed(job, tmp_path):
    """Another thread trains on meanwhile, beside all rules."""
    training = start(job, tmp_path, every=1, memory=MemoryLevel(max_bytes=1 << 16))
    is_over = threading.Event()

    def disturb():
        with torch.no_grad():
            while not is_over.is_set():
                training.model[0].weight.add_(1)

    thread = threading.Thread(target=disturb)
    thread.start()
    try:
        until(lambda: not training.engine.boundary(len(training.began) + 1) or training.began.append(True))
    finally:
        is_over.set()
        thread.join()
    dropped = len(training.began) + 1

    assert training.engine.statistics().failed == 1
    assert dropped not in stored(tmp_path)


def test_an_unprotected_training_is_reminded_rarely_but_again(job, caplog):
    now = 0.0
    told = Protection(job.config("/level"), Statistics(), clock=lambda: now)
    told.lost(KeeperUnavailable("no keeper"))
    times = []
    for now in range(2000):
        caplog.clear()
        told.remind()
        times += [now] * len(warnings(caplog, "still NOT protected"))

    assert times == [60, 660, 1260, 1860]  # after one minute and every ten, as docs/operations.md says
    told.regained()
    caplog.clear()
    told.remind()
    assert not caplog.records


@pytest.mark.parametrize(
    ("count", "available", "least", "says", "says_not"),
    [
        (3, 250, 2, "set MemoryLevel(slots=2), which fits", "not even"),
        (3, 150, 2, "2 slots, the least that protect a run, do not fit either", "set MemoryLevel"),
        (3, 50, 2, "not even one fits", "set MemoryLevel"),
        (3, 250, 3, "fewer would not protect this run", "set MemoryLevel"),
        (2, 150, 2, "fewer would not protect this run", "set MemoryLevel"),
    ],
)
def test_a_hint_names_what_fits_and_nothing_else(count, available, least, says, says_not):
    text = refusal(count, 100, available, least=least, is_bound=True)

    assert f"{count} slots of 100 bytes need {count * 100} bytes" in text
    assert f"MemoryLevel.max_bytes leaves {available}" in text
    assert says in text
    assert says_not not in text


# -------------------------------------------------------------------- required at the start


@pytest.mark.parametrize("way", ["prepare", "boundary"])
def test_memory_that_is_required_and_cannot_be_had_ends_the_training_at_its_start(way, job):
    training = job.start(ready=False, require="memory", memory=MemoryLevel(max_bytes=1 << 16))

    with pytest.raises(MemoryBoundExceeded, match=r'require="memory".*max_bytes'):
        training.engine.prepare() if way == "prepare" else training.engine.boundary(1)


def test_a_keeper_that_is_required_and_cannot_be_started_ends_the_training_at_its_start(job, tmp_path, monkeypatch):
    with no_interpreter(tmp_path, monkeypatch):
        training = job.start(ready=False, require="memory", keeper_timeout_s=3)
        with pytest.raises(KeeperUnavailable, match="ended with status 3"):
            training.engine.prepare()


def test_with_memory_required_the_first_boundary_is_captured(job):
    training = job.start(ready=False, require="memory")
    training.run(1, 2)

    assert training.began == [True, True]


def test_storage_that_is_required_and_does_not_answer_ends_the_training_at_its_start(job, tmp_path):
    (tmp_path / "file").write_text("no directory")
    training = job.start(tmp_path / "good", tmp_path / "file", ready=False, require="storage")

    with pytest.raises(LevelUnavailable, match=str(tmp_path / "file")):
        training.engine.prepare()

    good = job.start(tmp_path / "good", ready=False, require="storage")
    good.engine.prepare()
    assert not [path for path in (tmp_path / "good").rglob("*probe*")]


# -------------------------------------------------------------------- what the start says


def test_the_start_says_what_the_training_takes(job, tmp_path, caplog):
    caplog.set_level(logging.INFO, "lazysnap")
    training = job.start(tmp_path)
    training.run(1, 2)

    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("state ")]
    assert len(lines) == 1
    assert "3 slots = " in lines[0]
    assert f"snapshots at {tmp_path} every step" in lines[0]
    assert training.engine.flush(TIMEOUT_S)
    assert sum(f"{tmp_path}: a snapshot of " in record.getMessage() for record in caplog.records) == 1


def test_a_disk_that_does_not_hold_one_snapshot_is_told_at_the_start(job, caplog):
    if os.geteuid():
        pytest.skip("only root can mount a small disk")
    place = pathlib.Path(f"/dev/shm/lazysnap-small-{job.job_id}")
    place.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], check=False)
    if made.returncode:
        place.rmdir()
        pytest.skip("this container may not mount")
    try:
        training = job.start(place / "level", width=4096)
        training.run(1, 1)
        assert len(warnings(caplog, "not even one snapshot fits")) == 1
        training.engine.close(drain=False)
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)
        place.rmdir()
