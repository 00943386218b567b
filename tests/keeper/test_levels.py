"""Several levels behind real slots: each at its own pace, none held up by another, what fails comes back by itself."""

import pathlib
import threading

import pytest
from support.names import START, directory_of
from support.waiting import until

from lazysnap import faults
from lazysnap.arena import Slot, SlotPhase
from lazysnap.config import PersistentLevel
from lazysnap.keeper import persist
from lazysnap.keeper.durable import DurableSteps
from lazysnap.keeper.persist import Persister
from lazysnap.keeper.protocol import Durable, LevelDropped, LevelFailed
from lazysnap.levels import open_store
from lazysnap.levels.memory import map_anonymous
from lazysnap.shard.checksum import Checksums
from lazysnap.shard.layout import Layout, TensorSpec
from lazysnap.shard.manifest import CaptureMeta, FrozenReference

RUN = "ab" * 8
SIZE = 300_000
DEADLINE_S = 2.0
"""Of a level where something hangs: what does not hang moves within it, also on a busy disk."""


def image_of(step, size=SIZE):
    layout = Layout.plan([TensorSpec("x", "U8", (size,))])
    return layout.header + bytes([step % 251]) * size


class Rig:
    """A trainer's end of three slots, and the persister behind them."""

    def __init__(self, *levels, frozen=None):
        self.slots = [Slot.create(1 << 16, len(image_of(0))) for _ in range(3)]
        for slot in self.slots:
            slot.populate()
        self.events = []
        self.sequence = 0
        self.frozen = frozen or {}
        self.persister = Persister(levels, lambda: list(self.slots), self.events.append, self.frozen.get)

    def begin(self, step, *, pin=True, frozen=None):
        newest = max((s for s in self.slots if s.status().phase is SlotPhase.WHOLE), key=order, default=None)
        free = until(lambda: [s for s in self.slots if s is not newest and not s.status().pinned])
        slot = min(free, key=order)
        self.sequence += 1
        meta = CaptureMeta(RUN, START, step, 0, 1, 0, frozen=frozen).to_bytes()
        slot.begin(step, sequence=self.sequence, image_bytes=len(image_of(step)), meta=meta, pin=pin)
        return slot

    def capture(self, step, *, pin=True, frozen=None):
        slot = self.begin(step, pin=pin, frozen=frozen)
        slot.image[: len(image_of(step))] = image_of(step)
        slot.commit()
        self.persister.wake()
        return self.sequence

    def told(self, kind, level=None):
        return [e.step for e in self.events if isinstance(e, kind) and level in (None, e.level)]

    def settle(self):
        assert until(self.persister.is_drained)

    def close(self):
        self.persister.stop()


def order(slot):
    return slot.status().sequence


@pytest.fixture
def rig():
    rigs = []

    def make(*levels, frozen=None):
        rigs.append(Rig(*levels, frozen=frozen))
        return rigs[-1]

    yield make
    for made in rigs:
        made.close()


def hold(monkeypatch, place, condition):
    """Who comes to a fault point waits there until ``condition``; the event is set when somebody does."""
    original, has_come = faults.point, threading.Event()

    def point(name):
        if name == place:
            has_come.set()
            assert until(condition)
        original(name)

    monkeypatch.setattr(faults, "point", point)
    return has_come


def steps_at(level):
    return sorted(entry.step for entry in open_store(level.url).inventory().entries)


def check(level, step):
    store = open_store(level.url)
    entry = next(entry for entry in store.inventory().entries if entry.step == step)
    manifest = store.read_manifest(entry)
    out = map_anonymous(manifest.size_bytes)
    store.read_image(entry, manifest, out)
    assert bytes(out) == image_of(step)


def test_each_level_has_its_own_pace(rig, tmp_path):
    fast = PersistentLevel(tmp_path / "fast", every_n_steps=1, keep_last=9)
    slow = PersistentLevel(tmp_path / "slow", every_n_steps=3, keep_last=9)
    trainer = rig(fast, slow)

    for step in range(1, 8):
        trainer.capture(step)
        trainer.settle()

    assert steps_at(fast) == list(range(1, 8))
    assert steps_at(slow) == [1, 4, 7]
    check(slow, 4)


