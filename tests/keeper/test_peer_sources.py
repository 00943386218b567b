"""What a keeper lets others read of its slots and of its parity, and what it lets go of."""

import gc
import os
import threading
import weakref

import pytest
from support.parity_group import START, Captures, image_of

from lazysnap.keeper.node_part import read_index
from lazysnap.keeper.parity import ParitySet, ParityStore
from lazysnap.keeper.peer_sources import MAX_OPENED, KeeperSources
from lazysnap.keeper.questions import HeldParity
from lazysnap.memory.capture_reader import CaptureAborted
from lazysnap.peers.messages import NotYet, ParityOf, PartOf, SlotOf
from lazysnap.shard.manifest import CaptureMeta

TEXT = f"{START:016x}"


@pytest.fixture
def ranks():
    made = [Captures(number, 2) for number in range(2)]
    yield made
    for captures in made:
        captures.close()


@pytest.fixture
def store():
    return ParityStore()


@pytest.fixture
def sources(ranks, store):
    def slots():
        return {local_rank: dict(captures.keeper) for local_rank, captures in enumerate(ranks)}

    return KeeperSources(slots, lambda start: len(ranks), store)


def content(source):
    source.data.finish()
    size_bytes = source.data.size_bytes
    data = bytes(source.data.view(0, size_bytes)[:size_bytes])
    source.check()
    return data


def num_descriptors():
    return len(os.listdir("/proc/self/fd"))


def test_a_capture_is_read_by_its_number(ranks, sources):
    for step in (4, 5):
        for captures in ranks:
            captures.capture(step)
    for captures in ranks:
        for step in (4, 5):
            sequence = captures.place(step)[1]
            assert content(sources.open(SlotOf(captures.rank, sequence, "image"))) == image_of(step, captures.rank)
            meta = CaptureMeta.from_bytes(content(sources.open(SlotOf(captures.rank, sequence, "meta"))))
            assert (meta.rank, meta.step) == (captures.rank, step)


@pytest.mark.parametrize("what", [SlotOf(0, 7, "image"), SlotOf(5, 1, "image"), SlotOf(1, 0, "meta")])
def test_what_is_not_in_memory_is_refused(sources, what):
    with pytest.raises(CaptureAborted, match="not in memory any more"):
        sources.open(what)


def test_an_incomplete_capture_is_no_slot_to_read(ranks, sources):
    ranks[0].fill(ranks[0].begin(4))
    with pytest.raises(CaptureAborted):
        sources.open(SlotOf(0, 1, "image"))


def test_a_part_that_is_not_there_yet_is_asked_for_again(ranks, sources):
    what = PartOf(TEXT, 4, 1)
    descriptors = num_descriptors()
    with pytest.raises(NotYet, match="not captured by all ranks"):
        sources.open(what)
    ranks[0].capture(4)
    slot = ranks[1].begin(4)
    source = sources.open(what)
    read_index(source.data.view, source.data.size_bytes)
    with pytest.raises(NotYet, match="not copied yet"):
        source.data.finish()
    with pytest.raises(NotYet, match="not copied yet"):
        source.data.view(0, source.data.size_bytes)
    source.check()
    ranks[1].fill(slot).commit(copied_ns=1)
    assert image_of(4, 1) in content(source)
    del source
    sources.clear()
    assert num_descriptors() == descriptors


def test_a_step_that_a_rank_passed_is_refused_at_once(ranks, sources):
    for step in (4, 5, 6, 7):
        for captures in ranks:
            captures.capture(step)
    for start, step in [(TEXT, 4), ("no number", 5), (f"{START - 1:016x}", 6)]:
        with pytest.raises(CaptureAborted, match="not in memory any more"):
            sources.open(PartOf(start, step, 1))


def test_a_capture_that_is_written_over_is_noticed_and_one_that_comes_again_has_another_identity(ranks, sources):
    what = PartOf(TEXT, 4, 1)
    for captures in ranks:
        captures.capture(4)
    source = sources.open(what)
    source.data.view(0, 100)
    for captures in ranks:
        for step in (5, 6, 4):
            captures.capture(step)
    for call in (source.check, source.data.finish):
        with pytest.raises(CaptureAborted):
            call()
    assert sources.open(what) is source
    sources.forget(what)
    again = sources.open(what)
    again.check()
    assert again.identity != source.identity


def test_a_slot_that_the_keeper_frees_is_refused_and_what_was_opened_stays_readable(ranks, sources):
    ranks[0].capture(4)
    slot_id, sequence = ranks[0].place(4)
    source = sources.open(SlotOf(0, sequence, "image"))
    slot = ranks[0].keeper.pop(slot_id)
    weakref.finalize(slot, os.close, slot.descriptor)  # as ``SlotTable.free`` does
    del slot
    assert content(source) == image_of(4, 0)
    with pytest.raises(CaptureAborted):
        sources.open(SlotOf(0, sequence, "meta"))


def test_a_source_of_which_a_slot_is_freed_while_it_is_opened_is_not_kept(ranks, store):
    for captures in ranks:
        captures.capture(4)

    def slots():
        sources.clear()
        return {local_rank: dict(captures.keeper) for local_rank, captures in enumerate(ranks)}

    sources = KeeperSources(slots, lambda start: len(ranks), store)
    source = weakref.ref(sources.open(PartOf(TEXT, 4, 1)))
    assert source() is None


def test_few_sources_stay_open_and_their_slots_are_let_go(ranks, sources):
    gc.collect()  # what earlier tests left open is closed now, and not while this one counts
    descriptors = num_descriptors()
    for step in range(3 * MAX_OPENED):
        captures = ranks[step % 2]
        captures.capture(step)
        sources.open(SlotOf(captures.rank, captures.sequence, "image"))
        assert num_descriptors() <= descriptors + 2 * MAX_OPENED  # Python keeps one more for each mapping
    sources.clear()
    assert num_descriptors() <= descriptors


def test_sources_are_opened_by_several_threads(ranks, sources):
    for captures in ranks:
        captures.capture(4)
    errors = []

    def read(number):
        try:
            for _ in range(50):
                what = PartOf(TEXT, 4, 1 + number)
                content(sources.open(what))
                sources.forget(what)
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    threads = [threading.Thread(target=read, args=(number % 2,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def parity_of(step, data):
    held = HeldParity("run", TEXT, step, 3, [], 1, 1, 1 << 16, 0)
    return ParitySet(held, {0: memoryview(bytearray(data))})


def test_parity_is_read_until_it_is_freed(sources, store):
    what = ParityOf(TEXT, 4, 0)
    with pytest.raises(CaptureAborted, match="no parity of stripe 0 of step 4"):
        sources.open(what)
    first = parity_of(4, b"abc")
    store.add(first)
    source = sources.open(what)
    assert content(source) == b"abc"
    with pytest.raises(CaptureAborted, match="no parity of stripe 1"):
        sources.open(ParityOf(TEXT, 4, 1))
    store.add(parity_of(4, b"abd"))
    with pytest.raises(CaptureAborted, match="freed"):
        source.check()
    assert sources.open(what).identity != source.identity
    store.delete([first.key])
    with pytest.raises(CaptureAborted):
        sources.open(what)
