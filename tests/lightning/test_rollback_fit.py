"""A fit that meets a bad batch goes back in place, and ends as one that never saw it."""

import lightning.pytorch as pl
import pytest
import torch
from harness import BATCH_SIZE, Memory, Net, Numbers, digest
from lightning.pytorch.callbacks import Callback, ModelCheckpoint, ModelPruning, Timer, WeightAveraging
from test_callback import DieAt, Ready, make_trainer, raising
from torch.utils.data import DataLoader, Dataset

from lazysnap import ConfigError, LazySnapshotCallback, StateError

pytestmark = pytest.mark.filterwarnings("ignore:Encountered `nan` values in tensor:UserWarning")  # torchmetrics


class Batches(Dataset):
    """Whole batches in a fixed order; those in ``bad`` are multiplied by ``factor``."""

    def __init__(self, numbers, bad=(), factor=float("nan")):
        samples = Numbers(200, noisy=False).data.view(-1, BATCH_SIZE, 3)
        self.items = [
            (torch.arange(BATCH_SIZE), samples[n] * factor if n in bad else samples[n].clone()) for n in numbers
        ]

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]


class Stepping(Net):
    """A schedule by step; the last layer draws dropout."""

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.98)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class ByEpoch(Net):
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


class Manual(Net):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()
        return loss


class GoBackOnNan(Callback):
    """The judge of the loss that a program writes."""

    def __init__(self, lazy):
        self.lazy = lazy

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if not outputs["loss"].isfinite():
            self.lazy.rollback()


def fit(directory, batches, *callbacks, asks_first=True, model=None, seed=1, ckpt_path="latest", **settings):
    pl.seed_everything(seed, verbose=False)
    lazy = LazySnapshotCallback()
    both = [GoBackOnNan(lazy), lazy] if asks_first else [lazy, GoBackOnNan(lazy)]
    every = {"max_epochs": 1, "limit_val_batches": 0, **settings}
    trainer = make_trainer(directory, *both, Ready(lazy), *callbacks, **every)
    model = (model or Stepping)()
    trainer.fit(model, DataLoader(batches, batch_size=None), ckpt_path=ckpt_path)
    return trainer, model, lazy


def finish(trainer, model, lazy):
    state = [model.state_dict(), model.hidden, [one.state_dict() for one in trainer.optimizers]]
    schedules = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
    averages = [
        one._average_model.state_dict() for one in trainer.callbacks if getattr(one, "_average_model", None) is not None
    ]
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return digest([state, averages]), repr(schedules), metrics, trainer.global_step, torch.rand(2).tolist()


@pytest.mark.parametrize(
    ("model", "asks_first"), [(Stepping, True), (Stepping, False), (ByEpoch, True), (Manual, True)]
)
def test_a_nan_batch_in_the_middle_of_50_steps_leaves_no_trace(tmp_path, model, asks_first):
    never = finish(*fit(tmp_path / "never", Batches([n for n in range(50) if n != 24]), model=model))
    trainer, module, lazy = fit(tmp_path / "seen", Batches(range(50), bad=[24]), model=model, asks_first=asks_first)
    assert finish(trainer, module, lazy) == never
    assert never[3] == 49
    assert lazy.statistics().rollbacks == 1
    assert trainer.fit_loop.epoch_loop.batch_progress.total.completed == 50


def test_averaged_weights_checkpoints_and_loggers_know_nothing_of_the_bad_step(tmp_path):
    def callbacks(directory):
        kept = ModelCheckpoint(directory / "ckpt", every_n_train_steps=4, save_top_k=-1, filename="{step}")
        return WeightAveraging(), kept, Timer(duration="00:01:00:00")

    trace, wanted = [], []
    one, other = Batches([n for n in range(20) if n not in (7, 12)]), Batches(range(20), bad=[7, 12])
    settings = {"enable_checkpointing": True, "log_every_n_steps": 1}
    never = finish(
        *fit(tmp_path / "a", one, *callbacks(tmp_path / "a"), logger=Memory(wanted), **settings),
    )
    assert finish(*fit(tmp_path / "b", other, *callbacks(tmp_path / "b"), logger=Memory(trace), **settings)) == never
    names = [sorted(path.name for path in (tmp_path / place / "ckpt").iterdir()) for place in "ab"]
    assert names[0] == names[1]
    assert names[0]
    assert list(dict.fromkeys(trace)) == wanted


