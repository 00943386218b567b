"""Each node has a disk that no other one sees: what all of them have stays, whatever becomes of a disk or a keeper."""

import pytest
from support.waiting import until

from lazysnap.levels import open_store
from lazysnap.resolver import candidates

KEEP_LAST = 2
SLOTS = 4
"""With a capture at every step and storage (docs/architecture.md, "How many slots")."""
MOST_AHEAD = SLOTS + 2
"""Snapshots that a rank keeps beside the complete ones, for another one whose disk is slower."""


class Disks:
    """Two nodes of one rank each."""

    def __init__(self, root):
        self.paths = [root / "disk-a", root / "disk-b"]
        self.by_rank = {str(rank): {"node": f"node-{'ab'[rank]}", "levels": self.levels(rank)} for rank in (0, 1)}

    def levels(self, rank):
        return [{"url": str(self.paths[rank]), "every_n_steps": 1, "keep_last": KEEP_LAST}]

    def complete(self):
        return [plan.step for plan in candidates([open_store(str(path)).inventory() for path in self.paths])]

    def held(self, rank):
        return sorted({entry.step for entry in open_store(str(self.paths[rank])).inventory().entries})


@pytest.fixture
def disks(tmp_path):
    return Disks(tmp_path)


@pytest.fixture
def job(make_job):
    return make_job(nodes=("node-a", "node-b"), levels=[])


def test_each_keeps_what_all_have(job, disks, end_keepers):
    assert set(job.run("ddp", 2, by_rank=disks.by_rank, steps=12)) == {0}, job.output()

    assert disks.held(0) == disks.held(1) == [11, 12]
    assert disks.complete() == [12, 11]
    assert [line[2] for line in job.events("closed")] == ["True", "True"]


@pytest.mark.parametrize("works", [True, False])
def test_what_one_rank_has_is_not_durable(job, disks, works):
    if not works:
        disks.paths[1].write_text("no directory")

    with job.held(lambda: until(lambda: 4 in disks.held(0), job.output)):
        job.run("ddp", 2, by_rank=disks.by_rank, stop_at=4, hold_at=4, wait_durable=True, wait_s=20 if works else 2)

    assert [line[2:] for line in job.events("durable")] == [["4", str(works)]] * 2, job.output()
    if works:
        assert disks.complete()[0] == 4


@pytest.mark.parametrize("dies", [None, "engine.tally.take_back:1", "engine.tally.take_back:3"])
def test_a_disk_that_is_away_for_long_costs_the_others_nothing_that_all_had(job, disks, end_keepers, dies):
    """They go on, and what they have of later steps is bounded; a restart goes on from the last that all had.

    Whatever becomes of the rank that gives up its part of what the other one lacks.
    """
    broken, aside = disks.paths[1], disks.paths[1].with_name("aside")

    def break_disk():
        # Each deleted step 10: so both know that 11 and 12 are complete.
        until(lambda: disks.held(0) == disks.held(1) == [11, 12], job.output)
        broken.rename(aside)
        broken.write_text("no directory any more")

    faults = {0: f"{dies}:kill-both"} if dies else {}
    with job.held(break_disk):
        codes = job.run("ddp", 2, by_rank=disks.by_rank, steps=40, hold_at=12, faults=faults)
    if dies:
        assert codes[0] == -9, job.output()
    else:
        assert set(codes) == {0}, job.output()
        # It is told on all ranks alike, and nobody waits long for a disk that is away.
        assert [line[2] for line in job.events("closed")] == ["False", "False"]
    end_keepers(job)
    broken.unlink()
    aside.rename(broken)

    held = disks.held(0)
    if not dies:
        assert held[-4:] == [37, 38, 39, 40]
    # Complete ones; beyond them as many again, and as many as another rank may be behind; one that is just taken back,
    # and one that is just deleted.
    assert len(held) <= KEEP_LAST + KEEP_LAST + MOST_AHEAD + 2
    assert disks.complete() == [12, 11]
    assert set(job.run("ddp", 2, by_rank=disks.by_rank, steps=40)) == {0}, job.output()
    assert job.resumed() == 12
    assert disks.held(0) == disks.held(1) == [39, 40]


AT = [
    (1, "keeper.persist.sound:4:kill-both"),
    (1, "keeper.persist.sound:4:kill-peer"),
    (0, "engine.tally.count:4:kill-both"),
    (1, "engine.tally.full:2:kill"),
    (1, "engine.tally.published:2:kill-both"),
    (0, "level.store.uncommitted:1:kill-both"),
]


@pytest.mark.parametrize(("victim", "fault"), AT)
def test_a_rank_that_dies_between_commit_and_telling_leaves_what_all_have(job, disks, end_keepers, victim, fault):
    # Which rank fills a counter is chance: both may.
    victims = (0, 1) if "full" in fault or "published" in fault else (victim,)
    codes = job.run("ddp", 2, by_rank=disks.by_rank, steps=60, faults=dict.fromkeys(victims, fault))
    assert -9 in codes, job.output()
    end_keepers(job)
    last = disks.complete()
    assert last

    assert set(job.run("ddp", 2, by_rank=disks.by_rank, steps=60)) == {0}, job.output()

    assert job.resumed() == last[0]
    assert disks.held(0) == disks.held(1) == [59, 60]


@pytest.mark.parametrize("point", ["keeper.persist.committed", "keeper.persist.sound", "level.store.uncommitted"])
def test_a_keeper_that_dies_alone_is_followed_by_one_that_is_told_what_all_have(job, disks, point):
    """The next one would die there, too, but does not come so far."""
    codes = job.run("ddp", 2, by_rank=disks.by_rank, steps=24, faults={1: f"{point}:14:kill"}, lag_s=0.02)
    assert codes == [0, 0], job.output()

    assert disks.complete() == [24, 23]
    assert disks.held(0) == disks.held(1) == [23, 24]
