"""How fast are the levels beside their media, and what is lost when everything dies?"""

import argparse
import itertools
import math
import os
import signal
import statistics
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks import frame
from benchmarks.frame import DEADLINE_S, MARKER, OURS, Line, Report, Targets, cpu_s, lines_of, processes, say
from benchmarks.places import LEVELS, each, list_of
from benchmarks.raw import BLOCK, KEEP_HEAP, BufferedFile, Copies, DirectFile, S3Client, warm

ASKED = 0.85
"""Of the raw limit, for shards of 1 GiB."""
MEMORY = "memory"
LAYERS = 8
KEYS = ("measure", "level", "direction", "who")
COMPARED = ("seconds", "cpu_s", "lost", "restore_s", "first_step_s")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--levels", type=list_of(LEVELS), default=list(LEVELS), help="of " + ", ".join(LEVELS))
    parser.add_argument("--size-mb", type=int, default=1024, help="of a state in MiB; memory: seven times as much")
    parser.add_argument("--rounds", type=int, default=6, help="that count; one more goes ahead; 0: losses only")
    parser.add_argument("--train-mb", type=float, default=100.0, help="state of the training that is killed, in MB")
    parser.add_argument("--kill-at", type=int, default=60, help="step at which it is killed")
    parser.add_argument("--step-s", type=float, default=0.1, help="length of its steps")
    parser.add_argument("--repeats", type=int, default=3, help="deaths per level; 0: rates only")


def run(args: argparse.Namespace, report: Report) -> None:
    size = args.size_mb << 20
    for work in each(args.levels, size, report):
        more = {**KEEP_HEAP, "OMP_NUM_THREADS": "1", MARKER: uuid.uuid4().hex}
        if args.rounds:
            work("levels.rates", {"size": size, "rounds": args.rounds}, args.timeout_s, **more)
        if args.repeats:
            death = {"mb": args.train_mb, "kill_at": args.kill_at, "step_s": args.step_s, "repeats": args.repeats}
            work("levels.losses", death, args.timeout_s)
    rates, deaths = [], []
    for level, direction, ours, raw in comparisons(report):
        per_s = [[one["bytes"] / seconds / 1e6 for seconds in one["seconds"]] for one in (raw, ours)]
        cpu = [statistics.median(one["cpu_s"]) / one["bytes"] * 1e9 for one in (raw, ours)]
        rates.append((level, direction, raw["who"], *per_s, ratio(ours, raw), *cpu))
    for line in report.of("loss"):
        names = ("step_s", "killed_at", "lost", "restore_s", "first_step_s", "import_s")
        deaths.append((line["level"], line["state_bytes"][0] / 1e6, *(line[name] for name in names)))
    columns = ("level", "", "raw limit", "raw MB/s", "lazysnap MB/s", "of raw", "raw CPU s/GB", "lazysnap CPU s/GB")
    facts = (
        "level",
        "state MB",
        "step s",
        "killed at",
        "steps lost",
        "restore s",
        "start to first step s",
        "imports s",
    )
    targets, ratios = Targets(), {(level, direction): ratio(*both) for level, direction, *both in comparisons(report)}
    for level, direction in itertools.product(args.levels, ("write", "read")):
        text = f"{level}: {direction} rate of {args.size_mb} MiB, against the raw limit"
        targets.check(text, ">= {} of it", ASKED, ratios.get((level, direction), math.nan))
    report.show(frame.table("Rates", columns, rates), frame.table("SIGKILL", facts, deaths), targets.table())


def comparisons(report: Report) -> Iterator[tuple[str, str, Line, Line]]:
    """Level, direction, ours and the raw way that took the least time."""
    lines = list(report.of("rate"))
    for ours in (line for line in lines if line["who"] == OURS):
        level, direction = ours["level"], ours["direction"]
        others = [one for one in lines if one["who"] != OURS and (one["level"], one["direction"]) == (level, direction)]
        if others:
            yield level, direction, ours, min(others, key=lambda line: sum(line["seconds"]))


def ratio(ours: Line, raw: Line) -> float:
    """Our rate over the raw one: the median over pairs of rounds.

    The order turns with every round, and who comes first may find emptier caches on the way to the medium (over NFS:
    three times faster); in two rounds each side was first once.
    """
    pairs = zip(_by_twos(raw["seconds"]), _by_twos(ours["seconds"]), strict=True)
    return statistics.median(theirs / own for theirs, own in pairs)


def _by_twos(seconds: list[float]) -> list[float]:
    """Sums of two rounds; what is over at the end is left out, unless it is all there is."""
    return [sum(pair) for pair in zip(seconds[::2], seconds[1::2], strict=False)] or seconds


# ------------------------------------------------------------------------------------------------ rates, in a worker


