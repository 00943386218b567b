"""Fine-tuning with Lightning over a frozen base; unfreezing it in the middle works."""

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning
from test_callback import DieAt, Ready, finish, make_trainer, raising
from torch.utils.data import DataLoader, TensorDataset

from lazysnap import LazySnapshotCallback

WIDTH = 512


class LowRank(torch.nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = torch.nn.Parameter(torch.randn(2, base.in_features) / 30)
        self.up = torch.nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, batch):
        return self.base(batch) + batch @ self.down.t() @ self.up.t()


class Tuned(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.backbone = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU(), torch.nn.Linear(WIDTH, WIDTH)
        )
        self.head = torch.nn.Linear(WIDTH, 2)

    def training_step(self, batch, batch_idx):
        return self.head(self.backbone(batch[0])).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-3)


class Adapted(Tuned):
    def __init__(self):
        super().__init__()
        for place in (0, 2):
            self.backbone[place] = LowRank(self.backbone[place])


def fit(directory, model_class, *callbacks, seed=1):
    pl.seed_everything(seed, verbose=False)
    lazy = LazySnapshotCallback()
    trainer = make_trainer(directory, lazy, Ready(lazy), *callbacks, max_epochs=4)
    model = model_class()
    data = TensorDataset(torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(2)))
    trainer.fit(model, DataLoader(data, 4, shuffle=True), ckpt_path="latest")
    return trainer, model


def test_a_broken_off_tuning_goes_on_bit_for_bit(tmp_path):
    """Also where the restart begins with other weights of the base."""
    trainer, model = fit(tmp_path / "whole", Adapted)
    with pytest.raises(RuntimeError):
        fit(tmp_path / "cut", Adapted, DieAt(5, raising(RuntimeError("cut"))))

    again, resumed = fit(tmp_path / "cut", Adapted, seed=99)

    assert finish(again, resumed) == finish(trainer, model)


def test_a_backbone_that_is_unfrozen_in_the_middle_goes_on_bit_for_bit(tmp_path):
    def thaw():
        return BackboneFinetuning(unfreeze_backbone_at_epoch=2, verbose=False)

    trainer, model = fit(tmp_path / "whole", Tuned, thaw())
    for step in (3, 6):
        with pytest.raises(RuntimeError):
            fit(tmp_path / f"cut{step}", Tuned, thaw(), DieAt(step, raising(RuntimeError("cut"))))

        again, resumed = fit(tmp_path / f"cut{step}", Tuned, thaw(), seed=99)

        assert finish(again, resumed) == finish(trainer, model)


def test_snapshots_can_be_named_while_a_fit_runs(tmp_path):
    class Keep(pl.Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            lazy = next(item for item in trainer.callbacks if isinstance(item, LazySnapshotCallback))
            if trainer.global_step == 3:
                assert lazy.keep("third") == 3
                # Else a busy keeper may hear of the name when later captures have overwritten the snapshot.
                assert lazy.engine.wait(3, until="durable", timeout_s=60)
            if trainer.global_step == 5:
                lazy.keep("fifth")
                lazy.release("fifth")

    fit(tmp_path, Adapted, Keep())

    assert [path.name for path in (tmp_path / "lazysnap").glob("step-00000003*/keep-*")] == ["keep-third"]
    assert list((tmp_path / "lazysnap").glob("step-*/keep-fifth")) == []
