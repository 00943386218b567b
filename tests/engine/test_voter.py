"""Ranks that agree in words: in any order of acts, with answers lost and ranks dead at any point, what was agreed on is
whole on all of them.
"""

import random

import pytest
import torch.distributed as dist

from lazysnap import PersistentLevel, SnapshotConfig
from lazysnap.arena import PAGE, Slot, SlotPhase, SlotStatus, Word
from lazysnap.engine.ballot import NONE, Ballot
from lazysnap.engine.board import Board, BoardUnavailable
from lazysnap.engine.marks import Marks, Presence
from lazysnap.engine.slots import slots_needed
from lazysnap.engine.voter import Voter
from lazysnap.keeper.machine import may_drop

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
    """The training of one rank beside its voter: captures into slots, some of which fail, some are pinned; now and then
    they need slots of another size.
    """

    def __init__(self, ranks, store, chance, *, config, losses, failures, swells):
        self.ranks, self.chance, self.failures, self.swells = ranks, chance, failures, swells
        self.every = config.every_n_steps
        self.keeper = Keeper(slots_needed(config, len(WORLD), agrees=True))
        self.marks = Marks(NONE, 0)
        self.voter = Voter(self.marks, self.look, len(WORLD), self.every)
        self.board = Board(LossyStore(store, chance, losses, self.between), 1.0)
        self.step = self.sequence = 0
        self.writing = self.chosen = None
        self.is_asking = self.is_dead = False
        self.lag, self.hears, self.drift, self.frailty = 1.0, 1.0, None, 0.0

    def has(self, step):
        """Whether a restart would find it."""
        words = [(slot.word(Word.BEGIN), slot.word(Word.END), slot.word(Word.VOID)) for slot in self.keeper.slots]
        return (step + 1, step + 1, 0) in words

    def look(self, step):
        answer = self.marks.look(self.keeper.told, step)
        self.between(most=30)  # an answer is of one moment, what is made of it of a later one
        return answer

    def train(self):
        """One act of the training thread: choosing a slot and writing into it are two."""
        if self.is_dead:
            return
        if self.writing is not None and self.chance.random() < 0.5:
            self.finish()
        elif self.chosen is not None:
            slot, self.chosen = self.chosen, None
            self.sequence += 1
            pinned = self.chance.random() < 0.3
            slot.begin(self.step, sequence=self.sequence, image_bytes=0, meta=b"", pin=pinned)
            self.writing = slot
            self.voter.passed = self.step
        elif self.writing is None and not self.is_too_far():
            self.step += 1
            if self.step % self.every == 0:
                self.choose()
        if self.chance.random() < 0.5 and self.keeper.slots:
            self.chance.choice(self.keeper.slots).unpin()

    def choose(self):
        self.marks.hold(self.keeper.told)
        if self.chance.random() < self.swells:
            self.keeper.size += 1
        fitting = [slot for slot in self.keeper.told if slot.meta_capacity == self.keeper.size * PAGE]
        index = self.marks.choose([slot.status() for slot in fitting], [True] * len(fitting))
        if index is None:  # storage holds it up
            self.step -= 1
        else:
            self.chosen = fitting[index]

    def is_too_far(self):
        return self.drift is not None and self.step >= self.drift + min(rank.step for rank in self.ranks)

    def finish(self):
        slot, self.writing = self.writing, None
        if self.chance.random() < self.failures:
            slot.discard()
        else:
            slot.commit()

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
        for _ in range(self.chance.choice((0, 0, 0, 0, 0, 1, 3, most))):
            act(self.ranks, self.chance)
        if self.chance.random() < self.frailty:
            self.die()
        if self.is_dead:
            raise Died

    def die(self):
        self.is_dead = True


class Keeper:
    """Lets slots of another size go and makes new ones, as ``SlotPool`` does; its trainer hears of it later."""

    def __init__(self, count):
        self.count, self.size = count, 1
        self.slots, self.told, self.all = [], [], []
        self.acts = self.run()
        for _ in range(count + 1):
            next(self.acts)

    def run(self):
        while True:
            statuses = [slot.status() for slot in self.slots]
            yield
            for index, slot in enumerate(list(self.slots)):
                if slot.meta_capacity != self.size * PAGE and may_drop(statuses, index) and slot.let_go():
                    self.slots.remove(slot)
                    yield
                    self.told = list(self.slots)
            if sum(slot.meta_capacity == self.size * PAGE for slot in self.slots) < self.count:
                self.all.append(Slot.create(self.size * PAGE, PAGE))
                self.slots.append(self.all[-1])
                self.told = list(self.slots)


WORLD = range(3)


def act(ranks, chance):
    rank = chance.choice(ranks)
    if chance.random() < rank.lag:
        chance.choice((rank.train, rank.train, rank.vote))()
    if rank.swells and not rank.is_dead:
        next(rank.keeper.acts)
    safe(ranks)


def safe(ranks):
    """What the word says is agreed on is whole everywhere, also where nobody has heard of it yet."""
    agreed = ranks[0].peek()
    if agreed != NONE:
        assert all(rank.has(agreed) for rank in ranks), agreed
        assert all(rank.marks.agreed <= agreed for rank in ranks)


