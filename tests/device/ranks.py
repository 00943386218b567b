"""Two ranks on software devices, killed many times and started again: ``ranks.py PLACE CHAIN ...``.

As ``schedules.py``, with two processes that average their gradients. The averages are queued on the devices, so both
hosts run ahead. One rank or both are killed; the other one is then killed as well, as launchers do.
"""

import contextlib
import json
import os
import pathlib
import random
import re
import signal
import sys
import time
import traceback

import torch
import torch.distributed as dist
from device.schedules import STEPS_AT_MOST, TIMEOUT_S, Training, end_keeper, warm_up
from support import accelerator

from lazysnap import MemoryLevel, SnapshotConfig, SnapshotEngine

WORLD = 2
STARTS = 10
VICTIMS = ([0], [1], [0, 1])
SHARED_BYTES = WORLD * (64 + 2 * (1 << 20))


class RankTraining(Training):
    """Each rank has data of its own."""

    def __init__(self, rank: int, shared: torch.Tensor) -> None:
        super().__init__("device")
        self.rank, self.shared = rank, shared
        self.adam.register_step_pre_hook(lambda *_: self.average(self.first))
        self.sgd.register_step_pre_hook(lambda *_: self.average(self.second))
        torch.manual_seed(rank)

    def average(self, model: torch.nn.Module) -> None:
        for parameter in model.parameters():
            accelerator.SOFTWARE.all_reduce(parameter.grad, self.shared, self.rank, WORLD)


def rank_of(rank: int, place: pathlib.Path, shared: torch.Tensor, work) -> int:
    """Fork a process that does ``work(training)`` as a rank. Return its number."""
    pid = os.fork()
    if pid:
        return pid
    with contextlib.suppress(BaseException):
        output = os.open(place / f"output.{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        for handle in (1, 2):
            os.dup2(output, handle)
        try:
            work(RankTraining(rank, shared))
        except BaseException:  # noqa: BLE001  the outermost handler of the child
            traceback.print_exc()
            os._exit(1)
    os._exit(0)


def undisturbed(steps: int, place: pathlib.Path, shared: torch.Tensor) -> list[list[str]]:
    """Return for each rank the digests of all steps of a run without engines."""

    def work(training: RankTraining) -> None:
        digests = [training.digest()]
        for _ in range(steps):
            training.step()
            digests.append(training.digest())
        (place / f"told.{training.rank}").write_text(json.dumps(digests))

    shared.zero_()
    pids = [rank_of(rank, place, shared, work) for rank in range(WORLD)]
    assert {os.waitpid(pid, 0)[1] for pid in pids} == {0}, (place / "output.0").read_text()
    return [json.loads((place / f"told.{rank}").read_text()) for rank in range(WORLD)]


def train(training: RankTraining, job: str, meeting: pathlib.Path, plan: dict, passed: torch.Tensor) -> None:
    """Restore, then train with a capture at each boundary until SIGKILL: one start of one rank."""
    rank, file = training.rank, (meeting.parent / f"told.{training.rank}").open("a")
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=WORLD)
    config = SnapshotConfig(
        job_id=job, every_n_steps=plan["every"], memory=MemoryLevel(linger_s=60), verify_restart=False
    )
    engine = SnapshotEngine(config, training.state)
    found = engine.restore("latest")
    begins = 0 if found is None else found.step
    file.write(json.dumps({"resumed": begins, "digest": training.digest()}) + "\n")
    file.flush()
    engine._prepare()
    assert engine._wait_ready(TIMEOUT_S)
    torch.accelerator.synchronize()
    dist.barrier()
    accelerator.SOFTWARE.configure(
        seed=plan["seed"] + rank, dies_at=plan["deaths"].get(rank, 0), report_to=file.fileno()
    )
    for step in range(begins + 1, begins + 1 + STEPS_AT_MOST):
        training.step()
        began = engine.boundary(step)
        if not began and step % plan["every"] == 0:
            signal.sigtimedwait((), TIMEOUT_S)  # right if the other rank is dead: then this one is killed as well
            raise AssertionError("a due step was left out")
        passed[rank] = step
    os.kill(os.getpid(), signal.SIGKILL)


def start(place: pathlib.Path, job: str, plan: dict, shared: torch.Tensor, passed: torch.Tensor) -> list[dict]:
    """Start all ranks and wait until all are dead. Return what each rank reported."""
    shared.zero_()
    passed.zero_()
    meeting = place / "meeting"
    meeting.unlink(missing_ok=True)
    for rank in range(WORLD):
        (place / f"told.{rank}").write_text("")
    running = {
        rank_of(rank, place, shared, lambda training: train(training, job, meeting, plan, passed)): rank
        for rank in range(WORLD)
    }
    statuses = {}
    while running:
        pid, status = os.wait()
        statuses[running.pop(pid)] = os.waitstatus_to_exitcode(status)
        for other in running:  # as a launcher does
            os.kill(other, signal.SIGKILL)
    told = []
    for rank in range(WORLD):
        lines = (place / f"told.{rank}").read_text().splitlines()
        facts = {"races": [line for line in lines if not line.startswith("{")], "resumed": 0}
        for line in (line for line in lines if line.startswith("{")):
            facts |= json.loads(line)
        text = (place / f"output.{rank}").read_text()
        facts["output"] = "" if statuses[rank] == -signal.SIGKILL else text[-3000:]
        facts["slots"] = int((re.findall(r"\((\d+) copies\)", text) or [0])[0])
        told.append(facts)
    return told


def chain(number: int, place: pathlib.Path, shared: torch.Tensor) -> list[dict]:
    """Run all starts of a chain. Return the plan and the outcome of each."""
    job = f"ranks {os.getpid()} {number} {time.time_ns()}"
    passed = torch.zeros(WORLD, dtype=torch.int64).share_memory_()
    least, results = 0, []
    for which in range(STARTS):
        draw = random.Random(f"ranks {number} {which}")
        victims = VICTIMS[which % len(VICTIMS)]
        plan = {"seed": draw.getrandbits(32), "every": 1 + number % 2}
        plan["deaths"] = {rank: draw.randint(1, 640) for rank in victims}
        told = start(place, job, plan, shared, passed)
        results.append({"chain": number, "start": which, **plan, "least": least, "ranks": told})
        # A boundary begins when the capture before it is whole.
        least = max(least, min((last - 1) // plan["every"] * plan["every"] for last in passed.tolist()))
    end_keeper(job)
    return results


def main() -> None:
    place = pathlib.Path(sys.argv[1])
    place.mkdir(exist_ok=True)
    warm_up()
    shared = torch.zeros(SHARED_BYTES, dtype=torch.uint8).share_memory_()
    results = [result for number in map(int, sys.argv[2:]) for result in chain(number, place, shared)]
    steps = max(told["resumed"] for result in results for told in result["ranks"])
    digests = undisturbed(steps, place, shared)
    for result in results:
        for rank, told in enumerate(result["ranks"]):
            told["is_exact"] = told.pop("digest", "") == digests[rank][told["resumed"]]
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