class Engine:
    """lazysnap as a training uses it, with one level; the keeper's processor time counts."""

    def __init__(self, settings: Line, state: Line, level: str) -> None:
        from benchmarks.training import ready
        from lazysnap import MemoryLevel, PersistentLevel, SnapshotConfig, SnapshotEngine

        self._is_memory = level == MEMORY
        # Nothing is read back: the raw side does not either.
        how = {"every_n_steps": 1, "keep_last": 1, "verify": False, "storage_options": settings["options"]}
        levels = () if self._is_memory else (PersistentLevel(settings["url"], **how),)
        config = SnapshotConfig(levels=levels, memory=MemoryLevel(linger_s=60.0), job_id=f"rates-{os.getpid()}")
        self._make = lambda: SnapshotEngine(config, state)
        self.engine, self._step = self._make(), 0
        if not self._is_memory:
            self.engine.restore("latest")
        self.engine.prepare()
        ready(self.engine)

    def write(self, number: int) -> None:
        """From the boundary until the capture is whole, or durable."""
        self._step = number + 1
        until = "captured" if self._is_memory else "durable"
        if not self.engine.boundary(self._step) or not self.engine.wait(self._step, until=until, timeout_s=DEADLINE_S):
            raise RuntimeError(f"step {self._step} did not become {until}: {self.engine.statistics()}")

    def reopen(self) -> None:
        """From memory another engine reads, when the keeper is done with what it does after the trainer left."""
        if self._is_memory:
            self.engine.abandon()
            others = set(processes(os.environ[MARKER])) - {os.getpid()}
            before, now = -1.0, cpu_s(others)
            while now > before:
                time.sleep(0.5)  # long beside a tick of that clock, while the keeper computes
                before, now = now, cpu_s(others)
            self.engine = self._make()

    def read(self) -> None:
        """Every block compared, every tensor copied out."""
        found = self.engine.fetch() if self._is_memory else self.engine.fetch_stored()
        if found is None or found.step != self._step or found.skipped:
            raise RuntimeError(f"expected step {self._step}, got {found}")

    def delete(self) -> None:
        self.engine.close(drain=False)


