"""The training that is measured, and what workers do with lazysnap. Imported by workers only."""

import os
import sys
import time
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.workers import DEADLINE_S, HERE, Line

sys.path.append(str(HERE.parent / "examples"))

from gpt import GPT, GPTSize


class Net(torch.nn.Module):
    """A GPT whose call is its loss, so that wrappers find their way."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.gpt = GPT(size)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.gpt.loss(ids[:, :-1], ids[:, 1:])


class Trained:
    """A model and its optimizer."""

    model: Any
    optimizer: torch.optim.Optimizer

    def tensors(self) -> list[torch.Tensor]:
        """Of model and optimizer; of a sharded one this rank's parts."""
        values: list[Any] = list(self.model.parameters())
        for state in self.optimizer.state.values():
            values += state.values()
        tensors = []
        for value in values:
            if hasattr(value, "to_local"):
                value = value.to_local()
            if isinstance(value, torch.Tensor):
                tensors.append(value)
        return tensors

    def state_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def fingerprint(self) -> list[float]:
        """Equal for equal states: a sum over each tensor, weighted so that places count."""
        sums = []
        for tensor in self.tensors():
            flat = tensor.detach().flatten().double()
            weights = torch.arange(1, len(flat) + 1, device=flat.device)
            sums.append(float((flat * weights).sum()))
        return sums

    def objects(self) -> dict[str, Any]:
        """What is captured."""
        return {"model": self.model, "optimizer": self.optimizer}

    def step_of_ones(self) -> None:
        """A step that costs little. The first one gives the optimizer its state."""
        for parameter in self.model.parameters():
            parameter.grad = torch.ones_like(parameter)
        self.update()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class Training(Trained):
    """A transformer with AdamW, sharded by FSDP2 if there are several ranks, and its batches."""

    def __init__(self, job: Line) -> None:
        """Of a job ``size``, ``device``, and if given ``batch`` and ``ranks``."""
        self.size = GPTSize(*job["size"], dropout=0.0)
        self.batch = job.get("batch", 1)
        self.device = job["device"]
        self.micro_batches = 1
        is_sharded = job.get("ranks", 1) > 1
        torch.manual_seed(0)
        with torch.device(self.device):
            self.model = Net(self.size)
        if is_sharded:
            from torch.distributed.fsdp import fully_shard

            for module in (*self.model.gpt.blocks, self.model):
                fully_shard(module)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=not is_sharded)

    def batch_of(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step)
        shape = (self.batch, self.size.context + 1)
        return torch.randint(self.size.vocabulary, shape, generator=generator).to(self.device)

    def backward(self, step: int) -> None:
        for number in range(self.micro_batches):
            with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.device != "cpu"):
                loss = self.model(self.batch_of(100 * step + number))
            loss.backward()

    def batches(self, count: int) -> Any:
        return torch.utils.data.DataLoader([self.batch_of(n) for n in range(count)], batch_size=None)

    def trainer(self, **settings: Any) -> Any:
        """Of Lightning."""
        import lightning as L

        quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        return L.Trainer(accelerator="cpu", devices=1, **dict.fromkeys(quiet, False), **settings)

    def fit(self, trainer: Any, count: int, **which: Any) -> None:
        import lightning as L

        outer = self

        class Module(L.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = outer.model

            def training_step(self, ids: torch.Tensor, _: int) -> torch.Tensor:
                return self.net(ids)

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return outer.optimizer

        trainer.fit(Module(), self.batches(count), **which)


def layers(megabytes: float) -> torch.nn.Sequential:
    """A model whose weights and two moments take so much, where steps are to cost little."""
    width = max(8, int((megabytes * 1e6 / 12 / 8) ** 0.5))
    return torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(8)))


def config(job: Line, **level: Any) -> Any:
    """Snapshots in memory (or in files in its place), and at the level of the job if it has another one.

    A restart loads the newest capture: without the proof, which would train one step again.
    """
    from lazysnap import MemoryLevel, PersistentLevel, SnapshotConfig

    settings = {"every_n_steps": 1, "storage_options": job["options"], **level}
    levels = []
    if job["level"] not in ("memory", "files"):
        levels.append(PersistentLevel(job["url"], **settings))
    name = job.get("job_id") or f"benchmark-{os.getpid()}"
    memory = MemoryLevel(linger_s=300.0)
    if job["level"] == "files":
        memory = replace(memory, max_bytes=1, spill_dir=job["directory"])
    return SnapshotConfig(levels=tuple(levels), memory=memory, job_id=name, verify_restart=False)


class Layers(Trained):
    """A model of so many megabytes of state, whose gradients are ones."""

    def __init__(self, megabytes: float) -> None:
        self.model = layers(megabytes)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, foreach=False)


def engine_of(job: Line, state: Line, **settings: Any) -> Any:
    from lazysnap import SnapshotEngine

    return SnapshotEngine(config(job, **settings), state)


def die() -> None:
    """As a crash: a keeper that is there stays. Ranks that have a process group go together."""
    if dist.is_initialized():
        dist.barrier()
    sys.stdout.flush()
    os._exit(0)


def ready(engine: Any) -> None:
    """Wait until captures need not wait for memory."""
    if not engine._wait_ready(DEADLINE_S):
        raise RuntimeError(f"the keeper made no slots: {engine.statistics()}")


def capture(engine: Any, step: int, until: str = "captured") -> None:
    """One capture, until it is whole, or durable. On a busy machine it may wait until a slot is free."""
    deadline = time.monotonic() + DEADLINE_S
    began = engine.boundary(step)
    while not began and time.monotonic() < deadline:
        time.sleep(0.001)
        began = engine.boundary(step)
    if not began or not engine.wait(step, until=until, timeout_s=DEADLINE_S):
        raise RuntimeError(f"step {step} was not {until}: {engine.statistics()}")
