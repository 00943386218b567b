"""What lazysnap does on a GPU: its tests there, what a capture costs, how long a restore takes. One report.

    make gpu PYTHON=python3
    python benchmarks/gpu.py --sizes-gb 1 5

Needs a Python with torch and a CUDA device, and nothing else: no set-up and no network. Where xxhash is not installed,
its wheel may lie in ``.whl/``. Each size trains a transformer with AdamW in a process of its own, with and without a
capture at every step, and is killed; another process resumes it from memory and from disk. Method: docs/benchmarks.md.
"""

import argparse
import importlib.util
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DEADLINE_S = 300.0
STEPS = 6
"""Steps of one phase; phases without and with captures take turns."""
PHASES = 2
MOST_ON_DISK_GB = 5.0
BYTES_PER_PARAMETER = 12  # the weight and AdamW's two moments, in fp32
TARGETS = {"blocked_ms": 2.0, "of_raw": 0.9, "slow_down": 0.01}
"""At most so many ms blocked per capture, at least so much of the raw rate, at most so much longer a step."""


# ------------------------------------------------------------------------------------------- in the training process


def network(size_gb: float, device: str) -> tuple[Any, Any]:
    """A transformer whose state has about that size, and its optimizer."""
    import torch

    sys.path.insert(0, str(ROOT / "examples"))
    from gpt import GPT, GPTSize

    parameters = size_gb * 1e9 / BYTES_PER_PARAMETER
    width = 2048 if size_gb > 3 else 1024 if size_gb > 0.5 else 128
    layers = max(1, round(parameters / (12 * width * width)))
    torch.manual_seed(0)
    with torch.device(device):
        model = GPT(GPTSize(layers, heads=width // 64, width=width, context=512, vocabulary=512, dropout=0.0))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)


def synchronize(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def raw_rates(device: str, size: int) -> tuple[float, float]:
    """Bytes per second from the device to page-locked host memory, and back; medians of five."""
    import torch

    on_device = torch.ones(size, dtype=torch.uint8, device=device)
    on_host = torch.ones(size, dtype=torch.uint8, pin_memory=device == "cuda")

    def rate(target: torch.Tensor, source: torch.Tensor) -> float:
        seconds = []
        for _ in range(6):
            synchronize(device)
            start = time.perf_counter()
            target.copy_(source, non_blocking=True)
            synchronize(device)
            seconds.append(time.perf_counter() - start)
        return size / statistics.median(seconds[1:])

    return rate(on_host, on_device), rate(on_device, on_host)


class Training:
    """Steps of a training; ``micro_batches`` make a step long enough that a copy can hide in it."""

    def __init__(self, size_gb: float, device: str) -> None:
        self.model, self.optimizer = network(size_gb, device)
        self.device, self.micro_batches, self.step = device, 1, 0

    def train(self) -> None:
        import torch

        self.step += 1
        for _ in range(self.micro_batches):
            ids = torch.randint(512, (8 if self.device == "cuda" else 1, 257), device=self.device)
            with torch.autocast(self.device, dtype=torch.bfloat16):
                loss = self.model.loss(ids[:, :-1], ids[:, 1:])
            loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def seconds_per_step(self, steps: int, after: Callable[[int], None] = lambda step: None) -> float:
        """The mean of some steps; the device is waited for only at their end."""
        synchronize(self.device)
        start = time.perf_counter()
        for _ in range(steps):
            self.train()
            after(self.step)
        synchronize(self.device)
        return (time.perf_counter() - start) / steps

    def state_bytes(self) -> int:
        held = [value for state in self.optimizer.state.values() for value in state.values()]
        return sum(tensor.nbytes for tensor in (*self.model.parameters(), *held))

    def fingerprint(self) -> list[float]:
        """Equal for equal states: a sum over each tensor, weighted so that places count."""
        import torch

        found = []
        for parameter in self.model.parameters():
            for tensor in (parameter, *self.optimizer.state[parameter].values()):
                flat = tensor.detach().flatten().double()
                found.append(float((flat * torch.arange(1, len(flat) + 1, device=flat.device)).sum()))
        return found


def engine_of(job: str, training: Training, directory: str | None = None) -> Any:
    from lazysnap import MemoryLevel, PersistentLevel, SnapshotConfig, SnapshotEngine

    levels = () if directory is None else (PersistentLevel(directory, every_n_steps=1, keep_last=1),)
    memory = MemoryLevel(linger_s=60)
    config = SnapshotConfig(job_id=job, memory=memory, levels=levels, drain_timeout_s=DEADLINE_S)
    return SnapshotEngine(config, {"model": training.model, "optimizer": training.optimizer})


def ready(engine: Any) -> float:
    start = time.perf_counter()
    if not engine.wait_ready(DEADLINE_S):
        raise RuntimeError(f"no slots after {DEADLINE_S:g} s: {engine.statistics()}")
    return time.perf_counter() - start


def measure_captures(args: argparse.Namespace) -> dict[str, Any]:
    """Train with and without captures; leaves the last capture in memory, and one on disk where that is asked for."""
    training = Training(args.size_gb, args.device)
    training.train()
    size = training.state_bytes()
    down, up = raw_rates(args.device, min(size, 2 << 30))
    step_s = training.seconds_per_step(3)
    training.micro_batches = max(1, min(64, round(2 * size / down / step_s)))
    found: dict[str, Any] = {
        "state_bytes": size,
        "raw_down": down,
        "raw_up": up,
        "tensors": len(training.fingerprint()),
    }
    if args.directory is not None:
        engine = engine_of(f"{args.job}-disk", training, args.directory)
        ready(engine)
        engine.boundary(training.step)
        start = time.perf_counter()
        if not engine.close(drain=True):
            raise RuntimeError("the snapshot did not become durable")
        found["durable_s"] = time.perf_counter() - start
        found["on_disk"] = training.fingerprint()

    engine = engine_of(args.job, training)
    found["ready_s"] = ready(engine)
    boundary_s: list[float] = []
    missed = 0

    def capture(step: int) -> None:
        nonlocal missed
        start = time.perf_counter()
        missed += not engine.boundary(step)
        boundary_s.append(time.perf_counter() - start)

    training.seconds_per_step(2, capture)  # plans, and copies for the first time
    first_s = boundary_s[0]
    boundary_s.clear()
    gates, gate_s = engine.statistics().gate.count, engine.statistics().gate.total_s
    base, with_captures = [], []
    for _ in range(PHASES):
        base.append(training.seconds_per_step(STEPS))
        with_captures.append(training.seconds_per_step(STEPS, capture))
    gate = engine.statistics().gate
    rates = []
    for _ in range(3):
        training.train()
        engine.gate()
        synchronize(args.device)
        start = time.perf_counter()
        capture(training.step)
        if not engine.wait(training.step, until="captured", timeout_s=DEADLINE_S):
            raise RuntimeError(f"the capture did not become whole: {engine.statistics()}")
        rates.append(size / (time.perf_counter() - start))
    return found | {
        "micro_batches": training.micro_batches,
        "missed": missed,
        "torn": engine.statistics().torn,
        "base_step_s": statistics.median(base),
        "step_s": statistics.median(with_captures),
        "first_boundary_s": first_s,
        "boundary_s": statistics.median(boundary_s),
        "longest_boundary_s": max(boundary_s),
        "gate_s": (gate.total_s - gate_s) / max(1, gate.count - gates),
        "capture_rate": statistics.median(rates),
        "in_memory": training.fingerprint(),
    }


def measure_restore(args: argparse.Namespace) -> dict[str, Any]:
    """Load the newest snapshot into a new model."""
    training = Training(args.size_gb, args.device)
    engine = engine_of(args.job, training, args.directory)
    synchronize(args.device)
    start = time.perf_counter()
    snapshot = engine.restore("latest")
    synchronize(args.device)
    seconds = time.perf_counter() - start
    if snapshot is None:
        raise RuntimeError("no snapshot was found")
    engine.close(drain=False)
    return {"restore_s": seconds, "level": snapshot.level, "state": training.fingerprint()}


def in_child(args: argparse.Namespace) -> None:
    result = measure_captures(args) if args.act == "capture" else measure_restore(args)
    print(json.dumps({"result": result}), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)  # as a crash: memory stays


# ------------------------------------------------------------------------------------------- the report


def child(act: str, size_gb: float, device: str, job: str, directory: str | None) -> dict[str, Any]:
    """Run one measurement in a process of its own. Raises: RuntimeError, with the end of what it printed."""
    command = [sys.executable, __file__, "--act", act, "--size-gb", str(size_gb), "--device", device, "--job", job]
    command += ["--directory", directory] if directory is not None else []
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"result"')]
    if not lines:
        raise RuntimeError(f"{act} of {size_gb:g} GB failed:\n" + "\n".join(done.stderr.strip().splitlines()[-12:]))
    result: dict[str, Any] = json.loads(lines[-1])["result"]
    return result


def run_size(size_gb: float, device: str) -> dict[str, Any]:
    job = f"gpu-{uuid.uuid4().hex}"
    with tempfile.TemporaryDirectory(prefix="lazysnap-gpu-") as directory:
        fits = size_gb <= MOST_ON_DISK_GB and shutil.disk_usage(directory).free > 2 * size_gb * 1e9
        result = child("capture", size_gb, device, job, directory if fits else None)
        memory = child("restore", size_gb, device, job, None)
        exact = memory["state"] == result["in_memory"]
        result |= {"size_gb": size_gb, "from_memory_s": memory["restore_s"], "from_disk_s": None}
        if fits:
            disk = child("restore", size_gb, device, f"{job}-again", directory)
            exact = exact and disk["state"] == result["on_disk"]
            result["from_disk_s"] = disk["restore_s"]
    for name in ("in_memory", "on_disk"):
        result.pop(name, None)
    return result | {"exact": exact}


def report_of(result: dict[str, Any]) -> list[str]:
    """The lines about one size."""
    size, of_raw = result["state_bytes"], result["capture_rate"] / result["raw_down"]
    slower = result["step_s"] / result["base_step_s"] - 1
    blocked_ms = 1e3 * (result["boundary_s"] + result["gate_s"])
    disk = "" if result["from_disk_s"] is None else f", from disk {result['from_disk_s']:.2f} s"

    def judged(is_met: bool) -> str:
        return "met" if is_met else "NOT MET"

    down, rate = result["raw_down"] / 1e9, result["capture_rate"] / 1e9
    boundary, longest, first, gate = (
        1e3 * result[name] for name in ("boundary_s", "longest_boundary_s", "first_boundary_s", "gate_s")
    )
    base_ms, step_ms = 1e3 * result["base_step_s"], 1e3 * result["step_s"]
    from_memory = result["from_memory_s"]
    return [
        f"{size / 1e9:.2f} GB in {result['tensors']} tensors, micro-batches per step: {result['micro_batches']}",
        f"  device to host  raw {down:.1f} GB/s, a capture {rate:.1f} GB/s: {of_raw:.0%} of raw "
        f"(>= 90 %: {judged(of_raw >= TARGETS['of_raw'])})",
        f"  blocked         {blocked_ms:.2f} ms per capture (<= 2 ms: {judged(blocked_ms <= TARGETS['blocked_ms'])}): "
        f"boundary {boundary:.2f} ms (longest {longest:.2f}, first {first:.1f}), gate {gate:.2f} ms",
        f"  step            {base_ms:.1f} ms without, {step_ms:.1f} ms with a capture at each: {slower:+.1%} "
        f"(<= 1 %: {judged(slower <= TARGETS['slow_down'])}); {result['missed']} missed, {result['torn']} torn",
        f"  slots ready     after {result['ready_s']:.1f} s, in the background",
        f"  restore         from memory {from_memory:.2f} s ({size / from_memory / 1e9:.1f} GB/s; raw host to device "
        f"{result['raw_up'] / 1e9:.1f} GB/s){disk}; {'equal' if result['exact'] else 'NOT EQUAL'} to what was captured",
    ]


def find_packages() -> None:
    """Put the repository, and a wheel of xxhash that lies in ``.whl/``, on the path, also of child processes."""
    paths = [str(ROOT)]
    if importlib.util.find_spec("xxhash") is None:
        wheels = sorted((ROOT / ".whl").glob("xxhash-*.whl"))
        if not wheels:
            sys.exit("xxhash is missing: pip install xxhash, or put its wheel for this Python into .whl/")
        unpacked = tempfile.mkdtemp(prefix="lazysnap-wheel-")
        with zipfile.ZipFile(wheels[-1]) as wheel:
            wheel.extractall(unpacked)
        paths.append(unpacked)
    sys.path[:0] = paths
    os.environ["PYTHONPATH"] = os.pathsep.join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])


def run_tests(device: str) -> bool:
    """tests/gpu, by unittest: nothing has to be installed for it. On a GPU none may be skipped."""
    command = [sys.executable, "-m", "unittest", "discover", "-s", str(ROOT / "tests" / "gpu")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False, cwd=ROOT)
    lines = done.stderr.strip().splitlines()
    for line in lines if done.returncode else lines[-1:]:
        print(f"  {line}")
    return done.returncode == 0 and (device == "cpu" or "skipped" not in lines[-1])


def available_bytes() -> int:
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(meminfo["MemAvailable"].split()[0]) * 1024


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes-gb", type=float, nargs="+", default=[1.0, 5.0, 20.0], help="of the training state")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try this program out")
    parser.add_argument("--no-tests", action="store_true", help="measure only")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu"), help="for report.txt and figures.jsonl")
    for name in ("--act", "--size-gb", "--job", "--directory"):
        parser.add_argument(name, type=float if name == "--size-gb" else str, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parse()
    if args.act is not None:
        in_child(args)
    find_packages()
    import torch

    import lazysnap

    if args.device == "cuda" and not torch.cuda.is_available():
        sys.exit(
            f"torch {torch.__version__} of {sys.executable} sees no CUDA device: name another one, make gpu PYTHON=..."
        )
    args.out.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []

    def say(text: str) -> None:
        print(text, flush=True)
        lines.append(text)

    name = torch.cuda.get_device_name() if args.device == "cuda" else f"cpu ({os.cpu_count()} cores)"
    say(f"device   {name}, CUDA {torch.version.cuda}, {available_bytes() / 2**30:.0f} GiB of host memory available")
    say(
        f"versions lazysnap {lazysnap.__version__}, torch {torch.__version__}, Python {platform.python_version()}, "
        f"Linux {platform.release()}"
    )
    failed = []
    if not args.no_tests:
        passed = run_tests(args.device)
        say(f"tests    tests/gpu {'passed' if passed else 'FAILED'}")
        failed += [] if passed else ["tests/gpu"]
    with (args.out / "figures.jsonl").open("w") as file:
        for size_gb in args.sizes_gb:
            # Two slots, or three with a level, and what training and reading need beside.
            if (needed := 3.5 * size_gb * 1e9) > available_bytes():
                say(f"{size_gb:g} GB left out: it needs {needed / 2**30:.0f} GiB of host memory")
                continue
            try:
                result = run_size(size_gb, args.device)
            except (RuntimeError, subprocess.TimeoutExpired) as error:
                say(f"{size_gb:g} GB: {error}")
                failed.append(f"{size_gb:g} GB")
                continue
            failed += [] if result["exact"] else [f"{size_gb:g} GB is not equal"]
            file.write(json.dumps(result) + "\n")
            for line in report_of(result):
                say(line)
    (args.out / "report.txt").write_text("\n".join(lines) + "\n")
    if failed:
        sys.exit("failed: " + ", ".join(failed))


if __name__ == "__main__":
    main()
