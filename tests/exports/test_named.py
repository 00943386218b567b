"""A directory of ``save_state``: whoever changes it waits for an export into it, and not for ever."""

import contextlib
import fcntl
import os
import pathlib
import resource
import signal
import subprocess
import sys
import threading

import pytest
from support.waiting import until

from lazysnap.errors import ConfigError, LevelError, WaitTimeout
from lazysnap.exports import named
from lazysnap.exports.named import Named, delete_checkpoint, filled, forget_name, name_snapshot, named_in

EXPORT = """
import os, pathlib, sys
from lazysnap.exports.named import filled, named_in
directory = sys.argv[1]
with filled(directory, named_in(directory)) as temp:
    os.mkdir(temp)
    for name in ("optimizer.bin", "model.safetensors"):
        pathlib.Path(temp, name).write_bytes(b"")
"""


@pytest.fixture
def directory(tmp_path):
    path = str(tmp_path / "named")
    name_snapshot(path, Named("/runs/a", "1f3a" * 4, 3))
    return path


@contextlib.contextmanager
def locked(directory):
    """Within the context another process exports into the directory, and hangs."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def test_a_full_disk_leaves_the_earlier_name_and_no_other_file(directory):
    earlier = named_in(directory)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))  # as a quota
    try:
        with pytest.raises(LevelError):
            name_snapshot(directory, Named("/runs/a", "1f3a" * 4, 4))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(directory) == ["lazysnap.json"]
    assert named_in(directory) == earlier


def test_an_export_does_not_wait_for_ever_for_another_one(directory, monkeypatch):
    monkeypatch.setattr(named, "_EXPORT_S", 0.1)

    with locked(directory), pytest.raises(WaitTimeout, match="another process exports into it"):
        filled(directory, named_in(directory)).__enter__()

    with filled(directory, named_in(directory)) as temp:
        os.mkdir(temp)


def test_a_training_that_writes_there_itself_does_not_wait_for_ever_for_an_export_which_moves_nothing_there(
    directory, monkeypatch
):
    monkeypatch.setattr(named, "_MOVES_S", 0.1)

    def export():
        with filled(directory, named_in(directory)) as temp:
            os.mkdir(temp)
            pathlib.Path(temp, "model.safetensors").write_bytes(b"")
            forget_name(directory)

    with pytest.raises(ConfigError, match="does not name step 3 any more"):
        export()

    assert os.listdir(directory) == []


def test_a_checkpoint_is_not_deleted_while_an_export_moves_files_into_it(directory):
    """Else those that are moved later would stay: a part of a checkpoint."""
    environment = {**os.environ, "LAZYSNAP_FAULT": "export.named.move:2:stop"}
    with subprocess.Popen([sys.executable, "-c", EXPORT, directory], env=environment) as process:
        try:
            _, status = os.waitpid(process.pid, os.WUNTRACED)
            assert os.WIFSTOPPED(status), "it ended before it came there"
            deletion = threading.Thread(target=delete_checkpoint, args=(directory,))
            deletion.start()
            until(lambda: named_in(directory) is None)
            process.send_signal(signal.SIGCONT)
            deletion.join()
            process.wait(60)
        finally:
            process.kill()
    assert process.returncode == 0
    assert not os.path.exists(directory)
