"""Ranks count on one real store which snapshots all of them have."""

import datetime
import threading

import pytest
import torch.distributed as dist

from lazysnap import PersistentLevel, SnapshotConfig
from lazysnap.engine.board import Board, BoardUnavailable
from lazysnap.engine.tally import Tally
from lazysnap.keeper.client import KeeperClient
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.protocol import Sound, Surplus

RUN, START, AGAIN = "0" * 16, "1" * 16, "1" * 15 + "2"
TIMEOUT_S = 20.0


class LossyStore:
    """The next call of that kind is made, or not, and its answer is lost."""

    def __init__(self, store):
        self.store, self.loses = store, {}

    def clone(self):
        own = LossyStore(self.store.clone())
        own.loses = self.loses
        return own

    def __getattr__(self, name):
        def ask(*args):
            lost = self.loses.pop(name, None)
            if lost == "question":
                raise RuntimeError("lost")
            answer = getattr(self.store, name)(*args)
            if lost == "answer":
                raise RuntimeError("lost")
            return answer

        return ask


class Ranks:
    """The tallies of several ranks, each with a connection of its own to one store."""

    def __init__(self, number, root, keep_last=2):
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=datetime.timedelta(seconds=TIMEOUT_S))
        self.level = PersistentLevel(str(root / "level"), keep_last=keep_last)
        self.keys = self.store.num_keys()
        self.is_up = True
        self.lossy = LossyStore(self.store)
        self.asked = 0
        """How often a rank that has no board asked for one."""
        self.reached, self.may_go_on = threading.Event(), threading.Event()
        self.may_go_on.set()
        config = SnapshotConfig(levels=(self.level,), job_id=str(root))
        # Not connected: what they tell their keepers goes nowhere.
        clients = [KeeperClient(JobIdentity.from_config(config), config) for _ in range(number)]
        self.tallies = [Tally(config.levels, client, number, self.board) for client in clients]
        for tally in self.tallies:
            tally.begin(START)

    def board(self):
        self.asked += 1
        self.reached.set()
        assert self.may_go_on.wait(TIMEOUT_S)
        if not self.is_up:
            raise BoardUnavailable("down")
        return Board(self.lossy, TIMEOUT_S)

    def sound(self, rank, *steps, start=START):
        for step in steps:
            self.tallies[rank].hear(Sound(self.level.url, step, RUN, start))

    def surplus(self, rank, step):
        self.tallies[rank].hear(Surplus(self.level.url, step, RUN, START))

    def settle(self):
        for tally in self.tallies:
            assert tally.settle(TIMEOUT_S)

    def new_keys(self):
        return self.store.num_keys() - self.keys

    def close(self):
        for tally in self.tallies:
            tally.close()


@pytest.fixture
def make_ranks(tmp_path):
    made = []

    def make(number, **settings):
        made.append(Ranks(number, tmp_path, **settings))
        return made[-1]

    yield make
    for ranks in made:
        ranks.close()


def test_a_step_is_complete_when_the_last_rank_has_it_and_all_hear_of_it(make_ranks):
    ranks = make_ranks(3)
    for rank in (0, 1):
        ranks.sound(rank, 5)
    ranks.settle()
    assert not any(tally.wait(5, 0.0) for tally in ranks.tallies)

    ranks.sound(2, 5)

    assert all(tally.wait(5, TIMEOUT_S) for tally in ranks.tallies)
    for tally in ranks.tallies:
        [news] = tally.news()
        assert (news.level, news.step, news.count) == (ranks.level.url, 5, 1)
        assert not tally.wait(6, 0.0)


def test_a_rank_counts_once_however_often_its_keepers_tell_it(make_ranks):
    ranks = make_ranks(2)
    ranks.sound(0, 5, 5, 5)
    ranks.settle()

    assert not ranks.tallies[0].wait(5, 0.0)


def test_what_was_captured_before_this_start_counts_for_nothing(make_ranks):
    ranks = make_ranks(2)
    ranks.sound(0, 5, start="0" * 16)
    ranks.sound(1, 5)
    ranks.settle()

    assert not ranks.tallies[1].wait(5, 0.0)


@pytest.mark.parametrize("is_complete", [False, True])
def test_a_step_is_taken_back_until_it_is_complete_and_never_afterwards(make_ranks, is_complete):
    """Nor is it complete when the others come to it after that: by then its files are gone."""
    ranks = make_ranks(2)
    for rank in (0, 1) if is_complete else (0,):
        ranks.sound(rank, 5)
    ranks.settle()
    ranks.surplus(0, 5)
    ranks.settle()
    ranks.sound(1, 5)
    ranks.settle()
    assert [tally.wait(5, TIMEOUT_S * is_complete) for tally in ranks.tallies] == [is_complete] * 2

    ranks.surplus(1, 5)
    ranks.settle()

    assert ranks.new_keys() == is_complete


