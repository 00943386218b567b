"""What users do with the callback and with ckpt_path="latest", over the real engine and keeper."""

import pickle
import signal

import lightning.pytorch as pl
import pytest
import torch
from harness import BATCH_SIZE, Net, Numbers, digest
from lightning.pytorch.callbacks import Callback, LearningRateFinder, ModelCheckpoint
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.tuner import Tuner
from support.stored import newest_directory
from torch.utils.data import DataLoader

from lazysnap import LazySnapshotCallback, PersistentLevel, SnapshotConfig
from lazysnap.errors import ConfigError, SnapshotNotFound


class Plain(Net):
    """A net with a learning rate that a tuner can find."""

    def __init__(self, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Ready(Callback):
    """Waits until captures can begin, so that every step of a tiny training is captured."""

    def __init__(self, lazy):
        self.lazy = lazy

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if self.lazy.engine is not None:
            assert self.lazy.engine._wait_ready(20)


class DieAt(Callback):
    def __init__(self, step, action):
        self.step, self.action = step, action

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == self.step:
            self.action()


def loaders():
    return DataLoader(Numbers(24), BATCH_SIZE, shuffle=True), DataLoader(Numbers(8), 4)


def make_trainer(directory, *callbacks, package=pl, **settings):
    defaults = {
        "accelerator": "cpu",
        "max_epochs": 2,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "default_root_dir": directory,
        "num_sanity_val_steps": 0,
    }
    return package.Trainer(callbacks=list(callbacks), **{**defaults, **settings})


def fit(directory, *callbacks, ckpt_path="latest", seed=1, model=None, config=None, **settings):
    pl.seed_everything(seed, verbose=False)
    lazy = LazySnapshotCallback(config=config)
    trainer = make_trainer(directory, lazy, Ready(lazy), *callbacks, **settings)
    model = model or Plain()
    trainer.fit(model, *loaders(), ckpt_path=ckpt_path)
    return trainer, model


def finish(trainer, model):
    return digest([model.state_dict(), [item.state_dict() for item in trainer.optimizers], trainer.global_step])


def raising(error):
    def action():
        raise error

    return action


@pytest.fixture
def whole(tmp_path):
    """The end of an uninterrupted training."""
    return finish(*fit(tmp_path / "whole"))


@pytest.mark.parametrize("step", [1, 6])
def test_after_an_exception_a_fit_goes_on_from_the_step_before_it(step, tmp_path, whole):
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, DieAt(step, raising(ZeroDivisionError())))
    steps = []

    class Seen(Callback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            steps.append(trainer.global_step)

    assert finish(*fit(tmp_path, Seen(), seed=99)) == whole
    assert steps == list(range(step, 12))


def test_after_ctrl_c_a_fit_goes_on_from_the_step_before_it(tmp_path, whole):
    handler = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit):
            fit(tmp_path, DieAt(7, raising(KeyboardInterrupt())))
    finally:
        signal.signal(signal.SIGINT, handler)
    assert finish(*fit(tmp_path, seed=99)) == whole


def test_a_finished_training_started_again_ends_at_once_and_can_be_prolonged(tmp_path):
    long = finish(*fit(tmp_path / "long", max_epochs=3))
    short = finish(*fit(tmp_path / "short"))
    assert "/step-00000012-" in newest_directory(str(tmp_path / "short" / "lazysnap"))
    assert finish(*fit(tmp_path / "short", seed=5)) == short
    assert finish(*fit(tmp_path / "short", seed=6, max_epochs=3)) == long


def test_the_trainer_is_as_it_was_after_a_fit(tmp_path):
    trainer, _ = fit(tmp_path)
    for part in (trainer.fit_loop, trainer.fit_loop.epoch_loop, trainer._checkpoint_connector):
        assert not [name for name, value in vars(part).items() if callable(value) and hasattr(value, "__code__")]


def test_one_trainer_fits_twice(tmp_path):
    pl.seed_everything(1, verbose=False)
    lazy = LazySnapshotCallback()
    trainer = make_trainer(tmp_path, lazy, Ready(lazy), max_epochs=1)
    model = Plain()
    trainer.fit(model, *loaders(), ckpt_path="latest")
    trainer.fit_loop.max_epochs = 2
    trainer.fit(model, *loaders())
    assert trainer.global_step == 12
    assert "/step-00000012-" in newest_directory(str(tmp_path / "lazysnap"))


