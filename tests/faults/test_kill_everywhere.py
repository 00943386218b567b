"""Kill the trainer, the keeper or both at every fault point they pass; a restart must end as if nothing had happened.

A dry run writes down every point that this job passes. Then each point is hit again in a run of its own, and the job
is started once more without faults. What must hold, whatever died wherever (DESIGN, invariants 2, 3 and 4):

* the second run resumes from one whole snapshot, or starts fresh where none can exist yet, and never fails;
* if the keeper lives, at most the step in flight and one interval are lost;
* a step that was reported durable is never lost;
* the final weights and optimizer state are those of an uninterrupted run, bit for bit.
"""

import itertools
import json
import os
import pathlib
import queue
import subprocess
import sys
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest

STEPS = 9
HERE = pathlib.Path(__file__).parent
TIMEOUT_S = 90


class Zygote:
    """Starts trainers by forking a process that has torch already."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "zygote.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.answers: dict[int, queue.SimpleQueue[int]] = {}
        self.numbers = itertools.count()
        self.lock = threading.Lock()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        for line in self.process.stdout:
            answer = json.loads(line)
            self.answers[answer["id"]].put(answer["status"])

    def run(self, args: list[str], env: dict[str, str], output: pathlib.Path) -> int:
        number = next(self.numbers)
        self.answers[number] = queue.SimpleQueue()
        request = {"id": number, "args": args, "env": env, "output": str(output)}
        with self.lock:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
            self.process.stdin.flush()
        return self.answers[number].get(timeout=TIMEOUT_S)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.kill()  # the end of its input may not reach it: what was forked meanwhile holds the pipe, too
        self.process.wait(60)
        self.process.stdout.close()


@dataclass(frozen=True)
class Job:
    """One training job in a directory of its own."""

    zygote: Zygote
    root: pathlib.Path
    name: str

    def start(self, *, fault: str | None = None, log: pathlib.Path | None = None) -> int:
        place = self.root / self.name
        place.mkdir(exist_ok=True)
        environment = {"LAZYSNAP_JOB_ID": f"{self.root}/{self.name}"}
        if fault:
            environment["LAZYSNAP_FAULT"] = fault
        if log:
            environment["LAZYSNAP_FAULT_LOG"] = str(log)
        arguments = [
            str(HERE / "trainer.py"),
            str(place / "snapshots"),
            str(STEPS),
            str(self.journal),
            str(self.result),
        ]
        return self.zygote.run(arguments, environment, place / "output")

    @property
    def output(self) -> str:
        return (self.root / self.name / "output").read_text()[-3000:]

    @property
    def journal(self) -> pathlib.Path:
        return self.root / self.name / "journal"

    @property
    def result(self) -> pathlib.Path:
        return self.root / self.name / "result"

    def events(self) -> list[list[str]]:
        return [line.split() for line in self.journal.read_text().splitlines()]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def zygote():
    zygote = Zygote()
    yield zygote
    zygote.close()


@pytest.fixture(scope="module")
def dry_run(zygote: Zygote, root: pathlib.Path) -> tuple[str, Counter[str]]:
    """The digest of an uninterrupted run, and how often it passed each point."""
    job = Job(zygote, root, "dry")
    log = root / "points"
    assert job.start(log=log) == 0, job.output
    return job.result.read_text(), Counter(log.read_text().splitlines())


def violations(job: Job, fault: str, wanted: str) -> list[str]:
    """Run the job into ``fault``, then again without; say what did not hold."""
    first = job.start(fault=fault)
    if not job.journal.exists():
        job.journal.write_text("")
    before = job.events()
    if first not in (0, -9):
        return [f"{fault}: the faulty run ended with {first}: {job.output}"]
    finished = job.result.exists()
    job.result.unlink(missing_ok=True)
    second = job.start()
    if second != 0:
        return [f"{fault}: the restart ended with {second}: {job.output}"]
    problems = []
    after = job.events()[len(before) :]
    resumed = int(next(line[1] for line in after if line[0] == "resumed"))
    gated = max((int(line[1]) for line in before if line[0] == "gated"), default=0)
    durable = max((int(line[1]) for line in before if line[0] == "durable"), default=0)
    keeper_lived = not finished and first == -9 and fault.endswith(":kill") and not fault.startswith("keeper")
    if keeper_lived and resumed < gated - 1:
        problems.append(f"{fault}: step {gated} was captured, but the restart began from {resumed}")
    if resumed < durable:
        problems.append(f"{fault}: step {durable} was reported durable, but the restart began from {resumed}")
    if job.result.read_text() != wanted:
        problems.append(f"{fault}: resumed from {resumed}, the final weights differ from the uninterrupted run's")
    return problems


@pytest.mark.timeout(900)
@pytest.mark.parametrize("action", ["kill", "kill-both"])
def test_a_death_at_any_point_loses_at_most_one_interval_and_no_bit(zygote, root, dry_run, action):
    wanted, points = dry_run
    assert len(points) >= 20, f"the dry run passed suspiciously few points: {sorted(points)}"
    # The first pass (nothing complete yet) and one in the middle of the run (old snapshots and new ones side by side).
    faults = [f"{name}:{at}:{action}" for name, count in sorted(points.items()) for at in sorted({1, (count + 1) // 2})]

    with ThreadPoolExecutor(max_workers=max(2, os.cpu_count() or 2)) as pool:
        found = pool.map(
            lambda item: violations(Job(zygote, root, f"{action}-{item[0]}"), item[1], wanted), enumerate(faults)
        )

    assert [problem for problems in found for problem in problems] == []
