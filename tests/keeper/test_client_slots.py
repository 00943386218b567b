"""Slots as a trainer maps them, without a keeper."""

import gc
import os
import threading
import weakref

import pytest
from support.waiting import until

from lazysnap.keeper.client_slots import MappedSlots
from lazysnap.keeper.protocol import HandOver, MemoryRefused
from lazysnap.keeper.trainer_state import TrainerState
from lazysnap.memory.arena import Slot


def handed_over():
    """A descriptor of a slot, as a keeper sends it."""
    made = Slot.create(4096, 4096)
    fd = os.dup(made.fd)
    made.close()
    return fd


@pytest.mark.slow
def test_a_slot_that_is_returned_while_it_is_populated_goes(monkeypatch):
    entered, may_go_on = threading.Event(), threading.Event()
    original = Slot.populate

    def populate(slot, **settings):
        entered.set()
        assert may_go_on.wait(30)
        original(slot, **settings)

    monkeypatch.setattr(Slot, "populate", populate)
    slots = MappedSlots(threading.Condition())
    slots.want()
    slots.map(0, handed_over())
    assert entered.wait(30)
    gone = weakref.ref(slots.get(0))
    populating = next(thread for thread in threading.enumerate() if thread.name == "lazysnap-populate")
    slots.remove(slots.get(0))
    may_go_on.set()
    populating.join(30)

    assert slots.ready() == ()
    assert until(lambda: gc.collect() >= 0 and gone() is None)


def test_a_slot_that_is_populated_between_two_keepers_is_ready():
    slots = MappedSlots(threading.Condition())
    fd = handed_over()
    slots.map(0, fd)
    known = slots.get(0)
    slots.orphan_all()
    slots.want()
    slots.map(3, os.dup(fd))
    assert slots.get(3) is known
    assert until(slots.ready)

    (slot,) = slots.take_all()
    slot.close()


def test_a_slot_for_captures_that_cannot_be_mapped_is_memory_that_was_refused():
    """Nothing else would say why no capture begins."""
    state = TrainerState(lambda: None)
    readable = os.open(os.devnull, os.O_RDONLY)

    state.take(HandOver(slot=0), (readable,))

    [refused] = state.poll_events()
    assert isinstance(refused, MemoryRefused)
    assert refused.text.startswith("a slot of the keeper cannot be mapped: shared memory of 0 bytes is no arena slot")
    state.release()
