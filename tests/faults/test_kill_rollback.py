"""Kill the trainer, or trainer and keeper, at every point inside a rollback: the restart finds a good snapshot."""

import itertools
import pathlib
from dataclasses import dataclass

import pytest
from one_process import HERE, Job


@dataclass(frozen=True)
class RollbackJob(Job):
    """``rollback_trainer.py`` in a directory of its own."""

    mode: str = "watch"
    has_storage: bool = True

    def arguments(self) -> list[str]:
        directory = str(self.place / "snapshots") if self.has_storage else "-"
        return [str(HERE / "rollback_trainer.py"), directory, self.mode, str(self.journal), str(self.result)]

    def resumed(self) -> list[str]:
        """Step and word of the last start."""
        return [line for line in self.events() if line[0] == "resumed"][-1][1:]


def points_in_rollback(log: pathlib.Path, last: str) -> list[str]:
    """What the trainer passes from the beginning of its rollback to ``last``, as ``name:count``."""
    names = [name for name in log.read_text().splitlines() if name.startswith(("engine.", "capture.", "restore."))]
    found = names.index("engine.rollback.found")
    first = max(index for index, name in enumerate(names[:found]) if name == "restore.ask")
    counts = [f"{name}:{names[: index + 1].count(name)}" for index, name in enumerate(names)]
    return counts[first : names.index(last) + 1]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("rollbacks")


def whole_run(zygote, place: pathlib.Path, **settings) -> tuple[str, list[str]]:
    """The result of a run that nobody kills, and the points of its rollback."""
    job = RollbackJob(zygote, place, 0, **settings)
    log = place.with_suffix(".points")
    assert job.run(log=log) == 0, job.output
    last = "engine.rollback.captured" if settings["mode"] == "by hand" else "engine.rollback.loaded"
    return job.result.read_text(), points_in_rollback(log, last) if settings["mode"] != "never" else []


def killed_run(zygote, place: pathlib.Path, fault: str, **settings) -> RollbackJob:
    """Killed at ``fault``, and started again until its end."""
    job = RollbackJob(zygote, place, 0, **settings)
    assert job.run(fault=fault) == -9, f"{fault}: {job.output}"
    assert job.run() == 0, f"{fault}: {job.output}"
    return job


@pytest.mark.timeout(900)
def test_killed_inside_a_rollback_a_watched_training_ends_as_one_that_never_saw_the_batch(zygote, root):
    """At each point in turn the trainer dies alone, or with its keeper."""
    never, _ = whole_run(zygote, root / "never", mode="never")
    seen, points = whole_run(zygote, root / "seen", mode="watch")
    assert seen == never
    assert len(points) >= 6, points
    for point, action in zip(points, itertools.cycle(("kill", "kill-both")), strict=False):
        job = killed_run(zygote, root / f"{point}:{action}", f"{point}:{action}", mode="watch")
        step, word = job.resumed()
        # What was lost with the keeper is lost: storage may lag.
        assert word == "good", point
        assert int(step) == 7 or action == "kill-both", point
        assert job.result.read_text() == never, point


@pytest.mark.timeout(900)
@pytest.mark.parametrize("has_storage", [False, True])
def test_a_rollback_over_captured_steps_holds_from_its_commit_on(zygote, root, has_storage):
    """Step 7 is bad. Without storage it is gone when the state is loaded; else when step 6 is captured."""
    settings = {"mode": "by hand", "has_storage": has_storage}
    wanted, points = whole_run(zygote, root / f"by hand {has_storage}", **settings)
    committed = "engine.rollback.captured:1" if has_storage else "engine.rollback.load:1"
    is_over = dict(zip(points, itertools.accumulate(point == committed for point in points), strict=True))
    assert committed in points
    # With storage and without it others in turn, and the last one with both.
    for point in dict.fromkeys([*points[has_storage::2], committed, points[-1]]):
        job = killed_run(zygote, root / f"{has_storage} {point}", f"{point}:kill", **settings)
        step, word = job.resumed()
        assert (step, word) == ("6", "good") or not is_over[point], f"{point}: resumed step {step}, {word}"
        # The position in the data counts from the capture on: killed before it, the batches since step 6 come again.
        assert job.result.read_text() == wanted or point != points[-1], point
