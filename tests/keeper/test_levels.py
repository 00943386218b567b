"""Several levels behind real slots: each at its own pace, none held up by another, what fails comes back by itself."""

import contextlib
import logging
import pathlib
import threading

import pytest
from support.catalogue import inventory_of
from support.damage import flip
from support.listing import files_below
from support.node_rig import STARTS, check, check_entry, entries_at, frozen_slot, names_at, steps_at
from support.waiting import until

from lazysnap import faults
from lazysnap.config import PersistentLevel
from lazysnap.events import LevelFailed, NameFailed, Stored
from lazysnap.keeper import node_storage
from lazysnap.levels import open_store
from lazysnap.levels.storage import Storage
from lazysnap.memory.arena import SlotPhase

SIZE = 300_000
DEADLINE_S = 2.0
"""Of a level where something hangs: what does not hang moves within it, also on a busy disk."""


@pytest.fixture
def inject(monkeypatch):
    """Arm a fault point in this process, as LAZYSNAP_FAULT does at its start."""

    def arm(spec):
        monkeypatch.setattr(faults, "_ARMED", True)
        monkeypatch.setattr(faults, "_SPEC", spec)
        monkeypatch.setattr(faults, "_counts", {})

    return arm


def test_each_level_has_its_own_pace(rig, tmp_path):
    fast = PersistentLevel(tmp_path / "fast", every_n_steps=1, keep_last=9)
    slow = PersistentLevel(tmp_path / "slow", every_n_steps=4, keep_last=9)
    trainer = rig(fast, slow)

    for step in (2, 4, 6, 8, 10):
        assert trainer.store(fast) == step
        if step in (2, 4, 8):
            trainer.wait(slow, step)

    assert steps_at(fast) == [2, 4, 6, 8, 10]
    assert steps_at(slow) == [2, 4, 8]
    check(slow, 4)


@pytest.mark.slow
def test_a_level_that_refuses_is_stood_in_for_and_comes_back(rig, tmp_path):
    (tmp_path / "first").write_text("in the way")
    first, second = (PersistentLevel(tmp_path / name, every_n_steps=1) for name in ("first", "second"))
    trainer = rig(first, second)

    assert trainer.train() == 2
    assert until(lambda: trainer.failed(first) == [2])
    assert trainer.store(second) == 4
    check(second, 4)

    (tmp_path / "first").unlink()
    trainer.train_until(lambda: trainer.complete(first))
    newest = trainer.store()
    check(first, newest)
    check(second, newest)
    assert trainer.failed() == [2]
    assert until(lambda: not trainer.is_pinned())


@pytest.mark.slow
def test_when_no_level_works_no_slot_is_held_and_all_come_back(rig, tmp_path):
    (tmp_path / "a").write_text("in the way")
    levels = [PersistentLevel(tmp_path / "a" / name, every_n_steps=1) for name in "xy"]
    trainer = rig(*levels)

    trainer.train_until(lambda: trainer.failed(levels[0]) and trainer.failed(levels[1]))
    assert until(lambda: not trainer.is_pinned())
    for step in range(trainer.step + 1, trainer.step + 9):
        trainer.capture(step)

    (tmp_path / "a").unlink()
    trainer.train_until(lambda: all(map(trainer.complete, levels)))
    newest = trainer.store()
    for level in levels:
        check(level, newest)


def test_a_slow_level_takes_the_newest_and_leaves_out_what_it_did_not_begin(rig, tmp_path, passing):
    fast = PersistentLevel(tmp_path / "fast", every_n_steps=1, keep_last=1)
    slow = PersistentLevel(tmp_path / "slow", every_n_steps=1, keep_last=99)
    trainer, is_copying, goes_on = rig(fast, slow), threading.Event(), threading.Event()
    assert trainer.store() == 2

    def copy(name):
        if name == "keeper.persist.copy":
            is_copying.set()
            goes_on.wait(60)

    passing(copy)
    assert trainer.store(fast) == 4
    assert is_copying.wait(60)
    for _ in range(7):
        newest = trainer.store(fast)
    goes_on.set()
    trainer.wait(slow, newest)

    assert trainer.complete(slow) == steps_at(slow) == [2, 4, newest]
    assert len(trainer.complete(fast)) == 9
    assert until(lambda: steps_at(fast) == [newest])


