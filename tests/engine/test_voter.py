"""Ranks that agree in words: in any order of acts, with answers lost and ranks dead at any point, what was agreed on is
whole on all of them.
"""

import random

import pytest
import torch.distributed as dist

from lazysnap import PersistentLevel, SnapshotConfig
from lazysnap.arena import SlotPhase, SlotStatus
from lazysnap.engine.ballot import NONE, Ballot
from lazysnap.engine.board import Board, BoardUnavailable
from lazysnap.engine.marks import Marks
from lazysnap.engine.slots import slots_needed
from lazysnap.engine.voter import Presence, Voter

KEY = "run"


class LossyStore:
    """A real store of torch. Others go on before and after each question; questions and answers may be lost."""

    def __init__(self, store, chance, losses, between):
        self.store, self.chance, self.losses, self.between = store, chance, losses, between

    def clone(self):
        return self

    def set_timeout(self, _):
        pass

    def __getattr__(self, name):
        def ask(*args):
            self.between()
            if self.chance.random() < self.losses:
                raise RuntimeError("lost on the way there")
            answer = getattr(self.store, name)(*args)
            self.between()
            if self.chance.random() < self.losses:
                raise RuntimeError("lost on the way back")
            return answer

        return ask


class Died(Exception):
    """In the middle of an act of the thread that agrees: nothing of it comes after this."""


class Rank:
    """The training of one rank beside its voter: captures into slots, some of which fail, some are pinned."""

    def __init__(self, ranks, store, chance, *, config, losses, failures):
        self.ranks, self.chance, self.failures = ranks, chance, failures
        self.every = config.every_n_steps
        self.slots = [SlotStatus(SlotPhase.EMPTY, None, 0, 0, 0, False, True)] * slots_needed(
            config, len(WORLD), agrees=True
        )
        self.marks = Marks(NONE, 0)
        self.voter = Voter(self.marks, self.look, len(WORLD), self.every)
        self.board = Board(LossyStore(store, chance, losses, self.between), 1.0)
        self.step = self.sequence = 0
        self.writing = self.chosen = None
        self.is_asking = self.is_dead = False
        self.lag, self.hears, self.drift, self.frailty = 1.0, 1.0, None, 0.0

    def whole(self):
        return {slot.step for slot in self.slots if slot.phase is SlotPhase.WHOLE}

    def look(self, step):
        answer = Presence.GONE
        for slot in self.slots:
            if slot.step == step and slot.phase in (SlotPhase.WHOLE, SlotPhase.CAPTURING):
                answer = Presence.WHOLE if slot.phase is SlotPhase.WHOLE else Presence.COMING
        self.between(most=30)  # an answer is of one moment, what is made of it of a later one
        return answer

    def train(self):
        """One act of the training thread: choosing a slot and writing into it are two."""
        if self.is_dead:
            return
        if self.writing is not None and self.chance.random() < 0.5:
            self.finish()
        elif self.chosen is not None:
            index, self.chosen = self.chosen, None
            self.sequence += 1
            pinned = self.chance.random() < 0.3
            self.slots[index] = SlotStatus(SlotPhase.CAPTURING, self.step, self.sequence, 0, 0, pinned, True)
            self.writing = index
            self.voter.passed = self.step
        elif self.writing is None and not self.is_too_far():
            self.step += 1
            if self.step % self.every == 0:
                self.chosen = self.marks.choose(self.slots, [True] * len(self.slots))
                if self.chosen is None:  # storage holds it up
                    self.step -= 1
        if self.chance.random() < 0.5:
            index = self.chance.randrange(len(self.slots))
            self.slots[index] = unpinned(self.slots[index])

    def is_too_far(self):
        return self.drift is not None and self.step >= self.drift + min(rank.step for rank in self.ranks)

    def finish(self):
        index, self.writing = self.writing, None
        failed = self.chance.random() < self.failures
        phase = SlotPhase.VOID if failed else SlotPhase.WHOLE
        slot = self.slots[index]
        self.slots[index] = SlotStatus(phase, slot.step, slot.sequence, 0, 0, slot.pinned, True)

    def vote(self):
        if self.is_asking or self.is_dead or self.chance.random() > self.hears:
            return
        self.is_asking = True
        try:
            self.voter.act(self.board, KEY)
        except (BoardUnavailable, Died):
            pass
        finally:
            self.is_asking = False

    def between(self, most=3):
        """While a question is under way, everybody else goes on, this rank's training, too."""
        for _ in range(self.chance.choice((0, 0, 1, most))):
            act(self.ranks, self.chance)
        if self.chance.random() < self.frailty:
            self.die()
        if self.is_dead:
            raise Died

    def die(self):
        self.is_dead = True


