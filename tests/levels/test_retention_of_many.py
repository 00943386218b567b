"""Several ranks keep one place tidy, each its own files, and none takes the last snapshot that all of them have."""

import contextlib
import dataclasses
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from snapshots import RUN, Image, meta
from support.names import directory_of

from lazysnap.config import PersistentLevel
from lazysnap.errors import ShardCorrupt
from lazysnap.levels import open_store
from lazysnap.levels.belongings import Belongings, Told
from lazysnap.levels.local import LocalStorage
from lazysnap.levels.retention import Share
from lazysnap.levels.store import SnapshotStore
from lazysnap.resolver import candidates

FIRST, SECOND = "0" * 15 + "1", "0" * 15 + "2"


def nothing():
    pass


class Place:
    """A directory, and what each rank's keeper has there; which steps are complete it is told by the test."""

    def __init__(self, path, world_size=2, keep_last=1, keep_every=None, open_=open_store, every=100):
        self.path = path
        self.world_size = world_size
        self.level = PersistentLevel(str(path), every_n_steps=every, keep_last=keep_last, keep_every_n_steps=keep_every)
        self.stores = [open_(str(path)) for _ in range(world_size)]
        self.own = [self.successor(rank) for rank in range(world_size)]

    def successor(self, rank):
        """Of a keeper that died: it knows nothing."""
        return Belongings(self.stores[rank], self.level, Share.of_rank(rank, self.world_size))

    def write(self, rank, *steps, start=FIRST):
        for step in steps:
            what = dataclasses.replace(meta(step), rank=rank, world_size=self.world_size, start=start)
            self.own[rank].confirm(*self.stores[rank].write_entry(what, Image(step)), nothing)

    def told(self, *complete, void=(), start=FIRST, earlier=()):
        return Told(RUN, start, complete[-self.level.keep_last :], frozenset(void), tuple(earlier))

    def tidy(self, *complete, ranks=None, protect=(), **told):
        what = self.told(*complete, **told)
        return [
            self.own[rank].tidy(what, frozenset(protect), nothing)
            for rank in (range(self.world_size) if ranks is None else ranks)
        ]

    def surplus(self, rank, *complete, **told):
        return self.own[rank].surplus(self.told(*complete, **told), frozenset(), 2, lambda: None)

    def held(self, rank):
        return sorted({entry.step for entry in self.stores[0].inventory().entries if entry.rank == rank})

    def complete(self):
        return [(plan.step, plan.sources[0][0].start) for plan in candidates([self.stores[0].inventory()])]


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path / "run")


def test_a_step_goes_when_enough_newer_ones_are_told_to_be_complete(tmp_path):
    place = Place(tmp_path / "run", keep_last=2)
    for step in (1, 2, 3, 4):
        place.write(0, step)
        place.write(1, step)

    assert place.tidy(1) == [[], []]
    assert place.tidy(1, 2, 3) == [[1], [1]]
    # Of step 4 nobody said anything yet.
    assert place.held(0) == place.held(1) == [2, 3, 4]


def test_a_rank_that_fails_for_long_costs_no_rank_the_last_snapshot_that_all_have(tmp_path):
    """Two disks, each seen by its own node: nobody can see that the other one's is full."""
    here, there = Place(tmp_path / "here"), Place(tmp_path / "there")
    for step in (1, 2):
        here.write(0, step)
        there.write(1, step)
        here.tidy(step, ranks=[0])
        there.tidy(step, ranks=[1])
    void = set()
    for step in range(3, 30):
        here.write(0, step)
        void.update(here.surplus(0, 2, void=void))
        here.tidy(2, ranks=[0], void=void)

    # What only this rank has is bounded.
    assert here.held(0) == [2, 27, 28, 29]
    assert there.held(1) == [2]
    inventories = [one.stores[0].inventory() for one in (here, there)]
    assert [plan.step for plan in candidates(inventories)] == [2]


def test_what_is_not_complete_stays_until_its_rank_has_taken_its_part_back(place):
    place.write(0, 1, 2, 3, 4, 5)

    assert place.surplus(0) == [1, 2]
    assert place.tidy(ranks=[0]) == [[]]
    assert place.tidy(ranks=[0], void=[1]) == [[1]]
    assert place.surplus(0, void=[1]) == [2]


