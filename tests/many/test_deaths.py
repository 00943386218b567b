"""One rank, some or all killed at any point of a snapshot: all resume one common step, at most one interval back."""

import random

import pytest
from jobs import until

from lazysnap.levels import open_store
from lazysnap.resolver import candidates

POINTS = [
    "engine.begin",
    "engine.begun",
    "capture.copied_tensor",
    "capture.commit",
    "capture.committed",
    "engine.gated",
]
LONG = 48
"""Steps that are enough to die at one point after the other."""


@pytest.fixture(scope="module")
def wanted(make_shared_job):
    """What a training ends with that nothing happens to, by kind, world, and what else matters."""
    known = {}

    def ask(kind, world, **settings):
        key = (kind, world, *sorted(settings.items()))
        if key not in known:
            job = make_shared_job(f"whole{len(known)}", levels=[])
            # Snapshots change nothing.
            assert set(job.run(kind, world, silent=True, **settings)) == {0}, job.output()
            known[key] = job.results()
        return known[key]

    return ask


def begun(job, rank):
    return {int(line[2]) for line in job.events("begun") if line[0] == str(rank)}


def whole(job, world):
    """Steps that were certainly whole on all ranks: each of them went through the gate after it began."""
    gated = [{int(line[2]) for line in job.events("gated") if line[0] == str(rank)} for rank in range(world)]
    return set.intersection(*(gated[rank] & begun(job, rank) for rank in range(world)))


def fault(point, count):
    """A fault at about the same time of the training whatever the point."""
    return f"{point}:{count * 8 if 'tensor' in point else count}:kill"


@pytest.mark.parametrize("passage", [1, 2, 3])
def test_a_common_step_survives_a_change_of_size(make_job, passage):
    """Steps 1 to 5 lie in slots that are too small from step 6 on, which is left out while others are made."""
    job = make_job(levels=[])
    codes = job.run("ddp", 2, faults={1: f"engine.begin:{5 + passage}:kill"}, steps=12, swells_at=6)
    assert -9 in codes, job.output()
    common = max(whole(job, 2))

    assert set(job.run("ddp", 2, steps=12)) == {0}, job.output()

    assert job.resumed() >= common >= 5


