"""Measure lazysnap.

    python -m benchmarks stall | levels | restore | scale | rollback | gpu [options]
    python -m benchmarks compare --against a39cbad stall [options]

Lines of JSON and tables are written to ``--out``. How each measures, and figures: docs/benchmarks.md.
"""

import argparse
import signal
import sys
import tempfile
from pathlib import Path

from benchmarks import compare, gpu, levels, restore, rollback, scale, stall
from benchmarks.frame import Report

WAYS = {"stall": stall, "levels": levels, "restore": restore, "scale": scale, "rollback": rollback, "gpu": gpu}


def parse() -> argparse.Namespace:
    shape = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__, formatter_class=shape)
    ways = parser.add_subparsers(dest="what", required=True)
    for name, module in WAYS.items():
        way = ways.add_parser(name, help=str(module.__doc__), description=module.__doc__, formatter_class=shape)
        way.add_argument("--directory", type=Path, default=None, help="on the disk to measure; default: TMPDIR")
        way.add_argument("--out", type=Path, default=Path("runs", name))
        way.add_argument("--json", action="store_true", help="lines of JSON instead of tables on standard output")
        way.add_argument("--timeout-s", type=float, default=3600.0, help="for one worker")
        module.add_arguments(way)
    compare.add_arguments(ways.add_parser("compare", help=compare.__doc__, description=compare.__doc__))
    return parser.parse_args()


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # servers, mounts and files go as at any other end
    args = parse()
    if args.what == "compare":
        compare.run(args)
        return
    if args.directory is not None:
        args.directory.mkdir(parents=True, exist_ok=True)
        tempfile.tempdir = str(args.directory)
    WAYS[args.what].run(args, Report(args.what, args))


if __name__ == "__main__":
    main()