def unpinned(slot):
    return SlotStatus(slot.phase, slot.step, slot.sequence, 0, 0, False, True)


WORLD = range(3)


def act(ranks, chance):
    rank = chance.choice(ranks)
    if chance.random() < rank.lag:
        chance.choice((rank.train, rank.train, rank.vote))()
    safe(ranks)


def safe(ranks):
    """What the word says is agreed on is whole everywhere, also where nobody has heard of it yet."""
    agreed = ranks[0].peek()
    if agreed != NONE:
        assert all(agreed in rank.whole() for rank in ranks), agreed
        assert all(rank.marks.agreed <= agreed for rank in ranks)


def make(seed, *, losses=0.0, failures=0.0, every=1):
    chance = random.Random(seed)
    store = dist.HashStore()
    config = SnapshotConfig(every_n_steps=every, averaging_period="never", levels=(PersistentLevel("/x"),))
    ranks = []
    ranks += [Rank(ranks, store, chance, config=config, losses=losses, failures=failures) for _ in WORLD]

    def peek():
        word = store.compare_set(KEY, "?", "?").decode()
        return NONE if word == "?" else Ballot.of(word).agreed

    for rank in ranks:
        rank.peek = peek
    return ranks, chance


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("seed", range(15))
def test_what_was_agreed_on_is_whole_on_all_ranks_at_every_moment_and_they_go_on_agreeing(seed, every):
    ranks, chance = make(seed, every=every)

    for _ in range(4000):
        act(ranks, chance)

    assert ranks[0].peek() > ranks[0].step // 3
    assert all(len(rank.slots) == 4 for rank in ranks)


@pytest.mark.parametrize("seed", range(15))
def test_so_it_is_when_answers_are_lost_captures_fail_and_ranks_are_of_different_speed(seed):
    ranks, chance = make(seed, losses=0.1, failures=0.1)
    ranks[1].lag = 0.3
    for rank in ranks:
        rank.drift = 15  # they average their weights now and then

    for _ in range(6000):
        act(ranks, chance)

    assert ranks[0].peek() > 20


@pytest.mark.parametrize("seed", range(15))
def test_so_it_is_when_news_come_so_late_that_the_candidate_is_written_over_by_then(seed):
    ranks, chance = make(seed)
    for rank in ranks:
        rank.hears = 0.05

    for _ in range(6000):
        act(ranks, chance)

    assert ranks[0].peek() > 0


@pytest.mark.parametrize("seed", range(30))
def test_a_rank_that_dies_at_any_point_leaves_what_was_agreed_on_and_the_others_train_on(seed):
    ranks, chance = make(seed, losses=0.05)
    for _ in range(chance.randrange(200, 1500)):
        act(ranks, chance)
    victims = chance.sample(ranks, chance.randint(1, 2))

    for victim in victims:
        victim.frailty = 0.05  # inside what it asks or looks at
    for _ in range(2000):
        act(ranks, chance)
    for victim in victims:
        victim.die()
    steps = [rank.step for rank in ranks]
    for _ in range(2000):
        act(ranks, chance)

    alive = [number for number, rank in enumerate(ranks) if rank not in victims]
    assert all(ranks[number].step > steps[number] + 50 for number in alive)


@pytest.mark.parametrize("seed", range(10))
def test_where_the_store_is_gone_what_is_kept_stays_and_training_goes_on(seed):
    ranks, chance = make(seed)
    for _ in range(1500):
        act(ranks, chance)
    agreed, steps = ranks[0].peek(), [rank.step for rank in ranks]
    assert agreed != NONE

    for rank in ranks:
        rank.board = Board(LossyStore(None, chance, 1.0, lambda: None), 1.0)
    for _ in range(1500):
        act(ranks, chance)

    assert ranks[0].peek() == agreed
    assert all(rank.step > before + 50 for rank, before in zip(ranks, steps, strict=True))


def test_what_an_earlier_start_left_in_memory_is_not_taken_for_a_candidate():
    marks = Marks(4, 7)
    marks.learn(Ballot(4, 6, 0))
    old = SlotStatus(SlotPhase.WHOLE, 6, 7, 0, 0, False, True)
    base = SlotStatus(SlotPhase.WHOLE, 4, 5, 0, 0, False, True)
    new = SlotStatus(SlotPhase.WHOLE, 6, 8, 0, 0, False, True)

    assert not marks.is_ours(old)
    assert marks.choose([old, base, new], [True] * 3) == 0
    assert marks.keeps(6)
