"""Evaluating a training from outside, while it runs."""

from pathlib import Path

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from support.stored import newest_directory
from test_callback import Plain, fit, loaders, make_trainer

from lazysnap import LazySnapshotCallback

MESSAGES = Path(__file__).parents[2] / "docs" / "troubleshooting.md"


class Visitor(Callback):
    """At a step, waits until it is durable, and lets another trainer come by."""

    def __init__(self, directory):
        self.directory = directory
        self.seen = []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == 3 and not self.seen:
            lazy = next(item for item in trainer.callbacks if isinstance(item, LazySnapshotCallback))
            assert lazy.engine.wait(3, until="durable", timeout_s=60)
            other = make_trainer(self.directory, LazySnapshotCallback())
            metrics = other.validate(Plain(), loaders()[1], ckpt_path="latest", verbose=False)
            self.seen.append(metrics[0]["val_loss"])


def test_a_running_training_is_validated_from_storage_and_goes_on_undisturbed(tmp_path):
    visitor = Visitor(tmp_path)
    trainer, _ = fit(tmp_path, visitor)
    assert len(visitor.seen) == 1
    assert trainer.global_step == 12

    pl.seed_everything(1, verbose=False)
    last = make_trainer(tmp_path, LazySnapshotCallback()).validate(
        Plain(), loaders()[1], ckpt_path="latest", verbose=False
    )
    assert last[0]["val_loss"] != visitor.seen[0]


@pytest.mark.parametrize("precision", ["64-true", "32-true", "bf16-true"])
def test_a_training_is_evaluated_with_the_precision_that_the_evaluation_asks_for(tmp_path, precision):
    class OfAnyPrecision(Plain):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            return self.trainer.precision_plugin.convert_input(batch)

    trained, evaluated = OfAnyPrecision(), OfAnyPrecision()
    trainer = make_trainer(tmp_path, LazySnapshotCallback(), precision="64-true", max_epochs=1)
    trainer.fit(trained, *loaders(), ckpt_path="latest")

    other = make_trainer(tmp_path, LazySnapshotCallback(), precision=precision)
    other.validate(evaluated, loaders()[1], ckpt_path="latest", verbose=False)

    dtype = {"64-true": torch.float64, "32-true": torch.float32, "bf16-true": torch.bfloat16}[precision]
    loaded = evaluated.state_dict()
    for name, value in trained.state_dict().items():
        assert torch.equal(loaded[name], value.to(dtype) if value.is_floating_point() else value), name


def test_what_lightning_says_without_the_callback_is_on_the_page_of_messages(tmp_path):
    fit(tmp_path, max_epochs=1)
    place = newest_directory(tmp_path / "lazysnap")
    tries = {
        "Checkpoint file not found: latest": lambda: make_trainer(tmp_path).validate(
            Plain(), loaders()[1], ckpt_path="latest"
        ),
        "Is a directory: '": lambda: Plain.load_from_checkpoint(place),
    }
    for said, work in tries.items():
        with pytest.raises(OSError, match=said):
            work()
        assert f"* `{said}" in MESSAGES.read_text()