def test_a_level_that_refuses_is_stood_in_for_and_comes_back(rig, tmp_path):
    (tmp_path / "first").write_text("in the way")
    first, second = (PersistentLevel(tmp_path / name, every_n_steps=1) for name in ("first", "second"))
    trainer = rig(first, second)

    trainer.capture(1)
    trainer.settle()
    assert steps_at(second) == [1]
    assert trainer.told(LevelFailed, first.url) == [1]

    (tmp_path / "first").unlink()
    trainer.capture(2)
    trainer.settle()
    assert steps_at(first) == [2]
    assert steps_at(second) == [1, 2]
    trainer.capture(3)
    trainer.settle()
    assert trainer.told(LevelFailed) == [1]
    assert not any(slot.status().pinned for slot in trainer.slots)


def test_when_no_level_works_no_slot_is_held_and_the_next_capture_is_tried(rig, tmp_path):
    (tmp_path / "a").write_text("in the way")
    trainer = rig(*(PersistentLevel(tmp_path / "a" / name, every_n_steps=1) for name in "xy"))

    for step in (1, 2):
        trainer.capture(step)
        trainer.settle()

    assert sorted(trainer.told(LevelFailed)) == [1, 1, 2, 2]
    assert not any(slot.status().pinned for slot in trainer.slots)


def test_a_slow_level_takes_the_newest_and_leaves_out_what_it_did_not_begin(rig, tmp_path, monkeypatch):
    fast = PersistentLevel(tmp_path / "fast", every_n_steps=1, keep_last=1)
    slow = PersistentLevel(tmp_path / "slow", every_n_steps=1, keep_last=9)
    trainer = rig(fast, slow)
    trainer.capture(1)
    trainer.settle()

    is_copying = hold(monkeypatch, "keeper.persist.cascade", lambda: 5 in trainer.told(Durable, fast.url))
    for step in (2, 3, 4, 5):
        trainer.capture(step)
        assert until(lambda step=step: step in trainer.told(Durable, fast.url))
        assert is_copying.wait(60)
    trainer.settle()

    assert steps_at(slow) == [1, 2, 5]
    assert trainer.told(LevelDropped, slow.url) == [3, 4]
    assert steps_at(fast) == [5]


def test_what_retention_asks_for_is_never_left_out(rig, tmp_path):
    fast = PersistentLevel(tmp_path / "fast", every_n_steps=1, keep_last=1)
    slow = PersistentLevel(
        tmp_path / "slow", every_n_steps=1, keep_last=1, keep_every_n_steps=2, max_bytes_per_s=600_000
    )
    trainer = rig(fast, slow)

    for step in range(1, 8):
        trainer.capture(step)
        assert until(lambda step=step: step in trainer.told(Durable, fast.url))
    trainer.settle()

    assert set(steps_at(slow)) >= {2, 4, 6, 7}
    check(slow, 4)
    assert steps_at(fast) == [7]  # what had still to be copied went after it was copied


def test_a_capture_with_a_name_reaches_every_level_and_stays(rig, tmp_path):
    fast = PersistentLevel(tmp_path / "fast", every_n_steps=1, keep_last=1)
    slow = PersistentLevel(tmp_path / "slow", every_n_steps=100, keep_last=2)
    trainer = rig(fast, slow)
    trainer.capture(1)
    trainer.settle()
    sequence = trainer.capture(2, pin=False)

    assert trainer.persister.keep("before-anneal", RUN, sequence)
    trainer.settle()
    for step in (3, 4):
        trainer.capture(step)
        trainer.settle()

    for level, steps in ((fast, [2, 4]), (slow, [1, 2])):
        named = {entry.step: entry.names for entry in open_store(level.url).inventory().entries}
        assert sorted(named) == steps
        assert named[2] == ("before-anneal",)

    trainer.persister.release("before-anneal", RUN)
    trainer.settle()
    trainer.capture(5)
    trainer.settle()
    assert steps_at(fast) == [5]


