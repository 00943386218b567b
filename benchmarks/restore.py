"""How long until a training goes on, and what of it is the loading?

    python benchmarks/restore.py
    python benchmarks/restore.py --size 30m --levels memory,local --ranks 1

Seconds from the start of a process to the end of its first step, split into phases, from memory, a local disk, NFS and
S3, beside stock Lightning and torch.distributed.checkpoint that load the same state from the same place. NFS and S3
bring their own servers; what cannot be started here is left out, with the reason. Prints a JSON line per measurement,
tables and targets; writes both to `--out`. How it measures: docs/benchmarks.md.
"""

import argparse
import json
import os
import platform
import signal
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from places import LEVELS, NotHere, opened
from ratios import Lines, spread, table
from restarts import METHODS, PHASES, SIZES
from rich.console import Console

console = Console(stderr=True)
STATE_BYTES = {"tiny": 2 << 20, "30m": 400 << 20, "100m": 1200 << 20}
"""About; a guest gets memory for that."""
FROM_MEMORY = 5.0
"""Times faster than stock Lightning from a local disk, in the load phase."""
FROM_DISK = 1.0
"""Times as fast as DCP from a local disk, in the load phase."""


def show(to: Console, lines: Lines) -> None:
    """Tables and targets."""
    made = table(
        "from the start of a process to the end of its first step, in seconds: median (range)",
        ("level", "ranks", "method", "state MB", *PHASES, "total"),
        3,
    )
    for line in lines:
        if line["measure"] == "restore":
            facts = (line["level"], str(line["ranks"]), line["method"], f"{line['bytes'] / 1e6:,.0f}")
            made.add_row(*facts, *(spread(line[name], 2) for name in (*PHASES, "total")))
    to.print(made)
    to.print(targets(lines))
    for line in lines:
        if line["measure"] == "left out":
            to.print(f"{line['level']} left out: {line['reason']}", markup=False, highlight=False)


def targets(lines: Lines) -> Any:
    """What is to be reached, and was."""
    made = table("targets: load phase", ("target", "reached", "asked", ""), 4)
    asked = [
        ("from memory, against stock Lightning from a local disk", ("memory", "lazysnap"), "lightning", FROM_MEMORY),
        (
            "under Lightning, from memory, against stock Lightning from a local disk",
            ("memory", "lazysnap-lightning"),
            "lightning",
            FROM_MEMORY,
        ),
        ("from a local disk, against DCP", ("local", "lazysnap"), "dcp", FROM_DISK),
    ]
    for ranks in dict.fromkeys(line["ranks"] for line in lines if line["measure"] == "restore"):
        for text, ours, other, factor in asked:
            mine, theirs = _load(lines, *ours, ranks), _load(lines, "local", other, ranks)
            if mine is None or theirs is None:
                continue
            ratio = theirs / mine
            verdict = "[green]met" if ratio >= factor else "[red]not met"
            made.add_row(f"{ranks} rank{'s' * (ranks > 1)}: {text}", f"{ratio:.1f}x", f">= {factor:g}x", verdict)
    return made


def _load(lines: Lines, level: str, method: str, ranks: int) -> float | None:
    for line in lines:
        if line["measure"] == "restore" and (line["level"], line["method"], line["ranks"]) == (level, method, ranks):
            return statistics.median(line["load"])
    return None


def measure_all(args: argparse.Namespace, note: Callable[[dict[str, Any]], None]) -> None:
    """One level after the other: their servers do not run at the same time."""
    note(
        {
            "measure": "machine",
            "size": args.size,
            "rounds": args.rounds,
            "cores": os.cpu_count(),
            "load": os.getloadavg()[0],
            "python": platform.python_version(),
            "kernel": platform.release(),
        }
    )
    for level in args.levels:
        console.print(f"[dim]{level} ...")
        try:
            # Several processes in the guest: each with its own copy of the state.
            with opened(level, args.directory, 2 * STATE_BYTES[args.size]) as place:
                arguments = ["--size", args.size, "--rounds", str(args.rounds), "--ranks", args.ranks]
                arguments += ["--methods", args.methods, "--forget", str(place.directory)]
                for line in place.run("restarts", arguments, args.timeout_s):
                    note(line)
        except (NotHere, RuntimeError, TimeoutError, OSError) as error:
            console.print(f"[yellow]{level} left out: {error}", highlight=False)
            note({"measure": "left out", "level": level, "reason": str(error)})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="100m", help="of the model")
    parser.add_argument("--levels", default=",".join(LEVELS), help="of " + ", ".join(LEVELS))
    parser.add_argument("--ranks", default="1,2", help="numbers of ranks, sharded by FSDP2 if there are several")
    parser.add_argument("--methods", default=",".join(METHODS), help="of " + ", ".join(METHODS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=None, help="on the disk to measure; default: TMPDIR")
    parser.add_argument("--out", type=Path, default=Path("runs/restore"))
    parser.add_argument("--timeout-s", type=float, default=3600.0, help="for one level")
    args = parser.parse_args()
    args.levels = args.levels.split(",")
    unknown = set(args.levels) - set(LEVELS)
    if unknown:
        parser.error(f"--levels: {', '.join(sorted(unknown))} is not one of {', '.join(LEVELS)}")
    unknown = set(args.methods.split(",")) - set(METHODS)
    if unknown:
        parser.error(f"--methods: {', '.join(sorted(unknown))} is not one of {', '.join(METHODS)}")
    if args.rounds < 1 or not all(one.isdecimal() and int(one) for one in args.ranks.split(",")):
        parser.error("--rounds and each of --ranks must be at least 1")
    if args.directory is not None:
        args.directory.mkdir(parents=True, exist_ok=True)
    return args


def main() -> None:
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers, mounts and files go as at any other end
    args.out.mkdir(parents=True, exist_ok=True)
    lines: Lines = []
    with (args.out / "restore.jsonl").open("w") as file:

        def note(line: dict[str, Any]) -> None:
            lines.append(line)
            text = json.dumps(line)
            print(text, flush=True)
            file.write(text + "\n")
            file.flush()

        measure_all(args, note)
    text = Console(width=150, record=True, stderr=True)
    show(text, lines)
    (args.out / "restore.txt").write_text(text.export_text())
    console.print(f"written: {args.out}/restore.jsonl, restore.txt")


if __name__ == "__main__":
    main()