@pytest.mark.slow
def test_what_retention_asks_for_is_never_left_out(rig, tmp_path):
    fast = PersistentLevel(tmp_path / "fast", every_n_steps=1, keep_last=1)
    slow = PersistentLevel(
        tmp_path / "slow", every_n_steps=1, keep_last=1, keep_every_n_steps=4, max_bytes_per_s=600_000
    )
    trainer = rig(fast, slow)

    for _ in range(7):
        newest = trainer.store(fast)
    trainer.wait(slow, newest)

    assert newest == 14
    assert until(lambda: steps_at(slow) == [4, 8, 12, 14])
    check(slow, 4)
    assert until(lambda: steps_at(fast) == [14])  # what had still to be copied went after it was copied


@pytest.mark.slow
def test_a_capture_with_a_name_reaches_every_level_and_stays(rig, tmp_path):
    fast = PersistentLevel(tmp_path / "fast", every_n_steps=1, keep_last=1)
    slow = PersistentLevel(tmp_path / "slow", every_n_steps=100, keep_last=2)
    trainer = rig(fast, slow)
    assert trainer.store() == 2
    trainer.capture(3, must=True)

    trainer.storages[0].keep("before-anneal", 3)
    trainer.wait(fast, 3)
    trainer.wait(slow, 3)
    for _ in range(2):
        newest = trainer.store(fast)

    assert until(lambda: names_at(fast) == {3: ("before-anneal",), newest: ()})
    assert until(lambda: names_at(slow) == {2: (), 3: ("before-anneal",)})

    trainer.storages[0].release("before-anneal")
    newest = trainer.store(fast)
    assert until(lambda: steps_at(fast) == [newest])
    assert until(lambda: names_at(slow) == {2: (), 3: ()})


@pytest.fixture
def naming_fails(passing):
    """``naming_fails(count)``: the first so many names cannot be written."""

    def fail(count):
        left = [None] * count

        def work(name):
            if name == "level.local.create" and "naming" in threading.current_thread().name and left:
                left.pop()
                raise OSError("injected")

        passing(work)

    return fail


@pytest.mark.slow
def test_a_name_that_a_level_did_not_take_is_given_when_the_next_snapshot_is_there_and_told_once(
    rig, tmp_path, naming_fails
):
    level = PersistentLevel(tmp_path, every_n_steps=1, keep_last=9)
    naming_fails(3)
    trainer = rig(level)
    assert trainer.store() == 2

    trainer.storages[0].keep("first", 2)
    until(lambda: trainer.told(NameFailed))
    trainer.train_until(lambda: names_at(level)[2] == ("first",))

    assert [event.name for event in trainer.told(NameFailed)] == ["first"]
    assert not trainer.told(LevelFailed)


@pytest.mark.slow
def test_a_name_that_failed_once_is_given_without_another_snapshot(rig, tmp_path, naming_fails):
    """It may be the last of the training."""
    level = PersistentLevel(tmp_path, every_n_steps=1, keep_last=9)
    naming_fails(1)
    trainer = rig(level)
    assert trainer.store() == 2

    trainer.storages[0].keep("last", 2)
    until(lambda: trainer.told(NameFailed))
    until(lambda: trainer.storages[0].is_idle())

    assert names_at(level)[2] == ("last",)


def test_a_name_that_can_never_be_given_costs_the_level_nothing(rig, tmp_path):
    level = PersistentLevel(tmp_path, every_n_steps=1, keep_last=9)
    trainer = rig(level)
    assert trainer.store() == 2
    of_others = trainer.directory(level, 2) / "keep-mine"
    of_others.write_text("not ours")

    trainer.storages[0].keep("mine", 2)
    until(lambda: trainer.told(NameFailed))
    trainer.storages[0].keep("other", 2)
    until(lambda: "other" in names_at(level)[2])
    assert trainer.store() == 4

    assert [event.name for event in trainer.told(NameFailed)] == ["mine"]
    assert of_others.read_text() == "not ours"
    assert not trainer.told(LevelFailed)


