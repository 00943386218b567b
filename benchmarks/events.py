"""What it costs to write down the events of a run: processor time of keeper and trainer, with them and without."""

import argparse
import functools
import os
import time
from collections.abc import Iterator

from benchmarks.report import Report
from benchmarks.workers import Line, call

PROCESSES = ("keeper", "trainer")
WARM_UP_S = 3.0
STEP_S = 0.25
FIRST = 100_000
BUDGET = 0.1
"""Per cent of a step."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=20.0, help="of each training (20)")
    parser.add_argument("--rounds", type=int, default=5, help="trainings of each kind, in turns (5)")


def run(args: argparse.Namespace, report: Report) -> None:
    for _ in range(args.rounds):
        for number, events in enumerate(("off", "on")):
            job = {"seconds": args.seconds, "events": events}
            work = functools.partial(call, "events.train", job, LAZYSNAP_EVENTS=str(number), OMP_NUM_THREADS="1")
            report.take(f"events {events}", work)
    report.take("the largest file", functools.partial(call, "events.write", {}))
    for process in PROCESSES:  # the least: other work on the machine makes computing slower, never faster
        off, on = (
            min(line[f"{process}_ms_per_s"] for line in report.of("events") if line["events"] == events)
            for events in ("off", "on")
        )
        report.target(f"{process}: events, of a step", "<= {} %", BUDGET, (on - off) / 10)
    report.target("keeper: the largest file", "<= {} %", BUDGET, report.find(measure="file")["ms_per_s"] / 10)


# ------------------------------------------------------------------------------------------------ in a worker


def train(job: Line) -> Iterator[Line]:
    """A training whose steps only wait, with a small state that is captured at each step and stored at the first."""
    from benchmarks.training import engine_of, layers, ready

    engine = engine_of(job, {"model": layers(0.01)}, every_n_steps=FIRST)
    ready(engine)
    pids = dict(zip(PROCESSES, (engine._client.keeper_pid, os.getpid()), strict=True))
    step, began, before = FIRST - 1, time.monotonic(), {}
    while (age_s := time.monotonic() - began) < WARM_UP_S + job["seconds"]:
        if age_s >= WARM_UP_S and not before:
            before = {process: processor_s(pid) for process, pid in pids.items()}
        step += 1
        time.sleep(STEP_S)
        engine.boundary(step)
        engine.gate()
    used = {f"{process}_ms_per_s": 1e3 * (processor_s(pid) - before[process]) for process, pid in pids.items()}
    written = sum(entry.stat().st_size for entry in os.scandir(job["url"]) if entry.name.startswith("events-"))
    engine.close()
    found: Line = {name: ms / job["seconds"] for name, ms in used.items()}
    yield {"measure": "events", "events": job["events"], "file_kb": written / 1e3, **found}


def write(job: Line) -> Iterator[Line]:
    """Write a file of events of the greatest size once. A keeper does that every ``_MOST_S`` seconds."""
    from lazysnap.config import PersistentLevel
    from lazysnap.events import Progress, Stored
    from lazysnap.keeper.event_log import _MOST_S, MAX_BYTES, EventFileWriter

    os.makedirs(job["url"], exist_ok=True)
    times = {"waited_s": 12.345678, "taken": 1.8e9, "copy_s": 0.012345}
    lines = [
        Progress(t=1.8e9 + step, rank=0, start="0123456789abcdef", step=step, every=1, captured=step, **times)
        for step in range(5_500)
    ]
    writer = EventFileWriter(PersistentLevel(job["url"]), "0123456789abcdef", 0)
    before = time.process_time()
    for line in [*lines, Stored(t=2e9, level="/", step=1, bytes=1, seconds=1.0, checksum_s=0.1, read_back_s=0.1)]:
        writer.add(line)
    writer.close(60.0)
    ms = 1e3 * (time.process_time() - before)
    [size] = (entry.stat().st_size for entry in os.scandir(job["url"]))
    yield {"measure": "file", "mb": size / 1e6, "largest_mb": MAX_BYTES / 1e6, "ms": ms, "ms_per_s": ms / _MOST_S}


def processor_s(pid: int) -> float:
    """Return the processor time of a process, threads that ended included, in fractions of a clock tick."""
    return time.clock_gettime(~pid << 3 | 2)  # clock_getcpuclockid(3)