def test_what_a_rank_with_slow_storage_may_be_writing_stays_with_the_others_until_it_is_complete(tmp_path):
    """One needs 30 due steps for each snapshot: it stores multiples of 32, and is done with one before the next."""
    place = Place(tmp_path / "run", every=1)
    void, complete = set(), []
    for step in range(1, 140):
        place.write(0, step)
        if step % 32 == 30 and step > 32:
            place.write(1, step - 30)
            assert step - 30 in place.held(0), step
            complete.append(step - 30)
        void.update(place.surplus(0, *complete, void=void))
        place.tidy(*complete, void=void)
        assert len(place.held(0)) <= 1 + 1 + 2 + 6  # the complete one, those that wait, one for each stride

    assert complete == [32, 64, 96]
    assert place.complete()[0][0] == 96


def test_what_is_surplus_is_named_once_until_its_owner_says_more(place):
    """While the owner cannot ask the others, each further snapshot would cost more and more."""
    place.write(0, *range(1, 11))
    own, told, listed = place.own[0], place.told(), []

    def surplus(told):
        return own.surplus(told, frozenset(), 2, lambda: listed.append(1))

    assert surplus(told) == [1, 2, 3, 4, 5, 6, 7]
    place.write(0, 11)
    assert surplus(told) == [8]
    assert len(listed) == 8  # so many times it asked the level for names
    assert surplus(place.told()) == [1, 2, 3, 4, 5, 6, 7, 8]


def test_of_a_step_that_was_taken_back_and_is_complete_all_the_same_nothing_goes(place):
    place.write(0, 1, 2)

    assert place.tidy(1, ranks=[0], void=[1]) == [[]]


def test_what_a_keeper_did_not_write_itself_goes_as_well(place):
    """It took the place of one that died."""
    for step in (1, 2, 3):
        place.write(0, step)
        place.write(1, step)
    place.own[0] = place.successor(0)

    assert place.tidy(3) == [[1, 2], [1, 2]]


@pytest.mark.parametrize("is_read", [False, True])
def test_a_shard_that_is_read_back_damaged_is_no_snapshot_and_goes_unless_somebody_reads_it(tmp_path, is_read):
    place = Place(tmp_path / "run")
    what = dataclasses.replace(meta(1), rank=1, world_size=2, start=FIRST)
    written = place.stores[1].write_entry(what, Image(1))
    path = place.path / place.stores[1].place(written[0]).shard_path
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)

    with contextlib.ExitStack() as stack:
        if is_read:
            stack.enter_context(place.stores[0].storage.lease(place.stores[1].place(written[0]).shard_path))
        with pytest.raises(ShardCorrupt, match="damaged"):
            place.own[1].confirm(*written, nothing)

    assert place.stores[0].inventory().entries == ()
    assert path.exists() == is_read
    assert path.parent.exists() == is_read


def test_steps_with_a_name_milestones_and_what_is_copied_or_read_stay(tmp_path):
    place = Place(tmp_path / "run", keep_every=4)
    for step in range(1, 8):
        place.write(0, step)
        place.write(1, step)
    [named] = [entry for entry in place.stores[0].inventory().entries if (entry.step, entry.rank) == (1, 0)]
    place.stores[0].keep(named, "first")
    [read] = [entry for entry in place.stores[0].inventory().entries if (entry.step, entry.rank) == (5, 1)]
    with place.stores[1].storage.lease(place.stores[1].place(read).shard_path):
        place.tidy(7, protect=[2])

    assert place.held(0) == [1, 2, 4, 7]
    assert place.held(1) == [1, 2, 4, 5, 7]
    place.stores[0].release(RUN, "first")
    place.tidy(7)
    assert place.held(0) == place.held(1) == [4, 7]


def test_shards_of_two_starts_of_one_step_are_no_snapshot(place):
    """A training that died while it wrote step 2 went on from step 1, and passes step 2 again."""
    for rank in (0, 1):
        place.write(rank, 1)
    place.write(0, 2)
    place.write(1, 2, start=SECOND)

    assert place.complete() == [(1, FIRST)]
    assert place.tidy(start=SECOND) == [[], []]
    place.write(0, 2, start=SECOND)

    assert place.complete() == [(2, SECOND), (1, FIRST)]