def test_a_name_that_is_taken_away_before_it_was_given_is_not_given_later(rig, tmp_path, naming_fails):
    level = PersistentLevel(tmp_path, every_n_steps=1, keep_last=9)
    naming_fails(1)
    trainer = rig(level)
    assert trainer.store() == 2
    trainer.storages[0].keep("first", 2)
    until(lambda: trainer.told(NameFailed))

    trainer.storages[0].release("first")
    trainer.storages[0].keep("last", 2)
    trainer.store()

    until(lambda: trainer.storages[0].is_idle())
    assert names_at(level)[2] == ("last",)


def test_a_slow_level_that_comes_to_a_named_snapshot_after_newer_ones_does_not_delete_it(rig, tmp_path):
    fast = PersistentLevel(tmp_path / "fast", every_n_steps=1)
    slow = PersistentLevel(tmp_path / "slow", every_n_steps=6, keep_last=1)
    trainer = rig(fast, slow)
    trainer.store()
    trainer.store(fast)
    assert trainer.store() == 6

    trainer.storages[0].keep("kept", 4)  # it is at the fast level alone
    trainer.wait(slow, 4)

    assert until(lambda: names_at(slow) == {4: ("kept",), 6: ()})
    assert until(lambda: names_at(fast) == {4: ("kept",), 6: ()})
    check(slow, 4)


@pytest.fixture
def stalling(passing):
    """``stalling(directory, points)``: operations at that level that pass such a fault point wait until ``set``."""

    def make(directory, points="level."):
        let_go = threading.Event()
        is_there = f"/{directory}: "
        passing(
            lambda name: name.startswith(points) and is_there in threading.current_thread().name and let_go.wait(60)
        )
        made.append(let_go)
        return let_go

    made = []
    yield make
    for let_go in made:
        let_go.set()


def test_frozen_tensors_are_written_once_at_every_level(rig, tmp_path):
    levels = [PersistentLevel(tmp_path / name, every_n_steps=1, keep_last=1) for name in ("a", "b")]
    slot, reference = frozen_slot()
    trainer = rig(*levels, frozen={reference.digest: slot})

    for _ in range(3):
        trainer.store(frozen=reference)

    for level in levels:
        images = files_below(level.url, "frozen-*/*.safetensors")
        assert [path.stat().st_size for path in images] == [reference.size_bytes]
        store = open_store(level.url)
        (image,) = inventory_of(store).frozen
        assert store.verify(store.place(image)).checksums.whole == reference.digest
        assert until(lambda store=store: [e.frozen for e in inventory_of(store).entries] == [reference.digest])


def test_frozen_tensors_are_written_before_the_first_snapshot_that_needs_them(rig, tmp_path, passing):
    level = PersistentLevel(tmp_path / "a", every_n_steps=1)
    slot, reference = frozen_slot()
    seen = []

    def look(name):
        if name == "level.store.commit":
            seen.append([path.parent.name[:6] for path in files_below(tmp_path / "a", "*.json")])

    passing(look)
    trainer = rig(level, frozen={reference.digest: slot})
    trainer.store(frozen=reference)

    assert seen == [[], ["frozen"]]


def test_frozen_tensors_that_left_memory_are_copied_from_the_faster_level(rig, tmp_path, passing):
    first, second = (PersistentLevel(tmp_path / name, every_n_steps=1) for name in "ab")
    slot, reference = frozen_slot()
    held = {reference.digest: slot}
    trainer, is_clear = rig(first, second, frozen=held), threading.Event()
    passing(lambda name: name != "keeper.persist.copy" or is_clear.wait(60))
    trainer.store(first, frozen=reference)
    held.clear()
    is_clear.set()

    newest = trainer.store(frozen=reference)

    check(second, newest)
    assert [image.digest for image in inventory_of(open_store(second.url)).frozen] == [reference.digest]


