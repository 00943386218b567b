"""How long the keeper of the second rank waits for that of the first, which is a process, too: alive, or stopped."""

import contextlib
import pathlib

import pytest
from keeper_jobs import until
from node_jobs import GENERATION, RUN, Here, Member, image_of

from lazysnap.arena import Check, Word
from lazysnap.keeper.parts import CaptureKey
from lazysnap.levels import open_store
from lazysnap.resolver import candidates
from lazysnap.shard.manifest import CaptureMeta


@pytest.fixture
def make(tmp_path):
    with contextlib.ExitStack() as stack:

        def both(timeout_s, *, of_lead_s=None):
            made = []
            for rank, seconds in enumerate((of_lead_s or timeout_s, timeout_s)):
                one = Member(tmp_path, rank=rank, timeout_s=seconds).start()
                made.append(stack.enter_context(contextlib.closing(one)))
            return made

        yield both


class Clock:
    """In the place of ``time``: what a follower's deadlines are measured with goes on when a test says so."""

    def __init__(self, monkeypatch):
        self.now = 1000.0
        for module in ("node_lane", "parts"):
            monkeypatch.setattr(f"lazysnap.keeper.{module}.time", self)

    def monotonic(self):
        return self.now


def test_a_lead_that_lives_is_waited_for_beyond_the_deadline_but_not_for_ever(tmp_path, monkeypatch):
    """It has not come to this capture; asked, it says that more is to come, until ten deadlines have passed."""
    clock = Clock(monkeypatch)
    lead = Member(tmp_path, rank=0, timeout_s=4.0)
    follower = Here(lead, 1)
    news, key = follower.persister.news, CaptureKey(GENERATION, RUN, 5)

    def goes_on():
        """Whether the lead says so at the next moment of the clock, too."""
        clock.now += 3.5
        follower.persister.wake()
        until(lambda: news.last_sign(lead.url, key) == clock.now or follower.told("level_failed"))
        return news.last_sign(lead.url, key) == clock.now

    with contextlib.closing(lead), contextlib.closing(follower):
        lead.start()
        waiting = follower.adopt(5, pin=True)
        assert not follower.persister.is_drained()  # from this moment of the clock on it is awaited
        for _ in range(11):  # 3.5 s each: never as long as the deadline since the last answer, 38.5 in all
            assert goes_on()
            assert not follower.told("level_failed")
            assert waiting.status().pinned

        goes_on()  # 42 s

        assert until(lambda: follower.told("level_failed") == [5])
        assert until(lambda: not waiting.status().pinned)


def test_a_lead_that_hangs_is_given_up_and_followed_again_when_it_is_back(make):
    lead, member = make(2.0)
    with lead.stopped():
        waiting = member.adopt(5, pin=True)
        assert until(lambda: member.told("level_failed") == [5], 30.0)
        assert until(lambda: not waiting.status().pinned)

    member.adopt(6, pin=True)
    lead.adopt(6, pin=True)

    assert until(lambda: lead.told("durable") == member.told("durable") == [6])


@pytest.mark.parametrize("state", ["filling", "unchecked"])
def test_a_slot_that_is_used_again_while_the_lead_hangs_is_never_taken_for_what_it_held(make, state):
    """The lead reads it; its owner gives the lead up, and the trainer begins the next capture there."""
    lead, member = make(2.0, of_lead_s=100.0)
    lead.adopt(5, pin=True)
    slot = member.adopt(5, whole=False)
    if state == "unchecked":  # every byte is there, and read; whether they count is still to be said
        slot.set_word(Word.UNCHECKED, Check.DEVICE)
        slot.commit()
    slot.set_word(Word.PIN, 1)
    member.connection.send({"type": "begun"})
    level = pathlib.Path(member.url)
    assert until(lambda: [path for path in level.rglob("*") if path.is_file()])
    with lead.stopped():
        assert until(lambda: member.told("level_failed") == [5], 30.0)
        assert until(lambda: not slot.status().pinned)
        meta, image = CaptureMeta(RUN, 1, 6, 1, 2, 3, generation=GENERATION), image_of(1, 6)
        slot.begin(6, sequence=6, image_bytes=len(image), meta=meta.to_bytes(), pin=True)
        slot.image[: len(image)] = image
        slot.commit()
        member.connection.send({"type": "begun"})

    assert until(lambda: lead.told("level_failed"), 30.0)
    lead.adopt(6, pin=True)

    assert until(lambda: lead.told("durable") == member.told("durable") == [6])
    store = open_store(member.url)
    [plan] = candidates([store.inventory()])
    assert plan.step == 6
    store.verify_entry(plan.sources[0][0])
