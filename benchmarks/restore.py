"""How long until a training goes on, and what of it is the loading? Beside stock Lightning and DCP."""

import argparse
import math

from benchmarks import SIZES
from benchmarks.places import LEVELS, each
from benchmarks.report import Report

METHODS = ("lightning", "dcp", "lazysnap", "lazysnap-lightning")
TOUCHED = 4
"""Times the state: more than any method needs to load it."""
TARGETS = (
    # Level, method, the method that loads the same from a local disk, and how many times faster that is to be.
    ("memory", "lazysnap", "lightning", 5),
    ("memory", "lazysnap-lightning", "lightning", 5),
    ("local", "lazysnap", "dcp", 1),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", choices=SIZES, default="100m", help="of the model")
    parser.add_argument("--levels", nargs="+", choices=LEVELS, default=list(LEVELS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="sharded by FSDP2 if there are several")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--rounds", type=int, default=3)


def run(args: argparse.Namespace, report: Report) -> None:
    layers, _, width, context, vocabulary = SIZES[args.size]
    size = 12 * width * (12 * layers * width + context + vocabulary)  # about; weights and two moments
    for place in each(args.levels, 2 * size, report):  # several processes in a guest
        for ranks in args.ranks:
            job = {"size": SIZES[args.size], "rounds": args.rounds, "ranks": ranks, "methods": args.methods}
            place.measure(
                report, "restore_methods.rounds", {**job, "device": "cpu", "touched": TOUCHED * size // ranks}
            )
    for ranks in args.ranks:
        for level, method, other, times in TARGETS:
            if ranks > 1 and "lightning" in method + other:
                continue
            ours_s = report.find(measure="restore", level=level, method=method, ranks=ranks)["load_s"]
            theirs_s = report.find(measure="restore", level="local", method=other, ranks=ranks)["load_s"]
            reached = math.nan
            if ours_s:
                reached = theirs_s / ours_s
            text = f"{ranks} rank{'s' * (ranks > 1)}: {method} from {level}, against {other} from a local disk: load"
            report.target(text, ">= {} times faster", times, reached)
