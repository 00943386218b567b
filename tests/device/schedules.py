"""Trainings on the software device, each killed many times and started again: ``schedules.py PLACE CHAIN ...``.

A chain is one training under a job of its own. Each of its starts is a schedule: it restores, compares with a run that
nobody disturbs, trains with a capture at each boundary, and is killed by SIGKILL at a turn of the device's scheduler or
at a fault point. The number of the chain decides what is trained, how work on the device is ordered, how the loop uses
the engine and where each start dies. Starts are forked from this process, which has imported everything and never used
the device. One line of JSON is printed for each.

Every third start dies at a fault point. Consecutive chains take all points in turn, each at its first three passes.
"""

import contextlib
import json
import os
import pathlib
import random
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from importlib import reload

import torch
from support import accelerator
from support.bits import digest

from lazysnap import MemoryLevel, SnapshotConfig, SnapshotEngine, faults
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.launch import try_connect

STARTS = 10
STEPS_AT_MOST = 4
"""Most steps that one start trains."""
TIMEOUT_S = 60
KINDS = ("device", "device and cpu", "two devices")
INTERVALS = (1, 2, 3)
FAULT_EVERY = 3
"""One of so many starts dies at a fault point, the others at a turn of the scheduler."""
FAULTS_OF_CHAIN = -(-STARTS // FAULT_EVERY)
PASSES = 3


class Training:
    """Large tensors, which are copied alone, and small ones; buffers; numbers drawn on the device and on the CPU."""

    def __init__(self, kind: str) -> None:
        torch.manual_seed(0)
        second = {"device": "software:0", "device and cpu": "cpu", "two devices": "software:1"}[kind]
        self.first = torch.nn.Sequential(
            torch.nn.Linear(256, 300), torch.nn.BatchNorm1d(300), torch.nn.Dropout(0.1), torch.nn.Linear(300, 16)
        ).to("software:0")
        self.second = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)).to(second)
        self.adam = torch.optim.AdamW(self.first.parameters(), lr=1e-3)
        self.sgd = torch.optim.SGD(self.second.parameters(), lr=1e-2, momentum=0.9)
        self.counts = {"rows": 0}
        self.device = second
        self.state = {"first": self.first, "second": self.second, "adam": self.adam, "sgd": self.sgd}
        self.state["counts"] = self.counts

    def step(self) -> None:
        rows = int(torch.randint(4, 9, ()))
        hidden = self.first(torch.randn(rows, 256, device="software:0"))
        self.second(hidden.to(self.device)).square().mean().backward()
        self.adam.step()
        self.sgd.step()
        self.adam.zero_grad()
        self.sgd.zero_grad()
        self.counts["rows"] += rows

    def digest(self) -> str:
        """Return a digest of all that is restored, the generators included."""
        moments = [one.state_dict()["state"] for one in (self.adam, self.sgd)]
        found = [self.first.state_dict(), self.second.state_dict(), moments]
        tensors = torch.utils._pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.cpu(), found)
        return digest([tensors, self.counts, torch.get_rng_state(), torch.software.get_rng_state(0)])


def undisturbed(kind: str, steps: int, told: pathlib.Path) -> None:
    """Write the digest of each step of a run without an engine; in a process of its own."""
    training, digests = Training(kind), []
    digests.append(training.digest())
    for _ in range(steps):
        training.step()
        digests.append(training.digest())
    told.write_text(json.dumps(digests))


