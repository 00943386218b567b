"""Where memory does not suffice slots are files: they protect a training as memory does, and leave nothing behind."""

import contextlib
import dataclasses
import logging
import os
import signal

import pytest
from small_training import TIMEOUT_S, Training
from support.disks import fill, small_disk
from support.listing import files_below
from support.waiting import until

from lazysnap import MemoryLevel, PersistentLevel

MIB = 1 << 20


def tight(spill_dir=None):
    """Memory that holds no slot."""
    return MemoryLevel(max_bytes=1 << 16, linger_s=60, spill_dir=spill_dir)


def warnings(caplog, text):
    messages = (record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)
    return [message for message in messages if text in message]


def slots(training):
    return training.engine._client.slots()


@pytest.mark.slow
def test_a_training_without_memory_is_captured_into_files_and_resumes_from_them(job, tmp_path, caplog):
    caplog.set_level(logging.INFO, "lazysnap")
    # A level that stores nothing: what resumes is in the files.
    level = PersistentLevel(str(tmp_path / "level"), every_n_steps=1000)
    config = dataclasses.replace(job.config(memory=tight()), levels=(level,))
    training = Training(config)
    job.trainings.append(training)
    assert training.engine._wait_ready(TIMEOUT_S)
    training.run(1, 8)
    facts = training.facts()

    assert training.began == [True] * 8
    assert all(slot.is_file for slot in slots(training))
    assert training.engine.statistics().unprotected is None
    assert len(warnings(caplog, f"captures go into files in {tmp_path / 'level'}")) == 1
    assert f" in files in {tmp_path / 'level'} (3 copies); 65.5 kB of memory available" in caplog.text
    assert training.engine.wait(8, until="captured", timeout_s=TIMEOUT_S)
    job.crash(training)

    second = Training(config)
    job.trainings.append(second)
    snapshot = second.engine.restore("latest")
    assert (snapshot.step, snapshot.level) == (8, "memory")
    assert second.facts() == facts
    second.run(9, 9)
    assert second.engine.close()
    left = [path for path in files_below(tmp_path) if not path.match("step-*/*") and not path.match("events-*.jsonl")]
    assert left == []


@pytest.mark.slow
def test_files_outlive_the_keeper_as_memory_does(job, tmp_path):
    training = job.start(memory=tight(tmp_path))
    training.run(1, 3)
    keeper = training.engine._client.keeper_pid

    os.kill(keeper, signal.SIGKILL)
    until(lambda: training.engine.statistics().keepers_lost == 1)
    assert training.engine.wait(3, until="captured", timeout_s=TIMEOUT_S)
    assert training.engine._wait_ready(TIMEOUT_S)
    assert all(slot.is_file for slot in slots(training))
    training.run(4, 4)
    facts = training.facts()
    assert training.engine.wait(4, until="captured", timeout_s=TIMEOUT_S)
    job.crash(training)

    second = job.start(ready=False, memory=tight(tmp_path))
    assert second.engine.restore("latest").step == 4
    assert second.facts() == facts


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["none", "file", "memory", "small"])
def test_where_no_files_can_be_made_training_goes_on_and_says_why(kind, job, tmp_path, caplog):
    with small_disk(tmp_path / "small", 64 * MIB) if kind == "small" else contextlib.nullcontext(tmp_path) as disk:
        (disk / "file").write_text("no directory")
        places = {"none": "", "file": disk / "file", "memory": "/dev/shm", "small": disk}
        causes = {
            "none": "max_bytes",
            "file": "file cannot hold slots as files: Not a directory",
            "memory": "/dev/shm cannot hold slots as files: it is on no local disk",
            "small": "its disk has 0 (0 bytes) to spare",
        }
        training = job.start(tmp_path / "level", ready=False, memory=tight(places[kind]))
        assert not training.engine._wait_ready(TIMEOUT_S)
        training.run(1, 3)

        assert training.counters["seen"] == 24
        assert training.began == [False] * 3
        [warning] = (one for one in warnings(caplog, "NOT protected in memory: ") if "still" not in one)
        assert causes[kind] in warning
        assert "max_bytes" in warning


@pytest.mark.slow
def test_a_disk_that_fills_up_while_training_runs_costs_no_capture(job, tmp_path):
    with small_disk(tmp_path / "small", 320 * MIB) as disk:
        training = job.start(memory=tight(disk), width=4096)
        training.run(1, 2)
        assert all(slot.is_file for slot in slots(training))
        fill(disk)
        assert os.statvfs(disk).f_bavail == 0
        training.run(3, 12)
        os.sync()  # what was written into the slots found its blocks
        facts = training.facts()

        assert training.began == [True] * 12
        assert training.engine.wait(12, until="captured", timeout_s=TIMEOUT_S)
        job.crash(training)
        second = job.start(ready=False, width=4096, memory=tight(disk))
        assert second.engine.restore("latest").step == 12
        assert second.facts() == facts
