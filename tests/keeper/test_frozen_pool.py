"""The keeper's slots of frozen tensors: which are held, which go, within which bound."""

import json
import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from support.names import START

from lazysnap.keeper.frozen import FrozenPool
from lazysnap.memory.arena import Slot, SlotPhase, Word
from lazysnap.memory.failures import MemoryBoundExceeded
from lazysnap.shard.manifest import CaptureMeta, FrozenReference

ONE, TWO, THREE = ("1" * 32, "2" * 32, "3" * 32)


@pytest.fixture
def dropped():
    return []


@pytest.fixture
def pool(dropped):
    pool = FrozenPool(dropped.append)
    yield pool
    for _, slot in pool.items():
        slot.close()


def provide(pool, digest, *, rank=0, free=None):
    """The slot, without whether to fill it."""
    return pool.provide(rank, digest, (100, 5000), free)[0]


def fill(slot):
    slot.begin(0, sequence=1, image_bytes=5000, meta=b"{}", pin=False)
    slot.commit()


def make(pool, digest, *, rank=0, whole=True):
    slot = provide(pool, digest, rank=rank)
    if whole:
        fill(slot)
    return slot


class Capture:
    """A slot for captures, as a trainer fills it."""

    def __init__(self):
        self.slot = Slot.create(1 << 12, 1 << 12)
        self.sequence = 0

    def begin(self, frozen):
        self.sequence += 1
        reference = None if frozen is None else FrozenReference(frozen, 5000)
        meta = CaptureMeta("ab" * 8, START, self.sequence, 0, 1, 0, frozen=reference).to_bytes()
        self.slot.begin(self.sequence, sequence=self.sequence, image_bytes=10, meta=meta, pin=False)


@pytest.fixture
def capture():
    capture = Capture()
    yield capture
    capture.slot.close()


def test_a_slot_that_is_not_whole_is_not_offered(pool):
    slot = make(pool, ONE, whole=False)

    assert pool.get(ONE) is None
    assert pool.digests() == []
    slot.begin(0, sequence=1, image_bytes=5000, meta=b"{}", pin=False)
    assert pool.get(ONE) is None
    slot.commit()
    assert pool.get(ONE) is slot
    assert pool.digests() == [ONE]


def test_the_same_slot_is_provided_once(pool):
    assert make(pool, ONE) is provide(pool, ONE, free=0)
    assert len(pool.items()) == 1


def test_the_bound_is_kept(pool):
    needed = Slot.bytes_for(100, 5000)

    with pytest.raises(MemoryBoundExceeded, match=f"need {needed} bytes, MemoryLevel.max_bytes leaves {needed - 1} "):
        provide(pool, ONE, free=needed - 1)
    with pytest.raises(MemoryBoundExceeded, match="frozen tensors need"):
        pool.provide(0, ONE, (100, 1 << 50), None)
    assert pool.items() == []
    assert provide(pool, ONE, free=needed).size_bytes == needed == pool.size_bytes(0)
    assert pool.size_bytes(1) == pool.size_bytes(0, without=ONE) == 0


def test_what_a_capture_refers_to_stays_and_so_does_what_was_asked_for_last(pool, dropped, capture):
    for digest in (ONE, TWO, THREE):
        make(pool, digest)
    capture.begin(ONE)

    pool.sweep([capture.slot])
    assert dropped == [TWO]
    capture.slot.commit()
    pool.sweep([capture.slot])
    assert pool.digests() == [ONE, THREE]

    capture.begin(THREE)
    pool.sweep([capture.slot])
    assert dropped == [TWO, ONE]
    assert pool.digests() == [THREE]


def test_a_capture_that_was_discarded_holds_nothing(pool, dropped, capture):
    make(pool, ONE)
    make(pool, TWO)
    capture.begin(ONE)
    capture.slot.discard()

    pool.sweep([capture.slot])

    assert dropped == [ONE]


def test_while_a_capture_begins_nothing_goes(pool, dropped, capture):
    make(pool, ONE)
    make(pool, TWO)
    capture.begin(TWO)
    capture.begin(ONE)
    capture.slot.set_word(Word.META_CHECKSUM, 0)  # as between two stores of a begin

    pool.sweep([capture.slot])

    assert dropped == []


def test_one_that_is_asked_for_again_stays(pool, dropped):
    make(pool, ONE)
    make(pool, TWO)
    provide(pool, ONE)

    pool.sweep([])

    assert dropped == [TWO]


def test_adopting_takes_the_same_memory_once_and_prefers_what_is_whole(pool):
    held = make(pool, ONE, whole=False)
    assert pool.adopt(0, ONE, Slot.attach(os.dup(held.fd))) is held
    other = Slot.create(100, 5000)
    assert pool.adopt(0, ONE, other) is other
    other.begin(0, sequence=1, image_bytes=5000, meta=b"{}", pin=False)
    other.commit()

    third = Slot.create(100, 5000)
    assert pool.adopt(0, ONE, third) is other

    assert pool.get(ONE) is other
    assert other.status().phase is SlotPhase.WHOLE
    held.close()


def test_ranks_with_equal_tensors_share_a_slot_that_one_of_them_fills(pool, dropped):
    first, fills = pool.provide(0, ONE, (100, 5000), None)
    second, fills_too = pool.provide(1, ONE, (100, 5000), None)
    assert second is first
    assert (fills, fills_too) == (True, False)

    pool.filled(0)  # its trainer died over it
    assert pool.provide(1, ONE, (100, 5000), None) == (first, True)
    fill(first)
    pool.filled(1, ONE)
    assert pool.provide(0, ONE, (100, 5000), None) == (first, False)

    pool.forget(0)
    pool.sweep([])
    assert dropped == []
    pool.forget(1)
    pool.sweep([])
    assert dropped == [ONE]


def test_what_each_rank_asked_for_last_stays(pool, dropped):
    make(pool, ONE, rank=0)
    make(pool, TWO, rank=1)
    make(pool, THREE, rank=1)

    pool.sweep([])

    assert dropped == [TWO]


def test_ranks_that_ask_at_once_get_one_slot(pool):
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(lambda rank: pool.provide(rank, ONE, (100, 5000), None), range(8)))

    assert len({id(slot) for slot, _ in found}) == 1
    assert sum(fills for _, fills in found) == 1


def test_metadata_of_a_capture_without_frozen_tensors_says_nothing_of_them(capture):
    capture.begin(None)

    assert "frozen" not in json.loads(capture.slot.read_meta())
