"""How long until a training goes on, and what of it is the loading? Beside stock Lightning and DCP."""

import argparse
import itertools
import math
import statistics

from benchmarks.frame import SIZES, Report, Targets, by_name, table
from benchmarks.places import LEVELS, each, list_of

PHASES = ("imports", "build", "load", "step", "total")
METHODS = ("lightning", "dcp", "lazysnap", "lazysnap-lightning")
STATE_BYTES = {"tiny": 2 << 20, "small": 40 << 20, "30m": 400 << 20, "100m": 1200 << 20}
"""About; a guest gets memory for that."""
TOUCHED = 4
"""Times the state: more than any method needs to load it."""
TARGETS = (
    # Level, method, the method that loads the same from a local disk, and how many times faster that is to be.
    ("memory", "lazysnap", "lightning", 5),
    ("memory", "lazysnap-lightning", "lightning", 5),
    ("local", "lazysnap", "dcp", 1),
)
KEYS, COMPARED = ("measure", "level", "method", "ranks"), PHASES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--size", choices=SIZES, default="100m", help="of the model")
    parser.add_argument("--levels", type=list_of(LEVELS), default=list(LEVELS), help="of " + ", ".join(LEVELS))
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2], help="sharded by FSDP2 if there are several")
    parser.add_argument("--methods", type=list_of(METHODS), default=list(METHODS), help="of " + ", ".join(METHODS))
    parser.add_argument("--rounds", type=int, default=3)


def run(args: argparse.Namespace, report: Report) -> None:
    size = STATE_BYTES[args.size]
    for work in each(args.levels, 2 * size, report):  # several processes in a guest
        for ranks in args.ranks:
            job = {"size": SIZES[args.size], "rounds": args.rounds, "ranks": ranks, "methods": args.methods}
            work("restarts.rounds", {**job, "device": "cpu", "touched": TOUCHED * size // ranks}, args.timeout_s)
    report.show(tables(report), targets(report, args.ranks).table())


def tables(report: Report) -> str:
    names = ("level", "ranks", "method", "state MB", *PHASES, "exact")
    lines = [{**line, "state MB": line["bytes"] / 1e6, "exact": str(line["exact"])} for line in report.of("restore")]
    title = "From the start of a process to the end of its first step, in seconds"
    return table(title, names, [[line[name] for name in names] for line in lines])


def targets(report: Report, worlds: list[int]) -> Targets:
    made, lines = Targets(), by_name(report.of("restore"), "level", "method", "ranks")
    load_s = {key: statistics.median(line["load"]) for key, line in lines.items()}
    for ranks, (level, method, other, times) in itertools.product(worlds, TARGETS):
        if ranks == 1 or "lightning" not in method + other:
            text = f"{ranks} rank{'s' * (ranks > 1)}: {method} from {level}, against {other} from a local disk: load"
            reached = load_s.get(("local", other, ranks), math.nan) / load_s.get((level, method, ranks), math.nan)
            made.check(text, ">= {} times faster", times, reached)
    return made
