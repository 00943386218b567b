"""Words are right also where a processor does not keep stores in order; and each fence is needed for that."""

import os
import random

import mutants
import pytest
from hypothesis import given
from hypothesis import strategies as st
from weak_memory import Process, WeakMemory, WeakWords

from lazysnap.errors import FormatError
from lazysnap.shard.manifest import CaptureMeta

IMAGE_BYTES = 8
NUM_CAPTURES = 3
META = CaptureMeta("0" * 16, "1" * 16, 7, 0, 1, captured_ns=3).to_bytes()
"""Of the same step each time, as after rollbacks, so that only the sequence number tells captures apart."""
MAX_SEEDS = 3000
FENCE_OF_STORES = ("words", "        fence()\n        faults", "        faults")
FENCE_OF_LOADS = ("words", "        fence()\n        return self._cells", "        return self._cells")


class Waits(Exception):
    """The reader sees that it must wait."""


def stop_waiting():
    raise Waits


class Machine:
    """A trainer that made some captures in one slot, and a keeper that sees them in any order that is allowed."""

    def __init__(self, modules, pick):
        self.modules = modules
        self.memory = WeakMemory(pick)
        self.trainer, self.keeper = Process(), Process()
        self.running = self.trainer
        modules.words.fence = lambda: self.memory.fence(self.running)
        self.keeper_slot = modules.slots.make_slot(4096, IMAGE_BYTES)
        self.trainer_slot = modules.slots.TrainerSlot.attach(os.dup(self.keeper_slot.descriptor))
        self.trainer_slot._cells = WeakWords(self.memory, self.trainer, "slot")
        self.keeper_slot._cells = WeakWords(self.memory, self.keeper, "slot")

    def close(self):
        os.close(self.keeper_slot.descriptor)
        os.close(self.trainer_slot.descriptor)

    def capture(self, sequence):
        self.running = self.trainer
        self.trainer_slot.begin(int("1" * 16, 16), 7, sequence=sequence, image_bytes=IMAGE_BYTES, meta=META)
        self.memory.store(self.trainer, "image", sequence)
        self.trainer_slot.advance(IMAGE_BYTES)
        self.trainer_slot.commit(copied_ns=sequence)

    def read(self, sequence):
        """The capture whose bytes the keeper reads as those of that number; ``None``, if it sees that it cannot."""
        self.running = self.keeper
        try:
            reader = self.modules.capture_reader.CaptureReader(self.keeper_slot, sequence, stop_waiting)
            reader.view(0, IMAGE_BYTES)
            image = self.memory.load(self.keeper, "image")
            reader.finish()
        except (self.modules.capture_reader.CaptureAborted, FormatError, Waits):
            return None
        return image


def read_in_some_order(modules, seed):
    chance = random.Random(seed)
    machine = Machine(modules, chance.randrange)
    try:
        for sequence in range(1, NUM_CAPTURES + 1):
            machine.capture(sequence)
        wanted = 1 + chance.randrange(NUM_CAPTURES)
        return wanted, machine.read(wanted)
    finally:
        machine.close()


@pytest.fixture(scope="module")
def modules():
    return mutants.load()


@given(st.integers(0, 1 << 32))
def test_a_reader_gets_the_bytes_of_its_capture_or_none(modules, seed):
    wanted, image = read_in_some_order(modules, seed)

    assert image in (wanted, None)


def test_a_reader_gets_bytes_in_many_orders(modules):
    images = [read_in_some_order(modules, seed)[1] for seed in range(30)]

    assert sum(image is not None for image in images) > 3


@pytest.mark.slow
@pytest.mark.parametrize("fence", [FENCE_OF_STORES, FENCE_OF_LOADS])
def test_without_a_fence_a_reader_gets_bytes_of_another_capture(fence):
    modules = mutants.load(*fence)
    results = (read_in_some_order(modules, seed) for seed in range(MAX_SEEDS))

    assert any(image not in (wanted, None) for wanted, image in results)


