"""What all benchmarks share: worker processes, lines of JSON, repetitions, targets, and the one table writer.

Neither torch nor lazysnap is imported here: only worker processes import the package, from the tree that
``LAZYSNAP_TREE`` names, so that this benchmark measures another checkout as well (``python -m benchmarks compare``).
"""

import argparse
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
TREE = Path(os.environ.get("LAZYSNAP_TREE", ROOT)).resolve()
MARKER = "LAZYSNAP_BENCHMARK_RUN"
"""In the environment of every process of one measurement, the keeper included."""
DEADLINE_S = 600.0
OURS = "lazysnap"
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


def command(function: str, settings: Line) -> list[str]:
    """Of a worker that calls ``function``, a name such as ``levels.rates``."""
    return [sys.executable, str(ROOT / "benchmarks" / "worker.py"), function, json.dumps(settings)]


def environment(**more: str) -> dict[str, str]:
    """Of a worker."""
    paths = [str(TREE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "LAZYSNAP_TREE": str(TREE), "PYTHONPATH": os.pathsep.join(paths), **more}


def start(function: str, settings: Line, **more: str) -> "subprocess.Popen[str]":
    """A worker whose lines are read while it runs. It dies of its broken pipe if this process dies."""
    streams: Line = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command(function, settings), env=environment(**more), **streams)


def call(function: str, settings: Line, timeout_s: float = DEADLINE_S, **more: str) -> list[Line]:
    """All lines of a worker. Raises: RuntimeError, with the last line of what it said; TimeoutError."""
    process = start(function, settings, **more)
    try:
        out, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"no result within {timeout_s:.0f} s") from None
    finally:
        process.kill()
        process.wait()
    if process.returncode:
        raise RuntimeError(last_line(errors) or f"exit code {process.returncode}")
    return lines_of(out)


def say(line: Line) -> None:
    """From a worker."""
    print(json.dumps(line), flush=True)


def lines_of(text: str) -> list[Line]:
    """What workers said, without what others print; a line that a kill cut off is left out."""
    found = []
    for line in text.splitlines():
        try:
            found += [json.loads(line)] if line.startswith('{"') else []
        except ValueError:
            continue
    return found


def last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


def processes(run: str) -> list[int]:
    """All processes with this run's marker in their environment: workers, and the keeper."""
    wanted, found = f"{MARKER}={run}".encode(), []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            if wanted in Path(f"/proc/{entry}/environ").read_bytes().split(b"\0"):
                found.append(int(entry))
        except OSError:  # gone meanwhile, or of another user
            continue
    return found


def cpu_s(pids: Iterable[int]) -> float:
    """Seconds of processor time of these processes, user and system."""
    ticks = 0
    for pid in pids:
        try:
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13]))
        except OSError:  # gone meanwhile
            continue
    return ticks / os.sysconf("SC_CLK_TCK")


# ------------------------------------------------------------------------------------------------ the report


def cell(value: Any) -> str:
    """Three digits of a number; the median and the range of several."""
    if isinstance(value, list) and value:
        low, middle, high = (cell(float(one)) for one in (min(value), statistics.median(value), max(value)))
        return middle if low == high else f"{middle} ({low} to {high})"
    if isinstance(value, float):
        size = abs(value)
        return f"{value:,.0f}" if size >= 100 else f"{value:.1f}" if size >= 10 else f"{value:.3g}"
    return "-" if value in (None, []) else f"{value:,}" if isinstance(value, int) else str(value)


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """The one table writer: Markdown, numbers to the right. Empty without rows."""
    rows = list(rows)
    if not rows:
        return ""
    texts = [[cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(columns, *texts, strict=True)]
    is_text = [all(isinstance(value, str) for value in column) for column in zip(*rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        shown = [(str.ljust if text else str.rjust)(*one) for *one, text in zip(cells, widths, is_text, strict=True)]
        return f"| {' | '.join(shown)} |"

    rule = [f"{'-' * (width - 1)}{'-' if text else ':'}" for width, text in zip(widths, is_text, strict=True)]
    return "\n".join([f"{title}:", "", line(columns), line(rule), *map(line, texts), ""])


class Targets:
    """Each met, not met, or not measured."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, str, str]] = []

    def check(self, text: str, form: str, asked: float, reached: float) -> None:
        """``form`` begins with ``<=`` or ``>=``; what is missing is not a number."""
        is_met = reached <= asked if form.startswith("<=") else reached >= asked
        verdict = "not measured" if math.isnan(reached + asked) else "met" if is_met else "NOT MET"
        self.rows.append((text, form.format(cell(float(reached)))[3:], form.format(cell(float(asked))), verdict))

    def table(self) -> str:
        return table("Targets", ("target", "reached", "asked", ""), self.rows)


class Figures(dict[str, Any]):
    """A line; what it has not is not a number."""

    def __missing__(self, name: str) -> float:
        return math.nan


def by_name(lines: Iterable[Line], *keys: str) -> dict[Any, Figures]:
    """Lines by one key, or several; without one: a line that has nothing."""
    found: dict[Any, Figures] = defaultdict(Figures)
    for line in lines:
        values = {name: math.nan if value is None else value for name, value in line.items()}
        found[line[keys[0]] if len(keys) == 1 else tuple(line[key] for key in keys)] = Figures(values)
    return found


class Report:
    """Lines as they come, in ``<out>/<what>.jsonl``; tables at the end, in ``<what>.txt`` and on standard output."""

    def __init__(self, what: str, args: argparse.Namespace) -> None:
        args.out.mkdir(parents=True, exist_ok=True)
        self.lines: list[Line] = []
        self._path, self._is_json = args.out / f"{what}.jsonl", args.json
        self._path.write_text("")
        settings = {name: value for name, value in vars(args).items() if isinstance(value, (int, float, str, list))}
        self.note({"measure": "machine", **settings, **machine()})

    def note(self, line: Line) -> None:
        """At once, so that what is interrupted loses nothing."""
        self.lines.append(line)
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if self._is_json:
            say(line)

    @staticmethod
    def progress(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def left_out(self, reason: object, **which: Any) -> None:
        """What cannot be measured here is named, and the rest is measured."""
        self.progress(f"{' '.join(map(str, which.values()))} left out: {reason}")
        self.note({"measure": "left out", "which": which, "reason": str(reason)})

    def of(self, measure: str) -> Iterator[Line]:
        return (line for line in self.lines if line["measure"] == measure)

    def show(self, *tables: str) -> None:
        text = "\n".join(filter(None, tables))
        self._path.with_suffix(".txt").write_text(text)
        if not self._is_json:
            print(text)


def machine() -> Line:
    """What figures depend on."""
    commit = subprocess.run(
        ["git", "-C", str(TREE), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "none"
    facts: Line = {
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "kernel": platform.release(),
        "torch": torch,
    }
    return {"commit": commit.stdout.strip(), "date": time.strftime("%F"), **facts, "python": platform.python_version()}