@pytest.fixture
def make():
    made = []

    def ranks_of(seed, *, losses=0.0, failures=0.0, every=1, swells=0.0):
        chance = random.Random(seed)
        store = dist.HashStore()
        config = SnapshotConfig(every_n_steps=every, averaging_period="never", levels=(PersistentLevel("/x"),))
        ranks = []
        settings = {"config": config, "losses": losses, "failures": failures, "swells": swells}
        ranks += [Rank(ranks, store, chance, **settings) for _ in WORLD]
        made.extend(ranks)

        def peek():
            word = store.compare_set(KEY, "?", "?").decode()
            return NONE if word == "?" else Ballot.of(word).agreed

        for rank in ranks:
            rank.peek, rank.keys = peek, store.num_keys
        return ranks, chance

    yield ranks_of
    for rank in made:
        for slot in rank.keeper.all:
            slot.close()


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("seed", range(6))
def test_what_was_agreed_on_is_whole_on_all_ranks_at_every_moment_and_they_go_on_agreeing(make, seed, every):
    ranks, chance = make(seed, every=every)

    for _ in range(4000):
        act(ranks, chance)

    assert ranks[0].peek() > ranks[0].step // 3
    assert ranks[0].keys() <= 1 + 2 * len(ranks)  # the word, and counters that somebody has still to leave behind
    assert all(len(rank.keeper.slots) == 4 for rank in ranks)


@pytest.mark.parametrize("seed", range(6))
def test_so_it_is_when_answers_are_lost_captures_fail_and_ranks_are_of_different_speed(make, seed):
    ranks, chance = make(seed, losses=0.1, failures=0.1)
    ranks[1].lag = 0.3
    for rank in ranks:
        rank.drift = 15  # they average their weights now and then

    for _ in range(6000):
        act(ranks, chance)

    assert ranks[0].peek() > 20


@pytest.mark.parametrize("seed", range(6))
def test_so_it_is_when_news_come_so_late_that_the_candidate_is_written_over_by_then(make, seed):
    ranks, chance = make(seed)
    for rank in ranks:
        rank.hears = 0.05

    for _ in range(6000):
        act(ranks, chance)

    assert ranks[0].peek() > 0
    assert ranks[0].keys() <= 1 + 2 * len(ranks)


@pytest.mark.parametrize("hears", [1.0, 0.1])
@pytest.mark.parametrize("seed", range(6))
def test_so_it_is_when_captures_need_slots_of_another_size_and_the_keeper_lets_others_go(make, seed, hears):
    ranks, chance = make(seed, swells=0.1)
    for rank in ranks:
        rank.hears = hears

    for _ in range(4000):
        act(ranks, chance)

    assert ranks[0].peek() > 0
    assert min(rank.keeper.size for rank in ranks) > 5


@pytest.mark.parametrize("seed", range(10))
def test_a_rank_that_dies_at_any_point_leaves_what_was_agreed_on_and_the_others_train_on(make, seed):
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


@pytest.mark.parametrize("seed", range(4))
def test_where_the_store_is_gone_what_is_kept_stays_and_training_goes_on(make, seed):
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


@pytest.fixture
def slots():
    """Of one rank, with the captures 1, 2 and 3."""
    slots = [Slot.create(PAGE, PAGE) for _ in range(3)]
    for number, slot in enumerate(slots, 1):
        capture(slot, number)
    yield slots
    for slot in slots:
        slot.close()


def capture(slot, step):
    slot.begin(step, sequence=step, image_bytes=0, meta=b"", pin=False)
    slot.commit()


def test_a_candidate_that_is_written_over_while_a_rank_looks_at_it_is_not_counted(slots):
    marks, store = Marks(NONE, 0), dist.HashStore()
    store.set(KEY, str(Ballot(NONE, 1, 0)))

    def choose():
        return marks.choose([slot.status() for slot in slots], [True] * 3)

    def look(step):
        answer = marks.look(slots, step)
        capture(slots[chosen], 4)
        assert choose() == 1
        return answer

    chosen = choose()  # before anybody heard of the candidate that is in it
    assert chosen == 0
    voter, board = Voter(marks, look, 2, 1), Board(store, 1.0)
    voter.passed = 4
    assert voter.act(board, KEY)  # hears of it
    voter.act(board, KEY)

    assert board.count(f"{KEY}/1") == 0
    assert Ballot.of(store.get(KEY).decode()).candidate > 1


def test_what_a_rank_finds_whole_the_keeper_does_not_let_go_and_what_goes_is_not_found(slots):
    marks = Marks(NONE, 0)
    marks.learn(Ballot(NONE, 1, 0))
    before = [slot.status() for slot in slots]

    assert marks.look(slots, 1) is Presence.WHOLE
    assert not may_drop([slot.status() for slot in slots], 0)
    assert may_drop(before, 0)  # the keeper looked before that
    assert not slots[0].let_go()
    assert marks.look(slots, 1) is Presence.WHOLE

    marks.learn(Ballot(NONE, 2, 0))
    assert slots[1].let_go()
    assert marks.look(slots, 2) is Presence.GONE
