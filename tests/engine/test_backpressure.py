"""Storage that does not keep up gets fewer snapshots, the same ones on all ranks; memory loses none for it."""

import random
from dataclasses import replace

import pytest
from test_slots import Machine, status

from lazysnap import PersistentLevel, SnapshotConfig
from lazysnap.arena import SlotPhase
from lazysnap.engine.backpressure import Backpressure
from lazysnap.engine.slots import choose_slot
from lazysnap.keeper.protocol import Durable

LEVEL = PersistentLevel("/x", every_n_steps=10)


class Stuck(Machine):
    """A rank whose storage never lets go of a slot: every capture is due there."""

    def __init__(self, config, ranks, chance):
        super().__init__(config, ranks, chance)
        self.backpressure = Backpressure(0.0)

    def choose(self):
        index = choose_slot(self.slots, [True] * len(self.slots), self.kept)
        if index is None:
            if not self.backpressure.is_bypassed:
                self.backpressure.bypass(self.slots)
            spared = self.backpressure.without_pins(self.slots, len(self.slots) - self.kept - 1)
            index = choose_slot(spared, [True] * len(self.slots), self.kept)
        return index

    def is_pinned(self, index):
        held = [slot for number, slot in enumerate(self.slots) if number != index and slot.pinned]
        return not (self.backpressure.is_bypassed and held)

    def beside(self):
        if self.chance.random() < 0.3:
            self.finish()


@pytest.mark.parametrize(("every", "period", "ranks"), [(1, None, 2), (1, None, 4), (3, None, 3), (4, 4, 3), (6, 3, 2)])
@pytest.mark.parametrize("seed", range(20))
def test_where_storage_never_lets_go_some_step_is_whole_on_all_ranks_at_every_moment(every, period, ranks, seed):
    chance = random.Random(seed)
    config = SnapshotConfig(every_n_steps=every, averaging_period=period, levels=(PersistentLevel("/x"),))
    machines = [(Machine, Stuck)[number % 2](config, ranks, chance) for number in range(ranks)]
    runs = [machine.run(machines) for machine in machines]
    last = None
    for _ in range(4000):
        next(chance.choice(runs))
        common = max(set.intersection(*(machine.whole() for machine in machines)), default=None)
        assert last is None or common >= last
        last = common
    assert last > 20


class Storage:
    """Takes ``intervals`` from one due step to the next for each snapshot, and one at a time."""

    def __init__(self, intervals):
        self.intervals = intervals
        self.backpressure = Backpressure(60.0)
        self.backpressure.bypass([])
        self.stored = []
        self.writing = None
        self.until = 0.0

    def due(self, number):
        """The ``number``-th step that is due."""
        done = []
        if self.writing is not None and self.until <= number:
            done = [Durable("/x", self.writing * 10, 1, 1.0, self.writing)]
            self.stored.append(self.writing)
            self.writing = None
        held = [] if self.writing is None else [status(SlotPhase.WHOLE, self.writing, pinned=True)]
        backpressure = self.backpressure
        backpressure.look(held, done)
        pinned = not held and (not backpressure.is_bypassed or backpressure.is_turn(LEVEL, number * 10))
        backpressure.passed(number, pinned=pinned, held=held)
        if pinned:
            self.writing, self.until = number, number + self.intervals


@pytest.mark.parametrize("intervals", [0.5, 1.5, 3.0, 7.2, 20.0])
def test_what_slow_storage_gets_are_multiples_of_a_power_of_two_and_none_of_these_is_left_out(intervals):
    storage = Storage(intervals)
    for number in range(1, 1001):
        storage.due(number)

    stored = [number for number in storage.stored if number > 200]
    stride = min(stride for stride in (1, 2, 4, 8, 16, 32) if stride >= intervals)
    assert stored == list(range(stored[0], stored[-1] + 1, stride))
    assert all(number % stride == 0 for number in stored)
    assert len(stored) >= 700 // stride
    assert storage.backpressure.is_bypassed == (stride > 1)


def test_waits_add_up_until_storage_has_let_go_of_all():
    held, free = [status(SlotPhase.WHOLE, 1, pinned=True)], [status(SlotPhase.WHOLE, 1)]
    backpressure = Backpressure(10.0)
    backpressure.waited(6.0)
    backpressure.passed(2, pinned=True, held=held)
    assert not backpressure.is_over(3.0)
    assert backpressure.is_over(4.0)

    backpressure.passed(3, pinned=True, held=free)

    assert not backpressure.is_over(4.0)


def test_storage_that_hung_is_told_apart_from_slow_storage():
    """The first snapshot that it stores again took as long as it hung, which says nothing about the next."""
    first = status(SlotPhase.WHOLE, 1, pinned=True)
    backpressure = Backpressure(10.0)
    backpressure.bypass([first])
    for number in range(2, 500):
        backpressure.passed(number, pinned=False, held=[first])
    stored = Durable("/x", 10, 1, 1.0, 1)

    assert backpressure.look([replace(first, pinned=False)], [stored]) == stored

    assert backpressure.left_out == 498
    assert backpressure.is_turn(LEVEL, 5010)
    backpressure.passed(501, pinned=True, held=[])
    assert backpressure.look([], [Durable("/x", 5010, 1, 1.0, 501)]) is None
    assert not backpressure.is_bypassed