def test_bytes_that_are_not_what_their_digest_says_never_get_to_storage(rig, tmp_path):
    level = PersistentLevel(tmp_path / "a", every_n_steps=1)
    slot, reference = frozen_slot()
    slot.image[reference.size_bytes - 1] ^= 1
    trainer = rig(level, frozen={reference.digest: slot})

    step = trainer.train(frozen=reference)

    assert until(lambda: trainer.failed() == [step])
    assert files_below(level.url, "*.json") == []


@pytest.mark.slow
def test_a_level_with_a_bound_is_written_no_faster(rig, tmp_path):
    level = PersistentLevel(tmp_path / "a", every_n_steps=1, max_bytes_per_s=1_000_000)
    trainer = rig(level)

    for _ in range(3):
        trainer.store()

    durable = [event.seconds for event in trainer.told(Stored)]
    # A lower bound is safe to assert: the second and third wait for the bytes before them.
    assert sum(durable) >= 2 * SIZE / 1_000_000 * 0.9


@pytest.fixture
def damaging(passing):
    """Damages a step at a level once, at a fault point: by default between its commit and its being read back."""

    def arm(trainer, level, step, point="keeper.persist.committed"):
        done = threading.Event()

        def work(name):
            path = trainer.directory(level, step) / "node-00000-of-00001.safetensors"
            if name == point and path.exists() and not done.is_set():
                flip(path)
                done.set()

        passing(work)
        return done

    return arm


@pytest.mark.slow
def test_a_snapshot_that_is_read_back_damaged_does_not_count_and_nothing_older_is_deleted_for_it(
    rig, tmp_path, damaging
):
    level = PersistentLevel(tmp_path / "a", every_n_steps=1, keep_last=1)
    trainer = rig(level)
    trainer.store()
    is_damaged = damaging(trainer, level, 4)
    assert trainer.train() == 4
    assert is_damaged.wait(60)
    assert until(lambda: trainer.failed() == [4])

    assert until(lambda: steps_at(level) == [2])
    check(level, 2)
    assert trainer.store() == 6
    assert trainer.complete(level) == [2, 6]
    assert until(lambda: steps_at(level) == [6])
    assert trainer.failed() == [4]


def test_a_snapshot_that_was_read_back_damaged_counts_once_a_second_try_made_it_whole(rig, tmp_path, damaging):
    level = PersistentLevel(tmp_path / "a", every_n_steps=1, keep_last=1)
    trainer = rig(level)
    damaging(trainer, level, 2)
    trainer.train()
    assert until(lambda: trainer.failed() == [2])
    assert trainer.complete(level) == []

    assert until(lambda: is_stored(trainer, 2))
    assert trainer.complete(level) == [2]
    check(level, 2)


def is_stored(trainer, step):
    """Ask for it once."""
    wait = trainer.storages[0].wait_for(step)
    return until(lambda: (wait.result(),) if wait.result() is not None else ())[0]


@pytest.mark.slow
def test_while_one_level_damages_what_it_stores_the_next_one_stores_from_memory(rig, tmp_path, damaging):
    fast, slow = levels = [PersistentLevel(tmp_path / name, every_n_steps=1, keep_last=9) for name in ("fast", "slow")]
    trainer = rig(*levels)
    damaging(trainer, fast, 2)
    trainer.train()
    assert until(lambda: trainer.failed(fast) == [2])

    trainer.train_until(lambda: trainer.complete(slow))
    trainer.train_until(lambda: trainer.complete(fast))
    newest = trainer.store()

    assert trainer.failed(slow) == []
    for level in levels:
        assert 2 not in steps_at(level)
        check(level, newest)


def test_what_is_damaged_at_a_faster_level_is_copied_to_no_slower_one(rig, tmp_path, damaging):
    fast, slow = levels = [PersistentLevel(tmp_path / name, every_n_steps=1, keep_last=9) for name in ("fast", "slow")]
    trainer = rig(*levels)
    is_damaged = damaging(trainer, fast, 2, "keeper.persist.copy")
    assert trainer.store(fast) == 2
    assert is_damaged.wait(60)

    assert trainer.store() == 4
    assert trainer.complete(slow) == steps_at(slow) == [4]
    assert trainer.failed(slow) == [], "the level itself is well"


