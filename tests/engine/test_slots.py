"""The newest whole snapshot and what persistence reads are never overwritten, whatever happens in which order."""

import random
from dataclasses import replace

import pytest

from lazysnap import MemoryLevel, PersistentLevel, SnapshotConfig
from lazysnap.memory.arena import SlotPhase, SlotStatus
from lazysnap.ranks.slots import choose_slot, kept_whole, slots_needed, slots_to_return


def status(phase, sequence, pinned=False):
    return SlotStatus(phase, sequence, sequence, 0, 0, sequence if pinned else None, True)


def test_a_pinned_a_busy_and_the_newest_whole_slot_are_never_chosen():
    for seed in range(200):
        chance = random.Random(seed)
        slots = [
            status(chance.choice(list(SlotPhase)), number, chance.random() < 0.3)
            for number in chance.sample(range(100), chance.randint(1, 5))
        ]
        idle = [chance.random() < 0.8 for _ in slots]
        newest = max((s.sequence for s in slots if s.phase is SlotPhase.WHOLE), default=None)
        allowed = [s for s, free in zip(slots, idle, strict=True) if free and not s.pinned and s.sequence != newest]

        index = choose_slot(slots, idle, kept=1)

        if index is None:
            assert not allowed, seed
        else:
            assert slots[index] in allowed, seed
            # What is not whole is worth nothing and goes first; then the oldest.
            first = [s for s in allowed if s.phase is not SlotPhase.WHOLE] or allowed
            assert slots[index].sequence == min(s.sequence for s in first), seed


def test_two_slots_without_persistence_and_three_with():
    assert slots_needed(SnapshotConfig()) == 2
    assert slots_needed(SnapshotConfig(levels=(PersistentLevel("/x"),))) == 3
    assert slots_needed(SnapshotConfig(memory=MemoryLevel(slots=5))) == 5


def test_several_ranks_keep_the_one_that_all_have():
    """At every step two whole ones stay, else one."""
    stored = (PersistentLevel("/x"),)
    assert slots_needed(SnapshotConfig(levels=stored), 8) == 4
    assert slots_needed(SnapshotConfig(every_n_steps=2, levels=stored), 8) == 3
    assert slots_needed(SnapshotConfig(levels=stored), 8, runs_ahead=True) == 5
    assert slots_needed(SnapshotConfig(every_n_steps=2, levels=stored), 8, runs_ahead=True) == 4
    assert slots_needed(SnapshotConfig(levels=stored), 1, runs_ahead=True) == 3
    assert slots_needed(SnapshotConfig(memory=MemoryLevel(slots=2)), 8) == 3
    assert slots_needed(SnapshotConfig(memory=MemoryLevel(slots=6)), 8) == 6


def test_as_many_of_the_newest_whole_ones_as_are_to_be_kept_are_left_alone():
    slots = [status(SlotPhase.WHOLE, 7), status(SlotPhase.WHOLE, 8), status(SlotPhase.WHOLE, 6)]

    assert choose_slot(slots, [True] * 3, kept=2) == 2
    assert choose_slot(slots, [True] * 3, kept=3) is None
    assert choose_slot([*slots[:2], status(SlotPhase.VOID, 9)], [True] * 3, kept=2) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("every", "ranks"), [(1, 2), (1, 5), (2, 3), (3, 3)])
@pytest.mark.parametrize("seed", range(5))
def test_at_every_moment_some_step_is_whole_on_all_ranks_though_hosts_run_ahead_of_devices(every, ranks, seed):
    config = SnapshotConfig(every_n_steps=every, levels=(PersistentLevel("/x"),))

    machines, gap = walked(OnDevice, config, ranks, seed, moments=12_000)

    assert gap is None
    assert min(machine.step for machine in machines) > 10


def test_on_devices_one_capture_less_would_leave_moments_without_a_common_step():
    """So the model does let devices lag behind their hosts, and copy threads behind devices."""
    gaps = [walked(Forgetful, SnapshotConfig(), 3, seed, moments=12_000)[1] for seed in range(10)]

    assert any(gap is not None for gap in gaps)


