"""A fit that is started again with another program: what cannot go on is refused, what changed is named once."""

import lightning.pytorch as pl
import pytest
import torch
from test_callback import DieAt, make_trainer, raising
from torch.utils.data import DataLoader, TensorDataset

from lazysnap import LazySnapshotCallback
from lazysnap.errors import StateError


class Model(pl.LightningModule):
    def __init__(self, kind="AdamW", lr=0.01):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(4, 1)
        self.drop = torch.nn.Dropout(0.5)

    def training_step(self, batch, batch_idx):
        return self.drop(self.layer(batch[0])).square().mean()

    def configure_optimizers(self):
        optimizer = getattr(torch.optim, self.hparams.kind)(self.parameters(), lr=self.hparams.lr)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=6)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Ready(pl.Callback):
    def on_train_start(self, trainer, pl_module):
        lazy = next(item for item in trainer.callbacks if isinstance(item, LazySnapshotCallback))
        assert lazy.engine._wait_ready(60)


def fit(directory, model, *callbacks, items=16, batch=4, **settings):
    pl.seed_everything(1, verbose=False)
    lazy = LazySnapshotCallback()
    trainer = make_trainer(directory, lazy, *callbacks, **{"max_epochs": 3, **settings})
    data = TensorDataset(torch.randn(items, 4, generator=torch.Generator().manual_seed(2)))
    trainer.fit(model, DataLoader(data, batch, shuffle=True), ckpt_path="latest")
    return trainer


@pytest.fixture
def cut(tmp_path):
    """The directory of a fit that failed in its second epoch, with every step captured."""

    with pytest.raises(RuntimeError, match="cut"):
        fit(tmp_path, Model(), Ready(), DieAt(6, raising(RuntimeError("cut"))))
    return tmp_path


def said(caplog, words):
    return [record.getMessage() for record in caplog.records if words in record.getMessage()]


def test_another_optimizer_is_refused_by_its_class(cut):
    with pytest.raises(StateError, match=r"optimizer_states\.0: the snapshot is of .*AdamW.*live optimizer is .*SGD"):
        fit(cut, Model(kind="SGD"))

    assert fit(cut, Model()).global_step == 12


def test_changed_data_are_named_in_one_warning_and_hyperparameters_come_from_the_snapshot(cut, caplog):
    changed = Model(lr=0.02)

    fit(cut, changed, items=24, batch=8)

    [text] = said(caplog, "in the snapshot")
    assert "a batch has 8 samples, in the snapshot 4" in text
    assert "the data has 24 samples, in the snapshot 16" in text
    assert changed.optimizers().param_groups[0]["initial_lr"] == 0.01


def test_what_did_not_change_gives_no_warning_and_a_finished_fit_says_that_it_is_over(cut, caplog):
    trainer = fit(cut, Model())
    assert trainer.global_step == 12
    assert said(caplog, "in the snapshot") == said(caplog, "had ended") == []

    fit(cut, Model())
    [text] = said(caplog, "had ended")
    assert "max_epochs=3, at step 12" in text
    assert "raise that limit" in text

    caplog.clear()
    fit(cut, Model(), max_epochs=None, max_steps=12)
    [text] = said(caplog, "had ended")
    assert "max_steps=12" in text

    caplog.clear()
    assert fit(cut, Model(), max_epochs=4).global_step == 16
    assert said(caplog, "had ended") == said(caplog, "in the snapshot") == []


@pytest.mark.parametrize(("batch", "steps"), [(2, 8), (8, 2)])
def test_with_another_batch_size_each_sample_of_the_epoch_is_trained_once(tmp_path, caplog, batch, steps):
    class Seeing(Model):
        """Notes its samples by step, and the batch of the epoch by Lightning's count."""

        def training_step(self, batch, batch_idx):
            self.seen.append((self.trainer.global_step, self.current_epoch, batch_idx, batch[0][:, 0].tolist()))
            return super().training_step(batch, batch_idx)

    def seeing():
        model = Seeing()
        model.seen = []
        return model

    first, second = seeing(), seeing()
    with pytest.raises(RuntimeError, match="cut"):
        fit(tmp_path, first, Ready(), DieAt(6, raising(RuntimeError("cut"))))
    fit(tmp_path, second, batch=batch)

    at = second.seen[0][0]
    before = [value for step, epoch, _, values in first.seen if step < at and epoch == 1 for value in values]
    after = [value for _, epoch, _, values in second.seen if epoch == 1 for value in values]
    assert len(before) == 8
    assert len(set(before + after)) == len(before + after) == 16
    assert [index for _, epoch, index, _ in second.seen if epoch == 1] == [*range(steps // 2, steps)]
    assert len([index for _, epoch, index, _ in second.seen if epoch == 2]) == steps
    assert f"a batch has {batch} samples, in the snapshot 4" in caplog.text