def test_a_slow_level_that_comes_to_a_named_snapshot_after_newer_ones_does_not_delete_it(rig, tmp_path, monkeypatch):
    fast = PersistentLevel(tmp_path / "fast", every_n_steps=1)
    slow = PersistentLevel(tmp_path / "slow", every_n_steps=1, keep_last=1)
    trainer = rig(fast, slow)
    is_copying = hold(monkeypatch, "keeper.persist.cascade", lambda: 5 in trainer.told(Durable, fast.url))
    for step in range(1, 6):
        sequence = trainer.capture(step)
        assert until(lambda step=step: step in trainer.told(Durable, fast.url))
        assert is_copying.wait(60)
        if step == 3:
            assert trainer.persister.keep("kept", RUN, sequence)
    trainer.settle()

    assert trainer.told(Durable, slow.url)[-1] == 3, "it comes to it last"
    assert {entry.step: entry.names for entry in open_store(slow.url).inventory().entries} == {3: ("kept",), 5: ()}
    check(slow, 3)


def test_a_name_can_be_given_to_what_is_on_storage_already(rig, tmp_path):
    fast = PersistentLevel(tmp_path / "fast", every_n_steps=1, keep_last=2)
    slow = PersistentLevel(tmp_path / "slow", every_n_steps=100)
    trainer = rig(fast, slow)
    for step in (1, 2):
        sequence = trainer.capture(step)
        trainer.settle()

    assert trainer.persister.keep("late", RUN, sequence)
    trainer.settle()

    assert [e.names for e in open_store(slow.url).inventory().entries if e.step == 2] == [("late",)]
    assert not trainer.persister.keep("never", RUN, 99)


def frozen_slot(size=500_000):
    layout = Layout.plan([TensorSpec("base", "U8", (size,))])
    image = layout.header + b"\x07" * size
    slot = Slot.create(1 << 16, len(image))
    slot.begin(0, sequence=1, image_bytes=len(image), meta=CaptureMeta(RUN, START, 0, 0, 1, 0).to_bytes(), pin=False)
    slot.image[: len(image)] = image
    slot.commit()
    return slot, FrozenReference(Checksums.of(memoryview(image)).whole, len(image))


def test_frozen_tensors_are_written_once_at_every_level(rig, tmp_path):
    levels = [PersistentLevel(tmp_path / name, every_n_steps=1, keep_last=1) for name in ("a", "b")]
    slot, reference = frozen_slot()
    trainer = rig(*levels, frozen={reference.digest: slot})

    for step in (1, 2, 3):
        trainer.capture(step, frozen=reference)
        trainer.settle()

    for level in levels:
        images = list(pathlib.Path(level.url).glob("frozen-*/*.safetensors"))
        assert [path.stat().st_size for path in images] == [reference.size_bytes]
        store = open_store(level.url)
        (image,) = store.inventory().frozen
        assert store.verify_entry(image).checksums.whole == reference.digest
        assert [entry.frozen for entry in store.inventory().entries] == [reference.digest]


def test_frozen_tensors_that_left_memory_are_copied_from_the_faster_level(rig, tmp_path, monkeypatch):
    first, second = (PersistentLevel(tmp_path / name, every_n_steps=1) for name in "ab")
    slot, reference = frozen_slot()
    held = {reference.digest: slot}
    trainer = rig(first, second, frozen=held)
    hold(monkeypatch, "keeper.persist.cascade", lambda: not held)
    trainer.capture(1, frozen=reference)
    assert until(lambda: trainer.told(Durable, first.url))
    held.clear()

    trainer.settle()
    trainer.capture(2, frozen=reference)
    trainer.settle()

    assert steps_at(second)[-1] == trainer.told(Durable, second.url)[-1]
    assert [image.digest for image in open_store(second.url).inventory().frozen] == [reference.digest]


def test_bytes_that_are_not_what_their_digest_says_never_get_to_storage(rig, tmp_path):
    level = PersistentLevel(tmp_path / "a", every_n_steps=1)
    slot, reference = frozen_slot()
    slot.image[reference.size_bytes - 1] ^= 1
    trainer = rig(level, frozen={reference.digest: slot})

    trainer.capture(1, frozen=reference)
    trainer.settle()

    assert trainer.told(LevelFailed) == [1]
    assert list(pathlib.Path(level.url).rglob("*.json")) == []


