"""``lazysnap report`` of a real training that is killed twice, beside a stopwatch."""

import contextlib
import itertools
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from cli_level import run, run_json
from support.keepers import keeper_of, stopped
from support.waiting import until

from lazysnap import PersistentLevel, SnapshotConfig, SnapshotEngine
from lazysnap.events import Progress, Stored, TrainerStarted, read
from lazysnap.keeper.identity import JobIdentity

PROGRAM = Path(__file__).parent / "timed_trainer.py"
STEPS, KILLED_AT = 300, (130, 260)
FOR_EVER = 10**9
SHARE, UNWRITTEN_S = 0.02, 3.5
ROOM_S = 2.0
"""As docs/report.md states the accuracy, of the wall time and of the end of a process that ended together with its
keeper. Where the wall time is little, it states half a second; here tests on other workers delay both processes.
"""


def lines_of(journal):
    return [(what, float(number), float(at)) for what, number, at in map(str.split, journal.read_text().splitlines())]


def train(zygote, url, journal, kill_at, *, with_keeper=False):
    """Run one start. Return its beginning, its lines and its end."""
    began = time.time()
    steps = STEPS if kill_at is None else FOR_EVER
    child = zygote.start([str(PROGRAM), url, str(steps), str(journal)], {}, f"{journal}.output")
    try:
        if kill_at is not None:
            until(lambda: journal.exists() and f"step {kill_at} " in journal.read_text(), timeout_s=200)
            if with_keeper:
                until(
                    lambda: any((getattr(one, "step", 0) or 0) >= kill_at for file in read(url) for one in file.events),
                    timeout_s=200,
                )
                keeper = keeper_of(JobIdentity.from_config(SnapshotConfig(levels=(PersistentLevel(url),))))
                # It must not start another keeper.
                with contextlib.suppress(ProcessLookupError), stopped(child.pid):
                    os.kill(keeper, signal.SIGKILL)
                    child.kill()
            child.kill()
        assert child.get(200) == (0 if kill_at is None else -signal.SIGKILL)
    finally:
        child.kill()
    ended, lines = time.time(), lines_of(journal)
    return began, lines, lines[-1][2] if kill_at is None else ended


def stopwatch(starts):
    """Return the seconds of each class, by what the trainings wrote down and the processes' beginnings and ends."""
    seconds = dict.fromkeys(("setup", "restarting", "lost", "down", "draining", "busy"), 0.0)
    for index, (began, lines, ended) in enumerate(starts):
        steps = [(number, at) for what, number, at in lines if what == "step"]
        steps[0] = next((number, at) for what, number, at in lines if what == "first")  # its boundary waits for memory
        usual = (steps[-1][1] - steps[0][1]) / (len(steps) - 1)
        work_began = steps[0][1] - usual
        seconds["restarting" if index else "setup"] += work_began - began
        is_last = index == len(starts) - 1
        kept = steps[-1][0] if is_last else starts[index + 1][1][0][1]  # what the next one resumed
        kept_at = max((at for number, at in steps if number <= kept), default=work_began)
        seconds["busy"] += kept_at - work_began
        seconds["draining" if is_last else "lost"] += ended - kept_at
        if not is_last:
            seconds["down"] += starts[index + 1][0] - ended
    return seconds


@pytest.fixture
def stops(url):
    yield
    run("stop", url, "--force")


@pytest.mark.slow
def test_the_report_agrees_with_a_stopwatch(zygote, url, tmp_path, capsys, stops):
    starts = [
        train(zygote, url, tmp_path / "1", KILLED_AT[0]),
        train(zygote, url, tmp_path / "2", KILLED_AT[1], with_keeper=True),
        train(zygote, url, tmp_path / "3", None),
    ]
    expected = stopwatch(starts)
    wall = starts[-1][2] - starts[0][0]

    def complete():
        found = run_json(capsys, "report", url)[1]
        return found.get("how") == "goodbye" and found

    found = until(complete)
    seen = {**found["classes_s"]}
    seen["busy"] = seen.pop("productive") + seen.pop("waiting")
    differences = {name: seen[name] - expected[name] for name in expected}
    bound = max(SHARE * wall, ROOM_S)
    # A keeper that is killed takes its newest lines with it: when they ended is less well known.
    at_the_end = differences.pop("lost"), differences.pop("down")
    assert max(map(abs, at_the_end)) <= bound + UNWRITTEN_S, (at_the_end, wall)
    differences["lost and down"] = sum(at_the_end)
    assert max(map(abs, differences.values())) <= bound, (differences, wall)
    assert abs(found["wall_s"] - wall) <= bound
    assert sum(found["classes_s"].values()) == pytest.approx(found["wall_s"], abs=1e-5)

    first, second = found["interruptions"]
    resumed = [lines[0][1] for _, lines, _ in starts]
    assert [first["resumed_step"], second["resumed_step"]] == resumed[1:]
    assert (first["how"], first["source"], second["source"]) == ("died", "memory", url)
    last = [max(number for what, number, _ in lines if what == "step") for _, lines, _ in starts]
    assert first["step"] in (last[0], last[0] - 1)  # it may be killed between the note and the boundary
    assert second["resumed_step"] <= second["step"] <= last[1]
    for one, (before, after) in zip((first, second), itertools.pairwise(starts), strict=True):
        new = next(at for what, number, at in after[1] if what == "step" and number > one["step"])
        assert one["new_step_after_s"] == pytest.approx(new - before[2], abs=bound + UNWRITTEN_S)


@pytest.mark.slow
def test_a_run_names_the_time_of_a_write_and_the_interval_of_captures(url, capsys, stops):
    model = torch.nn.Linear(1000, 1000)
    level = PersistentLevel(url, every_n_steps=1)
    engine = SnapshotEngine(SnapshotConfig(every_n_steps=3, levels=(level,)), {"model": model})
    assert engine._wait_ready(60)
    for step in range(1, 40):
        engine.boundary(step)
        engine.gate()
    assert engine.close()

    def told(kind):
        return [one for file in read(url) for one in file.events if isinstance(one, kind)]

    until(lambda: all(any(one.step == 39 for one in told(kind)) for kind in (Stored, Progress)))
    assert all(one.seconds > 0 for one in told(Stored))
    assert [start.every_n_steps for start in told(TrainerStarted)] == [3]
    found = run_json(capsys, "report", url)[1]
    assert found["sources"][url]["seconds"] > 0
