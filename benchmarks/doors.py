"""What ``save_state()`` of Accelerate and a boundary of Lightning hold training up for, with the same state.

    python benchmarks/stall.py --door accelerate --params 100m

Each method runs in a process of its own, one after the other: stock ``Accelerator.save_state(directory)``,
``LazyAccelerator.save_state()``, and ``LazySnapshotCallback``. Blocked: the call itself, and what the next optimizer
step waits for the copy. Prints a JSON line per method and a table.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader
from worker import SIZES, Job, state_bytes

METHODS = ("accelerate-stock", "accelerate", "lightning")


class Net(torch.nn.Module):
    """The model as a module whose call is its loss, so that wrappers find their way."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.network = job.network()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.network.loss(ids[:, :-1], ids[:, 1:])


def run_accelerate(job: Job, *, is_lazy: bool) -> dict[str, Any]:
    from accelerate import Accelerator

    from lazysnap import LazyAccelerator

    made = {"cpu": job.device.type == "cpu", "project_dir": str(job.directory)}
    accelerator = LazyAccelerator(**made) if is_lazy else Accelerator(**made)
    model = Net(job)
    batches = [job.batch_of(step) for step in range(job.warm_up + job.steps)]
    prepared = accelerator.prepare(model, job.optimizer(model), DataLoader(batches, batch_size=None))
    model, optimizer, loader = prepared
    calls = []
    for step, ids in enumerate(loader):
        accelerator.backward(model(ids))
        optimizer.step()
        optimizer.zero_grad()
        if step >= job.warm_up and (is_lazy or (step - job.warm_up) % job.every == 0):
            started = time.perf_counter()
            accelerator.save_state(*([] if is_lazy else [str(job.directory / f"checkpoint-{step}")]))
            calls.append(time.perf_counter() - started)
    counted = accelerator.statistics() if is_lazy else None
    result = report(calls, counted, state_bytes(model, optimizer))
    accelerator.end_training()
    return result


def run_lightning(job: Job) -> dict[str, Any]:
    import lightning as L

    from lazysnap import LazySnapshotCallback

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inside = Net(job)

        def training_step(self, ids: torch.Tensor, _: int) -> torch.Tensor:
            return self.inside(ids)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return job.optimizer(self)

    callback, module = LazySnapshotCallback(), Module()
    trainer = L.Trainer(
        max_steps=job.warm_up + job.steps,
        accelerator="gpu" if job.device.type == "cuda" else "cpu",
        devices=1,
        callbacks=[callback],
        default_root_dir=job.directory,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batches = [job.batch_of(step) for step in range(job.warm_up + job.steps)]
    trainer.fit(module, DataLoader(batches, batch_size=None))
    counted = callback.statistics()
    return report([], counted, state_bytes(module, trainer.optimizers[0]))


def report(calls: list[float], counted: Any, size: int) -> dict[str, Any]:
    """``calls``: seconds of each call as the script sees it; ``counted``: the engine's own statistics."""
    result: dict[str, Any] = {"state_bytes": size, "calls": len(calls)}
    if calls:
        result |= {"call_ms": statistics.median(calls) * 1e3, "longest_call_ms": max(calls) * 1e3}
    if counted is not None:
        boundary, gate = counted.boundary, counted.gate
        result |= {
            "captures": counted.whole,
            "boundary_ms": boundary.total_s / max(boundary.count, 1) * 1e3,
            "gate_ms": gate.total_s / max(gate.count, 1) * 1e3,
        }
    return result


def measure_all(args: argparse.Namespace) -> None:
    """Run the methods one after the other and show them beside each other."""
    table = Table(title=f"Blocked per snapshot, {args.params}, {args.threads} threads")
    for name in (
        "method",
        "state MB",
        "snapshots",
        "call ms (median)",
        "longest",
        "boundary ms (mean)",
        "gate ms (mean)",
    ):
        table.add_column(name, justify="left" if name == "method" else "right")
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "doors.jsonl").open("w") as file:
        for method in METHODS:
            with tempfile.TemporaryDirectory(prefix="doors-", dir=args.directory) as directory:
                command = [sys.executable, __file__, method, directory, "--params", args.params]
                for name in ("batch", "threads", "warm_up", "snapshots", "every", "device"):
                    command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
                done = subprocess.run(command, capture_output=True, text=True, timeout=args.timeout_s)
            lines = [line for line in done.stdout.splitlines() if line.startswith('{"method"')]
            if done.returncode or not lines:
                raise RuntimeError(f"{method} failed (exit code {done.returncode}): {done.stderr[-2000:]}")
            print(lines[-1], flush=True)
            file.write(lines[-1] + "\n")
            result = json.loads(lines[-1])
            figures = ("call_ms", "longest_call_ms", "boundary_ms", "gate_ms")
            count = result.get("captures", result["calls"])
            shown = [f"{result[name]:.2f}" if name in result else "" for name in figures]
            table.add_row(method, f"{result['state_bytes'] / 1e6:.0f}", str(count), *shown)
    Console(width=140).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("method", choices=METHODS)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--params", choices=SIZES, required=True)
    for name in ("batch", "threads", "warm-up", "snapshots", "every"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--device", required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    size, device = SIZES[args.params], torch.device(args.device)
    job = Job(args.method, size, args.batch, args.warm_up, 0, args.snapshots, args.every, device, args.directory)
    is_lightning = args.method == "lightning"
    result = run_lightning(job) if is_lightning else run_accelerate(job, is_lazy=args.method == "accelerate")
    print(json.dumps({"method": args.method, **result}), flush=True)


if __name__ == "__main__":
    main()
