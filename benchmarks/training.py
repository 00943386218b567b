"""The training that is measured: a transformer with AdamW, whole or sharded by FSDP2. Imported by workers only."""

import sys
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.frame import DEADLINE_S, ROOT

sys.path.append(str(ROOT / "examples"))

from gpt import GPT, GPTSize


class Net(torch.nn.Module):
    """A GPT whose call is its loss, so that wrappers find their way."""

    def __init__(self, size: GPTSize) -> None:
        super().__init__()
        self.gpt = GPT(size)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.gpt.loss(ids[:, :-1], ids[:, 1:])


class Training:
    """Model, optimizer, batches."""

    def __init__(self, size: Sequence[int], *, batch: int = 1, device: str = "cpu", ranks: int = 1) -> None:
        self.size, self.batch, self.device = GPTSize(*size, dropout=0.0), batch, device
        self.micro_batches = 1
        torch.manual_seed(0)
        with torch.device(device):
            self.model = Net(self.size)
        if ranks > 1:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh("cpu", (ranks,))
            for block in self.model.gpt.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=ranks == 1)

    def batch_of(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step)
        shape = (self.batch, self.size.context + 1)
        return torch.randint(self.size.vocabulary, shape, generator=generator).to(self.device)

    def backward(self, step: int) -> None:
        for number in range(self.micro_batches):
            with torch.autocast(self.device, dtype=torch.bfloat16, enabled=self.device != "cpu"):
                loss = self.model(self.batch_of(100 * step + number))
            loss.backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> list[torch.Tensor]:
        """Of model and optimizer; of a sharded one this rank's parts."""
        held = [value for state in self.optimizer.state.values() for value in state.values()]
        found = [one for one in (*self.model.parameters(), *held) if isinstance(one, torch.Tensor)]
        return [one.to_local() if hasattr(one, "to_local") else one for one in found]

    def state_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors())

    def fingerprint(self) -> list[float]:
        """Equal for equal states: a sum over each tensor, weighted so that places count."""
        flat = (tensor.detach().flatten().double() for tensor in self.tensors())
        return [float((one * torch.arange(1, len(one) + 1, device=one.device)).sum()) for one in flat]

    def module(self, lightning: Any) -> Any:
        """For a trainer of Lightning."""
        outer = self

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.net = outer.model

            def training_step(self, ids: torch.Tensor, _: int) -> torch.Tensor:
                return self.net(ids)

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return outer.optimizer

        return Module()

    def trainer(self, lightning: Any, **how: Any) -> Any:
        quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        accelerator = "gpu" if self.device == "cuda" else "cpu"
        return lightning.Trainer(accelerator=accelerator, devices=1, **dict.fromkeys(quiet, False), **how)

    def objects(self) -> dict[str, Any]:
        """What is captured."""
        return {"model": self.model, "optimizer": self.optimizer}


def ready(engine: Any) -> None:
    """Wait until captures need not wait for memory. Nothing to do for an engine that has no such call."""
    if hasattr(engine, "wait_ready") and not engine.wait_ready(DEADLINE_S):
        raise RuntimeError(f"the keeper made no slots: {engine.statistics()}")


def capture(engine: Any, step: int) -> None:
    """One capture, until it is whole."""
    if not engine.boundary(step) or not engine.wait(step, until="captured", timeout_s=DEADLINE_S):
        raise RuntimeError(f"step {step} was not captured: {engine.statistics()}")
