"""One rank, some or all killed at any point of a snapshot: all resume one common step, at most one interval back."""

import itertools

import pytest
from jobs import is_of_keeper
from rank_keepers import kill_keepers
from support.catalogue import inventory_of
from support.stored import steps_at
from support.waiting import until

from lazysnap.levels.store import open_storage
from lazysnap.resolver import candidates

DRY = 24
"""Steps of the training whose points are written down."""
LONG = 80
"""Steps that are enough to die at one point after the other."""
ENDLESS = 1_000_000
"""More steps than any training takes that dies."""


def two_levels(root):
    return [{"url": str(root / name), "every_n_steps": 1, "keep_last": 2} for name in ("fast", "slow")]


@pytest.fixture(scope="module")
def passed(make_shared_job, tmp_path_factory):
    """How often each rank, or its keeper, passes each point where nothing happens; it starts twice, the second time
    from a snapshot.
    """
    job = make_shared_job("dry", levels=two_levels(tmp_path_factory.mktemp("dry")))
    assert set(job.run("ddp", 2, stop_at=2, log=True)) == {9}, job.output()
    assert set(job.run("ddp", 2, steps=DRY, log=True)) == {0}, job.output()
    found = [job.passed(rank) for rank in (0, 1)]
    both = found[0] + found[1]
    for points in found:
        points.update({point: both[point] - points[point] for point in both if is_of_keeper(point)})
    assert len(found[0]) >= 40, sorted(found[0])
    return found


def of_memory(passed):
    """Points of the trainer that have to do with what is in memory; those of a restart are test_agreement's."""
    return sorted(point for point in passed[0] if point.startswith(("engine.", "capture.")))


def of_storage(passed):
    """Points that keepers and levels pass in each training, before its end; and those of the start of a keeper."""
    ends = {"keeper.trainer_died", "keeper.lingering", "keeper.persist.checksum", "keeper.draining", "keeper.over"}
    seldom = {"keeper.memory.drop", "level.store.sweep"}  # where an earlier start left something
    alone = {"keeper.started"}  # by a keeper that does not know its trainer yet
    points = [point for point in passed[0] if is_of_keeper(point) and point not in ends | seldom | alone]
    return sorted([*points, *OF_STARTER])


OF_STARTER = ("client.start_keeper", "client.handed_over")
"""Points that the rank passes which starts the keeper: it is another one each time."""
AT_ONCE = (*OF_STARTER, "level.local.mkdir")


