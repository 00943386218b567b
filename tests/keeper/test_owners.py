"""Which processes find the keeper of a job, and which do not get to it."""

import contextlib
import os
import pathlib
import shutil
import signal
import tempfile

import pytest
from keeper_jobs import Job
from support.waiting import stop, until

from lazysnap.config import SnapshotConfig
from lazysnap.errors import FormatError, KeeperError
from lazysnap.keeper.asking import NeighbourMemory
from lazysnap.keeper.client import KeeperClient
from lazysnap.keeper.identity import JobIdentity
from lazysnap.memory.slots import Slot, make_slot
from lazysnap.warm.directories import ENVIRONMENT

WAIT_S = 60.0


@pytest.fixture
def runtime(monkeypatch):
    """A runtime directory of this test, which is not made yet."""
    with tempfile.TemporaryDirectory(prefix="lazysnap-", dir="/tmp") as directory:
        path = pathlib.Path(directory, "runtime")
        monkeypatch.setenv(ENVIRONMENT, str(path))
        yield path


@pytest.mark.slow
def test_who_reads_memory_can_neither_write_it_nor_change_its_size(job):
    trainer = job.trainer()
    trainer.capture(step=1)

    with contextlib.closing(NeighbourMemory(job.identity, 0, WAIT_S)) as memory:
        [entry] = memory.inventory.entries
        entry.slot.read(0, 10)[0] ^= 1
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.pwrite(entry.slot.descriptor, b"x", 0)
        with pytest.raises(OSError, match="Invalid argument"):
            os.ftruncate(entry.slot.descriptor, 0)
        del entry
    assert [found[2] for found in trainer.inventory()] == [True]


def test_memory_whose_size_its_sender_could_change_is_not_mapped():
    """Else whoever reads it could be killed by who makes it smaller."""
    with contextlib.closing(make_slot(4096, 4096)) as slot:
        with pytest.raises(PermissionError):
            os.ftruncate(slot.descriptor, 0)
        copy = os.memfd_create("copy")
        os.pwrite(copy, os.pread(slot.descriptor, slot.size_bytes, 0), 0)
        with pytest.raises(FormatError, match="size"):
            Slot.attach(copy)


@pytest.mark.parametrize("kind", ["mode", "link", "file", "other user", "too long"])
def test_a_runtime_directory_that_others_could_change_is_refused_and_the_way_out_is_named(runtime, monkeypatch, kind):
    if kind == "mode":
        runtime.mkdir(mode=0o755)
    elif kind == "link":
        elsewhere = runtime.with_name("elsewhere")
        elsewhere.mkdir(mode=0o700)
        runtime.symlink_to(elsewhere)
    elif kind == "file":
        runtime.touch()
    elif kind == "other user":
        if os.geteuid():
            pytest.skip("only root can make a directory of another user")
        runtime.mkdir(mode=0o700)
        os.chown(runtime, 65534, -1)
    else:
        monkeypatch.setenv(ENVIRONMENT, f"{runtime}/{'x' * 90}")
    client = KeeperClient(JobIdentity.from_config(SnapshotConfig(job_id="a")), 0, linger_s=1.0, io_timeout_s=20.0)

    with pytest.raises(KeeperError, match=f"set {ENVIRONMENT} to a directory"):
        client.connect(20.0)


@pytest.mark.slow
def test_no_other_user_can_enter_the_runtime_directory_or_open_the_socket(runtime, tmp_path):
    job = Job(str(tmp_path / "a"), tmp_path)
    try:
        job.trainer()
        assert runtime.stat().st_mode & 0o777 == 0o700
    finally:
        job.close()


@pytest.mark.slow
def test_a_start_with_another_home_or_directory_for_temporary_files_finds_the_same_keeper(monkeypatch, tmp_path):
    monkeypatch.delenv(ENVIRONMENT)
    names = ("HOME", "TMPDIR", "XDG_STATE_HOME", "XDG_RUNTIME_DIR")
    elsewhere = {name: str(tmp_path / name) for name in names}
    job = Job(str(tmp_path / "a"), tmp_path)
    try:
        first = job.trainer()
        first.capture(step=1)
        keeper = job.keeper_pid()
        second = job.start(environment=elsewhere)
        assert second.connect()["error"] == "JobBusy"
        first.kill()

        third = job.trainer(environment=elsewhere)

        assert job.keeper_pid() == keeper
        assert [found[2] for found in third.inventory()] == [True]
    finally:
        job.close()


@pytest.mark.slow
def test_the_files_of_a_killed_keeper_are_taken_over_and_the_last_keeper_leaves_none(runtime, tmp_path):
    job = Job(str(tmp_path / "a"), tmp_path)
    try:
        first = job.trainer()
        keeper = job.keeper_pid()
        stop(first.process.pid)  # it cannot start the next keeper
        os.kill(keeper, signal.SIGKILL)
        second = job.trainer()
        assert job.keeper_pid() != keeper
        first.kill()
        assert second.goodbye()
        assert until(job.is_gone)
        assert list(runtime.iterdir()) == []
    finally:
        job.close()


@pytest.mark.slow
def test_a_keeper_whose_files_were_deleted_leaves_those_of_the_next_keeper_alone(runtime, tmp_path):
    job = Job(str(tmp_path / "a"), tmp_path)
    try:
        first = job.trainer()
        first.capture(step=1)
        keeper = job.keeper_pid()
        shutil.rmtree(runtime)
        second = job.trainer()
        successor = job.keeper_pid()
        assert second.inventory() == []
        assert first.capture(step=2)
        assert first.goodbye()
        assert until(lambda: not pathlib.Path(f"/proc/{keeper}").exists())
        assert job.keeper_pid() == successor != keeper
    finally:
        job.close()
