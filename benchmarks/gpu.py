"""What lazysnap does on a GPU: its tests there, then the GPU part of ``stall`` and ``restore``, by size of the state.

``make gpu PYTHON=python3`` needs a Python with torch and a CUDA device, and nothing else: no set-up and no network.
Where xxhash or msgspec is not installed, its wheel may lie in ``.whl/``.
"""

import argparse
import importlib.util
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path

from benchmarks import restore, stall
from benchmarks.frame import ROOT, Line, Report, Targets, call, environment, table

DEADLINE_S = 300.0
MOST_ON_DISK_GB = 5.0
NEEDED = ("xxhash", "msgspec")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sizes-gb", type=float, nargs="+", default=[1.0, 5.0, 20.0], help="of the training state")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try this program out")
    parser.add_argument("--no-tests", action="store_true", help="measure only")


def run(args: argparse.Namespace, report: Report) -> None:
    find_packages()
    for line in call("gpu.device", {"device": args.device}):
        report.note(line)
    [device] = report.of("device")
    if "missing" in device:
        sys.exit(device["missing"])
    failed = [] if args.no_tests or run_tests(args.device, report) else ["tests/gpu"]
    for size_gb in args.sizes_gb:
        try:
            # Two slots, or three with a level, and what training and reading need beside.
            if (needed := 3.5 * size_gb * 1e9) > available_bytes():
                raise RuntimeError(f"it needs {needed / 2**30:.0f} GiB of host memory")
            for line in measure(size_gb, args.device, report):
                report.note({"size_gb": size_gb, **line})
        except (RuntimeError, TimeoutError) as error:
            report.left_out(error, size_gb=size_gb)
            failed += [f"{size_gb:g} GB"] * ("host memory" not in str(error))
    failed += [f"{line['size_gb']:g} GB, not what was captured" for line in report.of("restore") if not line["exact"]]
    facts = table("Device", ("", "is"), list(device.items())[1:])
    report.show(facts, *stall.tables(report), restore.tables(report), targets(report).table())
    if failed:
        sys.exit("failed: " + ", ".join(failed))


def measure(size_gb: float, device: str, report: Report) -> Iterator[Line]:
    """Each in a process of its own."""
    report.progress(f"{size_gb:g} GB ...")
    width = 2048 if size_gb > 3 else 1024 if size_gb > 0.5 else 128
    layers = max(1, round(size_gb * 1e9 / 12 / (12 * width * width)))  # a weight and two moments in fp32
    shared = {"size": (layers, width // 64, width, 256, 512), "device": device, "batch": 8 if device == "cuda" else 1}
    with tempfile.TemporaryDirectory(prefix="lazysnap-gpu-") as directory:
        job = {**shared, "method": stall.MEMORY, "directory": directory, "threads": os.cpu_count()}
        job |= {"warm_up": 3, "base": 10, "snapshots": 3, "every": 8}
        for line in call("gpu.captures", job, DEADLINE_S):
            yield {**line, "method": f"{line['method']}, {size_gb:g} GB"}
        fits = size_gb <= MOST_ON_DISK_GB and shutil.disk_usage(directory).free > 2 * size_gb * 1e9
        for level in ("memory", "local") if fits else ("memory",):
            place = {"level": level, "url": f"{directory}/level", "options": None, "forget": directory}
            how = {"rounds": 1, "ranks": 1, "methods": ["lazysnap"], "touched": int(1.5 * size_gb * 1e9)}
            yield from call("restarts.rounds", {**shared, **place, **how}, DEADLINE_S)


def targets(report: Report) -> Targets:
    made = Targets()
    for line in report.of("method"):
        rate = line["state_bytes"] / statistics.median(line["captured_when_idle_s"])
        slower = 1 + line["lost_s"] / line["base_step_s"]
        made.check(f"{line['method']}: blocked", "<= {} ms", 2, 1e3 * line["blocked_s"])
        made.check(f"{line['method']}: capture", ">= {} of the raw rate", 0.9, rate / line["raw_down"])
        made.check(f"{line['method']}: a step with a capture", "<= {} of one without", 1.01, slower)
    return made


def find_packages() -> None:
    """Put wheels that lie in ``.whl/`` on the path of child processes."""
    paths = []
    for name in (name for name in NEEDED if importlib.util.find_spec(name) is None):
        wheels = sorted((ROOT / ".whl").glob(f"{name}-*.whl"))
        if not wheels:
            sys.exit(f"{name} is missing: pip install {name}, or put its wheel for this Python into .whl/")
        paths.append(tempfile.mkdtemp(prefix="lazysnap-wheel-"))
        with zipfile.ZipFile(wheels[-1]) as wheel:
            wheel.extractall(paths[-1])
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])


def run_tests(device: str, report: Report) -> bool:
    """tests/gpu, by unittest: nothing has to be installed for it. On a GPU none may be skipped."""
    command = [sys.executable, "-m", "unittest", "discover", "-s", str(ROOT / "tests" / "gpu")]
    how: Line = {"capture_output": True, "text": True, "timeout": DEADLINE_S, "check": False}
    done = subprocess.run(command, env=environment(), cwd=ROOT, **how)
    lines = done.stderr.strip().splitlines()
    report.progress("\n".join(["tests/gpu:", *(lines if done.returncode else lines[-1:])]))
    return done.returncode == 0 and (device == "cpu" or "skipped" not in lines[-1])


def available_bytes() -> int:
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(meminfo["MemAvailable"].split()[0]) * 1024


# ------------------------------------------------------------------------------------------------ in workers


def device(settings: Line) -> Iterator[Line]:
    import torch

    is_cuda = settings["device"] == "cuda"
    found = {"measure": "device", "torch": torch.__version__, "CUDA": str(torch.version.cuda)}
    if is_cuda and not torch.cuda.is_available():
        what = f"torch {torch.__version__} of {sys.executable} sees no CUDA device"
        found["missing"] = f"{what}: name another one, make gpu PYTHON=..."
    else:
        found["device"] = torch.cuda.get_device_name() if is_cuda else f"cpu ({os.cpu_count()} cores)"
    yield {**found, "host memory GiB": available_bytes() / 2**30}


def captures(job: Line) -> Iterator[Line]:
    """As ``savers.run``, with steps that are long enough for a copy to hide in, beside the raw rates."""
    import torch

    from benchmarks import savers
    from benchmarks.training import Training

    training, is_cuda = Training(job["size"], batch=job["batch"], device=job["device"]), job["device"] == "cuda"

    def seconds(work: object) -> float:
        times = []
        for _ in range(6):
            started = time.perf_counter()
            work()
            torch.cuda.synchronize() if is_cuda else None
            times.append(time.perf_counter() - started)
        return statistics.median(times[1:])

    step_s = seconds(lambda: (training.backward(0), training.update()))
    size = training.state_bytes()
    on_device = torch.ones(min(size, 2 << 30), dtype=torch.uint8, device=job["device"])
    on_host = torch.ones(len(on_device), dtype=torch.uint8, pin_memory=is_cuda)
    down = len(on_device) / seconds(lambda: on_host.copy_(on_device, non_blocking=True))
    up = len(on_device) / seconds(lambda: on_device.copy_(on_host, non_blocking=True))
    training.micro_batches = max(1, min(64, round(2 * size / down / step_s)))
    [line] = savers.run(job, training)
    yield {**line, "raw_down": down, "raw_up": up, "micro_batches": training.micro_batches}