def faults(passed, point, victims, action="kill"):
    """At about the fourth snapshot after a start, whatever the point: then slots are used again."""
    if point in OF_STARTER:
        victims = range(len(passed))
    at = {rank: 1 if point in AT_ONCE else max(1, 9 * passed[rank][point] // (2 * DRY)) for rank in victims}
    return {rank: f"{point}:{count}:{action}" for rank, count in at.items()}


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


def trained(job, world):
    """The last step of each rank of which it is known that it trained it, 0 if it trained none."""
    steps = [[int(line[2]) for line in job.events("trained") if line[0] == str(rank)] for rank in range(world)]
    return [max(mine, default=0) for mine in steps]


def promised(job, world, every):
    """The step that no death in memory may cost. To train a step each rank passes the gate of the boundary before it,
    so before the last step of the slowest all is whole on all ranks: what is lost is less than an interval and that
    step, which is in flight.
    """
    return max(min(trained(job, world)) - 1, 0) // every * every


def whole(job, world):
    """Steps that were certainly whole on all ranks: each of them went through the gate after it began."""
    gated = [{int(line[2]) for line in job.events("gated") if line[0] == str(rank)} for rank in range(world)]
    return set.intersection(*(gated[rank] & job.begun(rank) for rank in range(world)))


@pytest.mark.parametrize("passage", [1, 2])
def test_a_common_step_survives_a_change_of_size(make_job, passage):
    """Steps 1 to 5 lie in slots that are too small from step 6 on, which is left out while others are made."""
    job = make_job(levels=[])
    codes = job.run("ddp", 2, faults={1: f"engine.begin:{5 + passage}:kill"}, steps=12, swells_at=6)
    assert -9 in codes, job.output()
    common = max(whole(job, 2))
    assert {line[2] for line in job.events("skipped")} == {"6"}
    left_out = {line[0] for line in job.events("skipped")}  # by both ranks, unless memory came in time for one
    least = {1: 5, 2: 7}[passage] if left_out == {"0", "1"} else 5
    assert min(trained(job, 2)) >= 5 + passage + ("1" in left_out)

    assert set(job.run("ddp", 2, steps=12)) == {0}, job.output()

    assert job.resumed() >= max(common, least)


VICTIMS = ((0,), (1,), (0, 1))


def test_a_common_step_survives_death_at_every_point(make_job, wanted, passed):
    """One training that dies at one point after the other. Who dies takes turns, and so does the interval."""
    job = make_job(levels=[])
    assert set(job.run("ddp", 2, stop_at=2, steps=LONG)) == {9}, job.output()
    reached = 2
    for number, point in enumerate(of_memory(passed)):
        victims = VICTIMS[number % len(VICTIMS)]
        every = 1 + number % 2
        codes = job.run("ddp", 2, faults=faults(passed, point, victims), every=every, steps=LONG)
        assert -9 in codes, (point, codes, job.output())
        assert job.resumed() >= reached, (point, job.output())
        reached = max([reached, promised(job, 2, every), *whole(job, 2)])

    assert set(job.run("ddp", 2, steps=LONG)) == {0}, job.output()

    assert job.resumed() >= reached
    assert job.results() == wanted("ddp", 2, steps=LONG)


@pytest.mark.slow
def test_any_of_three_ranks_die_while_one_of_them_lags_and_again_right_after_the_restart(make_job, wanted):
    subsets = [victims for count in (1, 2, 3) for victims in itertools.combinations(range(3), count)]
    job = make_job(levels=[])
    settings = {"steps": 40}
    reached = 0
    for number, victims in enumerate(subsets):
        lags = {str(number % 3): {"lag_s": 0.02}}
        # Copied, and not yet whole.
        deaths = dict.fromkeys(victims, f"capture.commit:{3 - number % 3}:kill")
        codes = job.run("ddp", 3, faults=deaths, by_rank=lags, **settings)
        assert -9 in codes, (victims, codes, job.output())
        assert job.resumed() >= reached, (victims, job.output())
        reached = max([reached, promised(job, 3, 1), *whole(job, 3)])

    assert set(job.run("ddp", 3, **settings)) == {0}, job.output()

    assert job.resumed() >= reached > 0
    assert job.results() == wanted("ddp", 3, steps=40)


@pytest.mark.slow
@pytest.mark.parametrize(("part", "victims", "every"), [(0, (0,), 1), (1, (1,), 2), (2, (0, 1), 1)])
def test_ranks_and_their_memory_lost_at_any_point_of_storage_leave_what_all_have_there(
    make_job, tmp_path, wanted, passed, part, victims, every
):
    """One training that loses a rank, or both, and the memory of all, at one point after the other.

    Each start trains until it dies: how many snapshots of a number of steps are stored is a matter of time.
    """
    job = make_job(levels=two_levels(tmp_path))
    settings = {"every": every}
    assert set(job.run("ddp", 2, steps=4, stop_at=4, wait_durable=True, **settings)) == {9}, job.output()
    kill_keepers(job)  # from here on each has its fault
    held = 4
    last = 4
    points = of_storage(passed)[part::3]
    if part == 0:  # a shard without its manifest is left and stays; half a file is left and swept
        points += ["level.store.commit", "level.local.write", "level.store.sweep"]
    for point in points:
        codes = job.run("ddp", 2, faults=faults(passed, point, victims, "kill-both"), steps=ENDLESS, **settings)
        assert -9 in codes, (point, codes, job.output())
        last = max([last, *trained(job, 2)])
        if job.events("resumed"):
            assert job.resumed() >= held, (point, job.output())
        kill_keepers(job)  # a survivor may have started one, which has the fault of this run
        plans = candidates([inventory_of(open_storage(level["url"])) for level in job.levels])
        held = max([held, *(plan.step for plan in plans)])

    steps = last + 4
    assert set(job.run("ddp", 2, steps=steps, **settings)) == {0}, job.output()

    assert job.resumed() >= held > 4
    assert job.results() == wanted("ddp", 2, steps=steps)


def test_what_all_have_in_memory_goes_to_storage_when_they_died(make_job, end_keepers, tmp_path):
    """No step was due there; and the newest one that each rank has is not the same."""
    job = make_job(levels=[{"url": str(tmp_path / "level"), "every_n_steps": 1000}])
    codes = job.run("ddp", 2, faults={0: "engine.gated:5:kill", 1: "capture.commit:5:kill"})
    assert codes == [-9, -9], job.output()
    newest = max([promised(job, 2, 1), *whole(job, 2)])
    assert newest >= 4
    until(lambda: any(step >= newest for step in steps_at(tmp_path / "level")), job.output)
    end_keepers(job)

    assert set(job.run("ddp", 2, look=True)) == {0}, job.output()

    assert job.resumed() >= newest
    assert {level for _, level, _ in job.origins()} == {str(tmp_path / "level")}
