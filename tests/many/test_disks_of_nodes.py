"""Each node has a disk that no other one sees: what all of them have stays, whatever becomes of a disk or a keeper."""

import pytest
from rank_keepers import processes
from support.catalogue import inventory_of
from support.waiting import TIMEOUT_S, until

from lazysnap import events
from lazysnap.levels.store import open_storage
from lazysnap.resolver import candidates

KEEP_LAST = 2


class Disks:
    """Two nodes of one rank each."""

    def __init__(self, root):
        self.paths = [root / "disk-a", root / "disk-b"]
        self.by_rank = {str(rank): {"node": f"node-{'ab'[rank]}", "levels": self.levels(rank)} for rank in (0, 1)}

    def levels(self, rank):
        return [{"url": str(self.paths[rank]), "every_n_steps": 1, "keep_last": KEEP_LAST}]

    def complete(self):
        return [plan.step for plan in candidates([inventory_of(open_storage(str(path))) for path in self.paths])]

    def held(self, rank):
        return sorted({entry.step for entry in inventory_of(open_storage(str(self.paths[rank]))).entries})

    def is_counted(self):
        """True if the coordinator counts the newest one: a file alone may still be read back."""
        found = [event for file in events.read(str(self.paths[0])) for event in file.events]
        steps = {step for event in found if isinstance(event, events.Complete) for step in event.steps}
        return self.complete()[0] in steps

    def hold_the_same(self, least=KEEP_LAST):
        """Both have the newest complete snapshots, at least so many, and nothing else."""
        is_same = self.held(0) == self.held(1) == self.complete()[::-1]
        return is_same and least <= len(self.held(0)) <= KEEP_LAST

    def come_to_hold_the_same(self, least=KEEP_LAST):
        """The keepers delete what is over soon after the trainings ended."""
        until(lambda: self.hold_the_same(least), self.told)

    def told(self):
        return f"{self.held(0)}, {self.held(1)}, complete: {self.complete()}"


@pytest.fixture
def disks(tmp_path):
    return Disks(tmp_path)


@pytest.fixture
def job(make_job):
    return make_job(nodes=("node-a", "node-b"), levels=[])


def test_each_keeps_what_all_have(job, disks, end_keepers):
    # So slow that the level stores enough of them to delete one.
    assert set(job.run("ddp", 2, by_rank=disks.by_rank, steps=12, lag_s=0.05)) == {0}, job.output()

    disks.come_to_hold_the_same()
    assert disks.complete()[0] == 12
    assert [line[2] for line in job.events("closed")] == ["True", "True"]


@pytest.mark.parametrize("works", [True, False])
def test_what_one_rank_has_is_not_durable(job, disks, works):
    if not works:
        disks.paths[1].write_text("no directory")

    job.run("ddp", 2, by_rank=disks.by_rank, stop_at=4, wait_durable=True, wait_s=TIMEOUT_S if works else 2)

    assert [line[2:] for line in job.events("durable")] == [["4", str(works)]] * 2, job.output()
    if works:
        assert disks.complete()[0] == 4


def test_a_disk_that_is_away_for_long_costs_the_others_nothing_that_all_had(job, disks, end_keepers):
    """They go on, and what they have of later steps is bounded; a restart goes on from the last that all had.

    With shorter steps each grant may come too late beside other tests, and nothing is stored before the hold.
    """
    broken, aside, had = disks.paths[1], disks.paths[1].with_name("aside"), []

    def break_disk():
        # On a busy machine one: the next step that was granted may lie ahead of the one at which training is held.
        until(lambda: disks.held(0) == disks.held(1) == disks.complete()[::-1] != [] and disks.is_counted(), disks.told)
        had.extend(disks.complete())
        broken.rename(aside)
        broken.write_text("no directory any more")

    with job.held(break_disk):
        codes = job.run("ddp", 2, by_rank=disks.by_rank, steps=40, hold_at=20, lag_s=0.1)
    assert set(codes) == {0}, job.output()
    # It is told on all ranks alike, and nobody waits long for a disk that is away.
    assert [line[2] for line in job.events("closed")] == ["False", "False"]
    end_keepers(job)
    broken.unlink()
    aside.rename(broken)

    # Beyond the complete ones what was under way, and what a keeper whose trainers are dead stores without the others.
    assert len(disks.held(0)) <= KEEP_LAST + 1 + 2
    complete = disks.complete()
    assert complete in (had, [20, *had][: len(had)])  # step 20 may have been under way when the disk went away
    for steps, resumed in ((40, complete[0]), (41, 40)):
        assert set(job.run("ddp", 2, by_rank=disks.by_rank, steps=steps)) == {0}, job.output()
        assert job.resumed() == resumed
    disks.come_to_hold_the_same()
    assert disks.complete() == [41, 40]


