"""Frozen tensors that are damaged at a level while a keeper writes snapshots that refer to them."""

import pytest
from frozen_damage import MANIFEST, NOTICED, SHARD, damage, flip, frozen_at, restorable
from support.catalogue import inventory_of
from support.node_rig import STARTS, frozen_slot, steps_at
from support.waiting import until

from lazysnap.config import PersistentLevel
from lazysnap.levels import open_store
from lazysnap.levels.storage import Storage

pytestmark = pytest.mark.slow


@pytest.fixture
def frozen():
    slot, reference = frozen_slot()
    yield slot, reference
    slot.close()


SOME = pytest.mark.parametrize("how", ["the shard is deleted", "a bit of the manifest is flipped"])
"""What else there is, tests/levels/test_frozen_at_levels.py tries."""


@SOME
def test_in_the_middle_of_a_run_it_is_replaced_from_memory_before_the_next_snapshot(rig, frozen, tmp_path, how):
    level = PersistentLevel(tmp_path / "a", every_n_steps=1, keep_last=2)
    slot, reference = frozen
    trainer = rig(level, frozen={reference.digest: slot})
    for _ in range(2):
        trainer.store(frozen=reference)

    damage(level.url, how)
    assert trainer.store(frozen=reference) == 6

    assert trainer.failed() == []
    assert until(lambda: restorable(level.url) == [4, 6])
    for _ in range(2):
        trainer.store(frozen=reference)
    assert until(lambda: restorable(level.url) == [8, 10])
    assert inventory_of(open_store(level.url)).problems == ()


@pytest.mark.parametrize("how", ["the shard is truncated", "the directory is deleted"])
def test_over_a_restart_of_the_keeper_it_is_replaced_and_costs_no_snapshot(rig, frozen, tmp_path, how):
    level = PersistentLevel(tmp_path / "a", every_n_steps=1, keep_last=2)
    slot, reference = frozen
    trainer = rig(level, frozen={reference.digest: slot})
    for _ in range(2):
        trainer.store(frozen=reference)
    trainer.storages[0].close()
    damage(level.url, how)

    trainer.replace()
    assert until(lambda: trainer.granted == 6)
    assert steps_at(level) == [2, 4], "they are as whole as the frozen tensors will be"
    assert trainer.store(frozen=reference) == 6

    assert trainer.failed() == []
    assert 6 in restorable(level.url)


def test_at_a_slower_level_it_is_replaced_from_the_faster_one_if_memory_has_it_no_more(rig, frozen, tmp_path):
    fast = PersistentLevel(tmp_path / "a", every_n_steps=1)
    slow = PersistentLevel(tmp_path / "b", every_n_steps=1)
    slot, reference = frozen
    held = {reference.digest: slot}
    trainer = rig(fast, slow, frozen=held)
    trainer.store(frozen=reference)
    held.clear()

    damage(slow.url, "the shard is truncated")
    trainer.store(frozen=reference)

    assert trainer.complete(slow) == [2, 4]
    assert restorable(slow.url) == [2, 4]


@SOME
def test_what_cannot_be_replaced_fails_the_level_until_it_can(rig, frozen, tmp_path, how):
    level = PersistentLevel(tmp_path / "a", every_n_steps=1, keep_last=5)
    slot, reference = frozen
    held = {reference.digest: slot}
    trainer = rig(level, frozen=held)
    trainer.store(frozen=reference)
    held.clear()
    damage(level.url, how)

    trainer.train_until(lambda: len(trainer.failed()) > 1, frozen=reference)

    assert trainer.complete(level) == [2]
    assert restorable(level.url) == []
    held[reference.digest] = slot
    trainer.train_until(lambda: len(trainer.complete(level)) > 1, frozen=reference)
    assert until(lambda: restorable(level.url) == trainer.complete(level))


@pytest.mark.parametrize(("verify", "checks_writes"), [(None, False), (False, False), (True, True)])
def test_damage_between_the_commit_and_the_read_back_costs_no_older_snapshot(
    rig, frozen, tmp_path, passing, monkeypatch, verify, checks_writes
):
    monkeypatch.setattr(Storage, "checks_writes", checks_writes)  # says the place
    level = PersistentLevel(tmp_path / "a", every_n_steps=1, keep_last=1, verify=verify)
    slot, reference = frozen
    trainer, damaged = rig(level, frozen={reference.digest: slot}), []

    def work(name):
        found = list(tmp_path.glob(f"a/frozen-*/{SHARD}"))
        if name == "level.store.commit" and found and not damaged and not found[0].with_name(MANIFEST).exists():
            damaged.append(found[0])
            flip(found[0])

    passing(work)
    assert trainer.store() == 2
    assert trainer.train(frozen=reference) == 4

    assert until(lambda: trainer.failed() == [4])
    assert trainer.complete(level) == [2]
    assert 2 in steps_at(level)
    trainer.train_until(lambda: len(trainer.complete(level)) > 1, frozen=reference)
    assert until(lambda: restorable(level.url) == trainer.complete(level)[-1:])


def test_two_runs_share_frozen_tensors_that_are_damaged_under_them(rig, frozen, tmp_path):
    level = PersistentLevel(tmp_path / "a", every_n_steps=1, keep_last=50)
    slot, reference = frozen
    jobs = [rig(level, frozen={reference.digest: slot}, run_id=run) for run in ("ab" * 8, "cd" * 8)]
    for how in [*NOTICED, *NOTICED]:
        for job in jobs:
            step = job.train(frozen=reference)
            assert until(lambda job=job, step=step: step in job.complete(level) + job.failed())
        damage(level.url, how)
    for job in jobs:
        job.store(frozen=reference)

    complete = {step for job in jobs for step in job.complete(level)}
    assert complete <= set(restorable(level.url))
    assert len(inventory_of(open_store(level.url)).frozen) == 1


def test_frozen_tensors_of_another_start_are_taken_as_they_are(rig, frozen, tmp_path):
    level = PersistentLevel(tmp_path / "a", every_n_steps=1)
    slot, reference = frozen
    trainer = rig(level, frozen={reference.digest: slot})
    trainer.store(frozen=reference)
    written = (frozen_at(level.url) / SHARD).stat().st_mtime_ns

    trainer.begin(STARTS[1], stored={level.url: [(STARTS[0], 2)]})
    trainer.store(frozen=reference)

    assert (frozen_at(level.url) / SHARD).stat().st_mtime_ns == written
    assert trainer.complete(level)[-1] in restorable(level.url)
