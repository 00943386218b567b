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

MEMORY, FILES, DISK, SYNC = "lazysnap-memory", "lazysnap-files", "lazysnap-disk", "torch-save"
ASYNC = ("lightning-async", "dcp-thread", "dcp-thread-cached", "dcp-process", "dcp-process-cached")
METHODS = ("none", SYNC, "lightning-save", *ASYNC, MEMORY, FILES, DISK, "lazysnap-lightning")
START_S = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--params", choices=SIZES, default="small")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of torch")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--snapshots", type=int, default=4, help="of a peer, 2 or more; the first one is the start")
    parser.add_argument("--every", type=int, default=25, help="steps from one snapshot of a peer to the next")


def lost_ms(took_s: float, base_s: float, snapshots: int) -> float:
    """Return the time lost per snapshot by steps that took ``took_s``, and take ``base_s`` without snapshots."""
    return 1e3 * (took_s - base_s) / snapshots


def run(args: argparse.Namespace, report: Report) -> None:
    is_large = args.params == "100m"
    limits = {"size": 1 << (30 if is_large else 26), "threads": args.threads}
    report.take("limits", functools.partial(call, "raw.limits", limits))
    job: Line = {name: getattr(args, name) for name in ("threads", "snapshots", "every")}
    job |= {"size": SIZES[args.params], "batch": 1, "base": 5, "device": "cpu"}
    for method in args.methods:
        work = functools.partial(measure, {**job, "method": method}, 1.0 if is_large else 0.05)
        report.take(method, work)
    targets(report)


def measure(job: Line, interval_s: float) -> list[Line]:
    """A method, and the memory of its processes."""
    run = uuid.uuid4().hex
    with peak_memory(run, interval_s) as peak:
        [line] = call("stall_methods.run", job, **{MARKER: run, "OMP_NUM_THREADS": str(job["threads"])})
    return [{**line, "peak_mb": peak[0] / 1e6}]


def targets(report: Report) -> None:
    """What is asked of lazysnap, beside what was reached."""
    none, sync = (report.find(measure="stall", method=method) for method in ("none", SYNC))
    peer_ms = min((line["blocked_ms"] for line in report.of("stall") if line["method"] in ASYNC), default=math.nan)
    for name in (MEMORY, DISK):
        own, times = report.find(measure="stall", method=name), ">= {} times less"
        report.target(f"{name}: blocked, against {SYNC} + fsync", times, 100, sync["blocked_ms"] / own["blocked_ms"])
        report.target(f"{name}: blocked, against the best peer", times, 20, peer_ms / own["blocked_ms"])
        report.target(f"{name}: longest boundary", "<= {} ms", 5, own["longest_boundary_ms"])
        start_s = max(START_S, 2 * own["raw_populate_ms"] / 1e3)
        report.target(f"{name}: lost at the start", "<= {} s", start_s, own["start_lost_ms"] / 1e3)
        more_mb = own["peak_mb"] - none["peak_mb"]
        report.target(f"{name}: memory beyond training's", "<= {} MB", own["slots_mb"] + 200, more_mb)
    memory, disk = (report.find(measure="stall", method=method) for method in (MEMORY, DISK))
    rates = [line["gb_per_s"] for line in report.of("limit") if line["limit"].startswith("memcpy")]
    # Somebody has to move the bytes.
    allowed_ms = max(2 * memory["state_mb"] / max(rates, default=math.nan), 0.1 * memory["base_step_ms"])
    report.target(f"{MEMORY}: lost per snapshot", "<= {} ms", allowed_ms, memory["lost_ms"])
    raw = report.find(limit="O_DIRECT")["gb_per_s"]
    for text, name in (("beside training", "durable_s"), ("idle", "idle_s")):
        reached = disk["state_mb"] / 1e3 / disk[name] / raw
        report.target(f"{DISK}: durable, {text}", ">= {} of raw O_DIRECT", 0.85, reached)
