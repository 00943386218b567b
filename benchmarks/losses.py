"""What a sudden death costs with one level: steps lost, seconds to resume; a worker of levels.py.

    python benchmarks/losses.py local /scratch/losses --mb 100 --out local.jsonl

A training of its own with AdamW, steps of a fixed length as a device would take them, a capture at every step; the
level takes the newest capture whenever it is idle. It is killed at a given step: the training alone for `memory`, with
its keeper for all others, as a machine that dies. Then the same command is started again.
"""

import argparse
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

MEMORY = "memory"
DEADLINE_S = 300.0
LAYERS = 8
_PATIENCE = 10


def config_of(job: dict[str, Any]) -> Any:
    """The settings of a training."""
    from lazysnap import MemoryLevel, PersistentLevel, SnapshotConfig

    levels = ()
    if job["level"] != MEMORY:
        levels = (PersistentLevel(job["url"], every_n_steps=1, keep_last=2, storage_options=job["options"]),)
    return SnapshotConfig(levels=levels, memory=MemoryLevel(linger_s=120.0), job_id=job["job_id"])


# ------------------------------------------------------------------------------------------------ the training


def say(event: str, **facts: Any) -> None:
    """One line; the clock is the same in all processes of a machine."""
    print(json.dumps({"event": event, "at": time.monotonic(), **facts}), flush=True)


def train(job: dict[str, Any]) -> None:
    """Resume, then train; a restarted one ends after its first step."""
    import torch

    from lazysnap import SnapshotEngine

    torch.set_num_threads(1)
    torch.manual_seed(0)
    width = max(8, int((job["mb"] * 1e6 / 12 / LAYERS) ** 0.5))  # weights and AdamW's two moments, float32
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    say("imported")
    engine = SnapshotEngine(config_of(job), {"model": model, "optimizer": optimizer})
    started = time.perf_counter()
    snapshot = engine.restore("latest")
    restore_s = time.perf_counter() - started
    step = snapshot.step if snapshot else 0
    level = snapshot.level if snapshot else None
    say("restored", step=step, level=level, restore_s=restore_s, skipped=list(snapshot.skipped if snapshot else ()))
    if not job["is_restart"] and not engine.wait_ready(DEADLINE_S):
        raise RuntimeError("the keeper made no slots")
    while True:
        start = time.perf_counter()
        step += 1
        model(torch.randn(8, width)).square().mean().backward()
        # The rest of the step, as a device would compute it: this processor is free meanwhile.
        time.sleep(max(0.0, job["step_s"] - (time.perf_counter() - start)))
        optimizer.step()
        optimizer.zero_grad()
        statistics = engine.statistics()
        durable = max(statistics.last_durable_step.values(), default=0)
        say("trained", step=step, durable=durable, state_bytes=statistics.shard_bytes)
        if job["is_restart"]:
            break
        engine.boundary(step)
    engine.close(drain=False)


# ------------------------------------------------------------------------------------------------ its end


def start(job: dict[str, Any], *, is_restart: bool) -> "subprocess.Popen[str]":
    """The training, in a process of its own; if this one dies, it dies of its broken pipe."""
    text = json.dumps({**job, "is_restart": is_restart})
    return subprocess.Popen([sys.executable, __file__, "train", text], stdout=subprocess.PIPE, text=True)


def read(process: "subprocess.Popen[str]", enough: Callable[[dict[str, Any]], bool]) -> list[dict[str, Any]]:
    """Its events until one is enough, or to its end."""
    events = []
    assert process.stdout is not None
    for line in process.stdout:
        with contextlib.suppress(ValueError):  # a line that the kill cut off
            events.append(json.loads(line))
            if enough(events[-1]):
                break
    return events


def to_its_end(event: dict[str, Any]) -> bool:
    """No event is enough."""
    return False


def keeper_pid(job: dict[str, Any]) -> int:
    """The keeper of a running training."""
    from lazysnap.keeper.identity import JobIdentity
    from lazysnap.keeper.launch import try_connect

    connection = try_connect(JobIdentity.from_config(config_of(job)))
    if connection is None:
        raise RuntimeError("the training has no keeper")
    with contextlib.closing(connection):
        return connection.peer_pid