class Start:
    """One start of a chain; its number decides what it does."""

    def __init__(self, chain: int, number: int, points: list[str]) -> None:
        draw = random.Random(f"{chain} {number}")
        self.chain, self.number = chain, number
        self.kind = KINDS[chain % len(KINDS)]
        self.every = INTERVALS[chain // len(KINDS) % len(INTERVALS)]
        self.seed = draw.getrandbits(32)
        self.dies_at = draw.randint(1, 640)
        self.fault = ""
        if points and number % FAULT_EVERY == 0:
            passes, point = divmod(chain * FAULTS_OF_CHAIN + number // FAULT_EVERY, len(points))
            self.dies_at = 0
            self.fault = f"{points[point]}:{1 + passes % PASSES}:kill"
        self.gates = [draw.random() < 0.3 for _ in range(STEPS_AT_MOST)]
        self.waits = [draw.random() < 0.15 for _ in range(STEPS_AT_MOST)]

    def run(self, job: str, passed: list[int], told: pathlib.Path, log: str = "") -> None:
        """Restore, train and die. ``passed``: shared memory for the last step whose boundary returned."""
        software, file = accelerator.SOFTWARE, told.open("a")
        os.environ |= {"LAZYSNAP_FAULT": self.fault, "LAZYSNAP_FAULT_LOG": log}
        training = Training(self.kind)
        config = SnapshotConfig(
            job_id=job, every_n_steps=self.every, memory=MemoryLevel(linger_s=60), verify_restart=False
        )
        engine = SnapshotEngine(config, training.state)
        found = engine.restore("latest")
        begins = 0 if found is None else found.step
        file.write(json.dumps({"resumed": begins, "digest": training.digest()}) + "\n")
        file.flush()
        engine._prepare()
        assert engine._wait_ready(TIMEOUT_S)
        reload(faults)  # armed only now: what a start does before is not what dies here
        os.environ["LAZYSNAP_FAULT"] = ""
        torch.accelerator.synchronize()
        software.configure(seed=self.seed, dies_at=self.dies_at, report_to=file.fileno())
        for at, step in enumerate(range(begins + 1, begins + 1 + STEPS_AT_MOST)):
            training.step()
            began = engine.boundary(step)
            assert began or step % self.every, "a due step was left out"
            passed[0] = step
            if self.gates[at]:
                engine.gate()
            if self.waits[at] and began:
                assert engine.wait(step, until="captured", timeout_s=TIMEOUT_S)
        counts = software.counters()
        file.write(json.dumps({"turns": counts["turns"], "order": counts["order"]}) + "\n")
        file.flush()
        os.kill(os.getpid(), signal.SIGKILL)


def forked(work, *args) -> int:
    """Do the work in a child. Return its status; negative: the signal that ended it."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    with contextlib.suppress(BaseException):
        output = os.open(f"{sys.argv[1]}/output", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for handle in (1, 2):  # a keeper that outlives the test keeps them open
            os.dup2(output, handle)
        try:
            work(*args)
        except BaseException:  # noqa: BLE001  the outermost handler of the child
            traceback.print_exc()
            os._exit(1)
    os._exit(0)


def fault_points(place: pathlib.Path) -> list[str]:
    """Return the points that a training passes at its boundaries and gates, and on its copy thread."""
    log = place / "points"
    start = Start(0, 0, [])
    start.kind, start.dies_at = "device and cpu", 0
    forked(start.run, f"points {os.getpid()}", [0], place / "told", str(log))
    end_keeper(f"points {os.getpid()}")
    return sorted({name for name in log.read_text().splitlines() if name.startswith(("engine.", "capture."))})


def end_keeper(job: str) -> None:
    connection = try_connect(JobIdentity.from_config(SnapshotConfig(job_id=job)))
    if connection is not None:
        with contextlib.closing(connection), contextlib.suppress(ProcessLookupError):
            os.kill(connection.peer_pid, signal.SIGKILL)


def chain(number: int, place: pathlib.Path, points: list[str]) -> Iterator[dict]:
    """Yield the outcome of each start of a chain."""
    job = f"schedules {os.getpid()} {number} {time.time_ns()}"
    passed = torch.zeros(1, dtype=torch.int64).share_memory_()
    least = 0
    for start in (Start(number, which, points) for which in range(STARTS)):
        told = place / "told"
        told.write_text("")
        passed[0] = 0
        status = forked(start.run, job, passed, told)
        lines = told.read_text().splitlines()
        facts = {}
        for line in lines:
            if line.startswith("{"):
                facts |= json.loads(line)
        result = {"chain": number, "start": start.number, "kind": start.kind, "dies": start.fault or start.dies_at}
        result |= {"resumed": 0, "least": least, "is_killed": status == -signal.SIGKILL, **facts}
        result["races"] = [line for line in lines if not line.startswith("{")]
        result["output"] = "" if result["is_killed"] else (place / "output").read_text()[-3000:]
        yield result
        # A boundary begins when the capture before it is whole.
        least = max(least, (int(passed[0]) - 1) // start.every * start.every)
    end_keeper(job)


def warm_up() -> None:
    """Import what PyTorch imports at the first step of an optimizer. No backward: its threads would not be forked."""
    for device in ("cpu", "meta"):
        layer = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Dropout()).to(device)
        layer(torch.ones(2, 2, device=device)).square().mean()
        for kind in (torch.optim.AdamW, torch.optim.SGD):
            optimizer = kind(layer.parameters(), lr=0.1)
            for parameter in layer.parameters():
                parameter.grad = torch.ones_like(parameter)
            optimizer.step()
            optimizer.state_dict()


def main() -> None:
    place = pathlib.Path(sys.argv[1])
    place.mkdir(exist_ok=True)
    chains = [int(number) for number in sys.argv[2:]]
    warm_up()
    points = fault_points(place)
    results = [result for number in chains for result in chain(number, place, points)]
    told = place / "undisturbed"
    for kind in KINDS:
        mine = [result for result in results if result["kind"] == kind]
        steps = max((result["resumed"] for result in mine), default=0)
        assert forked(undisturbed, kind, steps, told) == 0, (place / "output").read_text()
        digests = json.loads(told.read_text())
        for result in mine:
            result["is_exact"] = result.pop("digest", "") == digests[result["resumed"]]
    for result in results:
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
