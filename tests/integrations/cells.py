"""A notebook whose cell is run again after an error, in one process: ``cells.py DIRECTORY KIND``.

The cell makes everything anew and trains. Its first two runs fail in the middle, and what they made stays alive, as the
variables of a notebook do. It prints the steps from which each run of the cell went on, what an undisturbed training
ends with, what the last run ends with, and the error of using the engine that the first run made.
"""

import contextlib
import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

warnings.simplefilter("ignore")

import torch  # noqa: E402
from torch.utils.data import DataLoader, TensorDataset  # noqa: E402

from lazysnap.errors import ConfigError  # noqa: E402

STEPS = 12
FAILS_AT = (4, 9, 0)
"""The step before which each run of the cell fails; 0: it does not."""


class Failure(Exception):
    """An error in the program of the user."""


class Steps:
    """Counts the steps of one run of the cell."""

    def __init__(self, fails_at: int) -> None:
        self.fails_at = fails_at
        self.first: int | None = None

    def begin(self, step: int) -> None:
        """Step ``step`` begins."""
        if self.first is None:
            self.first = step
        if step == self.fails_at:
            raise Failure


def network() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))


def numbers() -> TensorDataset:
    return TensorDataset(torch.randn(2 * STEPS, 4, generator=torch.Generator().manual_seed(1)))


def loop(directory: str | None, steps: Steps, made: list[Any]) -> torch.nn.Module:
    from lazysnap import SnapshotEngine

    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    position = {"step": 0}
    if directory is not None:
        engine = SnapshotEngine(directory, {"model": model, "optimizer": optimizer, "position": position})
        made.append(engine)
        engine.restore("latest")
    while position["step"] < STEPS:
        steps.begin(position["step"] + 1)
        model(torch.randn(2, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        position["step"] += 1
        if directory is not None:
            engine.boundary()
    if directory is not None:
        assert engine.close()
    return model


def accelerate(directory: str | None, steps: Steps, made: list[Any]) -> torch.nn.Module:
    from accelerate import Accelerator

    from lazysnap import LazyAccelerator

    accelerator = Accelerator(cpu=True) if directory is None else LazyAccelerator(project_dir=directory, cpu=True)
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    loader = DataLoader(numbers(), 2, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step = 0
    if isinstance(accelerator, LazyAccelerator):
        made.append(accelerator)
        snapshot = accelerator.load_state("latest")
        step = 0 if snapshot is None else snapshot.step
    for (batch,) in loader:
        step += 1
        steps.begin(step)
        accelerator.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    accelerator.end_training()
    return accelerator.unwrap_model(model)


def transformers(directory: str | None, steps: Steps, made: list[Any]) -> torch.nn.Module:
    from transformers import Trainer, TrainingArguments

    from lazysnap import attach

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            return {"loss": self.net(x).square().mean()}

    class Fails(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            steps.begin(self.state.global_step + 1)
            return super().training_step(*args, **kwargs)

    arguments = TrainingArguments(
        directory or sys.argv[1] + "-undisturbed",
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        per_device_train_batch_size=2,
        num_train_epochs=1,
        disable_tqdm=True,
    )
    rows = [{"x": row} for (row,) in numbers()]
    trainer = Fails(Net(), arguments, train_dataset=rows)
    made.append(trainer)
    if directory is not None:
        attach(trainer)
    trainer.train(resume_from_checkpoint=None if directory is None else "latest")
    return trainer.model


def lightning(directory: str | None, steps: Steps, made: list[Any]) -> torch.nn.Module:
    import lightning.pytorch as pl

    from lazysnap import LazySnapshotCallback

    class Net(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
            steps.begin(self.trainer.global_step + 1)
            return self.net(batch[0]).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

    module = Net()
    trainer = pl.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory or sys.argv[1] + "-undisturbed",
        callbacks=[] if directory is None else [LazySnapshotCallback()],
    )
    made.append(trainer)
    loader = DataLoader(numbers(), 2, shuffle=True)
    trainer.fit(module, loader, ckpt_path=None if directory is None else "latest")
    return module


def bits(model: torch.nn.Module) -> list[str]:
    """All weights, exactly."""
    return [weight.double().item().hex() for value in model.state_dict().values() for weight in value.flatten()]


def main(directory: str, kind: str) -> None:
    cells: dict[str, Callable[[str | None, Steps, list[Any]], torch.nn.Module]] = {
        "loop": loop,
        "accelerate": accelerate,
        "transformers": transformers,
        "lightning": lightning,
    }
    cell = cells[kind]
    made: list[Any] = []
    begun = []
    undisturbed = bits(cell(None, Steps(0), []))
    for fails_at in FAILS_AT:
        steps = Steps(fails_at)
        with contextlib.suppress(Failure):
            resumed = bits(cell(directory, steps, made))
        begun.append(steps.first)
    error = ""
    if kind == "loop":
        try:
            made[0].boundary()
        except ConfigError as raised:
            error = f"{type(raised).__name__}: {raised}"
    print(json.dumps({"begun": begun, "undisturbed": undisturbed, "resumed": resumed, "error": error}))


if __name__ == "__main__":
    main(*sys.argv[1:])
