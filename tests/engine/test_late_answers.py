"""A level that answers a restart after its deadline: nothing stays open for an answer that nobody waits for."""

import contextlib
import os
import threading

import pytest
from support.fault_plan import Act, FaultPlan, Hang
from support.faulty import FaultyStorage
from support.snapshots import Snapshot
from support.waiting import until

from lazysnap.config import PersistentLevel
from lazysnap.levels.store import open_storage
from lazysnap.restore import level as level_module
from lazysnap.restore.level import Level
from lazysnap.restore.sources import Failure, Sources
from lazysnap.shard.names import SnapshotName


def open_files(below):
    found = []
    for handle in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{handle}"))
    return [path for path in found if path.startswith(str(below))]


@pytest.mark.slow
def test_a_shard_that_is_opened_after_the_deadline_is_closed_again(tmp_path, monkeypatch):
    level = PersistentLevel(tmp_path, every_n_steps=1, timeout_s=3)
    storage = open_storage(level.url)
    entry = Snapshot(3).write(storage)
    plan = FaultPlan(Hang(1, operation="read_into"))
    slow = FaultyStorage(storage, plan)
    monkeypatch.setattr(level_module, "open_storage", lambda *_, **__: slow)

    with contextlib.ExitStack() as stack:
        try:
            sources = Sources(None, None, None, {entry.level: Level(level, 1)}, stack)
            failure = sources.open(entry)
            assert isinstance(failure, Failure)
            assert "did not move for 3 s" in failure.text
            assert plan.hanging.is_set()
            assert open_files(tmp_path)
        finally:
            plan.release()

        assert until(lambda: not open_files(tmp_path))


@pytest.mark.slow
def test_a_level_whose_directories_are_listed_one_by_one_may_take_longer_than_its_deadline(tmp_path, monkeypatch):
    """As long as each listing comes in time."""
    level = PersistentLevel(tmp_path, every_n_steps=1, timeout_s=2)
    storage = open_storage(level.url)
    for step in (1, 2, 3):
        Snapshot(step).write(storage)
    plan = FaultPlan(Act(1, operation="list", lasting=True, action=lambda: threading.Event().wait(0.7)))
    slow = FaultyStorage(storage, plan)
    monkeypatch.setattr(level_module, "open_storage", lambda *_, **__: slow)

    listing = Level(level, 1).begin_names(marked=False).result()

    assert [SnapshotName.parse(directory.name).step for directory in listing.directories] == [1, 2, 3]
    assert plan.operations.count("list") == 4