def test_a_level_with_a_bound_is_written_no_faster(rig, tmp_path):
    level = PersistentLevel(tmp_path / "a", every_n_steps=1, max_bytes_per_s=1_000_000)
    trainer = rig(level)

    for step in (1, 2, 3):
        trainer.capture(step)
        trainer.settle()

    durable = [event.seconds for event in trainer.events if isinstance(event, Durable)]
    # A lower bound is safe to assert: the second and third wait for the bytes before them.
    assert sum(durable) >= 2 * SIZE / 1_000_000 * 0.9


def damaging(trainer, level, step, until_then=lambda: True):
    """Damages a step between its commit and its being read back, once.

    ``until_then``: what must be so before it is read back.
    """
    done = threading.Event()
    lane = trainer.persister._lanes[trainer.persister.levels.index(level)]
    read_back = lane._is_sound

    def damage(item):
        if item.entry.step == step and not done.is_set():
            path = pathlib.Path(level.url) / directory_of(step, RUN) / "rank-00000-of-00001.safetensors"
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
            done.set()
            assert until(until_then)
        return read_back(item)

    lane._is_sound = damage
    return done


def test_a_snapshot_that_is_read_back_damaged_does_not_count(rig, tmp_path):
    level = PersistentLevel(tmp_path / "a", every_n_steps=1, keep_last=1)
    trainer = rig(level)
    trainer.capture(1)
    trainer.settle()
    passed = damaging(trainer, level, 2)
    trainer.capture(2)
    assert passed.wait(60)
    trainer.settle()

    assert 1 in steps_at(level)
    check(level, 1)
    assert trainer.told(LevelFailed) == [2]

    trainer.capture(3)
    trainer.settle()
    assert steps_at(level) == [3]


def test_a_snapshot_that_is_read_back_damaged_is_not_durable_until_a_second_try_made_it_so(rig, tmp_path):
    level = PersistentLevel(tmp_path / "a", every_n_steps=1, keep_last=1)
    trainer, known = rig(level), DurableSteps()
    passed = damaging(trainer, level, 1)
    trainer.capture(1)
    assert passed.wait(60)
    trainer.settle()

    assert not trainer.persister.is_durable_everywhere()
    for event in trainer.events:
        known.hear(event)
    assert known.newest(level.url) == -1

    trainer.persister.try_again()
    trainer.persister.set_force(1)
    trainer.settle()
    assert trainer.persister.is_durable_everywhere()
    for event in trainer.events:
        known.hear(event)
    assert known.newest(level.url) == 1
    check(level, 1)


@pytest.mark.parametrize("order", ["copied first", "read back first"])
def test_what_a_faster_level_damaged_a_slower_one_takes_from_memory(rig, tmp_path, monkeypatch, order):
    levels = [PersistentLevel(tmp_path / name, every_n_steps=1, keep_last=9) for name in ("fast", "slow")]
    fast, slow = levels
    trainer, original = rig(*levels), faults.point

    def point(name):
        if name == "keeper.persist.cascade":
            assert until(damaged.is_set if order == "copied first" else lambda: trainer.told(LevelFailed, fast.url))
        original(name)

    def has_failed():
        return order != "copied first" or trainer.told(LevelFailed, slow.url)

    monkeypatch.setattr(faults, "point", point)
    damaged = damaging(trainer, fast, 1, has_failed)
    trainer.capture(1)
    assert until(lambda: trainer.told(LevelFailed, fast.url))
    trainer.settle()

    check(slow, 1)
    trainer.capture(2)
    trainer.settle()
    assert [trainer.told(Durable, level.url) for level in levels] == [[2], [1, 2]]
    assert trainer.persister.is_durable_everywhere()


