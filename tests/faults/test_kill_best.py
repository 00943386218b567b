"""Kill a training that keeps its best snapshots, its keeper, or both, at every point around capture, commit and names.

Whatever dies wherever:

* a level never has more than one name too many;
* a snapshot that had its name is there at the end of the next start, unless as many better ones as are wanted are;
* the next start goes on, and if it trains any step there is no name too many at its end;
* ``"best"`` is the best of those that are there.
"""

import pathlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from best_trainer import COUNT, VALUES, names_at
from one_process import HERE, Job
from support.waiting import until

from lazysnap.levels.store import open_storage
from lazysnap.shard.best import BestName, best_names
from lazysnap.snapshots.catalogue import Catalogue

PARTS = 3
"""Tests among which the deaths are divided, for several workers."""
ACTIONS = ("kill", "kill-both")
POINTS = ("engine.beg", "engine.best", "capture.committed", "keeper.persist", "keeper.names", "level.")


@dataclass(frozen=True)
class BestJob(Job):
    """``best_trainer.py`` in a directory of its own."""

    def arguments(self) -> list[str]:
        return [str(HERE / "best_trainer.py"), str(self.level), str(self.journal)]

    @property
    def level(self) -> pathlib.Path:
        return self.place / "snapshots"

    def names(self) -> list[BestName]:
        """Names at the level, the best first."""
        return best_names(path.name.removeprefix("keep-") for path in names_at(str(self.level)))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("best")


@pytest.fixture(scope="module")
def faults(zygote, root: pathlib.Path) -> list[str]:
    """Each point that an undisturbed training passes, and what dies there; the two deaths take turns.

    Where names change there is a death at each pass. At other points ``test_kill_everywhere`` has both deaths.
    """
    job = BestJob(zygote, root / "dry", len(VALUES))
    log = root / "points"
    assert job.run(log=log) == 0, job.output
    assert [(name.value, name.step) for name in job.names()] == [(1.0, 8), (2.0, 6)]
    passed = [name for name in log.read_text().splitlines() if name.startswith(POINTS)]
    found = []
    for number, name in enumerate(sorted(set(passed))):
        if name.startswith(("engine.best", "keeper.names")):
            for at in range(1, passed.count(name) + 1):
                found.append(f"{name}:{at}:{ACTIONS[(number + at) % 2]}")
        else:
            found.append(f"{name}:{(passed.count(name) + 1) // 2}:{ACTIONS[number % 2]}")
    return found


def violations(job: BestJob, fault: str) -> list[str]:
    """Run the job into ``fault``, then again without; say what did not hold."""
    job.run(fault=fault)
    before = job.names()
    second = job.run()
    if second != 0:
        return [f"{fault}: the restart ended with {second}: {job.output}"]
    has_trained = job.events()[-2][0] == "names"
    # A keeper does what is left to do after its trainer ended.
    until(lambda: len(job.names()) <= COUNT + (not has_trained), lambda: f"{fault}: {job.names()}")
    after = job.names()
    problems = []
    most = max([len(before), *(int(line[1]) for line in job.events() if line[0] == "names")])
    if most > COUNT + 1:
        problems.append(f"{fault}: {most} names: {before}")
    for name in before:
        better = [other for other in after if other.sort_key < name.sort_key]
        if name not in after and len(better) < COUNT:
            problems.append(f"{fault}: {name} was lost, there are {after}")
    best = Catalogue(open_storage(str(job.level))).find("best").step
    if best != after[0].step:
        problems.append(f'{fault}: "best" is step {best}, there are {after}')
    return problems


@pytest.mark.timeout(900)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_death_at_any_point_loses_no_best_snapshot_and_leaves_one_name_too_many_at_most(zygote, root, faults, part):
    assert len(faults) >= 15, faults
    with ThreadPoolExecutor(2) as pool:
        found = pool.map(
            lambda fault: violations(BestJob(zygote, root / fault, len(VALUES)), fault), faults[part::PARTS]
        )

    assert [problem for problems in found for problem in problems] == []
