"""A storage as one job of a level uses it: once the watchdog gave up, the job changes nothing any more."""

import contextlib
import threading
from functools import partial

import pytest
from support.fault_plan import FaultPlan
from support.faulty import FaultyStorage
from support.place import PAGE, WAIT_S, everything, pattern, read_object, write_object
from support.snapshots import Snapshot, look

from lazysnap.levels.local import LocalStorage
from lazysnap.levels.source import map_anonymous
from lazysnap.levels.storage import Storage
from lazysnap.levels.watchdog import LevelHangs, Watchdog
from lazysnap.levels.watched import RateLimiter, WatchedStorage
from lazysnap.memory.capture_reader import CaptureAborted

STEP, PATH = "step-00000001", "step-00000001/object"
DATA = pattern(5000)
BLOCK = map_anonymous(PAGE)
NEW = "step-00000002/new"

OPERATIONS = {
    "create": lambda storage: partial(storage.create, NEW, PAGE),
    "write": lambda storage: partial(storage.create(NEW, PAGE).write, 0, BLOCK),
    "publish": lambda storage: storage.create(NEW, PAGE).publish,
    "put": lambda storage: partial(storage.put, NEW, b"small"),
    "link": lambda storage: partial(storage.link, PATH, NEW),
    "get": lambda storage: partial(storage.get, PATH),
    "reader": lambda storage: partial(storage.reader, PATH),
    "read_into": lambda storage: partial(storage.reader(PATH).read_into, 0, map_anonymous(PAGE)),
    "size": lambda storage: partial(storage.size, PATH),
    "stamp": lambda storage: partial(storage.stamp, PATH),
    "list": lambda storage: storage.list,
    "is_link": lambda storage: partial(storage.is_link, PATH),
    "is_stale": lambda storage: partial(storage.is_stale, PATH),
    "delete": lambda storage: partial(storage.delete, PATH),
    "delete_abandoned": lambda storage: partial(storage.delete_abandoned, PATH),
    "delete_directory": lambda storage: partial(storage.delete_directory, "empty"),
    "abort_stale": lambda storage: storage.abort_stale,
}
"""By name a function that prepares an operation, and returns it."""


@pytest.fixture
def local(tmp_path):
    storage = LocalStorage(str(tmp_path / "run"))
    write_object(storage, PATH, DATA)
    (tmp_path / "run" / "empty").mkdir()
    return storage


@contextlib.contextmanager
def left_behind(work, is_ready):
    """Within the context the watchdog of ``work(beat)`` has given up; afterwards ``work`` ends with CaptureAborted."""
    attempt = Watchdog(work, "a job", 0.01)
    assert is_ready.wait(WAIT_S)
    with pytest.raises(LevelHangs):
        attempt.result()
    yield
    assert attempt.wait(WAIT_S)
    with pytest.raises(CaptureAborted, match="came back after its deadline"):
        attempt.result()


def test_the_list_of_operations_is_complete():
    public = {name for name in vars(Storage) if not name.startswith("_")}
    data = {"url", "parallel_writes", "parallel_reads", "abandoned_after_s", "checks_writes"}
    operations = public - data - {"exists"}  # that one asks for the size
    assert operations == OPERATIONS.keys() - {"write", "publish", "read_into"}
    assert operations <= vars(WatchedStorage).keys()


@pytest.mark.parametrize("name", OPERATIONS)
def test_each_operation_is_one_of_the_storage_below_and_reports_progress(local, name):
    plan, beats = FaultPlan(), []
    operation = OPERATIONS[name](WatchedStorage(FaultyStorage(local, plan), lambda: beats.append(len(plan.operations))))
    num_before = len(plan.operations)
    beats.clear()

    operation()

    assert plan.operations[num_before:] == [name]
    is_block = name in ("write", "read_into")
    assert beats == [num_before, num_before + 1][: 1 + is_block], "of a block also when it is there"


@pytest.mark.parametrize("name", OPERATIONS)
def test_a_thread_that_was_left_behind_changes_nothing(local, name):
    plan, is_ready, may_return = FaultPlan(), threading.Event(), threading.Event()

    def work(beat):
        operation = OPERATIONS[name](WatchedStorage(FaultyStorage(local, plan), beat))
        is_ready.set()
        assert may_return.wait(WAIT_S)
        operation()

    with left_behind(work, is_ready):
        num_before, before = len(plan.operations), everything(local)
        may_return.set()

    assert len(plan.operations) == num_before
    assert everything(local) == before
    assert read_object(local, PATH) == DATA


def test_the_copy_of_a_part_is_progress_of_the_job(local):
    class Copies(LocalStorage):
        def link(self, path, new_path, beat):
            beat()
            return True

    beats = []
    storage = WatchedStorage(Copies(local.url), lambda: beats.append("job"))

    assert storage.link(PATH, NEW)
    assert beats == ["job", "job"]


def test_a_thread_that_was_left_behind_removes_what_it_began_to_write(local):
    before, is_ready, may_return = everything(local), threading.Event(), threading.Event()

    def work(beat):
        with contextlib.closing(WatchedStorage(local, beat).create(NEW, PAGE)) as writer:
            writer.write(0, BLOCK)
            is_ready.set()
            assert may_return.wait(WAIT_S)
            writer.publish()

    with left_behind(work, is_ready):
        may_return.set()

    assert [path for path in everything(local) if path != "step-00000002/"] == before


def test_what_the_next_job_wrote_is_left_alone_by_the_one_before(tmp_path, passing):
    """The first one hangs before its commit, and returns when the next one has written the same step."""
    store, is_ready, may_return = (
        LocalStorage(str(tmp_path / "run")),
        threading.Event(),
        threading.Event(),
    )

    def hang_once(name):
        if name == "level.store.commit" and not is_ready.is_set():
            is_ready.set()
            assert may_return.wait(WAIT_S)

    passing(hang_once)
    with left_behind(lambda beat: Snapshot(1).write(WatchedStorage(store, beat)), is_ready):
        Watchdog(lambda beat: Snapshot(1).write(WatchedStorage(store, beat)), "the next job", WAIT_S).result()
        before = everything(store)
        may_return.set()

    assert everything(store) == before
    assert look(store).steps() == [1]
    assert look(store).problems == ()


@pytest.mark.slow
def test_a_write_that_waits_for_its_rate_does_not_hang(tmp_path):
    store, pace = LocalStorage(str(tmp_path / "run")), RateLimiter(10_000)
    pace.wait_for(20_000, lambda: None)

    Watchdog(lambda beat: Snapshot(1).write(WatchedStorage(store, beat, pace)), "a job", 1.0).result()

    assert look(store).steps() == [1]


def test_a_write_that_waits_for_its_rate_ends_when_nobody_waits_for_it(tmp_path):
    store, pace, beats = LocalStorage(str(tmp_path / "run")), RateLimiter(1), []
    pace.wait_for(1_000_000, lambda: None)

    def beat():
        beats.append("beat")
        if len(beats) >= 4:  # reads the manifest, creates the file, begins to wait, waits
            raise CaptureAborted("nobody waits")

    with pytest.raises(CaptureAborted, match="nobody waits"):
        Snapshot(1).write(WatchedStorage(store, beat, pace))

    assert everything(store) == ["step-00000001-0000000000000000-1111111111111111/"]