@pytest.fixture
def inject(monkeypatch):
    """Arm a fault point in this process, as LAZYSNAP_FAULT does at its start."""

    def arm(spec):
        monkeypatch.setattr(faults, "_ARMED", True)
        monkeypatch.setattr(faults, "_SPEC", spec)
        monkeypatch.setattr(faults, "_counts", {})

    return arm


@pytest.mark.parametrize(
    "place",
    ["level.local.create", "level.local.write", "level.local.sync", "level.local.rename", "level.store.commit"],
)
def test_a_level_that_hangs_is_given_up_after_its_deadline_and_comes_back(rig, tmp_path, inject, place):
    first = PersistentLevel(tmp_path / "a", every_n_steps=1, timeout_s=DEADLINE_S)
    second = PersistentLevel(tmp_path / "b", every_n_steps=1)
    inject(f"{place}:1:hang")
    trainer = rig(first, second)

    trainer.capture(1)
    trainer.settle()

    assert trainer.told(LevelFailed) == [1]
    assert "did not move" in trainer.events[0].text
    assert steps_at(second) == [1]
    assert steps_at(first) == []
    trainer.capture(2)
    trainer.settle()
    assert steps_at(first) == [2]
    assert steps_at(second) == [1, 2]
    assert not any(slot.status().pinned for slot in trainer.slots)


def test_a_slow_level_that_hangs_holds_up_no_faster_one(rig, tmp_path, inject):
    first = PersistentLevel(tmp_path / "a", every_n_steps=1)
    second = PersistentLevel(tmp_path / "b", every_n_steps=1, timeout_s=DEADLINE_S)
    inject("keeper.persist.cascade:1:hang")
    trainer = rig(first, second)

    for step in (1, 2, 3):
        trainer.capture(step)
        assert until(lambda step=step: step in trainer.told(Durable, first.url))
    trainer.settle()

    assert trainer.told(LevelFailed, second.url) == [1]
    assert steps_at(second)[-1] == 3


@pytest.mark.parametrize(
    ("place", "nth"),
    [
        ("level.local.write", 1),
        ("level.local.sync", 1),
        ("level.local.rename", 1),
        ("level.local.renamed", 1),
        ("level.store.commit", 1),
    ],
)
def test_a_capture_whose_slot_was_reused_while_its_level_hung_is_never_committed(
    rig, tmp_path, monkeypatch, place, nth
):
    """What hung comes back when the slot holds other bytes: nothing of it may become visible, or stay."""
    level = PersistentLevel(tmp_path / "a", every_n_steps=1, timeout_s=DEADLINE_S, keep_last=9)
    back, passed = threading.Event(), []
    trainer = rig(level)
    original = faults.point

    def point(name):
        if name == place and not hung:
            passed.append(name)
            if len(passed) == nth:
                hung.append(threading.current_thread())
                back.wait(60)
        original(name)

    hung = []
    monkeypatch.setattr(faults, "point", point)
    trainer.capture(1)
    trainer.settle()
    assert trainer.told(LevelFailed) == [1]
    for step in (2, 3, 4):
        trainer.capture(step)
        trainer.settle()

    back.set()
    hung[0].join(20)

    assert steps_at(level) == [2, 3, 4]
    for step in (2, 3, 4):
        check(level, step)
    assert until(lambda: not list(pathlib.Path(level.url).rglob("*.tmp-*")))


@pytest.mark.parametrize("place", ["level.local.sync", "level.local.renamed"])
def test_a_manifest_that_hung_and_arrives_late_is_that_of_a_whole_snapshot(rig, tmp_path, monkeypatch, place):
    """It is not taken back: another try may have committed the same name meanwhile."""
    level = PersistentLevel(tmp_path / "a", every_n_steps=1, timeout_s=DEADLINE_S, keep_last=9)
    back, passed = threading.Event(), []
    trainer = rig(level)
    original = faults.point

    def point(name):
        if name == place and not hung:
            passed.append(name)
            if len(passed) == 2:
                hung.append(threading.current_thread())
                back.wait(60)
        original(name)

    hung = []
    monkeypatch.setattr(faults, "point", point)
    trainer.capture(1)
    trainer.settle()
    assert trainer.told(LevelFailed) == [1]
    for step in (2, 3, 4):
        trainer.capture(step)
        trainer.settle()
    back.set()
    hung[0].join(20)

    assert steps_at(level) == [1, 2, 3, 4]
    for step in (1, 2, 3, 4):
        check(level, step)
    assert until(lambda: not list(pathlib.Path(level.url).rglob("*.tmp-*")))


