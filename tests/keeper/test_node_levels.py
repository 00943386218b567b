"""One file for two ranks, written by the first one's keeper: what is torn, left behind, named, or immutable."""

import os
import pathlib
import signal

import pytest
from keeper_jobs import until
from node_jobs import RUN, SIZES, Lead, Member, frozen_slot, image_of
from safetensors.torch import load_file

from lazysnap.arena import Word
from lazysnap.keeper.launch import start_keeper
from lazysnap.levels import open_store
from lazysnap.resolver import candidates


@pytest.fixture
def make(tmp_path):
    made = []

    def two(**settings):
        member = Member(tmp_path, **settings).start()
        made.append(member)
        lead = Lead(member)
        made.append(lead)
        return lead, member

    yield two
    for one in reversed(made):
        one.close()


def plans(member):
    """Complete snapshots, every byte read back."""
    store = open_store(member.url)
    found = candidates([store.inventory()])
    for plan in found:
        store.verify_entry(plan.sources[0][0])
        tensors = load_file(pathlib.Path(member.url) / store.place(plan.sources[0][0]).shard_path)
        for rank in (0, 1):
            values = tensors[f"rank-0000{rank}/x"]
            assert len(values) == SIZES[rank]
            assert (values == (plan.step + 100 * rank) % 251).all()
    return found


def steps(member):
    return [plan.step for plan in plans(member)]


def test_captures_that_still_fill_are_followed_and_let_go_when_all_is_written(make):
    lead, member = make()
    first, second = member.adopt(5, whole=False, pin=True), lead.adopt(5, whole=False, pin=True)
    assert not until(lambda: lead.told("durable"), 0.5)
    first.commit()
    second.commit()

    assert until(lambda: lead.told("durable") == member.told("durable") == [5])
    for rank, one in enumerate((lead, member)):  # each its own part
        assert [event["bytes"] for event in one.events if event["type"] == "durable"] == [len(image_of(rank, 5))]
    assert until(lambda: not first.status().pinned and not second.status().pinned)
    assert steps(member) == [5]


def test_one_that_is_torn_leaves_nothing_visible_and_the_next_is_written(make):
    lead, member = make()
    torn, whole = member.adopt(5, whole=False, pin=True), lead.adopt(5, pin=True)
    writing = pathlib.Path(member.url)
    assert until(lambda: [path for path in writing.rglob("*") if path.is_file()])
    torn.discard()

    assert until(lambda: lead.told("level_failed") == [5])
    assert until(lambda: not whole.status().pinned)
    assert [path for path in writing.rglob("*") if path.is_file()] == []
    member.adopt(6, pin=True)
    lead.adopt(6, pin=True)
    assert until(lambda: lead.told("durable") == member.told("durable") == [6])
    assert steps(member) == [6]


def test_where_the_lead_lost_its_part_the_other_one_is_let_go(make):
    lead, member = make()
    waiting, torn = member.adopt(5, whole=False, pin=True), lead.adopt(5, whole=False, pin=True)
    assert until(lambda: [path for path in pathlib.Path(member.url).rglob("*") if path.is_file()])
    torn.discard()

    assert until(lambda: member.told("level_failed") == [5])
    assert until(lambda: not waiting.status().pinned)


def test_an_older_capture_that_gets_a_name_is_written_after_newer_ones(make):
    lead, member = make(keep_last=1)
    for one in (lead, member):
        one.adopt(5)
        one.adopt(6, pin=True)
    assert until(lambda: lead.told("durable") == member.told("durable") == [6])

    assert lead.persister.keep("before", RUN, 5)
    member.connection.send({"type": "keep", "name": "before", "run_id": RUN, "sequence": 5, "step": 5})

    assert until(lambda: lead.told("durable") == member.told("durable") == [6, 5])
    assert until(lambda: open_store(member.url).inventory().entries[0].names == ("before",))
    assert steps(member) == [6, 5]


def test_immutable_tensors_that_only_one_rank_holds_are_written_for_it(make):
    lead, member = make()
    mine, my_reference = frozen_slot(b"a" * 7000)
    other, other_reference = frozen_slot(b"b" * 900)
    lead.frozen[my_reference.digest] = mine
    member.connection.send({"type": "adopt_frozen", "digest": other_reference.digest}, (other.fd,))
    member.adopt(5, pin=True, frozen=other_reference)
    lead.adopt(5, pin=True, frozen=my_reference)

    assert until(lambda: lead.told("durable") == member.told("durable") == [5])

    [plan] = plans(member)
    store = open_store(member.url)
    assert set(plan.frozen) == {my_reference.digest, other_reference.digest}
    for [image] in plan.frozen.values():
        store.verify_entry(image)


def test_a_keeper_that_took_a_dead_ones_place_is_waited_for_and_does_not_wait_for_what_is_over(make):
    """What is asked for before its trainer came is not refused; what the lead was done with before is let go."""
    lead, member = make(timeout_s=100)
    slots = [member.adopt(5, pin=True), lead.adopt(5, pin=True)]
    assert until(lambda: lead.told("durable") == [5])
    assert until(lambda: member.told("durable") == [5])
    assert until(lambda: not any(slot.status().pinned for slot in slots))
    os.kill(member.connection.peer_pid, signal.SIGKILL)
    member.connection.close()
    member.events.clear()
    # As if it had died before it noted that.
    slots[0].set_word(Word.PIN, 1)
    lead.adopt(6, pin=True)
    start_keeper(member.identity)
    assert not until(lambda: lead.told("level_failed"), 1.0)

    member.start()
    member.connection.send({"type": "adopt"}, (slots[0].fd,))
    member.adopt(6, pin=True)

    assert until(lambda: lead.told("durable") == [5, 6])
    assert until(lambda: member.told("durable") == [6])
    # Nobody answers under the lead's address here: else it would learn that this one is durable.
    assert until(lambda: member.told("level_failed") == [5])
    assert until(lambda: not slots[0].status().pinned)
    assert lead.told("level_failed") == []
