"""Kill the trainer, the keeper or both at every fault point they pass; a restart must end as if nothing had happened.

A dry run writes down every point that this job passes. Then each point is hit again in a run of its own, and the job
is started once more without faults. What must hold, whatever died wherever (DESIGN, invariants 2, 3 and 4):

* the second run resumes from one whole snapshot, or starts fresh where none can exist yet, and never fails;
* if the keeper lives, at most the step in flight and one interval are lost;
* a step that was reported durable is never lost;
* a training that outlives its keeper stores its last step with the next one;
* the final weights and optimizer state are those of an uninterrupted run, bit for bit.
"""

import pathlib
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from one_process import Job

STEPS = 9
PARTS = 2
"""Tests among which the deaths are divided, for several workers."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def dry_run(zygote, root: pathlib.Path) -> tuple[str, Counter[str]]:
    """The digest of an uninterrupted run, and how often it passed each point."""
    job = Job(zygote, root / "dry", STEPS)
    log = root / "points"
    assert job.run(log=log) == 0, job.output
    return job.result.read_text(), Counter(log.read_text().splitlines())


def violations(job: Job, fault: str, wanted: str) -> list[str]:
    """Run the job into ``fault``, then again without; say what did not hold."""
    first = job.run(fault=fault)
    if first not in (0, -9):
        return [f"{fault}: the faulty run ended with {first}: {job.output}"]
    if first == 0 and job.newest("durable") < STEPS:
        return [f"{fault}: training outlived it, and the last step was not stored: {job.output}"]
    gated, durable, before = job.newest("gated"), job.newest("durable"), len(job.events())
    finished = job.result.exists()
    job.result.unlink(missing_ok=True)
    second = job.run()
    if second != 0:
        return [f"{fault}: the restart ended with {second}: {job.output}"]
    problems = []
    resumed = int(next(line[1] for line in job.events()[before:] if line[0] == "resumed"))
    keeper_lived = not finished and first == -9 and fault.endswith(":kill") and not fault.startswith("keeper")
    if keeper_lived and resumed < gated - 1:
        problems.append(f"{fault}: step {gated} was captured, but the restart began from {resumed}")
    if resumed < durable:
        problems.append(f"{fault}: step {durable} was reported durable, but the restart began from {resumed}")
    if job.result.read_text() != wanted:
        problems.append(f"{fault}: resumed from {resumed}, the final weights differ from the uninterrupted run's")
    return problems


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", range(PARTS))
def test_a_death_at_any_point_loses_at_most_one_interval_and_no_bit(zygote, root, dry_run, part):
    wanted, points = dry_run
    assert len(points) >= 20, f"the dry run passed suspiciously few points: {sorted(points)}"
    faults = []
    for number, name in enumerate(sorted(points)):
        # The first pass (nothing complete yet) and one in the middle (old snapshots and new ones side by side), once
        # alone and once with the other process; which of them comes first takes turns.
        actions = ["kill", "kill-both"]
        if number % 2:
            actions.reverse()
        passes = dict.fromkeys([1, (points[name] + 1) // 2])
        faults += [f"{name}:{at}:{action}" for at, action in zip(passes, actions, strict=False)]
    mine = faults[part::PARTS]

    with ThreadPoolExecutor(2) as pool:
        found = pool.map(lambda fault: violations(Job(zygote, root / fault, STEPS), fault, wanted), mine)

    assert [problem for problems in found for problem in problems] == []