def is_noticed(modules, seed, moment):
    """True if the keeper that awaits a step hears of its capture, which begins at the same time.

    ``moment``: the load of the trainer after which the keeper acts; -1 for before it begins.
    """
    memory = WeakMemory(random.Random(seed).randrange, has_total_order=True)
    trainer, keeper = Process(), Process()
    running = [trainer]
    modules.words.fence = lambda: memory.fence(running[-1])
    pages = [modules.words.WordPage(memoryview(bytearray(4096))) for _ in range(2)]
    begin, awaited = modules.words.SlotWord.BEGIN, modules.words.AWAITED
    node = modules.words.NodePage.create()
    seen = []

    def act():
        """Await step 7 on a node whose levels were busy, then look at the slot."""
        running.append(keeper)
        node._cells = WeakWords(memory, keeper, "node")
        node.set_awaited_step(7)
        seen.append(pages[1].load(begin) == 8)
        node._cells = WeakWords(memory, trainer, "node", after_load)
        running.pop()

    num_loads = 0

    def after_load():
        nonlocal num_loads
        if num_loads == moment:
            act()
        num_loads += 1

    keeper_node = WeakWords(memory, keeper, "node")
    keeper_node[awaited] = modules.words._AWAITED_NONE
    memory.fence(keeper)
    memory.fence(trainer)
    pages[0]._cells = WeakWords(memory, trainer, "slot")
    pages[1]._cells = WeakWords(memory, keeper, "slot")
    node._cells = WeakWords(memory, trainer, "node", after_load)
    if moment == -1:
        act()
    pages[0].store(begin, 8)
    is_woken = node.is_awaited(7)
    node.close()
    return is_woken or seen == [True]


@pytest.mark.parametrize("moment", [-1, 0])
def test_no_awaited_capture_goes_unnoticed(modules, moment):
    assert all(is_noticed(modules, seed, moment) for seed in range(40))


def test_without_a_fence_an_awaited_capture_goes_unnoticed():
    modules = mutants.load(*FENCE_OF_LOADS)

    assert not all(is_noticed(modules, seed, 0) for seed in range(40))


def is_hold_seen(modules, seed):
    """True if a trainer that makes one more capture does not choose the slot that the keeper held."""
    memory = WeakMemory(random.Random(seed).randrange, has_total_order=True)
    trainer, keeper = Process(), Process()
    running = trainer
    modules.words.fence = lambda: memory.fence(running)
    keeper_slots = [modules.slots.make_slot(4096, IMAGE_BYTES) for _ in range(2)]
    trainer_slots = [modules.slots.TrainerSlot.attach(os.dup(slot.descriptor)) for slot in keeper_slots]
    for number in range(2):
        trainer_slots[number]._cells = WeakWords(memory, trainer, number)
        keeper_slots[number]._cells = WeakWords(memory, keeper, number)

    def capture(slot, sequence):
        slot.begin(1, 7, sequence=sequence, image_bytes=IMAGE_BYTES, meta=META)
        slot.commit(copied_ns=1)

    capture(trainer_slots[0], 1)
    running = keeper
    while not keeper_slots[0].hold(1, keeper_slots, kept=1):
        pass  # it does not see the capture yet
    running = trainer
    capture(trainer_slots[1], 2)
    views = [slot.view() for slot in trainer_slots]
    for slot in (*keeper_slots, *trainer_slots):
        os.close(slot.descriptor)
    return modules.slot_choice.choose_slot(views, 1, image_bytes=IMAGE_BYTES, meta_bytes=1) is None


def test_a_hold_is_seen_by_the_next_choice(modules):
    assert all(is_hold_seen(modules, seed) for seed in range(20))


def test_without_a_fence_a_hold_is_overlooked():
    modules = mutants.load(*FENCE_OF_LOADS)

    assert not all(is_hold_seen(modules, seed) for seed in range(200))