def only(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    """The events of one kind."""
    return [event for event in events if event["event"] == name]


class Moment:
    """When to kill: at a step, for a slow level later: at some ``part`` of the way from its second commit to its third.

    The first commit comes late (the level is swept and tried out) and says nothing of those that follow.
    """

    def __init__(self, level: str, kill_at: int, part: float) -> None:
        self._kill_at, self._part, self._level = kill_at, part, level
        self._durable = 0
        self._commits: list[int] = []

    def has_come(self, event: dict[str, Any]) -> bool:
        """Whether it is now. Raises: RuntimeError, if the level takes too long."""
        if event["event"] != "trained":
            return False
        step = event["step"]
        if step > _PATIENCE * self._kill_at:
            raise RuntimeError(f"{len(self._commits)} snapshots became durable in {step} steps")
        if event["durable"] > self._durable:
            self._durable = event["durable"]
            self._commits.append(step)
        if self._level == MEMORY:
            return step >= self._kill_at
        if len(self._commits) < 2:
            return False
        first, second = self._commits[:2]
        return step >= max(self._kill_at, second + round(self._part * (second - first)))


def kill(job: dict[str, Any], kill_at: int, part: float) -> list[dict[str, Any]]:
    """Train until step ``kill_at``, and ``part`` of a step longer; then SIGKILL. All its events."""
    moment = Moment(job["level"], kill_at, part)
    process = start(job, is_restart=False)
    try:
        events = read(process, moment.has_come)
        if process.poll() is not None:
            raise RuntimeError(f"the training died by itself before step {kill_at}")
        keeper = keeper_pid(job)
        time.sleep(part * job["step_s"])  # the moment of the death within a step, not a wait for anything
    finally:
        process.kill()
    if job["level"] != MEMORY:
        os.kill(keeper, signal.SIGKILL)
    events += read(process, to_its_end)
    process.wait(DEADLINE_S)
    return events


def resume(job: dict[str, Any]) -> dict[str, float]:
    """Start it again; what it resumed, and when it had done its first step."""
    begun = time.monotonic()
    process = start(job, is_restart=True)
    events = read(process, to_its_end)
    if process.wait(DEADLINE_S) != 0:
        raise RuntimeError(f"the restart failed with exit code {process.returncode}")
    restored, trained = only(events, "restored")[0], only(events, "trained")[0]
    if (restored["level"] or "").rstrip("/") != (MEMORY if job["level"] == MEMORY else config_of(job).levels[0].url):
        raise RuntimeError(f"resumed from {restored['level']}: {restored['skipped']}")
    return {
        "resumed": restored["step"],
        "restore_s": restored["restore_s"],
        "import_s": only(events, "imported")[0]["at"] - begun,
        "first_step_s": trained["at"] - begun,
        "state_bytes": trained["state_bytes"],
    }


def measure(job: dict[str, Any], kill_at: int, part: float) -> dict[str, float]:
    """One death and one restart."""
    trained = only(kill(job, kill_at, part), "trained")
    found = resume(job)
    steps = [after["at"] - before["at"] for before, after in itertools.pairwise(trained)]
    last = trained[-1]
    state_bytes = last["state_bytes"]
    return {
        **found,
        "state_bytes": state_bytes,
        "killed_at": last["step"],
        "lost": last["step"] - found["resumed"],
        "step_s": sorted(steps)[len(steps) // 2],
    }


def main() -> None:
    if sys.argv[1:2] == ["train"]:
        train(json.loads(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("level", help="memory, or any name for a storage level")
    parser.add_argument("url", help="of the level; unused for memory")
    parser.add_argument("--options", type=json.loads, default=None, help="storage_options as JSON")
    parser.add_argument("--mb", type=float, default=100.0, help="of training state")
    parser.add_argument("--kill-at", type=int, default=60, help="step")
    parser.add_argument("--step-s", type=float, default=0.1, help="length of a step")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    taken = []
    for number in range(args.repeats):
        job = {
            "job_id": f"losses-{args.level}-{os.getpid()}-{number}",
            "level": args.level,
            "url": f"{args.url}/{number}",
            "options": args.options,
            "mb": args.mb,
            "step_s": args.step_s,
        }
        taken.append(measure(job, args.kill_at, (number + 0.5) / args.repeats))
    columns = {name: [item[name] for item in taken] for name in taken[0]}
    args.out.write_text(json.dumps({"measure": "loss", "level": args.level, **columns}) + "\n")


if __name__ == "__main__":
    main()
