"""How long from SIGKILL to the first new step? With `lazysnap run`, each start cold, or from a warm parent."""

import argparse
import contextlib
import os
import re
import signal
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
    prints_steps: bool = False
    """True if it prints ``step 12`` after each step; it may have no engine then."""
    deadline_s: float = DEADLINE_S


def example(name: str, *words: str, ranks: int = 1) -> Program:
    return Program((str(ROOT / "examples" / name), "--max-steps", "1000000", *words), ranks)


TRAININGS = {
    "lightning": example("lightning_gpt.py", "--size", "tiny", "--dirpath", "{directory}/level"),
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
                report.take(" ".join(job.values()), lambda job=job: [measured(job, args.kills)])
    for line in [one for one in report.of("restart") if one["start"] == "warm" and one["load"] == "idle"]:
        for which, limit_s, reached_s in (
            (
                "median",
                2.0,
                report.find(measure="restart", **{n: line[n] for n in ("training", "load", "start")})["restart_s"],
            ),
            ("longest", 3.0, max(line["restart_s"])),
        ):
            report.target(
                f"{line['training']}, warm: SIGKILL to first new step, {which}", "<= {} s", limit_s, reached_s
            )


def measured(job: Line, kills: int) -> Line:
    with busy(job["load"]):
        taken = list(restarts(TRAININGS[job["training"]], job["start"], kills))
    return {"measure": "restart", **job, "restart_s": taken}


def restarts(program: Program, start: str, kills: int) -> Iterator[float]:
    """Yield the seconds from each kill to the first new step; ``start`` is ``cold`` or ``warm``."""
    with (
        tempfile.TemporaryDirectory(prefix="lazysnap-benchmark-", ignore_cleanup_errors=True) as own,
        Run(program, start, Path(own)) as training,
    ):
        if start == "warm":
            training.restart()  # not counted: it may wait for the imports of the parent
        for _ in range(kills):
            yield training.restart()


@contextlib.contextmanager
def busy(load: str) -> Iterator[None]:
    """Processes that keep every core busy, if ``load`` says so."""
    count = BUSY * (os.cpu_count() or 1) if load == "busy" else 0
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


class Run:
    """A training under `lazysnap run`, which starts it again after each kill."""

    def __init__(self, program: Program, start: str, directory: Path) -> None:
        ranks, self._program, self._directory = program.ranks, program, directory
        self._mark = f"restart-{os.getpid()}-{time.monotonic_ns()}"
        self._words = [word.format(directory=directory) for word in program.words]
        tools = Path(sys.executable).parent
        launcher = ["--standalone", "--nproc-per-node", str(ranks), "--max-restarts", "1000000"]
        command = [str(tools / "torchrun"), *launcher] if ranks > 1 else [sys.executable]
        # What a shell starts is started cold.
        cold = ["sh", "-c", 'exec "$@"', "sh"] if start == "cold" else []
        self._command = [str(tools / "lazysnap"), "run", "--max-restarts", "1000000", "--same-exit-within", "0", "--"]
        self._command += [*cold, *command, *self._words]
        self._environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
        self._environ |= {MARKER: self._mark, "LAZYSNAP_JOB_ID": self._mark}
        self._environ |= {"XDG_RUNTIME_DIR": str(directory), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
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
        deadline = time.monotonic() + self._program.deadline_s
        while (newest := self._step()) < step:
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"no step {step} after {newest}: {' | '.join(self._text().splitlines()[-8:])}")
            time.sleep(0.002)
        return newest

    def _step(self) -> int:
        """The newest step that the engine told the supervisor, or that was printed; 0 before the first."""
        if self._program.prints_steps:
            return int(([0, *re.findall(r"^step (\d+)$", self._text(), flags=re.M)])[-1])
        for path in self._directory.glob("lazysnap-warm/*/steps"):
            with contextlib.suppress(OSError, struct.error):
                return int(struct.unpack("q", path.read_bytes())[0])
        return 0

    def _victim(self) -> int:
        """The training process, or that of the last rank."""
        if self._program.ranks > 1:
            said = re.findall(rf"^rank {self._program.ranks - 1}, process (\d+): ", self._text(), flags=re.M)
            return int(said[-1])
        programs = [one for one in processes(self._mark) if one.cmdline()[1:3] == self._words[:2]]
        return int(next(one.pid for one in programs if one.name().startswith("python")))

    def _text(self) -> str:
        return (self._directory / "log").read_text()