@pytest.mark.slow
@pytest.mark.parametrize("place", ["level.local.create", "level.local.sync", "level.store.commit"])
def test_a_level_that_hangs_costs_its_own_snapshot_alone_and_comes_back(rig, tmp_path, inject, place):
    first = PersistentLevel(tmp_path / "a", every_n_steps=1, timeout_s=DEADLINE_S)
    second = PersistentLevel(tmp_path / "b", every_n_steps=1)
    inject(f"{place}:1:hang")
    trainer = rig(first, second)

    assert trainer.train() == 2
    assert until(lambda: trainer.failed() == [2])
    assert "did not move" in trainer.told(LevelFailed, first)[0].text
    assert steps_at(first) == []
    trainer.train_until(lambda: trainer.complete(second))
    trainer.train_until(lambda: trainer.complete(first))
    newest = trainer.store()

    for level in (first, second):
        assert 2 not in steps_at(level)
        check(level, newest)
    assert trainer.failed() == [2]
    assert until(lambda: not trainer.is_pinned())


@pytest.mark.slow
def test_a_slot_that_a_hanging_level_reads_is_given_back_long_before_its_deadline(rig, tmp_path, hanging):
    level = PersistentLevel(tmp_path / "a", every_n_steps=1, timeout_s=600)
    hung = hanging("level.local.write", 1)
    trainer = rig(level)
    assert trainer.train() == 2
    assert until(lambda: hung.threads)

    assert until(lambda: not trainer.is_pinned())
    assert trainer.failed() == []
    for step in range(3, 12):
        trainer.capture(step)
    hung.end()
    trainer.train_until(lambda: trainer.complete(level))
    for step in steps_at(level):  # step 2 as well, if all of it had been read
        check(level, step)


@pytest.mark.slow
def test_a_slow_level_that_hangs_holds_up_no_faster_one(rig, tmp_path, inject):
    first = PersistentLevel(tmp_path / "a", every_n_steps=1)
    second = PersistentLevel(tmp_path / "b", every_n_steps=1, timeout_s=DEADLINE_S)
    inject("keeper.persist.copy:1:hang")
    trainer = rig(first, second)

    for _ in range(3):
        trainer.store(first)
    assert until(lambda: trainer.failed(second) == [2])

    trainer.train_until(lambda: trainer.complete(second))
    assert trainer.failed() == [2]


@pytest.fixture
def hanging(passing):
    """``hanging(place, nth)``: the thread that passes there for the n-th time stands still until ``back.set()``."""

    class Hanging:
        def __init__(self, place, nth):
            self.back, self.threads, self.passed = threading.Event(), [], 0
            self.place, self.nth = place, nth
            passing(self.work)

        def work(self, name):
            if name == self.place and not self.threads:
                self.passed += 1
                if self.passed == self.nth:
                    self.threads.append(threading.current_thread())
                    assert self.back.wait(60)

        def end(self):
            self.back.set()
            self.threads[0].join(20)
            assert not self.threads[0].is_alive()

    return Hanging


def temporary_files(level):
    return [path for path in files_below(level.url, ".*.tmp-*") if path.parent != pathlib.Path(level.url)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "nth"),
    [("level.local.write", 1), ("level.local.renamed", 1), ("level.store.commit", 1), ("level.local.renamed", 2)],
    ids=lambda value: {1: "its file", 2: "its manifest"}.get(value),
)
def test_a_capture_whose_slot_was_reused_while_its_level_hung_is_never_committed(rig, tmp_path, hanging, place, nth):
    """What hung comes back when the slot holds other bytes, and its grant was cancelled: nothing of it may stay.

    If it is the manifest, it may become visible: that of a whole snapshot.
    """
    level = PersistentLevel(tmp_path / "a", every_n_steps=1, timeout_s=DEADLINE_S, keep_last=9)
    hung = hanging(place, nth)
    trainer = rig(level)
    assert trainer.train() == 2
    assert until(lambda: trainer.failed() == [2])
    stored = [trainer.store() for _ in range(4)]

    hung.end()

    for entry in entries_at(level):
        with contextlib.suppress(FileNotFoundError):  # the late one may just be going
            check_entry(level, entry)
    if nth == 2:
        stored.append(trainer.store())
    assert until(lambda: steps_at(level) == stored)
    assert trainer.complete(level) == stored
    assert until(lambda: not temporary_files(level))
    for step in stored:
        check(level, step)


