"""The report: lines of figures as they come, one table for each kind of them, and targets.

A line is a dictionary: ``measure`` names its table; texts and ``FACTS`` say what was measured; the rest are figures,
with their units in their names.
"""

import contextlib
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.workers import ROOT, Line

FACTS = ("ranks", "size_gb")
WIDEST = 9
"""Columns; a wider table is turned on its side."""


def cell(value: Any) -> str:
    """Three digits of a number; the median and the range of several."""
    if isinstance(value, list) and value:
        low = cell(float(min(value)))
        middle = cell(float(statistics.median(value)))
        high = cell(float(max(value)))
        if low == high:
            return middle
        return f"{middle} ({low} to {high})"
    if isinstance(value, float):
        if abs(value) >= 99.5:
            return f"{value:,.0f}"
        return f"{value:.3g}"
    if value in (None, []):
        return "-"
    if type(value) is int:
        return f"{value:,}"
    return str(value)


def table(title: str, lines: list[Line]) -> str:
    """In Markdown, a row for each line."""
    names: dict[str, None] = {}
    for line in lines:
        names |= dict.fromkeys(line)
    names.pop("measure")
    rows = [[name.replace("_", " ") for name in names]]
    for line in lines:
        rows.append([cell(line.get(name)) for name in names])
    if len(names) > WIDEST:
        rows = list(map(list, zip(*rows, strict=True)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rows.insert(1, ["-" * width for width in widths])
    text = f"{title}:\n\n"
    for row in rows:
        text += f"| {' | '.join(map(str.ljust, row, widths))} |\n"
    return text


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

    def take(self, name: str, work: Callable[[], Iterable[Line]]) -> None:
        """Note the lines that ``work`` gives. What cannot be measured here is named, and the rest is measured."""
        print(f"{name} ...", file=sys.stderr, flush=True)
        try:
            for line in work():
                self.note(line)
        except (RuntimeError, OSError, subprocess.SubprocessError) as error:
            self.left_out(name, error)

    def left_out(self, name: str, reason: object) -> None:
        print(f"{name} left out: {reason}", file=sys.stderr, flush=True)
        self.note({"measure": "left out", "what": name, "reason": str(reason)})

    def of(self, measure: str) -> list[Line]:
        return [line for line in self.lines if line["measure"] == measure]

    def find(self, **facts: Any) -> dict[str, Any]:
        """The line with these facts, medians in it; what is missing is not a number."""
        medians: dict[str, Any] = defaultdict(_not_measured)
        for line in self.lines:
            if facts.items() <= line.items():
                for name, value in line.items():
                    if isinstance(value, list):
                        medians[name] = statistics.median(value or [math.nan])
                    elif value is not None:
                        medians[name] = value
                break
        return medians

    def target(self, text: str, form: str, limit: float, reached: float) -> None:
        """``form`` begins with ``<=`` or ``>=``; what was not measured is not a number."""
        is_met = reached >= limit
        if form.startswith("<="):
            is_met = reached <= limit
        verdict = "NOT MET"
        if math.isnan(reached + limit):
            verdict = "not measured"
        elif is_met:
            verdict = "met"
        self.note(
            {
                "measure": "target",
                "target": text,
                "reached": form.format(cell(float(reached)))[3:],
                "asked": form.format(cell(float(limit))),
                "verdict": verdict,
            }
        )

    def show(self) -> None:
        measures = dict.fromkeys(line["measure"] for line in self.lines)
        text = "\n".join(table(measure, self.of(measure)) for measure in measures)
        self._path.with_suffix(".txt").write_text(text)
        print(text)


def _not_measured() -> float:
    return math.nan


def machine() -> Line:
    """What figures depend on."""
    words = ["git", "-C", str(ROOT / "lazysnap"), "describe", "--always", "--dirty"]
    commit = subprocess.run(words, capture_output=True, text=True, check=False).stdout.strip()
    facts: Line = {"commit": commit or "-", "date": time.strftime("%F"), "cores": os.cpu_count()}
    with contextlib.suppress(metadata.PackageNotFoundError):
        facts["torch"] = metadata.version("torch")
    facts |= {"load_average": os.getloadavg()[0], "kernel": platform.release()}
    return {**facts, "python": platform.python_version()}