def test_what_an_earlier_start_left_stays_until_enough_is_complete_of_this_one(tmp_path):
    """Ahead of where this one is now, too, for as long as it is."""
    place = Place(tmp_path / "run", keep_last=2)
    for rank in (0, 1):
        place.write(rank, 1, 2, 6)
    place.write(0, 2, start=SECOND)
    place.write(1, 2, start=SECOND)

    assert place.tidy(2, start=SECOND) == [[], []]
    assert (2, FIRST) in place.complete()
    for rank in (0, 1):
        place.write(rank, 3, start=SECOND)

    assert place.tidy(2, 3, start=SECOND) == [[1, 2], [1, 2]]
    assert place.complete() == [(6, FIRST), (3, SECOND), (2, SECOND)]


def test_starts_that_never_come_so_far_leave_no_more_than_one_that_does(tmp_path):
    """A training that dies again and again before there are ``keep_last`` of one start."""
    place = Place(tmp_path / "run", keep_last=4)
    complete = []
    for number in range(1, 9):
        start = f"{number:016x}"
        earlier = complete[-4:]
        place.own = [place.successor(rank) for rank in (0, 1)]
        for step in (2 * number, 2 * number + 1):
            for rank in (0, 1):
                place.write(rank, step, start=start)
            new = range(2 * number, step + 1)
            place.tidy(*new, start=start, earlier=earlier)
        complete += [(start, step) for step in new]
        place.write(0, 2 * number + 2, start=start)  # of which the other rank has nothing

        assert [step for step, _ in place.complete()] == [step for _, step in reversed(complete[-4:])]
        assert len(list(place.path.rglob("*.json"))) == 2 * len(complete[-4:]) + 1


def test_of_what_was_before_nothing_goes_until_something_new_is_complete(place):
    for rank in (0, 1):
        place.write(rank, 1, 2)

    assert place.tidy(start=SECOND, earlier=[(FIRST, 1), (FIRST, 2)], void=[7]) == [[], []]


@pytest.mark.parametrize("now", [1, 2])
def test_what_ranks_that_are_no_more_have_left_goes_with_the_rest(tmp_path, now, a_day_later):
    """A training of four ranks goes on with fewer: somebody deletes old snapshots and half-written files."""
    before = Place(tmp_path / "run", 4)
    for rank in range(4):
        before.write(rank, 1, 2)
    before.write(3, 3)
    half = before.path / directory_of(4) / "rank-00003-of-00004.safetensors"
    half.parent.mkdir()
    half.write_bytes(b"half")
    after = Place(tmp_path / "run", now)
    for step in (3, 4, 5):
        for rank in range(now):
            after.stores[rank].sweep(Share.of_rank(rank, now))
            after.write(rank, step, start=SECOND)
        after.tidy(step, start=SECOND) if now > 1 else after.stores[0].retain(after.level, RUN)

    assert after.complete()[0] == (5, SECOND)
    assert list(after.path.rglob("*-of-00004*")) == []


class Counted(LocalStorage):
    """Counts what it is asked."""

    def __init__(self, root):
        super().__init__(root)
        self.asked = Counter()

    def __getattribute__(self, name):
        if name in ("list", "get", "size", "stamp", "is_leased", "delete", "delete_directory"):
            object.__getattribute__(self, "asked")[name] += 1
        return object.__getattribute__(self, name)


def test_what_a_rank_asks_for_does_not_depend_on_how_many_there_are(tmp_path):
    asked = {}
    for ranks in (2, 4, 8):
        place = Place(tmp_path / str(ranks), ranks, 2, open_=lambda url: SnapshotStore(Counted(url)))
        for step in range(1, 6):
            for rank in range(ranks):
                place.write(rank, step)
            last = place.stores[1].storage.asked
            last.clear()
            place.tidy(*range(1, step + 1))
        asked[ranks] = dict(last)

    assert asked[2] == asked[4] == asked[8]
    assert sum(asked[2].values()) == 5


def test_frozen_tensors_that_all_ranks_bring_at_once_are_whole(place):
    base = dataclasses.replace(meta(0), run_id=RUN)
    digest = Place(place.path.parent / "other").stores[0].write(base, Image(5, 3_000_000)).checksums.whole
    barrier = threading.Barrier(4)

    def bring(_):
        store = open_store(str(place.path))
        barrier.wait(30)
        return store.write_frozen(base, Image(5, 3_000_000), digest)

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(bring, range(4)))

    assert {manifest.checksums.whole for manifest in found} == {digest}
    store = open_store(str(place.path))
    (image,) = store.inventory().frozen
    store.verify_entry(image)
    assert len(list(place.path.rglob("*.safetensors"))) == 1
    assert list(place.path.rglob("*.tmp*")) == []
