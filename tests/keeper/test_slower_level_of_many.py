"""Several ranks, and a level that cannot keep up with the one before: what waits for it is bounded, also on disk."""

import pathlib
import threading

import pytest
from keeper_jobs import until
from node_jobs import GENERATION, RUN, Member, capture

from lazysnap import faults
from lazysnap.config import PersistentLevel
from lazysnap.keeper import persist
from lazysnap.keeper.parts import CaptureKey
from lazysnap.keeper.persist import Persister
from lazysnap.keeper.schedule import most_waiting
from lazysnap.levels import open_store
from lazysnap.levels.belongings import Told

SLOTS = 3


class Rank:
    """The first of two; its slower level copies nothing until it is let go on."""

    def __init__(self, root, monkeypatch, **settings):
        fast = PersistentLevel(root / "fast", every_n_steps=1, keep_last=1)
        self.levels = (fast, PersistentLevel(root / "slow", every_n_steps=1, keep_last=2, **settings))
        self.slots, self.events = [], []
        self.may_copy, original = threading.Event(), faults.point

        def point(name):
            if name == "keeper.persist.cascade":
                assert self.may_copy.wait(120)
            original(name)

        monkeypatch.setattr(faults, "point", point)
        team = Member(root).teams[0]
        self.persister = Persister(self.levels, lambda: list(self.slots), self.events.append, team=team)

    def train(self, *steps):
        for step in steps:
            self.slots = [*self.slots, capture(0, step, pin=True)][-SLOTS:]
            self.persister.wake()
            assert until(lambda step=step: step in self.told("sound", 0))
            self.persister.tell(self.levels[0].url, Told(RUN, GENERATION, (step,)))

    def told(self, kind, level):
        return [one["step"] for one in self.events if one["type"] == kind and one["level"] == self.levels[level].url]

    def steps_at(self, level):
        return sorted(entry.step for entry in open_store(self.levels[level].url).inventory().entries)


@pytest.fixture
def make(tmp_path, monkeypatch):
    made = []

    def rank(**settings):
        made.append(Rank(tmp_path, monkeypatch, **settings))
        return made[-1]

    yield rank
    for one in made:
        one.may_copy.set()
        until(one.persister.is_drained, 20)
        one.persister.stop()


def test_what_waits_is_bounded_and_what_is_left_out_is_told(make):
    rank = make()
    rank.train(*range(1, 18))

    waiting = rank.persister.steps_to_copy(0)
    assert waiting == {1, 8, 16, 17}  # the first is at hand
    assert len(waiting) <= 1 + most_waiting(rank.levels[1], SLOTS)
    assert sorted(rank.told("level_dropped", 1)) == sorted(set(range(2, 17)) - {8, 16})
    # Nothing is kept on the faster disk for what was left out; the last deletion may still be under way.
    assert until(lambda: set(rank.steps_at(0)) <= waiting)

    rank.may_copy.set()
    assert until(rank.persister.is_drained, 30)
    assert rank.told("durable", 1) == [1, 8, 16, 17]


def test_another_rank_of_the_node_is_told_of_files_that_wait_for_long(make, monkeypatch):
    monkeypatch.setattr(persist, "_REMEMBERED", 2)
    rank = make(keep_every_n_steps=1)
    rank.train(1, 2, 3, 4, 5)

    with rank.persister.changed:
        files = [rank.persister.file_of(CaptureKey(GENERATION, RUN, step)) for step in (1, 2, 3)]
    assert [item.entry.step for item in files] == [1, 2, 3]
    assert all((pathlib.Path(rank.levels[0].url) / item.entry.location).is_dir() for item in files)
