"""What the program itself adds to a checkpoint: values of its own types, state of its callbacks, slow hooks."""

import time
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from test_callback import DieAt, Plain, finish, fit, raising

from lazysnap import PersistentLevel, SnapshotConfig, register_type
from lazysnap.errors import UnsupportedState
from lazysnap.state import codec


class Normalizer:
    """An object as packages for forecasting put it into their checkpoints."""

    def __init__(self, count=0):
        self.count = count


class Forecaster(Plain):
    """Keeps such objects in its checkpoints and hyperparameters, and asks for them when one is loaded."""

    def __init__(self):
        torch.manual_seed(3)
        super().__init__()
        self.normalizer, self.seen = Normalizer(), None
        self.save_hyperparameters({"scaling": self.normalizer})

    def training_step(self, batch, batch_idx):
        self.normalizer.count += 1
        return super().training_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint):
        mine = {"normalizer": self.normalizer, "length": self.normalizer.count, "all": [3, (self.normalizer, 4)]}
        checkpoint["dataset_parameters"] = mine
        checkpoint["object"] = self.normalizer

    def on_load_checkpoint(self, checkpoint):
        self.seen = checkpoint


class Counting(Callback):
    """Its state is known by its class, and holds a counter beside an object."""

    def __init__(self):
        self.count, self.normalizer = 0, Normalizer()

    @property
    def state_key(self):
        return Counting

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.count += 1

    def state_dict(self):
        return {"count": self.count, "normalizer": self.normalizer}

    def load_state_dict(self, state):
        self.count, self.restored = state["count"], state["normalizer"]


def cut_at(step):
    return DieAt(step, raising(ZeroDivisionError()))


def test_values_of_unknown_types_do_not_end_a_fit_and_the_programs_own_stand_in_at_a_restart(tmp_path, caplog):
    whole = finish(*fit(tmp_path / "whole", Counting(), model=Forecaster()))
    caplog.clear()
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path / "cut", Counting(), cut_at(5), model=Forecaster())
    said = [record.getMessage() for record in caplog.records if "left out of every snapshot" in record.getMessage()]

    model, counting = Forecaster(), Counting()
    trainer, _ = fit(tmp_path / "cut", counting, model=model, seed=99)

    assert finish(trainer, model) == whole
    assert len(said) == 1
    for path in (
        "$.dataset_parameters.normalizer",
        "$.dataset_parameters.all[1][0]",
        "$.object",
        "$.hyper_parameters.scaling",
        "Counting'].normalizer",
    ):
        assert path in said[0], path
    assert "Normalizer)" in said[0]
    assert "register_type" in said[0]
    mine = model.seen["dataset_parameters"]
    assert mine["length"] == 5  # of the snapshot; the objects are this program's
    assert mine["normalizer"] is model.normalizer
    assert mine["all"] == [3, (model.normalizer, 4)]
    assert model.seen["object"] is model.normalizer
    assert model.seen["hyper_parameters"]["scaling"] is model.normalizer
    assert counting.count == 12
    assert isinstance(counting.restored, Normalizer)


def test_a_registered_type_is_in_the_snapshot(tmp_path, monkeypatch):
    monkeypatch.setattr(codec, "_registered", {})
    monkeypatch.setattr(codec, "_decoders", {})
    register_type(Normalizer, name="Normalizer", encode=lambda one: one.count, decode=Normalizer)
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, cut_at(5), model=Forecaster())

    model = Forecaster()
    fit(tmp_path, model=model, seed=99)

    assert model.seen["object"].count == 5


class Scheduled(Plain):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        scheduler.normalizer = Normalizer()
        return [optimizer], [scheduler]


def test_an_unknown_type_in_a_schedule_is_refused_at_the_first_boundary(tmp_path):
    with pytest.raises(UnsupportedState, match=r"\$\.lr_schedulers\[0\]\.normalizer: .*Normalizer"):
        fit(tmp_path, model=Scheduled())


class Slow(Plain):
    """Its hook takes longer than a capture should, and gives the same but for ``changes``."""

    def __init__(self, changes=()):
        torch.manual_seed(3)
        super().__init__()
        self.changes, self.calls, self.seen = changes, [], None

    def on_save_checkpoint(self, checkpoint):
        step = checkpoint["global_step"]
        self.calls.append(step)
        end = time.perf_counter() + 0.011
        while time.perf_counter() < end:
            pass
        checkpoint["vocabulary"] = {"size": 7, "version": sum(step >= change for change in self.changes)}

    def on_load_checkpoint(self, checkpoint):
        self.seen = checkpoint["vocabulary"]


class SlowState(Callback):
    """The state of a callback that is slow, and another one at every step."""

    def __init__(self):
        self.steps = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.step = trainer.global_step

    def state_dict(self):
        end = time.perf_counter() + 0.011
        while time.perf_counter() < end:
            pass
        self.steps.append(self.step)
        return {"step": self.step}


def every_five(directory):
    return SnapshotConfig(levels=(PersistentLevel(directory, every_n_steps=5),))


def lines(caplog, text):
    return [record.getMessage() for record in caplog.records if text in record.getMessage()]


def test_a_slow_hook_that_gives_the_same_is_called_only_at_steps_that_a_level_stores(tmp_path, caplog):
    model, callback = Slow(), SlowState()
    fit(
        tmp_path,
        callback,
        model=model,
        config=SnapshotConfig(levels=(PersistentLevel(tmp_path / "s", every_n_steps=5),)),
    )

    assert callback.steps == [*range(1, 13)]  # it gives another entry at each step, and none stands in
    # The first entry is measured, two in a row are compared; 5 and 10 are stored, 12 is the last.
    assert model.calls == [1, 2, 3, 5, 10, 12]
    [said] = lines(caplog, "Slow.on_save_checkpoint took")
    assert "raise every_n_steps" in said
    assert len(lines(caplog, "SlowState.state_dict took")) == 1


def test_an_entry_that_is_older_than_its_step_is_named_at_a_restart_and_when_it_changes(tmp_path, caplog):
    model = Slow(changes=(4,))
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, cut_at(9), model=model, config=every_five(tmp_path / "first"))
    [said] = lines(caplog, "gives another entry than before")
    assert "steps 4 to 4 hold the older one" in said
    assert model.calls == [1, 2, 3, 5, 6, 7, 8, 9]

    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, cut_at(4), model=Slow(), config=every_five(tmp_path / "again"))
    again = Slow()
    fit(tmp_path, model=again, config=every_five(tmp_path / "again"))
    assert lines(caplog, "the snapshot holds what Slow.on_save_checkpoint gave at step 3")
    assert again.seen == {"size": 7, "version": 0}


class Writing(Plain):
    def on_save_checkpoint(self, checkpoint):
        with (Path(self.trainer.default_root_dir) / "notes.txt").open("a") as file:
            file.write("x")


def test_a_hook_that_writes_a_file_into_the_runs_directory_is_named_once(tmp_path, caplog):
    fit(tmp_path, model=Writing())

    [said] = lines(caplog, "Writing.on_save_checkpoint wrote")
    assert str(tmp_path / "notes.txt") in said
    assert "every captured step" in said
