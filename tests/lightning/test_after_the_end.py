"""A fit after the end of a fit: extended, it is one longer fit; with nothing left, it ends as the first did."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from torch.utils.data import DataLoader

from lazysnap import LazySnapshotCallback


class Counting(pl.LightningModule):
    """Notes its batches."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 1)
        self.seen = []

    def training_step(self, batch, batch_idx):
        self.seen.append((self.current_epoch, batch_idx, batch.sum().item()))
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), 0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "epoch"}}


def fit(place, max_steps, *callbacks):
    """Fit with 8 batches per epoch; return the module as the fit leaves it."""
    pl.seed_everything(3, verbose=False)
    module = Counting()
    data = DataLoader(torch.arange(64.0).reshape(16, 4) / 64, batch_size=2, shuffle=True)
    trainer = pl.Trainer(
        callbacks=[LazySnapshotCallback(place), *callbacks],
        max_epochs=-1,
        max_steps=max_steps,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=place,
    )
    trainer.fit(module, data, ckpt_path="latest")
    return module


@pytest.mark.parametrize("first", [5, 8, 13])
def test_a_fit_that_is_extended_trains_what_one_longer_fit_trains(tmp_path, first):
    """`max_steps` may have ended it within an epoch or behind one: no batch is left out, schedules count once."""
    whole = fit(tmp_path / "whole", 20)

    begun = fit(tmp_path / "cut", first)
    extended = fit(tmp_path / "cut", 20)

    assert begun.seen + extended.seen == whole.seen
    assert torch.equal(extended.net.weight, whole.net.weight)


@pytest.mark.parametrize("max_steps", [5, 8])
def test_a_fit_with_nothing_left_to_train_ends_with_the_same_weights(tmp_path, caplog, max_steps):
    """Averages are in the model, as at the end of the first fit."""
    first = fit(tmp_path, max_steps, EMAWeightAveraging(decay=0.5))
    caplog.set_level("INFO", logger="lazysnap")

    again = fit(tmp_path, max_steps, EMAWeightAveraging(decay=0.5))

    assert again.seen == []
    assert "nothing is left to train" in caplog.text
    assert f"step {max_steps}, which was resumed, is the last step of this training" in caplog.text
    assert torch.equal(again.net.weight, first.net.weight)