def test_a_counter_that_was_filled_by_one_that_died_at_once_is_read_by_the_next(make_ranks):
    ranks = make_ranks(2)
    ranks.sound(0, 5)
    ranks.settle()
    ranks.board().add(f"{RUN}/{START}/0/5", 1)

    ranks.surplus(0, 5)

    assert all(tally.settle(TIMEOUT_S) for tally in ranks.tallies)
    assert ranks.tallies[0].wait(5, TIMEOUT_S)


def test_the_store_does_not_fill_up(make_ranks):
    """Neither with steps that are complete, nor with those that one rank left out."""
    ranks = make_ranks(2)
    for step in range(1, 41):
        for rank in (0, 1) if step % 3 else (0,):
            ranks.sound(rank, step)
        ranks.settle()
    for rank in (0, 1):
        ranks.sound(rank, 41, 43)
    ranks.settle()

    assert all(tally.wait(43, TIMEOUT_S) for tally in ranks.tallies)
    assert sum(news.count for news in ranks.tallies[0].news()) == 27 + 2
    assert ranks.new_keys() == 1


def test_a_training_that_goes_back_counts_anew(make_ranks):
    ranks = make_ranks(2)
    for rank in (0, 1):
        ranks.sound(rank, 100)
    assert all(tally.wait(100, TIMEOUT_S) for tally in ranks.tallies)

    for tally in ranks.tallies:
        tally.begin(AGAIN)

    assert not any(tally.wait(60, 0.0) for tally in ranks.tallies)
    for rank in (0, 1):
        ranks.sound(rank, 60, start=AGAIN)
    assert all(tally.wait(60, TIMEOUT_S) for tally in ranks.tallies)


@pytest.mark.parametrize("is_up", [True, False])
def test_what_was_heard_before_a_training_went_back_counts_no_more(make_ranks, is_up):
    """Neither what is being counted just then, nor what waits behind that."""
    ranks = make_ranks(2)
    ranks.sound(1, 5, 6)
    ranks.settle()
    ranks.is_up, ranks.asked = is_up, 0
    ranks.reached.clear()
    ranks.may_go_on.clear()
    ranks.sound(0, 5, 6, 7, 8)
    assert ranks.reached.wait(TIMEOUT_S)

    ranks.tallies[0].begin(AGAIN)
    ranks.may_go_on.set()

    assert ranks.tallies[0].settle(TIMEOUT_S)
    assert not ranks.tallies[0].wait(5, 0.0)
    assert ranks.new_keys() == 2  # what the other rank counted
    # Once for what was being counted, once to settle; never for what was heard and not looked at yet.
    assert ranks.asked == (1 if is_up else 2)


def test_a_store_that_is_away_is_told_once_and_asked_again(make_ranks, caplog):
    ranks = make_ranks(2)
    ranks.is_up = False
    for step in (4, 5):
        for rank in (0, 1):
            ranks.sound(rank, step)
    ranks.settle()
    assert not ranks.tallies[0].wait(4, 0.0)
    assert len([record for record in caplog.records if "training goes on" in record.message]) == 2

    ranks.is_up = True
    for rank in (0, 1):
        ranks.sound(rank, 6)

    assert all(tally.wait(6, TIMEOUT_S) for tally in ranks.tallies)


def test_what_was_heard_while_the_store_was_away_is_counted_when_it_is_back(make_ranks):
    ranks = make_ranks(2)
    ranks.sound(0, 4)
    ranks.settle()
    ranks.is_up = False
    ranks.sound(1, 4)
    ranks.settle()

    ranks.is_up = True

    assert all(tally.wait(4, TIMEOUT_S) for tally in ranks.tallies)


def test_a_step_that_is_full_is_published_though_the_first_try_was_lost(make_ranks):
    ranks = make_ranks(2)
    ranks.sound(0, 4)
    ranks.settle()
    ranks.lossy.loses["compare_set"] = "question"
    ranks.sound(1, 4)

    assert all(tally.wait(4, TIMEOUT_S) for tally in ranks.tallies)


def test_what_may_have_been_taken_back_from_a_full_counter_is_not_given_up(make_ranks):
    """Who filled it may only be slow to say that it is complete."""
    ranks = make_ranks(2)
    ranks.sound(0, 5)
    ranks.settle()
    ranks.board().add(f"{RUN}/{START}/0/5", 1)
    ranks.lossy.loses["add"] = "answer"
    ranks.surplus(0, 5)
    ranks.settle()

    ranks.surplus(0, 5)
    ranks.settle()

    [column] = ranks.tallies[0]._columns.values()
    assert list(column.void) == []


def test_what_keepers_name_again_and_again_while_the_store_is_away_is_remembered_once(make_ranks):
    ranks = make_ranks(2)
    ranks.sound(0, *range(50))
    ranks.settle()
    tally = ranks.tallies[0]
    with tally._changed:  # the thread cannot take any of it
        for _ in range(20):
            for step in range(50):
                ranks.surplus(0, step)
        assert len(tally._heard) == 50
    ranks.settle()
