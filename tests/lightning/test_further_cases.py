"""Exact resume of trainings that use more of Lightning: cut near the start, at the end of an epoch, and after it."""

import logging

import pytest
import torch
import torchmetrics
from harness import BATCH_SIZE, BATCHES, Case, Net, Numbers, Stream, check_cuts, run
from lightning.pytorch.callbacks import BaseFinetuning, EarlyStopping, LearningRateMonitor, ModelCheckpoint
from torch.utils.data import DataLoader

SIZE = BATCHES * BATCH_SIZE


class ReloadedLoaders(Case):
    def settings(self):
        return {"max_epochs": 3, "reload_dataloaders_every_n_epochs": 1}


class Batches:
    """Batches without a loader, an object that no weak reference can be made to."""

    __slots__ = ("batches",)

    def __init__(self):
        rows = torch.randn(BATCHES, BATCH_SIZE, 3, generator=torch.Generator().manual_seed(1))
        self.batches = [(torch.arange(BATCH_SIZE), batch) for batch in rows]

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


class BatchesInMemory(Case):
    def train_loader(self):
        return Batches()


class TwoValidations(Case):
    def validation_loader(self):
        return [DataLoader(Numbers(8), 4), DataLoader(Numbers(12), 4, shuffle=True)]

    class module(Net):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            self.log("val_loss", self.loss(batch), add_dataloader_idx=dataloader_idx > 0)


class ValidationInAccumulation(Case):
    def settings(self):
        return {"max_epochs": 2, "accumulate_grad_batches": 4, "val_check_interval": 3}


class UnsizedSteps(Case):
    def train_loader(self):
        return DataLoader(Stream(SIZE), BATCH_SIZE)

    def settings(self):
        return {"max_epochs": -1, "max_steps": 15, "val_check_interval": 4, "check_val_every_n_epoch": None}


class StopsEarly(Case):
    def settings(self):
        return {"max_epochs": 10, "min_steps": 8, "val_check_interval": 2}

    def callbacks(self, directory):
        return [EarlyStopping("val_loss", mode="max", patience=1), LearningRateMonitor()]


class StepCheckpoints(Case):
    def settings(self):
        return {"max_epochs": 2, "val_check_interval": 4}

    def callbacks(self, directory):
        settings = {"save_last": True, "enable_version_counter": False, "monitor": "val_loss"}
        return [ModelCheckpoint(directory / "steps", every_n_train_steps=3, **settings)]


class Lbfgs(Case):
    class module(Net):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), lr=0.01, max_iter=3)


class Finetuned(Case):
    def settings(self):
        return {"max_epochs": 3}

    def callbacks(self, directory):
        class Later(BaseFinetuning):
            def freeze_before_training(self, pl_module):
                self.freeze(pl_module.layers[0])

            def finetune_function(self, pl_module, epoch, optimizer):
                if epoch == 1:
                    self.unfreeze_and_add_param_group(pl_module.layers[0], optimizer)

        return [Later()]

    class module(Net):
        def configure_optimizers(self):
            return torch.optim.Adam([item for item in self.parameters() if item.requires_grad], 1e-2)


class SkippedSteps(Case):
    class module(Net):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return None if batch_idx % 3 == 1 else loss


class EpochLeftEarly(Case):
    def settings(self):
        return {"max_epochs": 2, "val_check_interval": 2}

    class module(Net):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 4 else None


class ModesOfParts(Case):
    class module(Net):
        def on_train_epoch_start(self):
            self.layers[1].train(self.current_epoch != 1)


class ChainedSchedules(Case):
    class module(Net):
        def configure_optimizers(self):
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
            cool = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)
            both = torch.optim.lr_scheduler.SequentialLR(optimizer, [warm, cool], [3])
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": both, "interval": "step", "frequency": 2}}


class MetricObjects(Case):
    class module(Net):
        def __init__(self):
            super().__init__()
            self.errors = torchmetrics.MetricCollection([torchmetrics.MeanSquaredError()])
            self.losses = torchmetrics.CatMetric()
            self.validated = torchmetrics.MeanMetric()

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            self.errors(self.layers(batch[1]).squeeze(-1), batch[1].sum(-1))
            self.log_dict(self.errors, on_step=False, on_epoch=True)
            self.losses.update(loss.detach())
            return loss

        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            self.validated.update(self.loss(batch))
            self.log("validated", self.validated)

        def on_train_epoch_end(self):
            self.log("sum", self.losses.compute().sum())
            self.losses.reset()


CASES = [
    ReloadedLoaders,
    BatchesInMemory,
    TwoValidations,
    ValidationInAccumulation,
    UnsizedSteps,
    StopsEarly,
    StepCheckpoints,
    Lbfgs,
    Finetuned,
    SkippedSteps,
    EpochLeftEarly,
    ModesOfParts,
    ChainedSchedules,
    MetricObjects,
]


@pytest.mark.filterwarnings("ignore:.training_step. returned .None.", "ignore:Detected call of .lr_scheduler.step")
@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_resumed_it_ends_bit_for_bit_as_uninterrupted(kind, tmp_path):
    def three(kept):
        assert len(kept) >= 3
        return {item.step: item for item in (kept[1], kept[len(kept) // 2], kept[-1])}.values()

    check_cuts(kind(), tmp_path, three)


def test_a_training_that_was_stopped_early_and_is_started_again_trains_nothing_and_says_so(tmp_path, caplog):
    class Stopped(Case):
        def settings(self):
            return {"max_epochs": 10, "num_sanity_val_steps": 0}

        def callbacks(self, directory):
            return [EarlyStopping("val_loss", mode="max", patience=1)]

    whole = run(Stopped(), tmp_path)
    assert whole.final["epoch"] < 10

    with caplog.at_level(logging.WARNING, "lazysnap"):
        again = run(Stopped(), tmp_path, choice=whole.kept[-1])

    assert again.trace == []
    assert again.final["epoch"] == whole.final["epoch"]
    assert again.final["weights"] == whole.final["weights"]
    assert "stopped early" in caplog.text
