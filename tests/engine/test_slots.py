"""The newest whole snapshot and what persistence reads are never overwritten, whatever happens in which order."""

import random

import pytest

from lazysnap import MemoryLevel, PersistentLevel, SnapshotConfig
from lazysnap.arena import SlotPhase, SlotStatus
from lazysnap.engine.slots import choose_slot, slots_needed


def status(phase, sequence, pinned=False):
    return SlotStatus(phase, sequence, sequence, 0, 0, pinned, True)


@pytest.mark.parametrize("seed", range(200))
def test_a_pinned_a_busy_and_the_newest_whole_slot_are_never_chosen(seed):
    chance = random.Random(seed)
    slots = [
        status(chance.choice(list(SlotPhase)), number, chance.random() < 0.3)
        for number in chance.sample(range(100), chance.randint(1, 5))
    ]
    idle = [chance.random() < 0.8 for _ in slots]
    newest = max((s.sequence for s in slots if s.phase is SlotPhase.WHOLE), default=None)
    allowed = [s for s, free in zip(slots, idle, strict=True) if free and not s.pinned and s.sequence != newest]

    index = choose_slot(slots, idle)

    if index is None:
        assert not allowed
    else:
        assert slots[index] in allowed
        assert slots[index].sequence == min(s.sequence for s in allowed)


def test_two_slots_without_persistence_and_three_with():
    assert slots_needed(SnapshotConfig()) == 2
    assert slots_needed(SnapshotConfig(levels=(PersistentLevel("/x"),))) == 3
    assert slots_needed(SnapshotConfig(memory=MemoryLevel(slots=5))) == 5
