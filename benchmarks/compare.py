"""Before and after: run one benchmark, or all but ``gpu``, as it is here, on another checkout and on this one."""

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from benchmarks.frame import FACTS, ROOT, Line, Report, lines_of

ALL = ("stall", "levels", "restore", "scale", "rollback")
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
    names = [args.benchmark] if args.benchmark else ALL
    found: dict[str, list[Line]] = {"before": [], "after": []}
    with checkout(args.against) as before:
        for turn in range(args.turns):
            for when, tree in (("before", before), ("after", ROOT)):
                for name in names:
                    out = args.out / f"{when}-{turn}"
                    words = [sys.executable, "-m", "benchmarks", name, *args.options, "--out", str(out.resolve())]
                    print(f"{name} on {tree} ...", file=sys.stderr, flush=True)
                    how = {**os.environ, "LAZYSNAP_TREE": str(tree)}
                    subprocess.run(words, cwd=ROOT, env=how, stdout=subprocess.DEVNULL, check=True)
                    found[when] += lines_of((out / f"{name}.jsonl").read_text())
    old, new = map(figures, found.values())
    for key in {**old, **new}:
        line: Line = {"measure": "compared", "of": key[0], "figure": key[1], "before": old[key], "after": new[key]}
        if old[key] and new[key] and (base := statistics.median(old[key])):
            ratio = line["after/before"] = statistics.median(new[key]) / base
            is_worse = ratio * WORSE < 1 if key[1].endswith(MORE_IS_BETTER) else ratio > WORSE
            line["verdict"] = "WORSE" if is_worse else ""
        report.note(line)
    for when, lines in found.items():
        for line in lines:
            if line["measure"] == "left out":
                report.note({**line, "when": when})


@contextlib.contextmanager
def checkout(which: str) -> Iterator[Path]:
    """The tree of a directory or of a commit, which is gone afterwards."""
    if Path(which).is_dir():
        yield Path(which).resolve()
        return
    git = ["git", "-C", str(ROOT), "worktree"]
    with tempfile.TemporaryDirectory(prefix="lazysnap-before-") as directory:
        tree = Path(directory, "tree")
        subprocess.run([*git, "add", "--quiet", "--detach", str(tree), which], check=True)
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], check=True)


def figures(lines: list[Line]) -> defaultdict[tuple[str, str], list[float]]:
    """By what they are of, and their names: all values of all turns."""
    found = defaultdict(list)
    for line in lines:
        facts = {name: value for name, value in line.items() if isinstance(value, str) or name in FACTS}
        for name, value in line.items():
            if line["measure"] not in NO_FIGURES and name not in facts and value is not None:
                found[" ".join(map(str, facts.values())), name] += value if isinstance(value, list) else [value]
    return found
