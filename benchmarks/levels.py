"""How fast are the levels beside their media, and what is lost when everything dies?"""

import argparse
import functools
import itertools
import math
import os
import statistics
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.places import LEVELS, each
from benchmarks.raw import BLOCK, KEEP_HEAP, BufferedFile, Copies, DirectFile, S3Client, timed, warm
from benchmarks.report import Report
from benchmarks.workers import DEADLINE_S, MARKER, Line, call, cpu_s, lines_of, processes, start, tell

ASKED = 0.85
"""Of the raw limit, for shards of 1 GiB."""
OURS = "lazysnap"
KILL_AT, STEP_S = 60, 0.1
"""When the training is killed, in steps of this length."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=list(LEVELS))
    parser.add_argument("--size-mb", type=int, default=1024, help="of a state in MiB; memory: seven times as much")
    parser.add_argument("--rounds", type=int, default=6, help="that count; one more goes ahead; 0: losses only")
    parser.add_argument("--train-mb", type=float, default=100.0, help="state of the training that is killed, in MB")
    parser.add_argument("--repeats", type=int, default=3, help="deaths per level; 0: rates only")


def run(args: argparse.Namespace, report: Report) -> None:
    size = args.size_mb << 20
    for place in each(args.levels, size, report):
        if args.rounds:
            environment = {**KEEP_HEAP, "OMP_NUM_THREADS": "1", MARKER: uuid.uuid4().hex}
            place.measure(report, "levels.rates", {"size": size, "rounds": args.rounds}, **environment)
        if args.repeats:
            place.measure(report, "levels.losses", {"mb": args.train_mb, "repeats": args.repeats})
    for level, direction in itertools.product(args.levels, ("write", "read")):
        text = f"{level}: {direction} rate of {args.size_mb} MiB, against the raw limit"
        found = [line for line in report.of("rate") if (line["level"], line["direction"]) == (level, direction)]
        report.target(text, ">= {} of it", ASKED, min((line["of_raw"] for line in found), default=math.nan))


def ratio(ours: list[float], raw: list[float]) -> float:
    """Our rate over the raw one, from the seconds of each round: the median over pairs of rounds.

    The order turns with every round, and who comes first may find emptier caches on the way to the medium (over NFS:
    three times faster); in two rounds each side was first once. A last one without a pair counts if it is all there is.
    """
    both = ([sum(two) for two in zip(side[::2], side[1::2], strict=False)] or side for side in (raw, ours))
    return statistics.median(theirs / own for theirs, own in zip(*both, strict=True))


# ------------------------------------------------------------------------------------------------ rates, in a worker


class Engine:
    """lazysnap as a training uses it, with one level; the keeper's processor time counts."""

    def __init__(self, job: Line) -> None:
        import torch

        from benchmarks.training import engine_of, ready

        count = max(1, job["size"] // BLOCK)
        model = torch.nn.ParameterList(torch.rand(job["size"] // count // 4) for _ in range(count))
        state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1e-3)}
        self._is_memory = job["level"] == "memory"
        self._make = lambda: engine_of(job, state, keep_last=1)
        self.engine, self._step = self._make(), 0
        if not self._is_memory:
            self.engine.restore("latest")
        ready(self.engine)

    def write(self, number: int) -> None:
        """From the boundary until the capture is whole, or durable."""
        from benchmarks.training import capture

        self._step = number + 1
        capture(self.engine, self._step, "captured" if self._is_memory else "durable")

    def reopen(self) -> None:
        """From memory another engine reads, when the keeper is done with what it does after the trainer left."""
        if self._is_memory:
            self.engine.abandon()
            before, now = -1.0, cpu_s(os.environ[MARKER])
            while now > before:
                time.sleep(0.5)  # long beside a tick of that clock, while the keeper computes
                before, now = now, cpu_s(os.environ[MARKER])
            self.engine = self._make()

    def read(self) -> None:
        """Every block compared, every tensor copied out."""
        run = self.engine._run
        found = run.fetch("latest", run.restart if self._is_memory else replace(run.restart, client=None))
        if found is None or found.step != self._step or found.skipped:
            raise RuntimeError(f"expected step {self._step}, got {found}")

    def end(self) -> None:
        """Free the memory: what a start leaves that captured nothing would stay."""
        from benchmarks.training import capture

        if self._is_memory:
            capture(self.engine, self._step + 1)
        self.engine.close(drain=False)


def raw_sides(job: Line) -> dict[str, Any]:
    """What the medium of a level can do at best."""
    if job["level"] == "memory":
        return {"memcpy": Copies(job["size"])}
    image = warm(job["size"])
    if job["level"] == "s3":
        return {"botocore": S3Client(job["options"], urlsplit(job["url"]).netloc, image)}
    kinds = {"O_DIRECT": DirectFile} | ({"buffered": BufferedFile} if job["level"] == "nfs" else {})
    return {name: kind(Path(f"{job['url']}-raw"), image) for name, kind in kinds.items()}


def rates(job: Line) -> Iterator[Line]:
    """A worker. Ours and raw take turns, the order changes, and a first round does not count."""
    import torch

    torch.set_num_threads(1)
    ours = Engine(job)
    sides = {**raw_sides(job), OURS: ours}
    yield from _alternate(sides, "write", job)
    ours.reopen()
    yield from _alternate(sides, "read", job)
    ours.end()


def _alternate(sides: dict[str, Any], direction: str, job: Line) -> Iterator[Line]:
    seconds, cpu = ({who: [] for who in sides} for _ in range(2))
    run = os.environ[MARKER]
    for number in range(job["rounds"] + 1):
        for who in list(sides) if number % 2 else list(reversed(sides)):
            side, busy = sides[who], cpu_s(run)
            taken = timed(functools.partial(side.write, number) if direction == "write" else side.read)
            if number:  # the first one finds everything cold: connections, directories, modules
                seconds[who].append(taken)
                cpu[who].append(cpu_s(run) - busy)
            os.sync()  # deletions are not left for the next side to pay
    for raw in (who for who in sides if who != OURS):
        line = {"measure": "rate", "level": job["level"], "direction": direction, "raw_limit": raw}
        for name, who in (("raw", raw), (OURS, OURS)):
            line[f"{name}_mb_per_s"] = [job["size"] / 1e6 / one for one in seconds[who]]
            line[f"{name}_cpu_s_per_gb"] = statistics.median(cpu[who]) * 1e9 / job["size"]
        yield {**line, "of_raw": ratio(seconds[OURS], seconds[raw])}


# ------------------------------------------------------------------------------------------------ losses, in a worker


def train(job: Line) -> None:
    """The training that is killed, or its restart, which ends after its first step. Says what happens as it happens."""
    import torch

    from benchmarks.training import engine_of, layers, ready

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = layers(job["mb"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tell(job, "imported")
    engine = engine_of(job, {"model": model, "optimizer": optimizer}, keep_last=2)
    started = time.perf_counter()
    found = engine.restore("latest")
    step = found.step if found else 0
    tell(job, "restored", level=found and found.level, step=step, seconds=time.perf_counter() - started)
    if not job["is_restart"]:
        ready(engine)
    for number in itertools.count(step + 1):
        started = time.perf_counter()
        model(torch.randn(8, model[0].in_features)).square().mean().backward()
        # The rest of the step, as a device would compute it: this processor is free meanwhile.
        time.sleep(max(0.0, STEP_S - (time.perf_counter() - started)))
        optimizer.step()
        optimizer.zero_grad()
        own = engine.statistics()
        tell(job, "trained", step=number, durable=max(own.last_durable_step.values(), default=0), bytes=own.shard_bytes)
        engine.boundary(number)
        if job["is_restart"]:
            break
    engine.close(drain=False)


def losses(job: Line) -> Iterator[Line]:
    """A worker: deaths and restarts. For ``memory`` the training alone dies, else with its keeper."""
    taken: list[Line] = []
    for number in range(job["repeats"]):
        one = {**job, "job_id": f"losses-{os.getpid()}-{number}", "url": f"{job['url']}/{number}"}
        last = _killed(one, (number + 0.5) / job["repeats"])
        by = {event["event"]: event for event in call("levels.train", {**one, "is_restart": True})}
        expected = "memory" if job["level"] == "memory" else one["url"]
        if by["restored"]["level"] != expected:
            raise RuntimeError(f"expected a restart from {expected}: {by['restored']}")
        facts = {"state_mb": last["bytes"] / 1e6, "killed_at": last["step"], "resumed": by["restored"]["step"]}
        facts |= {"steps_lost": last["step"] - by["restored"]["step"], "restore_s": by["restored"]["seconds"]}
        taken.append({**facts, "first_step_s": by["trained"]["at"], "imports_s": by["imported"]["at"]})
    yield {"measure": "loss", "level": job["level"], **{name: [one[name] for one in taken] for name in taken[0]}}


def _killed(job: Line, part: float) -> Line:
    """Train until some step, and ``part`` of a step longer; then SIGKILL. The last step that was trained.

    A level that is slow gets the time to commit twice, and some part of the time that it then takes once more. The
    first commit comes late (the level is swept and tried out) and says nothing of those that follow.
    """
    run, trained, commits = uuid.uuid4().hex, [], []
    is_memory = job["level"] == "memory"
    process = start("levels.train", {**job, "is_restart": False}, **{MARKER: run})
    assert process.stdout is not None
    try:
        for line in (line for text in process.stdout for line in lines_of(text) if line["event"] == "trained"):
            trained.append(line)
            if line["durable"] and line["durable"] not in [durable for durable, _ in commits]:
                commits.append((line["durable"], line["step"]))
            kill_at = KILL_AT
            if not is_memory:
                [first, second] = [at for _, at in commits[:2]] if len(commits) > 1 else [0, math.inf]
                kill_at = max(kill_at, second + part * (second - first))
            if len(trained) > 10 * KILL_AT:
                raise RuntimeError(f"{len(commits)} snapshots became durable in {len(trained)} steps")
            if len(trained) >= kill_at:
                keepers = [one for one in processes(run) if one.pid != process.pid and not is_memory]
                time.sleep(part * STEP_S)  # the moment of the death within a step, not a wait for anything
                break
        else:
            raise RuntimeError(f"the training died by itself: {process.communicate()[1][-500:]}")
    finally:
        process.kill()
    for keeper in keepers:
        keeper.kill()
    rest = lines_of(process.communicate(timeout=DEADLINE_S)[0])
    return [*trained, *(line for line in rest if line["event"] == "trained")][-1]
