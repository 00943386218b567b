"""``keep_best`` of the callback keeps the snapshots that Lightning's own ModelCheckpoint would keep."""

import lightning.pytorch as pl
import pytest
import torch
from harness import BATCH_SIZE, Net, Numbers
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from support.stored import names_at
from support.waiting import TIMEOUT_S
from torch.utils.data import DataLoader

import lazysnap
from lazysnap import KeepBest, LazySnapshotCallback, PersistentLevel, SnapshotConfig
from lazysnap.errors import ConfigError
from lazysnap.shard.best import best_names


class Stored(Callback):
    """Waits until each step is stored: the name of a snapshot that is lost would be lost, too."""

    def __init__(self, lazy):
        self.lazy = lazy

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if self.lazy.engine is not None:
            assert self.lazy.engine._wait_ready(20)
            self.lazy.engine.wait(until="durable", timeout_s=TIMEOUT_S)


class DieAt(Callback):
    def __init__(self, step):
        self.step = step

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == self.step:
            raise ZeroDivisionError


def fit(directory, wish, *callbacks, has_validation=True, seed=1):
    pl.seed_everything(seed, verbose=False)
    config = SnapshotConfig(levels=(PersistentLevel(directory / "lazysnap", every_n_steps=1),))
    lazy = LazySnapshotCallback(config=config, keep_best=wish)
    trainer = pl.Trainer(
        accelerator="cpu",
        max_epochs=4,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(callback, ModelCheckpoint) for callback in callbacks),
        default_root_dir=directory,
        num_sanity_val_steps=1,
        limit_val_batches=1.0 if has_validation else 0,
        callbacks=[lazy, Stored(lazy), *callbacks],
    )
    loaders = [DataLoader(Numbers(12), BATCH_SIZE, shuffle=True), DataLoader(Numbers(8), 4)]
    trainer.fit(Net(), *loaders[: 1 + has_validation], ckpt_path="latest")


def kept(directory):
    """Values of the names, the best first."""
    return [name.value for name in best_names(name for name, _ in names_at(directory / "lazysnap"))]


@pytest.mark.parametrize(("metric", "has_validation"), [("val_loss", True), ("average", False)])
def test_the_same_snapshots_are_kept_as_lightning_keeps_files(tmp_path, metric, has_validation):
    stock = ModelCheckpoint(tmp_path / "files", monitor=metric, save_top_k=2)

    fit(tmp_path, KeepBest(metric, count=2), stock, has_validation=has_validation)

    values = sorted(float(value) for value in stock.best_k_models.values())
    assert kept(tmp_path) == pytest.approx(values)
    best = torch.load(stock.best_model_path, weights_only=False)["state_dict"]
    weights = lazysnap.load_weights(tmp_path / "lazysnap", "best")
    assert all(weights[name].equal(value) for name, value in best.items())


def test_a_fit_that_died_goes_on_with_the_best_that_it_had(tmp_path):
    fit(tmp_path / "whole", KeepBest("val_loss", count=2))
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path / "broken", KeepBest("val_loss", count=2), DieAt(8))

    fit(tmp_path / "broken", KeepBest("val_loss", count=2), seed=9)

    assert kept(tmp_path / "broken") == kept(tmp_path / "whole")


def test_a_metric_that_nothing_logs_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nothing logs 'val_los'; logged are \[.*'val_loss'"):
        fit(tmp_path, KeepBest("val_los"))
    with pytest.raises(ConfigError, match=r"LazySnapshotCallback.keep_best must be KeepBest"):
        LazySnapshotCallback(keep_best="val_loss")