@pytest.mark.slow
def test_an_error_in_what_a_level_does_costs_it_one_snapshot_and_does_not_end_it(rig, tmp_path, passing):
    level, raised = PersistentLevel(tmp_path / "a", every_n_steps=1), []

    def work(name):
        if name == "keeper.persist.committed" and not raised:
            raised.append(True)
            raise RuntimeError("injected")

    passing(work)
    trainer = rig(level)
    trainer.train_until(lambda: trainer.complete(level))

    assert raised
    assert trainer.failed() == [2]
    assert until(lambda: 2 not in steps_at(level))


@pytest.mark.slow
def test_a_level_where_three_threads_hang_is_left_alone_until_one_returns(rig, tmp_path, passing, caplog):
    level = PersistentLevel(tmp_path / "a", every_n_steps=1, timeout_s=DEADLINE_S)
    hanging, may_return, is_stuck = [], [threading.Event() for _ in range(3)], threading.Event()
    is_stuck.set()

    def work(name):
        if name == "level.local.write" and is_stuck.is_set():
            hanging.append(threading.current_thread())
            may_return[len(hanging) - 1].wait(60)

    passing(work)
    caplog.set_level(logging.INFO, "lazysnap")
    trainer = rig(level)
    assert trainer.train() == 2
    assert until(lambda: "3 earlier operations still hang there" in caplog.text)

    assert [event.step for event in trainer.told(LevelFailed)] == [2]
    assert len(hanging) == 3

    is_stuck.clear()
    may_return[1].set()
    hanging[1].join(20)
    trainer.train_until(lambda: trainer.complete(level))

    check(level, trainer.complete(level)[-1])
    for event in may_return:
        event.set()


def bytes_read():
    """By this process so far."""
    lines = pathlib.Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("rchar")).split()[1])


