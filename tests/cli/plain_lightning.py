"""A training that knows nothing of lazysnap; as a program it resumes a checkpoint with stock Lightning.

plain_lightning.py CHECKPOINT DIRECTORY
"""

import json
import sys
import warnings
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from support import bits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

STEPS_PER_EPOCH, EPOCHS = 6, 3


class Classifier(pl.LightningModule):
    """With everything that a checkpoint has to bring back: buffers, momentum, a schedule, a state of its own."""

    def __init__(self, width: int, rates: list[float]) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width), nn.Linear(width, 2))
        self.seen = 0

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        x, y = batch
        self.seen += len(x)
        loss = nn.functional.cross_entropy(self.layers(x), y)
        self.log("loss", loss)
        return loss

    def on_save_checkpoint(self, checkpoint: dict) -> None:
        checkpoint["seen"] = self.seen

    def on_load_checkpoint(self, checkpoint: dict) -> None:
        self.seen = checkpoint["seen"]

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.rates[0])
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def data() -> DataLoader:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(STEPS_PER_EPOCH * 8, 4, generator=generator)
    return DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), batch_size=8)


def trainer(directory: str, *callbacks: pl.Callback) -> pl.Trainer:
    checkpoints = ModelCheckpoint(directory, every_n_train_steps=4, save_top_k=-1, filename="stock-{step}")
    return pl.Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        devices=1,
        logger=False,
        callbacks=[checkpoints, *callbacks],
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def digest(module: Classifier) -> str:
    """Every bit of weights, optimizer, rates and the state of its own."""
    trainer = module.trainer
    schedule = trainer.lr_scheduler_configs[0].scheduler.state_dict()
    return bits.digest([module.state_dict(), trainer.optimizers[0].state_dict(), schedule, module.seen])


class Record(pl.Callback):
    """The digest after each step, and when a training starts."""

    def __init__(self) -> None:
        self.steps: dict[int, str] = {}
        self.start: tuple[int, int, str] | None = None

    def on_train_start(self, trainer: pl.Trainer, module: Classifier) -> None:
        self.start = (trainer.global_step, trainer.current_epoch, digest(module))

    def on_train_batch_end(self, trainer: pl.Trainer, module: Classifier, *_: Any) -> None:
        self.steps[trainer.global_step] = digest(module)


def resume(path: str, directory: str) -> dict[str, Any]:
    """Load a checkpoint in both of Lightning's ways, train to the end, and tell what was seen."""
    loaded = Classifier.load_from_checkpoint(path)
    weights = torch.load(path, weights_only=True)["state_dict"]
    record = Record()
    resumed = Classifier(**loaded.hparams)
    fit = trainer(directory, record)
    fit.fit(resumed, data(), ckpt_path=path)
    return {
        "hparams": dict(loaded.hparams),
        "weights_equal": all(torch.equal(value, weights[name]) for name, value in loaded.state_dict().items()),
        "start": record.start,
        "steps": record.steps,
        "end": (fit.global_step, fit.current_epoch),
        "lazysnap": "lazysnap" in sys.modules,
    }


def main() -> None:
    warnings.simplefilter("ignore")
    directory, *paths = sys.argv[1:]
    sys.stdout.write(json.dumps([resume(path, f"{directory}/{index}") for index, path in enumerate(paths)]))


if __name__ == "__main__":
    main()
