"""How long does a snapshot stop training, and what does it cost beside?

    python benchmarks/stall.py --params small
    python benchmarks/stall.py --params 100m --threads 2

Each method runs in a process of its own, one after the other, on the same model: a few steps without snapshots
(its base), then the same number of steps with them. The peers save every `--every` steps, lazysnap at each one.
Prints a JSON line per method, a table and the targets; writes both and a picture to `--out`. How it measures:
docs/benchmarks.md.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

import torch
from doors import measure_all
from memory import MARKER, PeakMemory
from report import judge, picture, tables
from rich.console import Console
from worker import METHODS, SIZES

WORKER = Path(__file__).parent / "worker.py"
console = Console(stderr=True)


def measure(method: str, args: argparse.Namespace) -> dict[str, Any]:
    """Run one method in its own process."""
    run = uuid.uuid4().hex
    environment = {**os.environ, MARKER: run, "OMP_NUM_THREADS": str(args.threads)}
    with tempfile.TemporaryDirectory(prefix="stall-", dir=args.directory) as directory:
        command = [sys.executable, str(WORKER), method, directory, "--params", args.params]
        for name in ("batch", "threads", "warm_up", "base", "snapshots", "every", "device"):
            command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
        memory = PeakMemory(run, 0.05 if args.params != "100m" else 1.0)
        try:
            process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=args.timeout_s)
            output, errors, code = process.stdout, process.stderr, process.returncode
        except subprocess.TimeoutExpired:
            output, errors, code = "", f"no result within {args.timeout_s:.0f} s", -1
        peak = memory.stop()
    lines = [line for line in output.splitlines() if line.startswith('{"method"')]
    if code != 0 or not lines:
        text = (errors.strip().splitlines() or ["no result"])[-1]
        console.print(f"[red]{method} failed (exit code {code}): {text}", highlight=False)
        return {"method": method, "error": text}
    result: dict[str, Any] = json.loads(lines[-1])
    return {**result, "peak_bytes": peak}


def machine(args: argparse.Namespace) -> dict[str, Any]:
    """What the figures depend on."""
    gpu = torch.cuda.get_device_name() if args.device == "cuda" else None
    return {
        "method": "machine",
        "params": args.params,
        "threads": args.threads,
        "batch": args.batch,
        "every": args.every,
        "snapshots": args.snapshots,
        "cores": os.cpu_count(),
        "device": gpu or args.device,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--params", choices=SIZES, default="small")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="torch threads for training")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--door", choices=("accelerate",), help="instead: save_state() beside stock and Lightning")
    parser.add_argument("--batch", type=int, default=None, help="default: 1 on a CPU, 16 on a GPU")
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--base", type=int, default=5, help="steps without snapshots, measured")
    parser.add_argument("--snapshots", type=int, default=4, help="by the peers; the first is reported apart")
    parser.add_argument("--every", type=int, default=8, help="steps from one snapshot of a peer to the next")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--directory", type=Path, default=None, help="on the disk to measure; default: TMPDIR")
    parser.add_argument("--out", type=Path, default=Path("runs/stall"))
    parser.add_argument("--timeout-s", type=float, default=1800.0, help="for one method")
    args = parser.parse_args()
    if min(args.base, args.snapshots, args.every, args.threads) < 1 or args.snapshots < 2:
        parser.error("--base, --every and --threads must be at least 1, --snapshots at least 2")
    if args.batch is None:
        args.batch = 16 if args.device == "cuda" else 1
    if args.directory is not None:
        args.directory.mkdir(parents=True, exist_ok=True)
    return args


def main() -> None:
    args = parse()
    if args.door:
        measure_all(args)
        return
    args.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict[str, Any]] = {}
    with (args.out / "stall.jsonl").open("w") as file:
        for method in ("machine", "limits", *args.methods):
            console.print(f"[dim]{method} ...")
            results[method] = machine(args) if method == "machine" else measure(method, args)
            line = json.dumps(results[method])
            print(line, flush=True)
            file.write(line + "\n")
    text = Console(width=150, record=True)
    for table in tables(results):
        text.print(table)
    text.print(judge(results))
    (args.out / "stall.txt").write_text(text.export_text(clear=False))
    picture(results, args.out / "stall.png")
    console.print(f"written: {args.out}/stall.jsonl, stall.txt, stall.png")


if __name__ == "__main__":
    main()