def test_a_keeper_that_takes_a_dead_ones_place_counts_what_is_there_and_reads_no_file(rig, tmp_path):
    """Manifests and sizes say enough. A file that is cut off does not count."""
    level = PersistentLevel(tmp_path / "a", every_n_steps=1, keep_last=9)
    trainer = rig(level)
    assert [trainer.store() for _ in range(4)] == [2, 4, 6, 8]
    cut = trainer.directory(level, 4) / "node-00000-of-00001.safetensors"
    with cut.open("r+b") as file:
        file.truncate(SIZE // 2)
    before = bytes_read()

    trainer.replace()

    assert until(lambda: trainer.complete(level) == [2, 6, 8])
    assert bytes_read() - before < SIZE
    assert trainer.store() == 10
    assert until(lambda: steps_at(level) == [2, 6, 8, 10])
    check(level, 2)


def test_a_level_that_does_not_answer_a_new_keeper_holds_up_no_other_one(rig, tmp_path, stalling, monkeypatch):
    monkeypatch.setattr(Storage, "abandoned_after_s", -3600.0)
    fast, slow = (PersistentLevel(tmp_path / name, every_n_steps=1, keep_last=1) for name in ("fast", "slow"))
    trainer = rig(fast, slow)
    assert trainer.store() == 2
    let_go = stalling("slow", "level.store.sweep")
    half = trainer.directory(slow, 99) / "node-00000-of-00001.safetensors"
    half.parent.mkdir()
    half.write_bytes(b"half")  # it is removed before a level is listed

    trainer.replace()
    trainer.train_until(lambda: len(trainer.complete(fast)) > 2)

    assert half.exists()
    assert trainer.complete(slow) == []
    let_go.set()
    assert until(lambda: 2 in trainer.complete(slow)), "what was there before counts"
    assert not half.exists()


@pytest.mark.slow
def test_threads_that_hang_at_a_level_count_for_the_next_start_too(rig, tmp_path, stalling):
    """Else every restart would leave three more behind."""
    level = PersistentLevel(tmp_path / "a", every_n_steps=1, timeout_s=0.5)
    let_go, trainer = stalling("a", "level.local.write"), rig(level)

    def hanging():
        return [thread for thread in threading.enumerate() if f"{level.url}: " in thread.name]

    for start in STARTS[1:5]:
        trainer.train_until(lambda: len(trainer.failed()) > 0)
        trainer.begin(start, follows=True)
    trainer.train_until(lambda: trainer.failed())

    assert len(hanging()) == 3
    let_go.set()
    trainer.train_until(lambda: trainer.complete(level))


def test_a_keeper_that_takes_a_dead_ones_place_answers_for_what_it_did_not_store(rig, tmp_path):
    level = PersistentLevel(tmp_path / "a", every_n_steps=100)
    trainer = rig(level)
    trainer.capture(1)
    trainer.replace()

    wait = trainer.storages[0].wait_for(1)

    assert until(lambda: wait.result() is not None)
    assert wait.result()
    check(level, 1)


@pytest.mark.parametrize("is_gone", [False, True])
def test_whoever_waits_for_a_step_is_answered_also_when_a_level_fails(rig, tmp_path, is_gone):
    """While trainers live, and when they said goodbye."""
    (tmp_path / "first").write_text("in the way")
    first, second = (PersistentLevel(tmp_path / name, every_n_steps=100) for name in ("first", "second"))
    trainer = rig(first, second)
    trainer.capture(3)
    trainer.ranks[0].is_gone = is_gone
    trainer.look()

    wait = trainer.storages[0].wait_for(3)

    assert until(lambda: wait.result() is not None)
    assert wait.result() is False
    check(second, 3)


def test_a_wait_for_a_step_that_memory_has_no_more_is_answered(rig, tmp_path):
    level = PersistentLevel(tmp_path / "a", every_n_steps=100)
    trainer = rig(level)
    for step in range(1, 6):
        trainer.capture(step)

    wait = trainer.storages[0].wait_for(1)

    assert until(lambda: wait.result() is False)


def test_a_torn_capture_that_was_granted_costs_no_later_one(rig, tmp_path):
    level = PersistentLevel(tmp_path / "a", every_n_steps=1)
    trainer = rig(level)
    assert until(lambda: trainer.granted == 2)
    slot = trainer.ranks[0].begin(2, trainer.run_id)
    trainer.step = 2
    trainer.look()
    slot.discard()
    trainer.look()

    trainer.train_until(lambda: trainer.complete(level))
    assert trainer.failed() == []
    assert 2 not in steps_at(level)


def test_what_an_earlier_start_stored_says_nothing_about_this_ones_steps(rig, tmp_path):
    level = PersistentLevel(tmp_path / "a", every_n_steps=1)
    trainer = rig(level)
    assert trainer.store() == 2

    trainer.begin(STARTS[1], stored={level.url: [(STARTS[0], 2)]})
    wait = trainer.storages[0].wait_for(2)
    assert trainer.complete(level) == []
    assert trainer.store() == 2

    assert until(wait.result)
    assert trainer.complete(level) == [2]


@pytest.mark.slow
def test_an_error_while_memory_rests_costs_one_try_and_not_all_later_ones(rig, tmp_path, passing, monkeypatch):
    monkeypatch.setattr(node_storage, "_AFTER_ERROR_S", 0.05)
    failed = []

    def fail_once(name):
        if name == "keeper.persist.checksum" and not failed:
            failed.append(name)
            raise OSError("nobody foresaw it")

    passing(fail_once)
    trainer = rig(PersistentLevel(tmp_path, every_n_steps=100), ranks=2)
    trainer.capture(1)
    for rank in trainer.ranks:
        rank.is_gone = True
    trainer.look()

    whole = [slot for rank in trainer.ranks for slot in rank.slots() if slot.status().phase is SlotPhase.WHOLE]
    assert until(lambda: all(slot.checksums is not None for slot in whole))
    assert failed
