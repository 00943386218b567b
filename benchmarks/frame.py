"""What all benchmarks share: worker processes, lines of figures, and the report.

A line is a dictionary: ``measure`` names its table; texts and ``FACTS`` say what was measured; the rest are figures,
with their units in their names. Only workers import torch and lazysnap, the latter from the checkout that
``LAZYSNAP_TREE`` names: so this benchmark measures other checkouts, too (``compare``).
"""

import contextlib
import json
import math
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TREE = Path(os.environ.get("LAZYSNAP_TREE", ROOT)).resolve()
MARKER = "LAZYSNAP_BENCHMARK_RUN"
"""In the environment of every process of one measurement, the keeper included."""
DEADLINE_S = 600.0
WORKER_S = 3600.0
FACTS = ("ranks", "size_gb")
SIZES = {
    # Layers, heads, width, context, vocabulary.
    "tiny": (2, 2, 64, 64, 256),
    "small": (4, 8, 256, 128, 1024),
    "30m": (8, 8, 512, 128, 8_192),
    # 98 million parameters: with AdamW's two moments 1.17 GB of state.
    "100m": (12, 12, 768, 128, 16_384),
}
Line = dict[str, Any]


# ------------------------------------------------------------------------------------------------ worker processes


def command(function: str, job: Line) -> list[str]:
    """Of a worker that calls ``function``, a name such as ``levels.rates``."""
    return [sys.executable, str(ROOT / "benchmarks" / "worker.py"), function, json.dumps(job)]


def environment(**more: str) -> dict[str, str]:
    paths = [str(TREE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"LAZYSNAP_TREE": str(TREE), "PYTHONPATH": os.pathsep.join(paths), **more}


def start(function: str, job: Line, **more: str) -> "subprocess.Popen[str]":
    """A worker whose lines are read while it runs. It dies of its broken pipe if this process dies."""
    words = command(function, {**job, "begun": time.monotonic()})
    streams: Line = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(words, env={**os.environ, **environment(**more)}, **streams)


def finish(process: "subprocess.Popen[str]", timeout_s: float, *, may_die: bool = False) -> list[Line]:
    """All lines of a worker, which may be told to kill itself. Raises: RuntimeError, with its last line."""
    try:
        out, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"no result within {timeout_s:.0f} s") from None
    finally:
        process.kill()
        process.wait()
    if process.returncode and not (may_die and process.returncode == -signal.SIGKILL):
        raise RuntimeError(last_line(errors) or f"exit code {process.returncode}")
    return lines_of(out)


def call(function: str, job: Line, **more: str) -> list[Line]:
    return finish(start(function, job, **more), WORKER_S)


def call_ranks(function: str, job: Line, ranks: int, **more: str) -> list[list[Line]]:
    """What each rank of a job says, each a process that torch finds the others from."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        more |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(found.getsockname()[1])}
    started = []
    for rank in map(str, range(ranks)):
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        started.append(start(function, job, **more, **(place if ranks > 1 else {})))
    try:
        return [finish(process, DEADLINE_S, may_die=True) for process in started]
    finally:
        for process in started:
            process.kill()


def tell(job: Line, event: str, **facts: Any) -> None:
    """From a worker: what happened, how many seconds after the start of its process."""
    print(json.dumps({"event": event, "at": time.monotonic() - job["begun"], **facts}), flush=True)


def lines_of(text: str) -> list[Line]:
    """What workers said, without what others print; a line that a kill cut off is left out."""
    found = []
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            found += [json.loads(line)] if line.startswith('{"') else []
    return found


def last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


def processes(run: str) -> list[Any]:
    """All processes with this run's marker in their environment: workers, and the keeper."""
    import psutil

    found = psutil.process_iter(["environ", "cpu_times"])
    return [process for process in found if (process.info["environ"] or {}).get(MARKER) == run]


