"""Measure lazysnap.

    python -m benchmarks stall | levels | restore | restart | parity | scale | gpu [options]
    python -m benchmarks compare --against a39cbad [stall [options]]

Lines of JSON and tables are written to ``--out``. How each measures, and figures: docs/benchmarks.md.
"""

import argparse
import importlib
import os
import signal
import sys
from pathlib import Path

from benchmarks.report import Report
from benchmarks.workers import HERE, ROOT

NAMES = [
    "stall",
    "levels",
    "restore",
    "restart",
    "parity",
    "scale",
    "gpu",
    "compare",
]


def parser() -> argparse.ArgumentParser:
    shape = argparse.RawDescriptionHelpFormatter
    root = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, formatter_class=shape)
    ways = root.add_subparsers(dest="what", required=True)
    for name in NAMES:
        try:
            module = importlib.import_module(f"benchmarks.{name}")
        except ImportError:
            if HERE.parent == ROOT:
                raise
            continue  # what it measures is not in the older package, beside which ``compare`` runs the others
        way = ways.add_parser(name, help=module.__doc__, description=module.__doc__, formatter_class=shape)
        way.add_argument("--directory", type=Path, help="on the disk to measure; default: TMPDIR")
        way.add_argument("--out", type=Path, default=Path("runs", name))
        module.add_arguments(way)
        way.set_defaults(run=module.run)
    return root


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers, mounts and files go as at any other end
    args = parser().parse_args()
    if args.directory is not None:
        args.directory.mkdir(parents=True, exist_ok=True)
        os.environ["TMPDIR"] = str(args.directory.resolve())
    report = Report(args.out, args.what)
    failure = args.run(args, report)
    report.show()
    sys.exit(failure)


if __name__ == "__main__":
    main()
