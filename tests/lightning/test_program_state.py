"""What the program itself adds to a checkpoint: values of its own types, state of its callbacks, slow hooks."""

import time

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from test_callback import DieAt, Plain, finish, fit, raising

from lazysnap import register_type
from lazysnap.errors import StateError
from lazysnap.integrations.lightning.extras import ModuleExtras
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
    with pytest.raises(StateError, match=r"\$\.lr_schedulers\[0\]\.normalizer: .*Normalizer"):
        fit(tmp_path, model=Scheduled())


class Slow(Plain):
    """Its hook takes longer than a capture may, and gives the same each time."""

    def __init__(self):
        torch.manual_seed(3)
        super().__init__()
        self.calls = []

    def on_save_checkpoint(self, checkpoint):
        self.calls.append(checkpoint["global_step"])
        end = time.perf_counter() + 0.11
        while time.perf_counter() < end:
            pass
        checkpoint["vocabulary"] = {"size": 7}


def lines(caplog, text):
    return [record.getMessage() for record in caplog.records if text in record.getMessage()]


def test_a_slow_hook_is_called_at_every_captured_step_and_named_once(tmp_path, caplog):
    model = Slow()
    fit(tmp_path, model=model)

    assert model.calls == [*range(1, 13)]  # no entry is older than its step
    [said] = lines(caplog, "collecting the training state takes")
    assert "on_save_checkpoint" in said
    assert "raise every_n_steps" in said


def test_a_hidden_buffer_that_was_made_in_inference_mode_is_in_each_snapshot():
    """Torch counts no writes to it, so nothing shows that it changed."""
    module = torch.nn.Module()
    with torch.inference_mode():
        module.register_buffer("hidden", torch.zeros(2), persistent=False)
    extras = ModuleExtras(module)
    with torch.inference_mode():
        module.hidden.add_(1)

    assert torch.equal(extras.collect()["buffers"]["hidden"], torch.ones(2))