def cpu_s(run: str) -> float:
    """Seconds of processor time of these processes, user and system."""
    return sum(sum(process.info["cpu_times"][:2]) for process in processes(run))


# ------------------------------------------------------------------------------------------------ the report


def cell(value: Any) -> str:
    """Three digits of a number; the median and the range of several."""
    if isinstance(value, list) and value:
        low, middle, high = (cell(float(one)) for one in (min(value), statistics.median(value), max(value)))
        return middle if low == high else f"{middle} ({low} to {high})"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 99.5 else f"{value:.3g}"
    return "-" if value in (None, []) else f"{value:,}" if type(value) is int else str(value)


def table(title: str, lines: list[Line]) -> str:
    """In Markdown, a row for each line; a wide one is turned on its side."""
    names = list(dict.fromkeys(name for line in lines for name in line if name != "measure"))
    rows = [[name.replace("_", " ") for name in names], *([cell(line.get(name)) for name in names] for line in lines)]
    rows = [list(row) for row in zip(*rows, strict=True)] if len(names) > 9 else rows
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    return "\n".join([f"{title}:", "", *(f"| {' | '.join(map(str.ljust, row, widths))} |" for row in rows), ""])


class Report:
    """Lines as they come, in ``<out>/<name>.jsonl``; tables at the end, in ``<name>.txt`` and on standard output."""

    def __init__(self, out: Path, name: str) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self.lines: list[Line] = []
        self._path = out / f"{name}.jsonl"
        self._path.write_text("")
        self.note({"measure": "machine", **machine(), "options": " ".join(sys.argv[1:])})

    def note(self, line: Line) -> None:
        """At once, so that what is interrupted loses nothing."""
        self.lines.append(line)
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def take(self, what: str, work: Any) -> None:
        """Note the lines that ``work`` gives. What cannot be measured here is named, and the rest is measured."""
        print(f"{what} ...", file=sys.stderr, flush=True)
        try:
            for line in work():
                self.note(line)
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            self.left_out(what, error)

    def left_out(self, what: str, reason: object) -> None:
        print(f"{what} left out: {reason}", file=sys.stderr, flush=True)
        self.note({"measure": "left out", "what": what, "reason": str(reason)})

    def of(self, measure: str) -> list[Line]:
        return [line for line in self.lines if line["measure"] == measure]

    def find(self, **facts: Any) -> dict[str, Any]:
        """The line with these facts, medians in it; what is missing is not a number."""
        line = next((line for line in self.lines if facts.items() <= line.items()), {})
        found = {
            name: statistics.median(value or [math.nan]) if isinstance(value, list) else value
            for name, value in line.items()
        }
        return defaultdict(lambda: math.nan, {name: value for name, value in found.items() if value is not None})

    def target(self, text: str, form: str, asked: float, reached: float) -> None:
        """``form`` begins with ``<=`` or ``>=``; what was not measured is not a number."""
        is_met = reached <= asked if form.startswith("<=") else reached >= asked
        verdict = "not measured" if math.isnan(reached + asked) else "met" if is_met else "NOT MET"
        said = {"reached": form.format(cell(float(reached)))[3:], "asked": form.format(cell(float(asked)))}
        self.note({"measure": "target", "target": text, **said, "verdict": verdict})

    def show(self) -> None:
        text = "\n".join(
            table(measure, self.of(measure)) for measure in dict.fromkeys(line["measure"] for line in self.lines)
        )
        self._path.with_suffix(".txt").write_text(text)
        print(text)


def machine() -> Line:
    """What figures depend on."""
    words = ["git", "-C", str(TREE), "describe", "--always", "--dirty"]
    commit = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    facts: Line = {"commit": commit, "date": time.strftime("%F"), "cores": os.cpu_count()}
    with contextlib.suppress(metadata.PackageNotFoundError):
        facts["torch"] = metadata.version("torch")
    return {
        **facts,
        "load_average": os.getloadavg()[0],
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
