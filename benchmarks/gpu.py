"""What lazysnap does on a GPU: its tests there, then the GPU part of ``stall`` and ``restore``, by size of the state.

``make gpu PYTHON=python3`` needs a CUDA device, and a Python with torch, pytest and what lazysnap imports: no network.
"""

import argparse
import functools
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from benchmarks.raw import warm_s
from benchmarks.report import Report
from benchmarks.workers import HERE, ROOT, Line, call, last_line
from lazysnap.memory.available import available_bytes

TESTS_S = 300.0
MOST_ON_DISK_GB = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes-gb", type=float, nargs="+", default=[1.0, 5.0, 20.0], help="of the training state")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try this program out, without tests"
    )


def run(args: argparse.Namespace, report: Report) -> str | None:
    """What failed."""
    report.take("device", functools.partial(call, "gpu.device", {"device": args.device}))
    if not report.of("device"):
        return f"no device for {sys.executable}; name another Python: make gpu PYTHON=..."
    if args.device == "cuda":
        report.take("tests/gpu", run_tests)
    for size_gb in args.sizes_gb:
        # Two slots, or three with a level, and what training and reading need beside.
        needed_bytes = 3.5 * size_gb * 1e9
        if needed_bytes > available_bytes():
            report.note({"measure": "too large", "size_gb": size_gb, "host_memory_needed_gib": needed_bytes / 2**30})
        else:
            report.take(f"{size_gb:g} GB", functools.partial(measure, size_gb, args.device))
    for line in report.of("stall"):
        rate = line["state_mb"] / 1e3 / report.find(measure="stall", method=line["method"])["idle_s"]
        slower = 1 + line["lost_ms"] / line["plain_step_ms"]
        report.target(f"{line['method']}: blocked", "<= {} ms", 2, line["blocked_ms"])
        report.target(f"{line['method']}: capture", ">= {} of the raw rate", 0.9, rate / line["raw_down_gb_per_s"])
        report.target(f"{line['method']}: a step with a capture", "<= {} of one without", 1.01, slower)
    failed = [line["what"] for line in report.of("left out")]
    for line in report.of("restore"):
        if line["exact"] != "yes":
            failed.append(f"{line['size_gb']:g} GB, not what was captured")
    if not failed:
        return None
    return f"failed: {', '.join(failed)}"


def measure(size_gb: float, device: str) -> Iterator[Line]:
    """Each in a process of its own."""
    width = 128
    if size_gb > 3:
        width = 2048
    elif size_gb > 0.5:
        width = 1024
    layers = max(1, round(size_gb * 1e9 / 12 / (12 * width * width)))  # a weight and two moments in fp32
    batch = 1
    if device == "cuda":
        batch = 8
    shared = {"size": (layers, width // 64, width, 256, 512), "device": device, "batch": batch}
    job = {"method": "lazysnap-memory", "threads": os.cpu_count(), "plain": 10, "snapshots": 3, "every": 8}
    for line in call("gpu.captures", {**shared, **job}):
        yield {**line, "method": f"{line['method']}, {size_gb:g} GB", "size_gb": size_gb}
    levels = ["memory"]
    if size_gb <= MOST_ON_DISK_GB and shutil.disk_usage(tempfile.gettempdir()).free > 2 * size_gb * 1e9:
        levels.append("local")
    for level in levels:
        job = {"level": level, "rounds": 1, "ranks": 1, "methods": ["lazysnap"], "touched": int(1.5 * size_gb * 1e9)}
        for line in call("restore_methods.rounds", {**shared, **job}):
            yield {**line, "size_gb": size_gb}


def run_tests() -> Iterator[Line]:
    """tests/gpu, by a pytest without plugins. Only what needs a second device may be skipped."""
    alone = ("--noconftest", "-c", os.devnull, "--rootdir", str(ROOT))
    words = [sys.executable, "-m", "pytest", "-q", *alone, str(HERE.parent / "tests" / "gpu")]
    paths = [str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    settings: Line = {"capture_output": True, "text": True, "timeout": TESTS_S, "check": False, "env": env}
    done = subprocess.run(words, cwd=ROOT, **settings)
    last = last_line(done.stdout)
    if done.returncode or ("skipped" in last and " 1 skipped" not in last):
        raise RuntimeError(done.stdout + done.stderr)
    yield {"measure": "tests", "tests/gpu": last}


# ------------------------------------------------------------------------------------------------ in workers


def device(job: Line) -> Iterator[Line]:
    import torch

    is_cuda = job["device"] == "cuda"
    if is_cuda and not torch.cuda.is_available():
        raise RuntimeError(f"torch {torch.__version__} sees no CUDA device")
    name = f"cpu ({os.cpu_count()} cores)"
    if is_cuda:
        name = torch.cuda.get_device_name()
    yield {
        "measure": "device",
        "device": name,
        "cuda": str(torch.version.cuda),
        "host_memory_gib": available_bytes() / 2**30,
    }


def captures(job: Line) -> Iterator[Line]:
    """As ``stall_methods.run``, with steps that are long enough for a copy to hide in, beside the raw rates."""
    import torch

    from benchmarks import stall_methods
    from benchmarks.training import Training

    training = Training(job)
    is_cuda = job["device"] == "cuda"

    def step() -> None:
        training.backward(0)
        training.update()

    step_s = warm_s(step)
    size = training.state_bytes()
    on_device = torch.ones(min(size, 2 << 30), dtype=torch.uint8, device=job["device"])
    on_host = torch.ones(len(on_device), dtype=torch.uint8, pin_memory=is_cuda)
    down = len(on_device) / warm_s(functools.partial(on_host.copy_, on_device, non_blocking=True))
    up = len(on_device) / warm_s(functools.partial(on_device.copy_, on_host, non_blocking=True))
    training.micro_batches = max(1, min(64, round(2 * size / down / step_s)))
    [line] = stall_methods.run(job, training)
    raw = {"raw_down_gb_per_s": down / 1e9, "raw_up_gb_per_s": up / 1e9}
    yield {**line, **raw, "micro_batches": training.micro_batches}
