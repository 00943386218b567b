"""One method of the stall benchmark in its own process: trains, saves, prints one JSON line."""

import argparse
import dataclasses
import json
import logging
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import limits
import torch
from recorder import Recorder
from savers import PLAIN, FsyncInBackground, Lazysnap, LazysnapDisk, Nothing

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

from gpt import GPT, GPTSize

LIGHTNING = ("lightning-save", "lightning-async")
METHODS = ("none", "torch-save", *LIGHTNING, *(m for m in PLAIN if m not in ("none", "torch-save")))
SIZES = {
    "tiny": GPTSize(layers=2, heads=2, width=64, context=64, vocabulary=256),
    "small": GPTSize(layers=4, heads=8, width=256, context=128, vocabulary=1024),
    # 98 million parameters: with AdamW's two moments 1.18 GB of state.
    "100m": GPTSize(layers=12, heads=12, width=768, context=128, vocabulary=16_384),
}


@dataclasses.dataclass(frozen=True)
class Job:
    """What to measure."""

    method: str
    size: GPTSize
    batch: int
    warm_up: int
    base: int
    snapshots: int
    every: int
    device: torch.device
    directory: Path

    @property
    def steps(self) -> int:
        """Steps in the snapshot phase, the same for all methods."""
        return self.snapshots * self.every

    def network(self) -> GPT:
        torch.manual_seed(0)
        return GPT(dataclasses.replace(self.size, dropout=0.0)).to(self.device)

    def optimizer(self, model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def batch_of(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step)
        shape = (self.batch, self.size.context + 1)
        return torch.randint(self.size.vocabulary, shape, generator=generator).to(self.device)


def run_plain(job: Job) -> dict[str, Any]:
    """Methods that work in any loop."""
    model = job.network()
    optimizer = job.optimizer(model)
    recorder = Recorder(job.warm_up, job.device.type == "cuda")
    saver: Nothing | None = None
    eager = not issubclass(PLAIN[job.method], Lazysnap)  # these save every `every` steps, lazysnap each one
    for step in range(1, job.warm_up + job.base + job.steps + 1):
        ids = job.batch_of(step)
        model.loss(ids[:, :-1], ids[:, 1:]).backward()
        if saver is not None:
            start = time.perf_counter()
            saver.gate()
            recorder.gate(time.perf_counter() - start)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        recorder.step_done()
        done = step - job.warm_up - job.base
        if done == 0:
            recorder.snapshot_phase()
            saver = PLAIN[job.method](model, optimizer, job.directory)
        if saver is not None and done < job.steps and (done % job.every == 0 or not eager):
            start = time.perf_counter()
            saver.wait()
            recorder.waited(time.perf_counter() - start)
            start = time.perf_counter()
            taken = saver.save(step)
            recorder.boundary(time.perf_counter() - start, taken=taken)
    assert saver is not None
    if isinstance(saver, Lazysnap) and not recorder.taken:
        raise RuntimeError(f"no capture in {job.steps} steps: they ended before the slots were ready; take more steps")
    start = time.perf_counter()
    saver.drain()
    recorder.drained(start)
    written = bytes_below(job.directory)
    durable = lazysnap_durable(job.directory) if isinstance(saver, LazysnapDisk) else saver.durable_s
    statistics = plain(saver.engine.statistics()) if isinstance(saver, Lazysnap) else None
    durable_when_idle_s = idle_capture(saver, job) if isinstance(saver, LazysnapDisk) else None
    saver.close()
    return {
        **recorder.report(),
        "durable_s": durable,
        "durable_when_idle_s": durable_when_idle_s,
        "state_bytes": state_bytes(model, optimizer),
        "bytes_written": written,
        "statistics": statistics,
    }


def plain(value: Any) -> Any:
    """Dataclasses and counters as dicts (``dataclasses.asdict`` counts a Counter's pairs anew)."""
    if dataclasses.is_dataclass(value):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    return dict(value) if isinstance(value, dict) else value


def idle_capture(saver: LazysnapDisk, job: Job) -> float:
    """Seconds until a capture is durable while nothing else runs: one more, after training."""
    if not saver.engine.boundary(job.warm_up + job.base + job.steps + 1):
        raise RuntimeError("no slot was free although everything was durable")
    saver.drain()
    return lazysnap_durable(job.directory)[-1]


def bytes_below(directory: Path) -> int:
    """Bytes of all files in a directory."""
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def lazysnap_durable(directory: Path) -> list[float]:
    """Seconds from capture to commit of every snapshot on disk, from the files themselves."""
    durable = []
    for path in sorted(directory.glob("step-*/*.json")):
        body = json.loads(path.read_bytes())["manifest"]
        durable.append((path.stat().st_mtime_ns - body["captured_ns"]) / 1e9)
    return durable


def state_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all tensors of the state, tied weights once."""
    tensors = [*model.parameters(), *model.buffers()]
    for state in optimizer.state.values():
        tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
    return sum({t.data_ptr(): t.nbytes for t in tensors}.values())


def run_lightning(job: Job) -> dict[str, Any]:
    """Methods that need Lightning's Trainer."""
    import lightning as L
    from lightning.pytorch.plugins import AsyncCheckpointIO, TorchCheckpointIO

    recorder = Recorder(job.warm_up, job.device.type == "cuda")
    background = FsyncInBackground()
    asked: dict[str, float] = {}

    class TimedIO(TorchCheckpointIO):
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            super().save_checkpoint(checkpoint, path, storage_options)
            background.submit(Path(path), asked[str(path)])

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = job.network()

        def training_step(self, ids: torch.Tensor, _: int) -> torch.Tensor:
            return self.network.loss(ids[:, :-1], ids[:, 1:])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return job.optimizer(self)

    class Save(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            recorder.step_done()
            done = trainer.global_step - job.warm_up - job.base
            if done == 0:
                recorder.snapshot_phase()
            if 0 <= done < job.steps and done % job.every == 0:
                start = time.perf_counter()
                path = str(job.directory / f"step-{trainer.global_step}.ckpt")
                asked[path] = start
                trainer.save_checkpoint(path)
                recorder.boundary(time.perf_counter() - start)
            if done == job.steps:
                asked["end"] = time.perf_counter()

    asynchronous = job.method == "lightning-async"
    trainer = L.Trainer(
        max_steps=job.warm_up + job.base + job.steps,
        accelerator="gpu" if job.device.type == "cuda" else "cpu",
        devices=1,
        callbacks=[Save()],
        plugins=[AsyncCheckpointIO(TimedIO()) if asynchronous else TimedIO()],
        default_root_dir=job.directory,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    batches = [job.batch_of(step) for step in range(job.warm_up + job.base + job.steps)]
    trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))  # its teardown drains the thread
    background.drain()
    recorder.drained(asked["end"])
    optimizer = trainer.optimizers[0]
    return {
        **recorder.report(),
        "durable_s": background.durable_s,
        "state_bytes": state_bytes(module.network, optimizer),
        "bytes_written": bytes_below(job.directory),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("method", choices=[*METHODS, "limits"])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--params", choices=SIZES, required=True)
    for name in ("batch", "threads", "warm-up", "base", "snapshots", "every"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--device", required=True)
    args = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.simplefilter("ignore")
    torch.set_num_threads(args.threads)
    if args.method == "limits":
        print(json.dumps(limits.measure(args.directory, large=args.params == "100m")), flush=True)
        return
    LazysnapDisk.every = args.every
    job = Job(
        args.method,
        SIZES[args.params],
        args.batch,
        args.warm_up,
        args.base,
        args.snapshots,
        args.every,
        torch.device(args.device),
        args.directory,
    )
    result = run_lightning(job) if args.method in LIGHTNING else run_plain(job)
    print(json.dumps({"method": args.method, **result}), flush=True)


if __name__ == "__main__":
    main()
