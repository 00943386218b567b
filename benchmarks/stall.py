"""How long does a snapshot stop training, and what does it cost beside? lazysnap, torch.save, Lightning, DCP."""

import argparse
import math
import os
import statistics
import tempfile
import uuid

from benchmarks.frame import MARKER, SIZES, Report, Targets, by_name, call, table
from benchmarks.raw import PeakMemory

MEMORY, DISK, SYNC = "lazysnap-memory", "lazysnap-disk", "torch-save"
ASYNC = ("lightning-async", "dcp-thread", "dcp-thread-cached", "dcp-process", "dcp-process-cached")
METHODS = ("none", SYNC, "lightning-save", *ASYNC, MEMORY, DISK)
DOORS = {"accelerate": ("accelerate-save", "lazysnap-accelerate", "lazysnap-lightning")}
START_S = 2.0
KEYS = ("measure", "method", "name")
_COLUMNS = {
    "boundary_s": "boundary ms",
    "longest_boundary_s": "longest boundary",
    "gate_s": "gate ms",
    "blocked_s": "blocked ms",
    "longest_blocked_s": "longest blocked",
    "waited_s": "waited ms",
    "lost_s": "lost ms",
    "start_lost_s": "start lost ms",
    "first_blocked_s": "first blocked ms",
    "populate_s": "raw populate ms",
}
_IDLE = ("durable_when_idle_s", "captured_when_idle_s")
COMPARED = (*_COLUMNS, *_IDLE, "base_step_s", "durable_s", "peak_bytes", "slot_bytes")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--params", choices=SIZES, default="small")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of torch")
    parser.add_argument("--methods", nargs="+", choices=(*METHODS, *DOORS["accelerate"]), default=list(METHODS))
    parser.add_argument("--door", choices=DOORS, help="instead: save_state() beside stock and Lightning")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--warm-up", type=int, default=2)
    parser.add_argument("--base", type=int, default=5, help="steps without snapshots")
    parser.add_argument("--snapshots", type=int, default=4, help="of a peer; the first belongs to the start")
    parser.add_argument("--every", type=int, default=25, help="steps from one snapshot of a peer to the next")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")


def run(args: argparse.Namespace, report: Report) -> None:
    if min(args.base, args.every, args.threads) < 1 or args.snapshots < 2:
        raise SystemExit("--base, --every and --threads must be at least 1, --snapshots at least 2")
    job = {name: getattr(args, name) for name in ("batch", "threads", "warm_up", "base", "snapshots", "every")}
    job |= {"device": args.device, "size": SIZES[args.params]}
    for method in ("limits", *(DOORS[args.door] if args.door else args.methods)):
        report.progress(f"{method} ...")
        marker = uuid.uuid4().hex
        memory = PeakMemory(marker, 0.05 if args.params != "100m" else 1.0)
        with tempfile.TemporaryDirectory(prefix="stall-", dir=args.directory, ignore_cleanup_errors=True) as directory:
            settings = {**job, "method": method, "directory": directory, "size": job["size"]}
            if method == "limits":
                settings["size"] = 1 << (30 if args.params == "100m" else 26)
            function = "raw.limits" if method == "limits" else "savers.run"
            more = {MARKER: marker, "OMP_NUM_THREADS": str(args.threads)}
            try:
                lines = call(function, settings, args.timeout_s, **more)
            except (RuntimeError, TimeoutError) as error:
                report.left_out(error, method=method)
                continue
            finally:
                peak = memory.stop()
            for line in lines:
                report.note(line if method == "limits" else {**line, "peak_bytes": peak})
    report.show(*tables(report), "" if args.door else targets(report).table())


def ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1e3 * seconds


def tables(report: Report) -> list[str]:
    lines = list(report.of("method"))
    stalls = [(line["method"], line["snapshots"], *(ms(line.get(name)) for name in _COLUMNS)) for line in lines]
    whole = []
    for line in lines:
        durable = line.get("durable_s") or []
        seconds = (durable[1:] or None, *map(line.get, _IDLE))
        sizes = (*(line.get(name, 0) / 1e6 for name in ("state_bytes", "peak_bytes", "slot_bytes")),)
        whole.append((line["method"], ms(line["base_step_s"]), *sizes, *seconds))
    columns = ("method", "base step ms", "state MB", "peak MB", "slots MB", "durable s", "idle", "capture s, idle")
    return [
        table("Per snapshot after the start", ("method", "snapshots", *_COLUMNS.values()), stalls),
        table("Per run", columns, whole),
        table(
            "Raw limits",
            ("limit", "GB/s"),
            [(line["name"], line["bytes_per_s"] and line["bytes_per_s"] / 1e9) for line in report.of("limit")],
        ),
    ]


def targets(report: Report) -> Targets:
    """What is asked of lazysnap, beside what was reached."""
    made, by, rate = Targets(), by_name(report.of("method"), "method"), by_name(report.of("limit"), "name")
    peer_s = min((by[method]["blocked_s"] for method in ASYNC if method in by), default=math.nan)
    for name in (MEMORY, DISK):
        own, times = by[name], ">= {} times less"
        made.check(f"{name}: blocked, against {SYNC} + fsync", times, 100, by[SYNC]["blocked_s"] / own["blocked_s"])
        made.check(f"{name}: blocked, against the best asynchronous peer", times, 20, peer_s / own["blocked_s"])
        made.check(f"{name}: longest boundary", "<= {} ms", 5, 1e3 * own["longest_boundary_s"])
        made.check(f"{name}: lost at the start", "<= {} s", max(START_S, 2 * own["populate_s"]), own["start_lost_s"])
        more_mb = (own["peak_bytes"] - by["none"]["peak_bytes"]) / 1e6
        made.check(f"{name}: memory beyond training's", "<= {} MB", own["slot_bytes"] / 1e6 + 200, more_mb)
    memory, disk = by[MEMORY], by[DISK]
    # Somebody has to move the bytes.
    floor_s = memory["state_bytes"] / max(rate[f"memcpy_{who}"]["bytes_per_s"] for who in ("1_thread", "all_threads"))
    allowed_ms = 1e3 * max(2 * floor_s, 0.1 * memory["base_step_s"])
    made.check(f"{MEMORY}: lost per snapshot", "<= {} ms", allowed_ms, 1e3 * memory["lost_s"])
    for text, seconds in (("beside training", disk.get("durable_s", [])[1:]), ("idle", disk.get(_IDLE[0]))):
        reached = disk["state_bytes"] / statistics.median(seconds or [math.nan]) / rate["o_direct"]["bytes_per_s"]
        made.check(f"{DISK}: durable, {text}", ">= {} of raw O_DIRECT", 0.85, reached)
    return made
