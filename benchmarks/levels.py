"""How fast are the levels beside their media, and what is lost when everything dies?

    python benchmarks/levels.py
    python benchmarks/levels.py --size-mb 64 --levels memory,local

For each level, in the same run: write and read rate beside the raw limit of its medium, taking turns; processor time
per GB; steps lost and seconds to resume after a SIGKILL. NFS and S3 bring their own servers; what cannot be started
here is left out, with the reason. Prints a JSON line per measurement, tables and targets; writes both to `--out`. How
it measures: docs/benchmarks.md.
"""

import argparse
import json
import os
import platform
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from places import LEVELS, NotHere, Place, opened
from ratios import Lines, show
from rich.console import Console

console = Console(stderr=True)


def machine(args: argparse.Namespace) -> dict[str, Any]:
    """What the figures depend on."""
    return {
        "measure": "machine",
        "size_mb": args.size_mb,
        "rounds": args.rounds,
        "train_mb": args.train_mb,
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def measure(place: Place, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All lines of one level; a part that fails leaves the others alone."""
    rates = ["--size-mb", str(args.size_mb), "--rounds", str(args.rounds)]
    losses = ["--mb", str(args.train_mb), "--kill-at", str(args.kill_at), "--step-s", str(args.step_s)]
    losses += ["--repeats", str(args.repeats)]
    workers = [("rates", rates)] * (args.rounds > 0) + [("losses", losses)] * (args.repeats > 0)
    for worker, arguments in workers:
        console.print(f"[dim]{place.name}: {worker} ...")
        load = os.getloadavg()[0]
        try:
            lines = place.run(worker, arguments, args.timeout_s)
        except (RuntimeError, TimeoutError, OSError) as error:
            yield left_out(place.name, f"{worker}: {error}")
            continue
        for line in lines:
            yield {**line, "load": load}


def left_out(level: str, reason: str) -> dict[str, Any]:
    """Says so at once, too."""
    console.print(f"[yellow]{level} left out: {reason}", highlight=False)
    return {"measure": "left out", "level": level, "reason": reason}


def measure_all(args: argparse.Namespace, note: Callable[[dict[str, Any]], None]) -> None:
    """One level after the other: their servers do not run at the same time."""
    note(machine(args))
    for level in args.levels:
        try:
            with opened(level, args.directory, args.size_mb << 20) as place:
                for line in measure(place, args):
                    note(line)
        except NotHere as error:
            note(left_out(level, str(error)))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size-mb", type=int, default=1024, help="of a shard, in MiB; memory: five times as much")
    parser.add_argument("--levels", default=",".join(LEVELS), help="of " + ", ".join(LEVELS))
    parser.add_argument(
        "--rounds", type=int, default=6, help="that count, in pairs; one more goes ahead; 0: losses only"
    )
    parser.add_argument("--train-mb", type=float, default=100.0, help="state of the training that is killed, in MB")
    parser.add_argument("--kill-at", type=int, default=60, help="step at which it is killed")
    parser.add_argument("--step-s", type=float, default=0.1, help="length of its steps")
    parser.add_argument("--repeats", type=int, default=3, help="deaths per level; 0: rates only")
    parser.add_argument("--directory", type=Path, default=None, help="on the disk to measure; default: TMPDIR")
    parser.add_argument("--out", type=Path, default=Path("runs/levels"))
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="for one level's rates, or losses")
    args = parser.parse_args()
    args.levels = args.levels.split(",")
    unknown = set(args.levels) - set(LEVELS)
    if unknown:
        parser.error(f"--levels: {', '.join(sorted(unknown))} is not one of {', '.join(LEVELS)}")
    if min(args.size_mb, args.rounds + 1, args.repeats + 1, args.kill_at) < 1 or not args.rounds + args.repeats:
        parser.error("--size-mb, --kill-at and one of --rounds and --repeats must be at least 1, the other at least 0")
    if args.directory is not None:
        args.directory.mkdir(parents=True, exist_ok=True)
    return args


def main() -> None:
    args = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers, mounts and files go as at any other end
    args.out.mkdir(parents=True, exist_ok=True)
    lines: Lines = []
    with (args.out / "levels.jsonl").open("w") as file:

        def note(line: dict[str, Any]) -> None:
            lines.append(line)
            text = json.dumps(line)
            print(text, flush=True)
            file.write(text + "\n")
            file.flush()

        measure_all(args, note)
    text = Console(width=150, record=True, stderr=True)
    show(text, lines)
    (args.out / "levels.txt").write_text(text.export_text())
    console.print(f"written: {args.out}/levels.jsonl, levels.txt")


if __name__ == "__main__":
    main()
