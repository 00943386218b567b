"""Before and after: run one benchmark, as it is here, on another checkout and on this one; print both side by side."""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import levels, restore, rollback, scale, stall
from benchmarks.frame import ROOT, Line, lines_of, table

WAYS: dict[str, Any] = {"stall": stall, "levels": levels, "restore": restore, "scale": scale, "rollback": rollback}
WORSE = 1.1
"""All figures are such that less is better."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--against", required=True, help="a tag, branch or commit, or a directory")
    parser.add_argument("--turns", type=int, default=1, help="how often both are measured, one after the other")
    parser.add_argument("--out", type=Path, default=Path("runs/compare"))
    parser.add_argument("benchmark", choices=WAYS)
    parser.add_argument("options", nargs=argparse.REMAINDER, help="of that benchmark")


def run(args: argparse.Namespace) -> None:
    found: dict[str, list[list[Line]]] = {"before": [], "after": []}
    with checkout(args.against) as before:
        for turn in range(args.turns):
            for name, tree in (("before", before), ("after", ROOT)):
                found[name].append(measure(args, tree, args.out / f"{name}-{turn}"))
    old, new = (figures(WAYS[args.benchmark], turns) for turns in found.values())
    rows = []
    for key, after in new.items():
        before_it = old.get(key)
        base = statistics.median(before_it) if before_it else 0
        ratio = statistics.median(after) / base if base and after else None
        rows.append((*key, before_it, after, ratio, "WORSE" if ratio is not None and ratio > WORSE else ""))
    rows += [(*key, values, None, None, "") for key, values in old.items() if key not in new]
    title = f"{args.benchmark} {' '.join(args.options)}, before ({args.against}) and after"
    text = table(title, ("of", "figure", "before", "after", "after/before", ""), rows)
    text += "".join(f"\n{line}" for line in left_out(found))
    (args.out / f"{args.benchmark}.md").write_text(text)
    print(text)


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


def measure(args: argparse.Namespace, tree: Path, out: Path) -> list[Line]:
    """All lines of one run."""
    print(f"{args.benchmark} on {tree} ...", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "benchmarks", args.benchmark, *args.options, "--out", str(out)]
    environment = {**os.environ, "LAZYSNAP_TREE": str(tree)}
    subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=True)
    found = lines_of((out / f"{args.benchmark}.jsonl").read_text())
    own = tree / "benchmarks" / "scale.py"
    if args.benchmark == "scale" and tree != ROOT and own.exists() and not (tree / "benchmarks" / "frame.py").exists():
        # Its inside was another one: what its own program simulates has the same names. Ours counts real ranks.
        options = argparse.ArgumentParser()
        scale.add_arguments(options)
        ranks = ",".join(map(str, options.parse_known_args(args.options)[0].simulated))
        command = [sys.executable, str(own), "--counted", "", "--simulated", ranks, "--json"]
        environment |= {"PYTHONPATH": str(tree)}
        done = subprocess.run(command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        found = [line for line in found if line["measure"] != "left out"] + lines_of(done.stdout)
    return found


def figures(way: Any, turns: list[list[Line]]) -> dict[tuple[str, str], list[float]]:
    """By what they are of, and their names: all values of all turns."""
    found: dict[tuple[str, str], list[float]] = {}
    for line in (line for turn in turns for line in turn if line["measure"] not in ("machine", "left out")):
        of = " ".join(str(line[name]) for name in way.KEYS if name in line)
        for name, value in _flat({name: line[name] for name in way.COMPARED if name in line}):
            found.setdefault((of, name), []).extend(value)
    return found


def _flat(values: Line, prefix: str = "") -> Iterator[tuple[str, list[float]]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{name}.")
        elif isinstance(value, (int, float, list)) and value != []:
            yield f"{prefix}{name}", value if isinstance(value, list) else [value]


def left_out(found: dict[str, list[list[Line]]]) -> Iterator[str]:
    for name, turns in found.items():
        for line in (line for turn in turns for line in turn if line["measure"] == "left out"):
            yield f"{name}: left out: {json.dumps({k: v for k, v in line.items() if k != 'measure'})}"
