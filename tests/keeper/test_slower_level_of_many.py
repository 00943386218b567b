"""Several ranks, and a level that cannot keep up with the one before: what waits for it is bounded, also on disk."""

import threading

import pytest
from node_jobs import RUN, START, Member, capture
from support.waiting import until

from lazysnap import faults
from lazysnap.config import PersistentLevel
from lazysnap.keeper.persist import Persister
from lazysnap.keeper.protocol import Durable, LevelDropped, Sound
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
            assert until(lambda step=step: step in self.told(Sound, 0))
            self.persister.tell(self.levels[0].url, Told(RUN, START, (step,)))

    def told(self, kind, level):
        return [one.step for one in self.events if isinstance(one, kind) and one.level == self.levels[level].url]

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
        until(one.persister.is_drained)
        one.persister.stop()


def test_what_waits_is_bounded_and_what_is_left_out_is_told(make):
    rank = make()
    rank.train(*range(1, 18))

    waiting = rank.persister.steps_to_copy(0)
    assert waiting == {1, 8, 16, 17}  # the first is at hand
    assert len(waiting) <= 1 + most_waiting(rank.levels[1], SLOTS)
    assert sorted(rank.told(LevelDropped, 1)) == sorted(set(range(2, 17)) - {8, 16})
    # Nothing is kept on the faster disk for what was left out; the last deletion may still be under way.
    assert until(lambda: set(rank.steps_at(0)) <= waiting)

    rank.may_copy.set()
    assert until(rank.persister.is_drained)
    assert rank.told(Durable, 1) == [1, 8, 16, 17]
