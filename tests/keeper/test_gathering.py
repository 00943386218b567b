"""One keeper asks another for its part: what is answered, when, and how long it is waited for."""

import contextlib
import time

import pytest
from keeper_jobs import until
from node_jobs import GENERATION, RUN, Member

from lazysnap.config import PersistentLevel, SnapshotConfig
from lazysnap.errors import LevelUnavailable
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.parts import CaptureKey, News, Outcome
from lazysnap.keeper.team import Team
from lazysnap.shard.stem import Stem
from lazysnap.topology import places


@pytest.fixture
def member(tmp_path):
    member = Member(tmp_path)
    yield member
    member.close()


def test_a_capture_is_offered_as_soon_as_it_has_begun(member):
    member.start().adopt(5, whole=False)

    assert member.ask(5) == 5


def test_one_that_was_left_out_or_torn_is_refused_at_once(member):
    member.start().adopt(5)
    member.adopt(7).discard()
    assert member.ask(5) == 5

    for step in (4, 6, 7):
        with pytest.raises(LevelUnavailable, match=f"rank 1 of this node: it has not captured step {step}"):
            member.ask(step, timeout_s=300)


def test_one_that_may_still_come_is_waited_for_until_the_deadline(member):
    member.start().adopt(5)

    with pytest.raises(LevelUnavailable, match="step 8 was not captured by rank 1 of this node within"):
        member.ask(8, timeout_s=0.5)


def test_when_the_trainer_is_dead_nothing_more_is_promised(member):
    member.start().adopt(5)
    assert member.ask(5) == 5
    member.connection.close()
    member.connection = None

    with pytest.raises(LevelUnavailable, match="has not captured step 8"):
        member.ask(8, timeout_s=300)
    assert member.ask(5) == 5


def test_a_keeper_that_is_not_there_is_waited_for_only_while_a_trainer_may_start_it(member):
    with pytest.raises(LevelUnavailable, match="rank 1 of this node"):
        member.ask(5, timeout_s=300, is_alone=True)
    with pytest.raises(LevelUnavailable, match="rank 1 of this node"):
        member.ask(5, timeout_s=0.2)
    member.start()


def test_a_slot_is_not_lent_where_a_faster_level_is_about_to_free_it(tmp_path):
    """The lead may read for as long as a slow level takes, and the slot would be free, and used, before."""
    fast = PersistentLevel(str(tmp_path / "fast"), every_n_steps=1)
    member = Member(tmp_path, faster=(fast,)).start()
    with contextlib.closing(member):
        slot = member.adopt(5, whole=False, pin=True)
        with pytest.raises(LevelUnavailable, match="step 5 was not captured by rank 1 of this node within"):
            member.ask(5, timeout_s=0.5)
        slot.commit()

        offer = member.offer(5)

        assert (offer.url, offer.location, offer.rank, offer.slot) == (fast.url, "step-00000005", 1, None)


def test_a_slot_is_lent_where_the_faster_level_fails(tmp_path, monkeypatch):
    """It may hang there: it is tried again, but nothing waits for it."""
    monkeypatch.setenv("LAZYSNAP_FAULT", "level.store.publish_shard:1:raise")
    member = Member(tmp_path, faster=(PersistentLevel(str(tmp_path / "fast"), every_n_steps=1),)).start()
    with contextlib.closing(member):
        member.adopt(5, pin=True)
        assert until(lambda: member.told("level_failed") == [5])
        assert member.ask(5) == 5

        member.adopt(6, whole=False, pin=True)

        assert member.ask(6) == 6


class Clock:
    """In the place of ``time``: what the deadlines of gathering are measured with goes on when a test says so."""

    sleep = staticmethod(time.sleep)

    def __init__(self, monkeypatch):
        self.passed_s = 0.0
        monkeypatch.setattr("lazysnap.keeper.gathering.time", self)

    def monotonic(self):
        return self.passed_s


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_a_keeper_that_does_not_answer_is_waited_for_less_the_next_time(member, clock):
    """Each capture that waits holds slots of all ranks. As soon as it answers once, it has all its time again."""
    member.start().adopt(5)
    late, waited = {}, []

    def beat():
        clock.passed_s += 1.0

    with member.stopped():
        for _ in range(5):
            started = clock.passed_s
            with pytest.raises(LevelUnavailable, match="rank 1 of this node"):
                member.ask(5, timeout_s=60, late=late, beat=beat)
            waited.append(clock.passed_s - started)

    assert waited == [61, 7, 7, 7, 61]  # every fourth time in full: it may only be slower than the short deadline
    assert late == {1: 5}
    assert member.ask(5, late=late) == 5
    assert late == {}


def test_a_keeper_that_is_steadily_slower_than_the_short_deadline_is_heard_in_the_full_one(member, clock):
    member.start().adopt(5)
    late = {1: 4}

    def beat():
        if clock.passed_s < 10.0:  # of 15; a tenth of it would be over
            clock.passed_s += 1.0
        elif 8 not in member.slots:
            member.adopt(8)

    assert member.ask(8, timeout_s=15, late=late, beat=beat) == 8
    assert late == {}


def test_what_was_heard_is_kept_by_capture():
    news = News()
    first, second = (CaptureKey(GENERATION, RUN, step) for step in (5, 6))
    done = Outcome("", "step-00000006", "node-00000-of-00001", 0.5)
    news.hear_sign("a", first)
    assert news.last_sign("a", second) == news.last_sign("a", first) > 0
    assert news.last_sign("b", first) == 0

    news.hear_outcome("a", second, done)

    assert (news.outcome("a", second), news.outcome("a", first), news.outcome("b", second)) == (done, None, None)
    # The lead goes in order: it will hardly come back to the first. A sign about a later one says nothing of it.
    assert news.passed_s("a", first) >= 0
    assert news.passed_s("a", second) is None
    assert news.passed_s("b", first) is None
    assert news.last_sign("a", first) < news.last_sign("a", second)
    news.hear_outcome("a", first, Outcome("the disk is full"))
    news.forget_failures()
    assert (news.outcome("a", first), news.outcome("a", second)) == (None, done)
    # Ranks that were started again are later, whatever the step.
    assert CaptureKey("00000000deadbef0", RUN, 1) > second


def test_who_sits_where_travels_to_the_keeper_whole():
    identity = JobIdentity.from_config(SnapshotConfig(job_id="job"))
    found = [Team.of(places(["a", "b", "a", "b", "c"]), rank, identity) for rank in range(5)]

    assert [team.ranks for team in found] == [(0, 2), (1, 3), (0, 2), (1, 3), (4,)]
    assert [(team.node, team.nodes, team.is_lead) for team in found] == [
        (0, 3, True),
        (1, 3, True),
        (0, 3, False),
        (1, 3, False),
        (2, 3, True),
    ]
    assert [Team.from_fields(vars(team)) for team in found] == found
    node, rank = PersistentLevel("/a", aggregate="node"), PersistentLevel("/a")
    assert [team.gathers(node) for team in found] == [True] * 4 + [False]
    assert not any(team.gathers(rank) for team in found)
    # Each file is looked after by exactly one rank that writes, also those of more nodes and ranks than there are now.
    for level in (node, rank):
        writers = [team.share(level) for team in found if team.is_lead or not team.gathers(level)]
        for stem in [Stem.of_node(index, 9) for index in range(9)] + [Stem.of_rank(index, 16) for index in range(16)]:
            assert sum(share.has(stem) for share in writers) == 1, (level, stem)