def walked(kind, config, ranks, seed, moments):
    """The machines after so many acts, or at the first moment without a common step, and that moment."""
    chance = random.Random(seed)
    machines = [kind(config, ranks, chance) for _ in range(ranks)]
    runs = [machine.run(machines) for machine in machines]
    weights = [chance.random() + 0.05 for _ in runs]
    last = None
    for moment in range(moments):
        next(chance.choices(runs, weights)[0])
        common = max(set.intersection(*(machine.whole() for machine in machines)), default=None)
        if last is not None:
            if common is None or common < last:
                return machines, moment
            # The interval, the capture in flight, and those that other ranks may lack.
            assert max(machine.step for machine in machines) - common <= (machines[0].kept + 1) * config.every_n_steps
        last = common
    return machines, None


@pytest.mark.slow
@pytest.mark.parametrize("swells", [False, True])
@pytest.mark.parametrize(("every", "ranks"), [(1, 2), (1, 5), (2, 4), (3, 3)])
@pytest.mark.parametrize("seed", range(5))
def test_at_every_moment_of_any_run_some_step_is_whole_on_all_ranks(every, ranks, seed, swells):
    """Ranks in any order that gradients and gates allow; storage lets go of slots when it likes."""
    chance = random.Random(seed)
    config = SnapshotConfig(every_n_steps=every, levels=(PersistentLevel("/x"),))
    machines = [(Swelling if swells else Machine)(config, ranks, chance) for _ in range(ranks)]
    runs = [machine.run(machines) for machine in machines]
    last = None
    for _ in range(3000):
        next(chance.choice(runs))
        common = max(set.intersection(*(machine.whole() for machine in machines)), default=None)
        if last is not None:
            assert common is not None
            assert common >= last
            # One interval, and the step in flight.
            assert max(machine.step for machine in machines) - common <= every + 1
        last = common
    assert last > 20


class Machine:
    """One rank as a state machine: each act of it ends with a yield."""

    def __init__(self, config, ranks, chance):
        self.config = config
        self.kept = kept_whole(config, ranks, runs_ahead=False)
        self.slots = [status(SlotPhase.EMPTY, 0) for _ in range(slots_needed(config, ranks))]
        self.chance = chance
        self.step = self.sent = 0
        self.writing = None

    def whole(self):
        return {slot.step for slot in self.slots if slot.phase is SlotPhase.WHOLE}

    def run(self, all_ranks):
        every = self.config.every_n_steps
        while True:
            self.sent += 1
            while min(rank.sent for rank in all_ranks) < self.sent:
                yield self.beside()
            yield self.beside()
            self.finish()  # the gate
            yield
            self.step += 1
            if self.step % every == 0:
                while (index := self.choose()) is None:
                    yield self.beside()
                pinned = self.is_pinned(index)
                self.slots[index], self.writing = status(SlotPhase.CAPTURING, self.step, pinned), index
            yield self.beside()

    def choose(self):
        return choose_slot(self.slots, [True] * len(self.slots), self.kept)

    def is_pinned(self, index):
        return self.chance.random() < 0.5

    def beside(self):
        """What copier and keeper do meanwhile, at times of their own."""
        if self.chance.random() < 0.3:
            self.finish()
        if self.chance.random() < 0.3:
            index = self.chance.randrange(len(self.slots))
            self.slots[index] = replace(self.slots[index], pinned_step=None)

    def finish(self):
        if self.writing is not None:
            self.slots[self.writing] = replace(self.slots[self.writing], phase=SlotPhase.WHOLE)
            self.writing = None


