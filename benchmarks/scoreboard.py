"""What is left of a training after a fault? lazysnap, and what users would take instead, under ``lazysnap chaos``."""

import argparse
import functools
import json
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

from benchmarks.report import Report
from benchmarks.workers import ROOT, Line, last_line

METHODS = {
    # Method: the package whose version is pinned in the extra `scoreboard`.
    "none": "torch",
    "torch.save": "torch",
    "dcp-async": "torch",
    "lightning": "lightning",
    "transformers": "transformers",
    "torch-checkpointing": "torch-checkpointing",
    "lm-resiliency": "lm-resiliency",
    "ravex": "ravex",
    "lazysnap": "lazysnap",
    "lazysnap-lightning": "lazysnap",
}
FAULTS = ("kill", "both", "term", "flip", "full", "slow", "hang")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS))
    parser.add_argument("--seed", type=int, default=1603)


def run(args: argparse.Namespace, report: Report) -> None:
    for method in args.methods:
        report.take(method, functools.partial(measured, method, args))


def measured(method: str, args: argparse.Namespace) -> list[Line]:
    """One method under all faults; its figures are those of its undisturbed run."""
    try:
        version = metadata.version(METHODS[method])
    except metadata.PackageNotFoundError:
        raise RuntimeError(f"{METHODS[method]} is not installed: pip install 'lazysnap[scoreboard]'") from None
    with tempfile.TemporaryDirectory(prefix="lazysnap-scoreboard-", ignore_cleanup_errors=True) as own:
        place = Path(own, "chaos")
        faults = ["kill"] if method == "none" else args.faults
        options = ["--faults", ",".join(faults), "--seed", str(args.seed), "--may-lose", "10", "--result", "result.pt"]
        words = ["-m", "lazysnap.cli", "chaos", "--json", "--dir", str(place), *options, "--"]
        words += [sys.executable, "-m", "benchmarks.rivals", method, "{dir}"]
        chaos = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        try:
            result = json.loads(last_line(chaos.communicate()[0]) or "{}")
        finally:
            chaos.terminate()  # it ends the training, too
            chaos.wait()
        if "runs" not in result:
            raise RuntimeError(last_line(result.get("error", f"exit code {chaos.returncode}")))
        log = (place / "undisturbed" / "log.txt").read_text(errors="replace")
    figures = next((json.loads(line[8:]) for line in log.splitlines() if line.startswith("figures {")), {})
    return [{"measure": "scoreboard", "method": method, "version": version, **figures, **verdicts(result["runs"])}]


def verdicts(runs: list[Line]) -> Line:
    """For each fault the verdict, with the steps that were trained again; and the seconds of a restart."""
    found: Line = {
        one["fault"]: one["verdict"] + (f", {one['steps_again']} again" if one["steps_again"] is not None else "")
        for one in runs
    }
    restarts = [one["restart_s"] for one in runs if one["restart_s"] is not None]
    return {**found, "restart_s": restarts}