def test_a_trainer_that_listens_to_nothing_holds_up_no_other_level(rig, tmp_path, inject):
    """What is told takes seconds then: never under the lock that all levels need."""
    fast = PersistentLevel(tmp_path / "fast", every_n_steps=1)
    slow = PersistentLevel(tmp_path / "slow", every_n_steps=1, timeout_s=60)
    inject("keeper.persist.cascade:1:hang")
    trainer, free = rig(fast, slow), []

    def emit(event):
        if isinstance(event, LevelDropped):
            other = threading.Thread(target=lambda: free.append(trainer.persister.steps_to_copy(0)), daemon=True)
            other.start()
            other.join(20)
            assert free
        trainer.events.append(event)

    trainer.persister.emit = emit
    for step in (1, 2, 3):
        trainer.capture(step)
        assert until(lambda step=step: step in trainer.told(Durable, fast.url))

    assert trainer.told(LevelDropped, slow.url) == [2]


def test_an_error_in_what_a_level_is_to_do_next_does_not_end_its_thread(rig, tmp_path, monkeypatch):
    level, raised, original = PersistentLevel(tmp_path / "a", every_n_steps=1), [], persist.slot_for

    def slot_for(*arguments, **settings):
        if any(status.step == 1 for status in arguments[2]) and not raised:
            raised.append(True)
            raise RuntimeError("injected")
        return original(*arguments, **settings)

    monkeypatch.setattr(persist, "slot_for", slot_for)
    trainer = rig(level)
    trainer.capture(1)

    assert until(lambda: trainer.told(Durable) == [1])
    assert raised


def test_a_level_where_three_threads_hang_is_left_alone_until_one_returns(rig, tmp_path, monkeypatch):
    level = PersistentLevel(tmp_path / "a", every_n_steps=1, timeout_s=DEADLINE_S)
    trainer, original = rig(level), faults.point
    hanging, may_return, is_stuck = [], [threading.Event() for _ in range(3)], threading.Event()
    is_stuck.set()

    def point(name):
        if name == "level.local.write" and is_stuck.is_set():
            hanging.append(threading.current_thread())
            may_return[len(hanging) - 1].wait(60)
        original(name)

    monkeypatch.setattr(faults, "point", point)
    for step in (1, 2, 3, 4):
        trainer.capture(step)
        trainer.settle()

    texts = [event.text for event in trainer.events if isinstance(event, LevelFailed)]
    assert ["did not move" in text for text in texts] == [True, True, True, False]
    assert "3 earlier operations still hang there" in texts[-1]
    assert len(hanging) == 3

    is_stuck.clear()
    may_return[1].set()
    hanging[1].join(20)
    writers = [thread for thread in threading.enumerate() if thread.name.endswith("writing step 2")]
    assert until(lambda: not any(thread.is_alive() for thread in writers))
    trainer.capture(5)
    trainer.settle()

    assert steps_at(level) == [5]
    for event in may_return:
        event.set()


def test_an_older_attempts_damaged_snapshot_with_a_greater_step_costs_no_later_one(rig, tmp_path):
    """It went wrong at step 9; the training went back, and on: what is written now is sound, and counts."""
    level = PersistentLevel(tmp_path / "a", every_n_steps=1, keep_last=2)
    trainer = rig(level)
    passed = damaging(trainer, level, 9)
    trainer.capture(9)
    assert passed.wait(60)
    trainer.settle()
    assert trainer.told(LevelFailed) == [9]

    for step in (6, 7, 8):
        trainer.capture(step)
        trainer.settle()
        assert trainer.persister.is_durable_everywhere()

    assert trainer.told(LevelFailed) == [9]
    assert trainer.told(Durable) == [6, 7, 8]