class OnDevice(Machine):
    """One rank on a device. Host, compute stream, copies and copy thread each act at times of their own: the host
    queues work and goes on, and only the gate behind the next one makes it wait for a capture.
    """

    def __init__(self, config, ranks, chance):
        self.config, self.chance = config, chance
        self.kept = kept_whole(config, ranks, runs_ahead=True)
        count = slots_needed(config, ranks, runs_ahead=True)
        self.slots = [status(SlotPhase.EMPTY, 0) for _ in range(count)]
        self.step = 0
        self.queue = []
        self.reduced = self.stepped = 0
        """Steps whose gradients this device has waited for, and given; steps that it has made."""
        self.copied = set()
        self.writing = None

    def run(self, all_ranks):
        host = self.host(all_ranks)
        while True:
            actor = self.chance.randrange(4)
            if actor == 0:
                next(host)
            elif actor == 1:
                self.compute(all_ranks)
            elif actor == 2:
                self.copy()
            else:
                self.beside()
            yield

    def host(self, all_ranks):
        every = self.config.every_n_steps
        while True:
            self.queue.append(("reduce", self.step + 1))
            yield
            if self.writing is not None and self.slots[self.writing].step == self.step:
                self.queue.append(("await", self.step))  # its gate
            else:
                while self.writing is not None:  # the gate behind that
                    yield
            self.step += 1
            self.queue.append(("step", self.step))
            yield
            while self.writing is not None:  # the boundary begins with that gate, too
                yield
            while self.step % every == 0 and (index := self.choose()) is None:
                yield
            if self.step % every == 0:
                self.slots[index] = status(SlotPhase.CAPTURING, self.step, self.is_pinned(index))
                self.writing = index
            yield

    def compute(self, all_ranks):
        if not self.queue:
            return
        what, step = self.queue[0]
        if what == "reduce":
            self.reduced = step  # it has come so far
            if min(rank.reduced for rank in all_ranks) < step:
                return
        elif what == "await":
            if step not in self.copied:
                return
        else:
            self.stepped = step
        del self.queue[0]

    def copy(self):
        if self.writing is not None and self.slots[self.writing].step <= self.stepped:
            self.copied.add(self.slots[self.writing].step)

    def finish(self):
        if self.writing is not None and self.slots[self.writing].step in self.copied:
            super().finish()


class Forgetful(OnDevice):
    """Keeps as many captures as without a device."""

    def __init__(self, config, ranks, chance):
        super().__init__(config, ranks, chance)
        self.kept -= 1
        del self.slots[0]


class Swelling(Machine):
    """Captures have another size every few steps. The keeper has no room for all slots of both sizes."""

    def __init__(self, config, ranks, chance):
        super().__init__(config, ranks, chance)
        self.count, self.sizes = len(self.slots), [0] * len(self.slots)

    def choose(self):
        size = self.step // (3 * self.config.every_n_steps) % 2
        fits = [other == size for other in self.sizes]
        going = slots_to_return(self.slots, [True] * len(fits), self.kept, fits, self.count)
        for index in sorted(going, reverse=True):
            del self.slots[index], self.sizes[index]
        if len(self.slots) < self.count + self.kept and self.sizes.count(size) < self.count:
            self.slots.append(status(SlotPhase.EMPTY, 0))
            self.sizes.append(size)
        fitting = [index for index, other in enumerate(self.sizes) if other == size]
        chosen = choose_slot([self.slots[index] for index in fitting], [True] * len(fitting), self.kept)
        return None if chosen is None else fitting[chosen]


def test_the_keeper_gets_slots_of_another_size_and_those_too_many_when_nothing_in_them_is_needed():
    whole, torn = SlotPhase.WHOLE, SlotPhase.VOID
    slots = [status(whole, 4), status(whole, 3), status(whole, 2, pinned=True), status(torn, 5), status(whole, 1)]
    slots.append(status(SlotPhase.CAPTURING, 6))
    idle = [True] * 6

    assert slots_to_return(slots, idle, 1, [False] * 6, 3) == [3, 4, 1]
    assert slots_to_return(slots, idle, 2, [False] * 6, 3) == [3, 4]
    assert slots_to_return(slots, [True, False, True, False, True, True], 1, [False] * 6, 3) == [4]
    assert slots_to_return(slots, idle, 1, [True] * 6, 4) == [3, 4]
    assert slots_to_return(slots, idle, 1, [True] * 6, 9) == []
