"""Frozen tensors that are damaged at a level while a keeper writes snapshots that refer to them."""

import pytest
from frozen_damage import DAMAGES, NOTICED, SHARD, damage, flip, frozen_at
from support.waiting import until
from test_levels import Rig, frozen_slot

from lazysnap.config import PersistentLevel
from lazysnap.errors import FormatError
from lazysnap.keeper.protocol import Durable, LevelFailed
from lazysnap.levels import open_store
from lazysnap.resolver import candidates


@pytest.fixture
def frozen():
    slot, reference = frozen_slot()
    yield slot, reference
    slot.close()


@pytest.fixture
def rig():
    rigs = []

    def make(*levels, **settings):
        rigs.append(Rig(*levels, **settings))
        return rigs[-1]

    yield make
    for one in rigs:
        one.close()


def restorable(level):
    """Steps whose shard and frozen tensors are whole there."""
    store = open_store(level.url)
    steps = []
    for plan in candidates([store.inventory()]):
        try:
            for offers in [*plan.sources, *plan.frozen.values()]:
                store.verify_entry(offers[0])
        except FormatError:
            continue
        steps.append(plan.step)
    return sorted(steps)


def capture(trainer, reference, *steps):
    for step in steps:
        trainer.capture(step, frozen=reference)
        trainer.settle()


@pytest.mark.parametrize("how", NOTICED)
def test_in_the_middle_of_a_run_it_is_replaced_from_memory_before_the_next_snapshot(rig, frozen, tmp_path, how):
    level = PersistentLevel(tmp_path / "a", every_n_steps=1, keep_last=2)
    slot, reference = frozen
    trainer = rig(level, frozen={reference.digest: slot})
    capture(trainer, reference, 1, 2)

    damage(level.url, how)
    capture(trainer, reference, 3)

    assert trainer.told(Durable) == [1, 2, 3]
    assert trainer.told(LevelFailed) == []
    assert restorable(level) == [2, 3]
    capture(trainer, reference, 4, 5)
    assert restorable(level) == [4, 5]
    assert open_store(level.url).inventory().problems == ()


@pytest.mark.parametrize("how", DAMAGES)
def test_over_a_restart_of_the_keeper_it_is_replaced_before_the_first_snapshot(rig, frozen, tmp_path, how):
    level = PersistentLevel(tmp_path / "a", every_n_steps=1, keep_last=2)
    slot, reference = frozen
    first = rig(level, frozen={reference.digest: slot})
    capture(first, reference, 1, 2)
    first.persister.stop()
    damage(level.url, how)

    second = rig(level, frozen={reference.digest: slot})
    capture(second, reference, 3)

    assert second.told(Durable) == [3]
    assert second.told(LevelFailed) == []
    assert restorable(level) == [2, 3]


@pytest.mark.parametrize("how", NOTICED)
def test_at_a_slower_level_it_is_replaced_from_the_faster_one_if_memory_has_it_no_more(rig, frozen, tmp_path, how):
    fast = PersistentLevel(tmp_path / "a", every_n_steps=1)
    slow = PersistentLevel(tmp_path / "b", every_n_steps=1)
    slot, reference = frozen
    held = {reference.digest: slot}
    trainer = rig(fast, slow, frozen=held)
    capture(trainer, reference, 1)
    held.clear()

    damage(slow.url, how)
    capture(trainer, reference, 2)

    assert trainer.told(Durable, slow.url) == [1, 2]
    assert restorable(slow) == [1, 2]


@pytest.mark.parametrize("how", NOTICED)
def test_what_cannot_be_replaced_fails_the_level_until_it_can(rig, frozen, tmp_path, how):
    level = PersistentLevel(tmp_path / "a", every_n_steps=1, keep_last=5)
    slot, reference = frozen
    held = {reference.digest: slot}
    trainer = rig(level, frozen=held)
    capture(trainer, reference, 1)
    held.clear()
    damage(level.url, how)

    capture(trainer, reference, 2, 3)

    assert trainer.told(Durable) == [1]
    assert trainer.told(LevelFailed) == [2, 3]
    assert restorable(level) == []
    held[reference.digest] = slot
    capture(trainer, reference, 4)
    assert trainer.told(Durable) == [1, 4]
    assert restorable(level) == [1, 4]


def test_damage_between_the_commit_and_the_read_back_costs_no_older_snapshot(rig, frozen, tmp_path):
    level = PersistentLevel(tmp_path / "a", every_n_steps=1, keep_last=1)
    slot, reference = frozen
    trainer = rig(level, frozen={reference.digest: slot})
    trainer.capture(1)
    trainer.settle()

    [lane] = trainer.persister._lanes
    read_back = lane._is_sound

    def damage(item):
        if item.entry.step == 2:
            flip(frozen_at(level.url) / SHARD)
        return read_back(item)

    lane._is_sound = damage
    capture(trainer, reference, 2)

    assert until(lambda: trainer.told(LevelFailed) == [2])
    assert restorable(level) == [1]
    capture(trainer, reference, 3)
    assert restorable(level) == [3]


def test_two_jobs_of_one_run_share_frozen_tensors_that_are_damaged_under_them(rig, frozen, tmp_path):
    level = PersistentLevel(tmp_path / "a", every_n_steps=1, keep_last=50)
    slot, reference = frozen
    jobs = [rig(level, frozen={reference.digest: slot}) for _ in range(2)]
    step = 0
    for how in [*DAMAGES, *DAMAGES]:
        for job in jobs:
            step += 1
            job.capture(step, frozen=reference)
        for job in jobs:
            job.settle()
        damage(level.url, how)
    for job in jobs:
        step += 1
        capture(job, reference, step)

    durable = [told for job in jobs for told in job.told(Durable)]
    assert {step, step - 1} <= set(durable)
    assert set(durable) <= set(restorable(level))
    assert len(set(durable)) > step // 2
    assert len(open_store(level.url).inventory().frozen) == 1