@pytest.mark.parametrize("bad", [[8], [11]])
def test_with_accumulation_the_whole_window_is_dropped(tmp_path, bad):
    never = finish(*fit(tmp_path / "a", Batches([*range(8), *range(12, 20)]), accumulate_grad_batches=4))
    seen = finish(*fit(tmp_path / "b", Batches(range(20), bad=bad), accumulate_grad_batches=4))
    assert seen == never
    assert never[3] == 4


@pytest.mark.parametrize(("bad", "model"), [(0, Stepping), (5, ByEpoch)])
def test_at_either_end_of_an_epoch_the_schedules_stay_right(tmp_path, bad, model):
    """Batch ``bad`` of the second epoch of 6 is bad: its first, or its last."""

    class Sometimes(Batches):
        spoilt = False

        def __getitem__(self, index):
            number, batch = super().__getitem__(index)
            is_bad = self.spoilt and index == bad
            return number, batch * float("nan") if is_bad else batch

    class Spoil(Callback):
        def on_train_epoch_start(self, trainer, module):
            data.spoilt = trainer.current_epoch == 1

    data = Sometimes(range(6))
    trainer, module, lazy = fit(tmp_path, data, Spoil(), max_epochs=3, model=model)
    assert trainer.global_step == 17
    assert lazy.statistics().rollbacks == 1
    assert trainer.current_epoch == 3
    [config] = trainer.lr_scheduler_configs
    wanted = 1e-2 * (0.98**17 if model is Stepping else 0.5**3)
    assert config.scheduler.get_last_lr() == [pytest.approx(wanted)]
    assert module.layers[0].weight.isfinite().all()


def test_a_fit_that_ended_after_a_rollback_goes_on_where_it_was(tmp_path):
    """The exception comes some steps after the rollback; the restart ends as the run that never saw the batch."""
    never = finish(*fit(tmp_path / "a", Batches([n for n in range(20) if n != 8])))
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path / "b", Batches(range(20), bad=[8]), DieAt(11, raising(ZeroDivisionError())))
    assert finish(*fit(tmp_path / "b", Batches(range(20), bad=[8]), seed=99)) == never


def fit_with_pruning(directory, **settings):
    """Each of two epochs has a bad batch; at the end of the first one the module is pruned."""
    pruning = ModelPruning("l1_unstructured", amount=0.5, **settings)
    return fit(directory, Batches(range(6), bad=[3]), pruning, max_epochs=2)


def test_after_pruning_a_rollback_says_that_snapshots_lack_the_masks(tmp_path):
    with pytest.raises(StateError, match=r"rollback: the module is pruned, .* Nothing was changed"):
        fit_with_pruning(tmp_path)


def test_a_pruned_module_goes_back_if_snapshots_have_the_masks(tmp_path):
    trainer, module, lazy = fit_with_pruning(tmp_path, make_pruning_permanent=False)

    assert lazy.statistics().rollbacks == 2
    assert trainer.global_step == 10
    assert all(parameter.isfinite().all() for parameter in module.parameters())


@pytest.mark.parametrize("steps", [0, True, "1"])
def test_what_cannot_work_is_refused(tmp_path, steps):
    with pytest.raises(ConfigError, match="work while a training runs"):
        LazySnapshotCallback().rollback(steps)

    class Asks(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            with pytest.raises(ConfigError, match="rollback: steps must be an integer"):
                lazies[0].rollback(steps)

    lazies = []
    pl.seed_everything(1, verbose=False)
    lazies.append(LazySnapshotCallback())
    trainer = make_trainer(tmp_path, lazies[0], Asks(), max_epochs=1, limit_val_batches=0)
    trainer.fit(Stepping(), DataLoader(Batches(range(2)), batch_size=None))
    assert lazies[0].statistics().rollbacks == 0