@pytest.mark.parametrize("entry", ["validate", "test", "predict"])
def test_evaluations_take_the_latest_weights_or_say_that_there_are_none(entry, tmp_path):
    class Evaluated(Plain):
        def test_step(self, batch, batch_idx):
            self.log("test_loss", self.loss(batch))

        def predict_step(self, batch, batch_idx):
            return self.loss(batch)

    def evaluate(directory):
        model = Evaluated()
        getattr(make_trainer(directory, LazySnapshotCallback()), entry)(
            model, loaders()[1], ckpt_path="latest", **({} if entry == "predict" else {"verbose": False})
        )
        return digest(model.layers.state_dict())

    with pytest.raises(SnapshotNotFound, match="no whole snapshot") as caught:
        evaluate(tmp_path / "empty")
    assert isinstance(caught.value, FileNotFoundError)
    _, model = fit(tmp_path)
    assert evaluate(tmp_path) == digest(model.layers.state_dict())


def test_paths_last_and_best_are_lightnings_as_before(tmp_path):
    checkpoint = ModelCheckpoint(tmp_path / "ckpt", monitor="val_loss", save_last=True, save_top_k=-1)
    trainer, _ = fit(tmp_path, checkpoint, enable_checkpointing=True, max_epochs=1)
    assert trainer.global_step == 6
    for path in ("last", checkpoint.best_model_path, str(tmp_path / "ckpt" / "last.ckpt")):
        again = ModelCheckpoint(tmp_path / "ckpt", monitor="val_loss", save_last=True, save_top_k=-1)
        other, _ = fit(tmp_path / "other", again, enable_checkpointing=True, ckpt_path=path)
        assert other.global_step == 12
        assert other.ckpt_path is not None
    trainer.validate(dataloaders=loaders()[1], ckpt_path="best", verbose=False)
    with pytest.raises(FileNotFoundError):
        fit(tmp_path / "other", ckpt_path=str(tmp_path / "no.ckpt"))


@pytest.mark.filterwarnings("ignore:The dirpath has changed")
@pytest.mark.parametrize(("directory", "is_kept"), [("ckpt", True), ("ckpt-2", False), ("ck", False)])
def test_the_last_file_counts_in_the_directory_of_the_callback_alone(tmp_path, directory, is_kept):
    """``save_last="link"`` makes a link to it."""

    def checkpoint(name):
        return ModelCheckpoint(tmp_path / name, every_n_train_steps=2, save_top_k=-1)

    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, checkpoint("ckpt"), DieAt(5, raising(ZeroDivisionError())), enable_checkpointing=True)
    again = checkpoint(directory)
    seen = []

    class Watch(pl.Callback):
        def on_train_batch_start(self, *_):
            seen.append(again._last_checkpoint_saved)

    fit(tmp_path, again, Watch(), enable_checkpointing=True, seed=99)

    first = str(tmp_path / "ckpt" / "epoch=0-step=4.ckpt")
    assert seen[0] == (first if is_kept else "")


def test_fast_dev_run_ignores_latest_and_writes_nothing(tmp_path):
    trainer, _ = fit(tmp_path, fast_dev_run=True)
    assert trainer.global_step == 1
    assert not (tmp_path / "lazysnap").exists()


def test_the_default_checkpoint_callback_stays(tmp_path):
    trainer, _ = fit(tmp_path, enable_checkpointing=True)
    assert isinstance(trainer.checkpoint_callback, ModelCheckpoint)


def test_a_learning_rate_finder_leaves_snapshots_and_restarts_alone(tmp_path):
    settings = {"num_training_steps": 5, "update_attr": True, "early_stop_threshold": None}
    whole = finish(*fit(tmp_path / "whole", LearningRateFinder(**settings)))
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, LearningRateFinder(**settings), DieAt(8, raising(ZeroDivisionError())))
    assert finish(*fit(tmp_path, LearningRateFinder(**settings), seed=99)) == whole


