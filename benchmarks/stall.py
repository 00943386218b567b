"""How long does a snapshot stop training, and what does it cost beside? lazysnap, torch.save, Lightning, DCP."""

import argparse
import functools
import math
import os
import uuid

from benchmarks import SIZES
from benchmarks.raw import peak_memory
from benchmarks.report import Report
from benchmarks.workers import MARKER, Line, call

MEMORY = "lazysnap-memory"
FILES = "lazysnap-files"
DISK = "lazysnap-disk"
SYNC = "torch-save"
ASYNC = ("lightning-async", "dcp-thread", "dcp-thread-cached", "dcp-process", "dcp-process-cached")
METHODS = ("none", SYNC, "lightning-save", *ASYNC, MEMORY, FILES, DISK, "lazysnap-lightning")
START_S = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--params", choices=SIZES, default="small")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of torch")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--snapshots", type=int, default=4, help="of a peer, 2 or more; the first one is the start")
    parser.add_argument("--every", type=int, default=25, help="steps from one snapshot of a peer to the next")


def run(args: argparse.Namespace, report: Report) -> None:
    copied_bytes = 1 << 26
    interval_s = 0.05
    if args.params == "100m":
        copied_bytes = 1 << 30
        interval_s = 1.0
    report.take("limits", functools.partial(call, "raw.limits", {"size": copied_bytes, "threads": args.threads}))
    job: Line = {"threads": args.threads, "snapshots": args.snapshots, "every": args.every}
    job |= {"size": SIZES[args.params], "batch": 1, "plain": 5, "device": "cpu"}
    for method in args.methods:
        report.take(method, functools.partial(measure, {**job, "method": method}, interval_s))
    targets(report)


def measure(job: Line, interval_s: float) -> list[Line]:
    """A method, and the memory of its processes."""
    run = uuid.uuid4().hex
    with peak_memory(run, interval_s) as peak:
        [line] = call("stall_methods.run", job, **{MARKER: run, "OMP_NUM_THREADS": str(job["threads"])})
    return [{**line, "peak_mb": peak[0] / 1e6}]


def targets(report: Report) -> None:
    """What is asked of lazysnap, beside what was reached."""
    none = report.find(measure="stall", method="none")
    sync = report.find(measure="stall", method=SYNC)
    memory = report.find(measure="stall", method=MEMORY)
    disk = report.find(measure="stall", method=DISK)
    peers_ms = []
    for line in report.of("stall"):
        if line["method"] in ASYNC:
            peers_ms.append(line["blocked_ms"])
    best_peer_ms = min(peers_ms, default=math.nan)
    times = ">= {} times less"
    for name, ours in ((MEMORY, memory), (DISK, disk)):
        report.target(f"{name}: blocked, against {SYNC} + fsync", times, 100, sync["blocked_ms"] / ours["blocked_ms"])
        report.target(f"{name}: blocked, against the best peer", times, 20, best_peer_ms / ours["blocked_ms"])
        report.target(f"{name}: longest boundary", "<= {} ms", 5, ours["longest_boundary_ms"])
        start_s = max(START_S, 2 * ours["raw_populate_ms"] / 1e3)
        report.target(f"{name}: lost at the start", "<= {} s", start_s, ours["start_lost_ms"] / 1e3)
        beyond_mb = ours["peak_mb"] - none["peak_mb"]
        report.target(f"{name}: memory beyond training's", "<= {} MB", ours["slots_mb"] + 200, beyond_mb)
    rates = []
    for line in report.of("limit"):
        if line["limit"].startswith("memcpy"):
            rates.append(line["gb_per_s"])
    # Somebody has to move the bytes.
    allowed_ms = max(2 * memory["state_mb"] / max(rates, default=math.nan), 0.1 * memory["plain_step_ms"])
    report.target(f"{MEMORY}: lost per snapshot", "<= {} ms", allowed_ms, memory["lost_ms"])
    raw = report.find(limit="O_DIRECT")["gb_per_s"]
    for text, name in (("during training", "durable_s"), ("idle", "idle_s")):
        reached = disk["state_mb"] / 1e3 / disk[name] / raw
        report.target(f"{DISK}: durable, {text}", ">= {} of raw O_DIRECT", 0.85, reached)
