"""How fast are the levels beside their media?"""

import argparse
import functools
import itertools
import math
import os
import statistics
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.places import LEVELS, each
from benchmarks.raw import BLOCK, KEEP_HEAP, BufferedFile, Copies, DirectFile, S3Client, timed, warm
from benchmarks.report import Report
from benchmarks.workers import MARKER, Line, cpu_s

ASKED = 0.85
"""Of the raw limit, for shards of 1 GiB."""
OURS = "lazysnap"
READ_BACK = ("local", "nfs")
"""Levels whose files are read back after their commit. The raw side does the same: its rate is that of both."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=list(LEVELS))
    parser.add_argument("--size-mb", type=int, default=1024, help="of a state in MiB; memory: seven times as much")
    parser.add_argument("--rounds", type=int, default=6, help="that count; one more goes ahead")


def run(args: argparse.Namespace, report: Report) -> None:
    size = args.size_mb << 20
    for place in each(args.levels, size, report):
        environment = {**KEEP_HEAP, "OMP_NUM_THREADS": "1", MARKER: uuid.uuid4().hex}
        place.measure(report, "levels.rates", {"size": size, "rounds": args.rounds}, **environment)
    for level, direction in itertools.product(args.levels, ("write", "read")):
        text = f"{level}: {direction} rate of {args.size_mb} MiB, against the raw limit"
        shares = []
        for line in report.of("rate"):
            if (line["level"], line["direction"]) == (level, direction):
                shares.append(line["of_raw"])
        report.target(text, ">= {} of it", ASKED, min(shares, default=math.nan))


def ratio(ours: list[float], raw: list[float]) -> float:
    """Our rate over the raw one, from the seconds of each round: the median over pairs of rounds.

    The order turns with every round, and who comes first may find emptier caches on the way to the medium (over NFS:
    three times faster); in two rounds each side was first once. A last one without a pair counts if it is all there is.
    """
    shares = []
    for raw_s, ours_s in zip(_in_pairs(raw), _in_pairs(ours), strict=True):
        shares.append(raw_s / ours_s)
    return statistics.median(shares)


def _in_pairs(seconds: list[float]) -> list[float]:
    """The sums of two rounds each; the one round, if there is no second."""
    return list(map(sum, zip(seconds[::2], seconds[1::2], strict=False))) or seconds


# ------------------------------------------------------------------------------------------------ in a worker


class Engine:
    """lazysnap as a training uses it, with one level; the keeper's processor time counts."""

    def __init__(self, job: Line) -> None:
        import torch

        from benchmarks.training import engine_of, ready

        count = max(1, job["size"] // BLOCK)
        model = torch.nn.ParameterList(torch.rand(job["size"] // count // 4) for _ in range(count))
        state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1e-3)}
        self._is_memory = job["level"] == "memory"
        self._make = functools.partial(engine_of, job, state, keep_last=1)
        self.engine = self._make()
        self._step = 0
        if not self._is_memory:
            self.engine.restore("latest")
        ready(self.engine)

    def write(self, number: int) -> None:
        """From the boundary until the capture is whole, or durable."""
        from benchmarks.training import capture

        self._step = number + 1
        until = "durable"
        if self._is_memory:
            until = "captured"
        capture(self.engine, self._step, until)

    def reopen(self) -> None:
        """From memory another engine reads, when the keeper is done with what it does after the trainer left."""
        if self._is_memory:
            self.engine.abandon()
            before_s = -1.0
            now_s = cpu_s(os.environ[MARKER])
            while now_s > before_s:
                time.sleep(0.5)  # long beside a tick of that clock, while the keeper computes
                before_s = now_s
                now_s = cpu_s(os.environ[MARKER])
            self.engine = self._make()

    def read(self) -> None:
        """Every block compared, every tensor copied out."""
        run = self.engine._run
        restart = run.restart
        if not self._is_memory:
            restart = replace(restart, client=None)
        snapshot = run.fetch("latest", restart)
        if snapshot is None or snapshot.step != self._step or snapshot.skipped:
            raise RuntimeError(f"expected step {self._step}, got {snapshot}")

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
    directory = Path(f"{job['url']}-raw")
    sides: dict[str, Any] = {"O_DIRECT": DirectFile(directory, image)}
    if job["level"] == "nfs":
        sides["buffered"] = BufferedFile(directory, image)
    return sides


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


def _write(side: Any, number: int, *, is_read_back: bool) -> None:
    side.write(number)
    if is_read_back:
        side.read()


def _alternate(sides: dict[str, Any], direction: str, job: Line) -> Iterator[Line]:
    seconds: dict[str, list[float]] = defaultdict(list)
    busy_s: dict[str, list[float]] = defaultdict(list)
    run = os.environ[MARKER]
    order = list(sides)
    for number in range(job["rounds"] + 1):
        order.reverse()
        for name in order:
            work = sides[name].read
            if direction == "write":
                is_read_back = name != OURS and job["level"] in READ_BACK
                work = functools.partial(_write, sides[name], number, is_read_back=is_read_back)
            busy_before_s = cpu_s(run)
            taken_s = timed(work)
            if number:  # the first one finds everything cold: connections, directories, modules
                seconds[name].append(taken_s)
                busy_s[name].append(cpu_s(run) - busy_before_s)
            os.sync()  # deletions are not left for the next side to pay
    for raw in sides:
        if raw == OURS:
            continue
        line = {"measure": "rate", "level": job["level"], "direction": direction, "raw_limit": raw}
        for label, name in (("raw", raw), (OURS, OURS)):
            line[f"{label}_mb_per_s"] = [job["size"] / 1e6 / taken_s for taken_s in seconds[name]]
            line[f"{label}_cpu_s_per_gb"] = statistics.median(busy_s[name]) * 1e9 / job["size"]
        yield {**line, "of_raw": ratio(seconds[OURS], seconds[raw])}