def test_a_data_module_without_hooks_for_checkpoints_is_captured_and_resumed(tmp_path):
    class Data(pl.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(Numbers(24), 4)

    lazy = LazySnapshotCallback()
    make_trainer(tmp_path, lazy, max_epochs=1).fit(Plain(), datamodule=Data(), ckpt_path="latest")
    assert lazy.statistics().last_whole_step == 6
    again = make_trainer(tmp_path, LazySnapshotCallback(), max_epochs=2)
    again.fit(Plain(), datamodule=Data(), ckpt_path="latest")
    assert (again.global_step, again.current_epoch) == (12, 2)


def test_a_batch_size_scaler_works_beside_it(tmp_path):
    class Data(pl.LightningDataModule):
        batch_size = 2

        def train_dataloader(self):
            return DataLoader(Numbers(24), self.batch_size)

        def val_dataloader(self):
            return DataLoader(Numbers(8), 4)

    lazy = LazySnapshotCallback()
    trainer = make_trainer(tmp_path, lazy, max_epochs=1)
    data = Data()
    Tuner(trainer).scale_batch_size(Plain(), datamodule=data, max_trials=2, steps_per_trial=1)
    assert data.batch_size == 4
    trainer.fit(Plain(), datamodule=data, ckpt_path="latest")
    assert trainer.global_step == 6
    assert lazy.statistics().last_whole_step == 6


def test_slurms_requeue_checkpoint_is_taken_when_it_is_newer(tmp_path, monkeypatch, caplog):
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, DieAt(3, raising(ZeroDivisionError())))
    trainer, _ = fit(tmp_path / "other", max_epochs=1)
    trainer.save_checkpoint(tmp_path / "hpc_ckpt_1.ckpt")
    monkeypatch.setattr(SLURMEnvironment, "detect", staticmethod(lambda: True))
    monkeypatch.setenv("SLURM_NTASKS", "1")
    monkeypatch.setenv("SLURM_JOB_NAME", "bash")
    fit(tmp_path)
    assert "hpc_ckpt_1.ckpt is newer" in caplog.text


def test_another_model_is_refused_by_the_names_of_its_tensors(tmp_path):
    class Wider(Plain):
        def __init__(self):
            super().__init__()
            self.layers[3] = torch.nn.Linear(8, 2)

    fit(tmp_path, max_epochs=1)
    model = Wider()
    before = digest(model.state_dict())
    with pytest.raises(ValueError, match=r"state_dict\.layers\.3\.weight"):
        fit(tmp_path, model=model)
    assert digest(model.state_dict()) == before


def test_pickled_it_keeps_its_settings(tmp_path):
    lazy = LazySnapshotCallback(tmp_path / "here", every_n_steps=3)
    assert pickle.loads(pickle.dumps(lazy))._arguments == lazy._arguments
    trainer = make_trainer(tmp_path, lazy)
    trainer.fit(Plain(), *loaders())
    copy = pickle.loads(pickle.dumps(lazy))
    make_trainer(tmp_path, copy).fit(Plain(), *loaders(), ckpt_path="latest")


def test_settings_that_contradict_each_other_are_refused(tmp_path):
    config = SnapshotConfig(every_n_steps=5, levels=(PersistentLevel(tmp_path),))
    LazySnapshotCallback(tmp_path, every_n_steps=5, config=config)
    with pytest.raises(ConfigError, match="dirpath"):
        LazySnapshotCallback(tmp_path / "other", config=config)
    with pytest.raises(ConfigError, match="every_n_steps"):
        LazySnapshotCallback(every_n_steps=4, config=config)
    with pytest.raises(ConfigError, match="every_n_steps"):
        LazySnapshotCallback(every_n_steps=0)
    with pytest.raises(ConfigError, match="SnapshotConfig"):
        LazySnapshotCallback(config={"every_n_steps": 1})


@pytest.mark.filterwarnings("ignore:Found `dataloader_iter`.*:UserWarning")
def test_a_step_that_fetches_its_own_batches_is_refused(tmp_path):
    class Fetching(Plain):
        def training_step(self, dataloader_iter):
            return self.loss(next(dataloader_iter)[0])

    with pytest.raises(ConfigError, match="dataloader_iter"):
        fit(tmp_path, model=Fetching())


def test_every_n_steps_still_saves_the_last_step(tmp_path):
    pl.seed_everything(1, verbose=False)
    lazy = LazySnapshotCallback(every_n_steps=5)
    make_trainer(tmp_path, lazy, Ready(lazy)).fit(Plain(), *loaders())
    assert "/step-00000012-" in newest_directory(str(tmp_path / "lazysnap"))


def test_the_command_line_takes_it(tmp_path, monkeypatch):
    from lightning.pytorch.cli import LightningCLI

    class Data(pl.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(Numbers(24), BATCH_SIZE)

        def val_dataloader(self):
            return DataLoader(Numbers(8), 4)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train"])
    arguments = [
        "fit",
        "--ckpt_path=latest",
        "--trainer.callbacks=lazysnap.LazySnapshotCallback",
        "--trainer.callbacks.every_n_steps=2",
        "--trainer.max_epochs=1",
        "--trainer.accelerator=cpu",
        "--trainer.logger=false",
        "--trainer.enable_checkpointing=false",
        "--trainer.enable_progress_bar=false",
        f"--trainer.default_root_dir={tmp_path}",
    ]
    for _ in range(2):
        cli = LightningCLI(Plain, Data, args=arguments, save_config_kwargs={"overwrite": True})
        assert cli.trainer.global_step == 6
