"""A directory of ``save_state``: whoever changes it waits for an export into it, and not for ever."""

import contextlib
import fcntl
import os
import pathlib

import pytest

from lazysnap.errors import ConfigError, WaitTimeout
from lazysnap.exports import named
from lazysnap.exports.named import Named, filled, forget_name, name_snapshot, named_in


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
