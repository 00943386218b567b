"""How long from SIGKILL to the first new step? With `lazysnap run`, each start cold, or from a warm parent."""

import argparse
import contextlib
import functools
import math
import os
import re
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import Report
from benchmarks.workers import DEADLINE_S, MARKER, ROOT, Line, processes


@dataclass(frozen=True)
class Program:
    """A training: the words after ``python``, in which ``{directory}`` is replaced."""

    words: tuple[str, ...]
    ranks: int = 1


def example(name: str, *words: str, ranks: int = 1) -> Program:
    return Program((str(ROOT / "examples" / name), "--max-steps", "1000000", *words), ranks)


TRAININGS = {
    "lightning": example("lightning_gpt.py", "--dirpath", "{directory}/level"),
    "transformers": example("hf_trainer.py", "--output-dir", "{directory}/level"),
    "ddp-2": example("ddp_loop.py", "--dirpath", "{directory}/level", ranks=2),
    "ddp-4": example("ddp_loop.py", "--dirpath", "{directory}/level", ranks=4),
}
STEPS = 5
"""New steps between a restart and the next kill."""
BUSY = 2
"""Processes per core that do nothing but compute."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trainings", nargs="+", choices=TRAININGS, default=list(TRAININGS))
    parser.add_argument("--loads", nargs="+", choices=("idle", "busy"), default=["idle", "busy"])
    parser.add_argument("--starts", nargs="+", choices=("cold", "warm"), default=["cold", "warm"])
    parser.add_argument("--kills", type=int, default=20)


def run(args: argparse.Namespace, report: Report) -> None:
    for training in args.trainings:
        for load in args.loads:
            for start in args.starts:
                job = {"training": training, "load": load, "start": start}
                report.take(" ".join(job.values()), functools.partial(measured, job, args.kills))
    for line in report.of("restart"):
        if line["start"] == "warm" and line["load"] == "idle":
            text = f"{line['training']}, warm: SIGKILL to first new step"
            report.target(f"{text}, median", "<= {} s", 2.0, statistics.median(line["restart_s"] or [math.nan]))
            report.target(f"{text}, longest", "<= {} s", 3.0, max(line["restart_s"]))


def measured(job: Line, kills: int) -> Iterator[Line]:
    with busy(job["load"]):
        restart_s = list(restarts(TRAININGS[job["training"]], job["start"], kills))
    yield {"measure": "restart", **job, "restart_s": restart_s}


def restarts(program: Program, start: str, kills: int) -> Iterator[float]:
    """Yield the seconds from each kill to the first new step; ``start`` is ``cold`` or ``warm``."""
    with (
        tempfile.TemporaryDirectory(prefix="lazysnap-benchmark-", ignore_cleanup_errors=True) as directory,
        Run(program, start, Path(directory)) as training,
    ):
        if start == "warm":
            training.restart()  # not counted: it may wait for the imports of the parent
        for _ in range(kills):
            yield training.restart()


@contextlib.contextmanager
def busy(load: str) -> Iterator[None]:
    """Processes that keep every core busy, if ``load`` says so."""
    started = []
    if load == "busy":
        for _ in range(BUSY * (os.cpu_count() or 1)):
            started.append(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


class Run:
    """A training under `lazysnap run`, which starts it again after each kill."""

    def __init__(self, program: Program, start: str, directory: Path) -> None:
        ranks = program.ranks
        self._program = program
        self._directory = directory
        self._mark = f"restart-{os.getpid()}-{time.monotonic_ns()}"
        self._words = [word.format(directory=directory) for word in program.words]
        tools = Path(sys.executable).parent
        launcher = ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "1000000"]
        self._command = [str(tools / "lazysnap"), "run", "--max-restarts", "1000000", "--"]
        if start == "cold":
            self._command += ["sh", "-c", 'exec "$@"', "sh"]  # what a shell starts is started cold
        if ranks > 1:
            self._command += [str(tools / "torchrun"), *launcher]
        else:
            self._command.append(sys.executable)
        self._command += self._words
        self._environ = dict(os.environ)
        self._environ.pop("PYTHONDONTWRITEBYTECODE", None)
        self._environ |= {MARKER: self._mark, "LAZYSNAP_JOB_ID": self._mark}
        self._environ |= {"LAZYSNAP_RUNTIME_DIR": f"{directory}/runtime", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        self._environ |= {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // ranks)), "TMPDIR": str(directory)}
        self._environ |= {"PYTHONPATH": str(ROOT)}

    def __enter__(self) -> "Run":
        self._log = (self._directory / "log").open("w")
        how: dict[str, Any] = {"stdout": self._log, "stderr": subprocess.STDOUT, "env": self._environ}
        self._process = subprocess.Popen(self._command, cwd=self._directory, **how)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        for process in processes(self._mark):  # the keeper, too
            process.kill()
        self._process.wait()
        self._log.close()

    def restart(self) -> float:
        """Let it train a little, kill one process, and wait for the first new step; the seconds from the kill on."""
        step = self._after(self._step() + STEPS)
        victim = self._victim()
        began = time.monotonic()
        os.kill(victim, signal.SIGKILL)
        # What ended between the reading and the kill is no new step.
        last = max(step, self._step())
        self._after(last + 1 + (self._program.ranks > 1))  # the other ranks may have been through with one more
        return time.monotonic() - began

    def _after(self, step: int) -> int:
        """Wait until that step is over; the newest one."""
        deadline = time.monotonic() + DEADLINE_S
        newest = self._step()
        while newest < step:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no step {step} after {newest}: {' | '.join(self._text().splitlines()[-8:])}")
            time.sleep(0.002)
            newest = self._step()
        return newest

    def _step(self) -> int:
        """The newest step that the engine told the supervisor; 0 before the first."""
        for path in self._directory.glob("runtime/*/steps"):
            with contextlib.suppress(OSError, struct.error):
                return int(struct.unpack("q", path.read_bytes())[0])
        return 0

    def _victim(self) -> int:
        """The training process, or that of the last rank."""
        if self._program.ranks > 1:
            pids = re.findall(rf"^rank {self._program.ranks - 1}, process (\d+): ", self._text(), flags=re.M)
            return int(pids[-1])
        for process in processes(self._mark):
            if process.cmdline()[1:3] == self._words[:2] and process.name().startswith("python"):
                return int(process.pid)
        raise RuntimeError("the training does not run")

    def _text(self) -> str:
        return (self._directory / "log").read_text()