@pytest.mark.slow
def test_a_lost_node_and_no_trainer_left_the_other_node_stores_its_newest_steps_and_ends(job, disks):
    """Rank 0's node is left. No level was due since the first step."""
    for settings in disks.by_rank.values():
        settings["levels"][0]["every_n_steps"] = 1000

    codes = job.run("ddp", 2, by_rank=disks.by_rank, steps=60, faults={1: "engine.begun:20:kill-both"}, linger_s=1)

    assert codes[1] == -9, job.output()
    # The captures of two steps more, or one, may have been whole on node 0 when it was killed.
    until(lambda: max(disks.held(0), default=0) >= 17, job.output)
    until(lambda: not processes(job), job.output)
    assert max(job.begun(0)) - 1 in disks.held(0)


AT = [
    (1, "keeper.persist.verified:4:kill-peer"),
    (0, "keeper.persist.verified:4:kill-both"),
    (1, "keeper.persist.committed:2:kill-both"),
    (0, "level.store.uncommitted:1:kill-both"),
]


@pytest.mark.parametrize(("victim", "fault"), AT)
def test_a_rank_that_dies_between_commit_and_telling_leaves_what_all_have(job, disks, end_keepers, victim, fault):
    # It trains until the level has stored so many that the fault is reached.
    codes = job.run("ddp", 2, by_rank=disks.by_rank, steps=10_000, faults={victim: fault}, lag_s=0.02)
    assert -9 in codes, job.output()
    end_keepers(job)
    [newest, *_] = disks.complete()

    # What one disk alone has is deleted once enough newer ones are complete: the last steps of two trainings.
    steps = [newest + 40, newest + 41]
    for resumed, last in zip([newest, steps[0]], steps, strict=True):
        assert set(job.run("ddp", 2, by_rank=disks.by_rank, steps=last)) == {0}, job.output()
        assert job.resumed() == resumed
    disks.come_to_hold_the_same()
    assert disks.complete() == steps[::-1]


@pytest.mark.parametrize("point", ["keeper.persist.committed", "level.store.uncommitted"])
def test_a_keeper_that_dies_alone_is_followed_by_one_that_is_told_what_all_have(job, disks, point):
    """The next one would die there, too, but does not come so far."""
    codes = job.run("ddp", 2, by_rank=disks.by_rank, steps=24, faults={1: f"{point}:4:kill"}, lag_s=0.02)
    assert codes == [0, 0], job.output()

    # A rank whose keeper just died leaves a step out. The last one is captured at the end, where that is possible.
    least = max(job.begun(0) & job.begun(1))
    # Levels may leave out any step but the last one.
    until(lambda: disks.hold_the_same(least=1) and disks.complete()[0] >= least, disks.told)
    assert {line[2] for line in job.events("closed")} == {str(least == 24)}


def test_a_slow_disk_of_one_node_gets_fewer_snapshots_the_same_as_the_others_and_holds_nobody_up(job, disks):
    disks.by_rank["1"]["levels"][0]["max_bytes_per_s"] = 500_000

    # Without parity: while a newer step is being protected two are held, and a capture may be left out.
    codes = job.run("ddp", 2, by_rank=disks.by_rank, steps=60, lag_s=0.01, parity=None)
    assert set(codes) == {0}, job.output()

    disks.come_to_hold_the_same()
    assert disks.complete()[0] == 60
    stored = {int(line[2]) for line in job.events("persisted")}
    assert len(stored) == 1
    assert 2 <= stored.pop() < 60
    for rank in (0, 1):
        assert job.begun(rank) == set(range(1, 61)), job.output()
