"""Before and after: run one benchmark, or all but ``gpu``, as it is here, on another checkout and on this one."""

import argparse
import contextlib
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from benchmarks.report import FACTS, Report
from benchmarks.workers import HERE, ROOT, Line, lines_of

ALL = ("stall", "levels", "restore", "scale")
WORSE = 1.1
MORE_IS_BETTER = ("_per_s", "of_raw")
"""How the names of such figures end."""
NO_FIGURES = ("machine", "left out", "target")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--against", required=True, help="a tag, branch or commit, or a directory")
    parser.add_argument("--turns", type=int, default=1, help="how often both are measured, one after the other")
    parser.add_argument("benchmark", nargs="?", choices=ALL, help="default: all")
    parser.add_argument("options", nargs=argparse.REMAINDER, help="of that benchmark")


def run(args: argparse.Namespace, report: Report) -> None:
    lines: dict[str, list[Line]] = {"before": [], "after": []}
    names = ALL
    if args.benchmark:
        names = (args.benchmark,)
    with tree(args.against) as before:
        for turn in range(args.turns):
            for when, directory in (("before", before), ("after", ROOT)):
                for name in names:
                    out = args.out.resolve() / f"{when}-{turn}"
                    words = [sys.executable, "-m", "benchmarks", name, *args.options, "--out", str(out)]
                    print(f"{name} {when} ...", file=sys.stderr, flush=True)
                    subprocess.run(words, cwd=directory, stdout=subprocess.DEVNULL, check=True)
                    lines[when] += lines_of((out / f"{name}.jsonl").read_text())
    old = figures(lines["before"])
    new = figures(lines["after"])
    for key in {**old, **new}:
        subject, figure = key
        report.note({"measure": "compared", "of": subject, "figure": figure, **pair(figure, old[key], new[key])})
    for when in lines:
        for line in lines[when]:
            if line["measure"] == "left out":
                report.note({**line, "when": when})


@contextlib.contextmanager
def tree(which: str) -> Iterator[Path]:
    """A directory in which this benchmark runs beside the package of a commit, or of a directory."""
    with tempfile.TemporaryDirectory(prefix="lazysnap-before-") as directory:
        made = Path(directory)
        (made / "benchmarks").symlink_to(HERE)
        if Path(which).is_dir():
            (made / "lazysnap").symlink_to(Path(which, "lazysnap").resolve())
        else:
            archive = made / "package.tar"
            words = ["git", "-C", str(HERE.parent), "archive", "--output", str(archive), which, "lazysnap"]
            subprocess.run(words, check=True)
            shutil.unpack_archive(archive, made)
        yield made


def figures(lines: list[Line]) -> defaultdict[tuple[str, str], list[float]]:
    """By what they are of, and their names: all values of all turns."""
    values_of = defaultdict(list)
    for line in lines:
        if line["measure"] in NO_FIGURES:
            continue
        facts = []
        values = {}
        for name, value in line.items():
            if isinstance(value, str) or name in FACTS:
                facts.append(str(value))
            elif isinstance(value, list):
                values[name] = value
            elif value is not None:
                values[name] = [value]
        for name in values:
            values_of[" ".join(facts), name] += values[name]
    return values_of


def pair(name: str, old: list[float], new: list[float]) -> Line:
    """Both, their ratio if they have one, and whether that is worse."""
    both: Line = {"before": old, "after": new}
    if not old or not new:
        return both
    base = statistics.median(old)
    if base > 0:  # time lost may be less than nothing
        ratio = statistics.median(new) / base
        is_worse = ratio > WORSE
        if name.endswith(MORE_IS_BETTER):
            is_worse = ratio * WORSE < 1
        both["after/before"] = ratio
        both["verdict"] = ""
        if is_worse:
            both["verdict"] = "WORSE"
    return both
