"""The keeper frees a slot when its trainer returns it, never by itself: nothing written or needed is freed."""

import pytest

from lazysnap.memory.arena import SlotPhase
from lazysnap.memory.failures import MemoryBoundExceeded
from lazysnap.memory.slot_pool import SlotPool

PAGE = 4096
SMALL = (PAGE, PAGE, 3)
LARGE = (PAGE, 64 << 20, 1)


class Levels:
    """Storage that reads the slots it is given."""

    def __init__(self):
        self.read = []

    def is_reading(self, slot):
        return slot in self.read


@pytest.fixture
def levels():
    return Levels()


@pytest.fixture
def pool(levels):
    """Three slots; ``seen`` are those that the trainer was handed."""
    seen = {}
    pool = SlotPool(seen.__setitem__)
    pool.seen = seen
    assert pool.provide(SMALL, None, levels.is_reading)
    yield pool
    for slot in pool.all():
        slot.close()


def capture(slot, step):
    slot.begin(step, sequence=step, image_bytes=10, meta=b"{}", pin=False)
    slot.commit()


def held(pool):
    """Steps that are whole in slots of the keeper."""
    return {status.step for slot in pool.all() if (status := slot.status()).phase is SlotPhase.WHOLE}


def test_captures_stay_though_captures_have_another_size_now_until_their_slots_are_returned(pool, levels):
    for step, slot in enumerate(pool.all(), 1):
        capture(slot, step)

    assert not pool.provide(LARGE, None, levels.is_reading)
    assert held(pool) == {1, 2, 3}

    for number, slot in pool.items():
        if slot.status().step in (1, 2):
            pool.take_back(number)
    assert held(pool) == {3}


def test_a_capture_that_begins_whatever_the_keeper_does_meanwhile_becomes_whole_in_a_slot_of_the_keeper(pool, levels):
    """Captures are of another size for a moment, and then of the old one again."""
    oldest = pool.all()[0]

    def train_meanwhile(slot):
        oldest.begin(4, sequence=4, image_bytes=10, meta=b"{}", pin=False)
        return levels.is_reading(slot)

    pool.take_back(next(number for number, slot in pool.items() if slot is pool.all()[2]))
    pool.provide(LARGE, None, train_meanwhile)
    oldest.commit()

    assert 4 in held(pool)


def test_room_is_found_when_slots_of_another_size_are_returned_and_no_level_reads_them(pool, levels):
    bound = sum(slot.size_bytes for slot in pool.all()) + (65 << 20)
    two = (*LARGE[:2], 2)
    with pytest.raises(MemoryBoundExceeded):
        pool.provide(two, bound, levels.is_reading)
    bound = 2 * (65 << 20)
    assert not pool.provide(two, bound, levels.is_reading)
    numbers = [number for number, slot in pool.items() if slot.image_capacity == PAGE]
    levels.read = [pool.all()[0]]
    for number in numbers:
        pool.take_back(number)

    assert not pool.provide(two, bound, levels.is_reading)
    levels.read = []
    assert pool.provide(two, bound, levels.is_reading)
    assert [slot.image_capacity for slot in pool.all()] == [64 << 20] * 2


def test_slots_that_are_not_wanted_any_more_are_not_populated(pool, levels):
    """The first boundary knows the size that was estimated before: it does not wait for slots of the wrong one."""
    estimated = (PAGE, 64 << 20, 2)
    pool.is_outdated = lambda wanted: wanted == estimated and len(pool.all()) > 3

    assert not pool.provide(estimated, None, levels.is_reading)
    assert [slot.image_capacity for slot in pool.all()].count(64 << 20) == 1  # made when that was noticed
