"""Worker processes: ``python -m benchmarks.workers MODULE.FUNCTION JOB`` prints what a function yields, as JSON lines.

Only workers import torch and lazysnap: what one of them cannot do here is left out, and the rest is measured.
"""

import contextlib
import importlib
import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
"""This benchmark."""
ROOT = Path(__file__).parent.parent
"""Where workers find it, and the package that is measured: another place than ``HERE.parent`` in a comparison."""
MARKER = "LAZYSNAP_BENCHMARK_RUN"
"""In the environment of every process of one measurement, the keeper included."""
DEADLINE_S = 600.0
WORKER_S = 3600.0
Line = dict[str, Any]


def command(function: str, job: Line) -> list[str]:
    """Of a worker that calls ``function``, a name such as ``levels.rates``; to be run in ``ROOT``."""
    return [sys.executable, "-m", "benchmarks.workers", function, json.dumps({**job, "begun": time.monotonic()})]


def start(function: str, job: Line, **environment: str) -> "subprocess.Popen[str]":
    """A worker whose lines are read while it runs. It dies of its broken pipe if this process dies."""
    streams: Line = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command(function, job), cwd=ROOT, env={**os.environ, **environment}, **streams)


def finish(process: "subprocess.Popen[str]", timeout_s: float) -> list[Line]:
    """All lines of a worker. Raises: RuntimeError, with the last line of its error."""
    try:
        out, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no result within {timeout_s:.0f} s") from None
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        raise RuntimeError(last_line(errors) or f"exit code {process.returncode}")
    return lines_of(out)


def call(function: str, job: Line, **environment: str) -> list[Line]:
    """All lines of a worker, with a directory of its own on the disk, for what it measures if its job names no place,
    and for what torch leaves behind.
    """
    with tempfile.TemporaryDirectory(prefix="lazysnap-benchmark-", ignore_cleanup_errors=True) as directory:
        place = {"level": "local", "url": f"{directory}/level", "options": None, "directory": directory}
        return finish(start(function, {**place, **job}, TMPDIR=directory, **environment), WORKER_S)


def call_ranks(function: str, job: Line, ranks: int, **environment: str) -> list[list[Line]]:
    """The lines of each rank of a job. A rank is a process; torch connects them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    started = []
    for rank in map(str, range(ranks)):
        world = {}
        if ranks > 1:
            world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
            world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        started.append(start(function, job, **environment, **world))
    try:
        return [finish(process, DEADLINE_S) for process in started]
    finally:
        for process in started:
            process.kill()


def call_each_rank(function: str, job: Line, ranks: int, **environment: str) -> list[Line]:
    """As ``call_ranks``, of ranks that print one line each."""
    answers = []
    for [answer] in call_ranks(function, job, ranks, **environment):
        answers.append(answer)
    return answers


def columns(lines: list[Line]) -> Line:
    """One line for several that have the same names: lists of their values."""
    return {name: [line[name] for line in lines] for name in lines[0]}


def by_event(lines: list[Line]) -> dict[str, Line]:
    """The lines of a worker that used ``tell``, by their events."""
    return {line["event"]: line for line in lines}


def tell(job: Line, event: str, **facts: Any) -> None:
    """From a worker: what happened, how many seconds after the start of its process."""
    print(json.dumps({"event": event, "at": time.monotonic() - job["begun"], **facts}), flush=True)


def lines_of(text: str) -> list[Line]:
    """The lines of workers, without what others print; a line that a kill cut off is left out."""
    lines = []
    for line in text.splitlines():
        if line.startswith('{"'):
            with contextlib.suppress(ValueError):
                lines.append(json.loads(line))
    return lines


def last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


def processes(run: str) -> list[Any]:
    """All processes with this run's marker in their environment: workers, and the keeper."""
    import psutil

    marked = []
    for process in psutil.process_iter(["environ", "cpu_times"]):
        environment = process.info["environ"] or {}
        if environment.get(MARKER) == run:
            marked.append(process)
    return marked


def cpu_s(run: str) -> float:
    """Seconds of processor time of these processes, user and system."""
    return sum(sum(process.info["cpu_times"][:2]) for process in processes(run))


if __name__ == "__main__":
    # What the package tells its user is not measured, and would be taken for the reason of a failure.
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    module, name = sys.argv[1].split(".")
    for line in getattr(importlib.import_module(f"benchmarks.{module}"), name)(json.loads(sys.argv[2])) or ():
        print(json.dumps(line), flush=True)
