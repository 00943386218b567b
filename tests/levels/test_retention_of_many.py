"""Several ranks keep one place tidy, each its own files, and none takes the last snapshot that all of them have."""

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from snapshots import RUN, Image, meta

from lazysnap.config import PersistentLevel
from lazysnap.errors import ShardCorrupt
from lazysnap.levels import open_store
from lazysnap.levels.retention import Share
from lazysnap.resolver import candidates

FIRST, SECOND = "0" * 15 + "1", "0" * 15 + "2"


class Place:
    """A directory, and a store of each rank's keeper on it."""

    def __init__(self, path, world_size=2):
        self.path = path
        self.world_size = world_size
        self.stores = [open_store(str(path)) for _ in range(world_size)]

    def write(self, rank, *steps, generation=FIRST):
        for step in steps:
            what = dataclasses.replace(meta(step), rank=rank, world_size=self.world_size, generation=generation)
            self.stores[rank].write(what, Image(step))

    def retain(self, rank, keep_last=1):
        level = PersistentLevel(str(self.path), keep_last=keep_last)
        return self.stores[rank].retain(level, RUN, share=Share.of_rank(rank, self.world_size))

    def held(self, rank):
        return sorted({entry.step for entry in self.stores[0].inventory().entries if entry.rank == rank})

    def complete(self):
        return [(plan.step, plan.sources[0][0].generation) for plan in candidates([self.stores[0].inventory()])]

    def damage(self, rank, step):
        [entry] = [e for e in self.stores[0].inventory().entries if (e.rank, e.step) == (rank, step)]
        path = self.path / self.stores[0].place(entry).shard_path
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path / "run")


def test_a_step_stays_until_a_newer_one_is_complete(place):
    """The other rank's disk stands still: however far this one goes, what both have stays."""
    place.write(1, 1, 2)
    for step in range(1, 12):
        place.write(0, step)
        place.retain(0)

    assert place.complete()[0] == (2, FIRST)
    assert place.held(1) == [1, 2]
    # What only this rank has is bounded, too.
    assert place.held(0) == [1, 2, 9, 10, 11]


def test_a_step_goes_when_every_rank_has_a_newer_one_that_it_read_back(place):
    for step in (1, 2, 3):
        place.write(0, step)
        place.write(1, step)

    # Rank 1 went on to 3, so it found 2 whole; of 3 nobody knows yet.
    assert place.retain(0) == [1]
    place.retain(1)  # now it has half a snapshot
    assert place.held(0) == place.held(1) == [2, 3]


def test_a_shard_that_was_read_back_damaged_makes_its_step_count_for_no_rank(place):
    for step in (1, 2):
        place.write(0, step)
        place.write(1, step)
    place.damage(1, 2)
    place.retain(0)
    with pytest.raises(ShardCorrupt, match="damaged"):
        place.retain(1)
    place.write(0, 3)
    place.write(1, 3)
    place.retain(0)
    place.retain(1)

    assert [step for step, _ in place.complete()] == [3, 1]


def test_shards_of_two_starts_of_one_step_are_no_snapshot(place):
    """A training that died while it wrote step 2 went on from step 1, and passes step 2 again."""
    for rank in (0, 1):
        place.write(rank, 1)
    place.write(0, 2)
    place.write(1, 2, generation=SECOND)

    assert place.complete() == [(1, FIRST)]
    for rank in (0, 1):
        assert place.retain(rank) == []
    place.write(0, 2, generation=SECOND)

    assert place.complete() == [(2, SECOND), (1, FIRST)]


def test_a_step_that_is_passed_again_replaces_the_first_when_all_have_it(place):
    for rank in (0, 1):
        place.write(rank, 1, 2)
    place.write(0, 2, generation=SECOND)
    place.retain(0)
    assert (2, FIRST) in place.complete()

    place.write(1, 2, generation=SECOND)
    for step in (3, 4):
        for rank in (0, 1):
            place.write(rank, step, generation=SECOND)
            place.retain(rank)
    for rank in (0, 1):
        place.retain(rank)

    assert place.complete() == [(4, SECOND), (3, SECOND)]
    assert place.held(0) == place.held(1) == [3, 4]


def test_a_disk_that_only_one_rank_sees_keeps_what_others_may_still_need(place):
    for step in range(1, 10):
        place.write(0, step)
        place.retain(0, keep_last=2)

    # Another rank may be two steps behind, and need the last two of its own.
    assert place.held(0) == [6, 7, 8, 9]


@pytest.mark.parametrize("now", [1, 2])
def test_what_ranks_that_are_no_more_have_left_goes_with_the_rest(tmp_path, now):
    """A training of four ranks goes on with fewer: somebody deletes old snapshots and half-written files."""
    before = Place(tmp_path / "run", 4)
    for rank in range(4):
        before.write(rank, 1, 2)
    before.write(3, 3)
    half = before.path / "step-00000004" / "rank-00003-of-00004.safetensors"
    half.parent.mkdir()
    half.write_bytes(b"half")
    after = Place(tmp_path / "run", now)
    for step in (3, 4, 5):
        for rank in range(now):
            after.stores[rank].sweep(Share.of_rank(rank, now))
            after.write(rank, step, generation=SECOND)
            after.retain(rank)
    for rank in range(now):
        after.retain(rank)

    assert after.complete()[0] == (5, SECOND)
    assert list(after.path.rglob("*-of-00004*")) == []


def test_immutable_tensors_that_all_ranks_bring_at_once_are_written_once(place):
    base = dataclasses.replace(meta(0), run_id=RUN)
    digest = Place(place.path.parent / "other").stores[0].write(base, Image(5, 3_000_000)).checksums.whole
    barrier = threading.Barrier(4)

    def bring(_):
        store = open_store(str(place.path))
        barrier.wait(30)
        return store.write_frozen(base, Image(5, 3_000_000), digest)

    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(bring, range(4)))

    assert len({manifest.created_ns for manifest in found}) == 1
    assert len(list(place.path.rglob("*.safetensors"))) == 1
    assert list(place.path.rglob("*.tmp*")) == []