def rates(settings: Line) -> Iterator[Line]:
    """A worker. Ours and raw take turns, the order changes, and a first round does not count."""
    import torch

    torch.set_num_threads(1)
    size, level, url = settings["size"], settings["level"], settings["url"]
    count = max(1, size // BLOCK)
    model = torch.nn.ParameterList(torch.rand(size // count // 4) for _ in range(count))
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1e-3)}
    sides: dict[str, Any] = {}
    if level == MEMORY:
        sides["memcpy"] = Copies([parameter.detach() for parameter in model])
    elif level == "s3":
        sides["botocore"] = S3Client(settings["options"], urlsplit(url).netloc, warm(size), warm(size))
    else:
        image, out = warm(size), warm(size)
        sides["O_DIRECT"] = DirectFile(Path(f"{url}-raw"), image, out)
        if level == "nfs":
            sides["buffered"] = BufferedFile(Path(f"{url}-raw"), image, out)
    ours = sides[OURS] = Engine(settings, state, level)
    yield from _alternate(sides, "write", settings)
    ours.reopen()
    yield from _alternate(sides, "read", settings)
    for side in sides.values():
        side.delete()


def _alternate(sides: dict[str, Any], direction: str, settings: Line) -> Iterator[Line]:
    taken: dict[str, dict[str, list[float]]] = {who: {"seconds": [], "cpu_s": []} for who in sides}
    run = os.environ[MARKER]
    for number in range(settings["rounds"] + 1):
        for who in list(sides) if number % 2 else list(reversed(sides)):
            busy, started = cpu_s(processes(run)), time.perf_counter()
            sides[who].write(number) if direction == "write" else sides[who].read()
            seconds = time.perf_counter() - started
            if number:  # the first one finds everything cold: connections, directories, modules
                taken[who]["seconds"].append(seconds)
                taken[who]["cpu_s"].append(cpu_s(processes(run)) - busy)
            os.sync()  # deletions are not left for the next side to pay
    facts = {"measure": "rate", "level": settings["level"], "direction": direction, "bytes": settings["size"]}
    yield from ({**facts, "who": who, **samples} for who, samples in taken.items())


# ------------------------------------------------------------------------------------------------ losses, in a worker


def config_of(job: Line) -> Any:
    from lazysnap import MemoryLevel, PersistentLevel, SnapshotConfig

    options = {"every_n_steps": 1, "keep_last": 2, "storage_options": job["options"]}
    levels = () if job["level"] == MEMORY else (PersistentLevel(job["url"], **options),)
    return SnapshotConfig(levels=levels, memory=MemoryLevel(linger_s=120.0), job_id=job["job_id"])


def train(job: Line) -> None:
    """The training that is killed, or its restart, which ends after its first step. Says what happens as it happens."""
    import torch

    from benchmarks.training import ready
    from lazysnap import SnapshotEngine

    def tell(event: str, **facts: Any) -> None:
        say({"event": event, "at": time.monotonic(), **facts})  # the clock is the same in all processes

    torch.set_num_threads(1)
    torch.manual_seed(0)
    width = max(8, int((job["mb"] * 1e6 / 12 / LAYERS) ** 0.5))  # weights and AdamW's two moments, float32
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(LAYERS)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tell("imported")
    engine = SnapshotEngine(config_of(job), {"model": model, "optimizer": optimizer})
    started = time.perf_counter()
    found = engine.restore("latest")
    step, facts = (
        (found.step, {"level": found.level, "skipped": list(found.skipped)}) if found else (0, {"level": None})
    )
    tell("restored", step=step, restore_s=time.perf_counter() - started, **facts)
    if not job["is_restart"]:
        ready(engine)
    for number in itertools.count(step + 1):
        started = time.perf_counter()
        model(torch.randn(8, width)).square().mean().backward()
        # The rest of the step, as a device would compute it: this processor is free meanwhile.
        time.sleep(max(0.0, job["step_s"] - (time.perf_counter() - started)))
        optimizer.step()
        optimizer.zero_grad()
        own = engine.statistics()
        tell("trained", step=number, durable=max(own.last_durable_step.values(), default=0), bytes=own.shard_bytes)
        if job["is_restart"]:
            break
        engine.boundary(number)
    engine.close(drain=False)


def losses(settings: Line) -> Iterator[Line]:
    """A worker: deaths and restarts. For ``memory`` the training alone dies, else with its keeper."""
    taken = []
    for number in range(settings["repeats"]):
        job = {**settings, "job_id": f"losses-{os.getpid()}-{number}", "url": f"{settings['url']}/{number}"}
        part = (number + 0.5) / settings["repeats"]
        events = _killed(job, _moment(job, part), part)
        trained = [event for event in events if event["event"] == "trained"]
        begun = time.monotonic()
        process = frame.start("levels.train", {**job, "is_restart": True})
        out, errors = process.communicate(timeout=DEADLINE_S)
        if process.returncode:
            raise RuntimeError(f"the restart failed: {errors[-500:]}")
        by = {event["event"]: event for event in lines_of(out)}
        where = MEMORY if job["level"] == MEMORY else config_of(job).levels[0].url
        if (by["restored"]["level"] or "").rstrip("/") != where:
            raise RuntimeError(f"expected a restart from {where}: {by['restored']}")
        taken.append(
            {
                "state_bytes": trained[-1]["bytes"],
                "step_s": statistics.median(b["at"] - a["at"] for a, b in itertools.pairwise(trained)),
                "killed_at": trained[-1]["step"],
                "resumed": by["restored"]["step"],
                "lost": trained[-1]["step"] - by["restored"]["step"],
                "restore_s": by["restored"]["restore_s"],
                "import_s": by["imported"]["at"] - begun,
                "first_step_s": by["trained"]["at"] - begun,
            }
        )
    yield {"measure": "loss", "level": settings["level"], **{name: [one[name] for one in taken] for name in taken[0]}}


def _moment(job: Line, part: float) -> Callable[[Line], bool]:
    """Whether to kill now: at a step; for a slow level later, some part of the way from its second commit to its third.

    The first commit comes late (the level is swept and tried out) and says nothing of those that follow.
    """
    commits: list[tuple[int, int]] = [(0, 0)]

    def has_come(event: Line) -> bool:
        step = event["step"]
        if step > 10 * job["kill_at"]:
            raise RuntimeError(f"{len(commits) - 1} snapshots became durable in {step} steps")
        if event["durable"] > commits[-1][0]:
            commits.append((event["durable"], step))
        if job["level"] == MEMORY or len(commits) < 3:
            return job["level"] == MEMORY and step >= job["kill_at"]
        first, second = commits[1][1], commits[2][1]
        return step >= max(job["kill_at"], second + round(part * (second - first)))

    return has_come


def _killed(job: Line, has_come: Callable[[Line], bool], part: float) -> list[Line]:
    """Train until the moment, and ``part`` of a step longer; then SIGKILL. All its events."""
    run, events = uuid.uuid4().hex, []
    process: subprocess.Popen[str] = frame.start("levels.train", {**job, "is_restart": False}, **{MARKER: run})
    keepers: set[int] = set()
    assert process.stdout is not None
    try:
        for text in process.stdout:
            events += lines_of(text)
            if events and events[-1]["event"] == "trained" and has_come(events[-1]):
                keepers = set(processes(run)) - {process.pid}
                time.sleep(part * job["step_s"])  # the moment of the death within a step, not a wait for anything
                break
        else:
            raise RuntimeError(f"the training died by itself: {process.communicate()[1][-500:]}")
    finally:
        process.kill()
    for pid in keepers if job["level"] != MEMORY else ():
        os.kill(pid, signal.SIGKILL)
    events += lines_of(process.communicate()[0])
    return events