@pytest.mark.parametrize("victims", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("every", [1, 2])
def test_a_common_step_survives_death_at_every_point(make_job, wanted, victims, every):
    """One training that dies at one point after the other."""
    job = make_job(levels=[])
    settings = {"every": every, "steps": LONG}
    reached = 0
    for point in POINTS:
        codes = job.run("ddp", 2, faults=dict.fromkeys(victims, fault(point, 3)), **settings)
        assert -9 in codes, (point, codes, job.output())
        assert job.resumed() >= reached, (point, job.output())
        common = whole(job, 2)
        assert common, (point, job.output())
        reached = max(common)

    assert set(job.run("ddp", 2, **settings)) == {0}, job.output()

    assert job.resumed() >= reached
    assert job.results() == wanted("ddp", 2, steps=LONG)


@pytest.mark.parametrize(("seed", "kind", "every"), [(0, "ddp", 1), (1, "fsdp", 2), (2, "fsdp", 1), (3, "ddp", 2)])
def test_any_of_four_ranks_die_anywhere_while_some_lag_and_again_right_after_the_restart(
    make_job, wanted, seed, kind, every
):
    chance = random.Random(seed)
    job = make_job(levels=[])
    settings = {"every": every, "steps": 24}
    reached = 0
    for most in (5, 3):
        victims = chance.sample(range(4), chance.randint(1, 4))
        faults = {rank: fault(chance.choice(POINTS), chance.randint(1, most)) for rank in victims}
        lags = {str(rank): {"lag_s": chance.choice([0.0, 0.02])} for rank in range(4)}
        codes = job.run(kind, 4, faults=faults, by_rank=lags, **settings)
        assert -9 in codes, (codes, job.output())
        assert job.resumed() >= reached, job.output()
        reached = max(job.resumed(), *whole(job, 4) or [0])

    assert set(job.run(kind, 4, **settings)) == {0}, job.output()

    assert job.resumed() >= reached
    assert job.results() == wanted(kind, 4, steps=24)


@pytest.mark.parametrize(("every", "period"), [(1, 3), (2, 2)])
@pytest.mark.parametrize("victims", [(0,), (1,), (0, 1)])
def test_with_local_sgd_a_common_step_survives_too(make_job, wanted, every, period, victims):
    """Nothing but the averaging holds the ranks together: one may come to its end, two steps after the last of them,
    while the other one dies.
    """
    settings = {"every": every, "period": period}
    job = make_job(levels=[])
    lags = {"1": {"lag_s": 0.03}}
    codes = job.run(
        "local", 2, faults=dict.fromkeys(victims, fault("engine.begun", 6 // every)), by_rank=lags, **settings
    )
    assert -9 in codes, job.output()
    common = whole(job, 2)
    assert common

    assert set(job.run("local", 2, **settings)) == {0}, job.output()

    assert job.resumed() >= max(common)
    assert job.results() == wanted("local", 2, period=period)


STORED = [
    "keeper.persist.begin",
    "level.store.publish_shard",
    "level.store.commit",
    "level.store.committed",
    "keeper.persist.committed",
    "level.local.delete",
    "level.store.uncommitted",
    "level.store.deleted",
]


def test_a_rank_and_its_memory_lost_at_any_point_of_storage_leaves_what_all_have_there(job, wanted):
    """One training that loses the trainer and the keeper of a rank at one point after the other."""
    url = job.levels[0]["url"]
    held = 0
    for point in STORED:
        at = 3 if point.startswith(("keeper", "level.store.c", "level.store.p")) else 1
        codes = job.run("ddp", 2, steps=200, faults={1: f"{point}:{at}:kill-both"})
        assert -9 in codes, (point, codes, job.output())
        assert job.resumed() >= held, (point, job.output())
        found = candidates([open_store(url).inventory()])
        assert found, point
        held = found[0].step

    assert set(job.run("ddp", 2, steps=200)) == {0}, job.output()

    assert job.resumed() >= held
    assert job.results() == wanted("ddp", 2, steps=200)


def test_what_all_have_in_memory_goes_to_storage_when_they_died(make_job, end_keepers, tmp_path):
    """No step was due there; and the newest one that each rank has is not the same."""
    job = make_job(levels=[{"url": str(tmp_path / "level"), "every_n_steps": 1000}])
    codes = job.run("ddp", 2, faults={0: fault("engine.gated", 5), 1: fault("capture.commit", 5)})
    assert codes == [-9, -9], job.output()
    newest = max(whole(job, 2))
    store = open_store(str(tmp_path / "level"))
    until(lambda: any(plan.step >= newest for plan in candidates([store.inventory()])), job.output)
    end_keepers(job)

    assert set(job.run("ddp", 2, look=True)) == {0}, job.output()

    assert job.resumed() >= newest
    assert {line[3] for line in job.events("resumed")} == {str(tmp_path / "level")}


def test_what_a_slow_disk_is_still_to_get_is_not_given_up_by_the_others(job):
    """However few snapshots are to be kept: those that one rank alone has wait for the other, a slot's worth behind."""
    [level] = job.levels
    level["keep_last"] = 1
    slow = [{**level, "max_bytes_per_s": 200_000}]

    assert set(job.run("ddp", 2, by_rank={"1": {"levels": slow}}, steps=16)) == {0}, job.output()

    assert [line[2] for line in job.events("closed")] == ["True", "True"]
    assert [int(line[2]) for line in job.events("persisted")] == [len(begun(job, 0))] * 2, job.output()


def test_a_rank_with_a_slow_disk_holds_the_others_and_all_persist_the_same_steps(job):
    [level] = job.levels
    level["keep_last"] = 20
    slow = [{**level, "max_bytes_per_s": 200_000}]

    assert set(job.run("ddp", 2, by_rank={"1": {"levels": slow}})) == {0}, job.output()

    inventory = open_store(level["url"]).inventory()
    held = [sorted(entry.step for entry in inventory.entries if entry.rank == rank) for rank in (0, 1)]
    assert held[0] == held[1] == sorted(begun(job, 0))
    assert begun(job, 0) == begun(job, 1)
    assert len(held[0]) >= 5
