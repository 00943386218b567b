"""Figures of snapshots in the trainer's own loggers."""

import csv
import random

import pytest
import torch
from harness import Storing
from lightning.pytorch.loggers import CSVLogger, Logger
from test_callback import DieAt, Plain, finish, fit, loaders, make_trainer, raising

PREFIX = "lazysnap/"
EVERY = 4


class Broken(Logger):
    """Takes what the training logs, and no figures."""

    name = "broken"
    version = "0"
    calls = 0

    def log_metrics(self, metrics, step=None):
        if any(name.startswith(PREFIX) for name in metrics):
            self.calls += 1
            raise OSError("the disk is full")

    def log_hyperparams(self, *args, **kwargs):
        pass


class Drawing(Broken):
    """Draws random numbers."""

    def log_metrics(self, metrics, step=None):
        torch.rand(3)
        random.random()


def csv_logger(directory):
    return CSVLogger(directory, name="", version="csv")


def rows(directory):
    """What the file has, row by row, without empty cells."""
    with (directory / "csv" / "metrics.csv").open() as file:
        return [{name: value for name, value in row.items() if value} for row in csv.DictReader(file)]


def figures(directory):
    """By step."""
    found = [row for row in rows(directory) if any(name.startswith(PREFIX) for name in row)]
    return {int(row.pop("step")): {name: float(value) for name, value in row.items()} for row in found}


def others(directory):
    """What the training logged itself."""
    return [row for row in rows(directory) if not any(name.startswith(PREFIX) for name in row)]


def test_a_csv_file_has_the_figures_of_snapshots_every_few_steps_beside_what_the_training_logs(tmp_path):
    fit(tmp_path / "with", Storing(2), logger=csv_logger(tmp_path / "with"), log_every_n_steps=EVERY)
    trainer = make_trainer(tmp_path / "none", logger=csv_logger(tmp_path / "none"), log_every_n_steps=EVERY)
    torch.manual_seed(1)
    found = figures(tmp_path / "with")

    assert list(found) == [4, 8, 12]
    for values in found.values():
        assert set(values) >= {f"{PREFIX}{name}" for name in ("stall_ms", "copy_gb_per_s", "skipped", "torn")}
        assert values[f"{PREFIX}lag_steps/memory"] in (1, 2)
        assert values[f"{PREFIX}lag_s/memory"] > 0
        assert values[f"{PREFIX}lag_steps/storage_0"] >= 1
        assert values[f"{PREFIX}torn"] == 0
    plain(trainer)
    assert [row["step"] for row in others(tmp_path / "with")] == [row["step"] for row in others(tmp_path / "none")]
    assert others(tmp_path / "with") == others(tmp_path / "none")


def plain(trainer):
    """The same training without snapshots."""
    import lightning.pytorch as pl

    pl.seed_everything(1, verbose=False)
    trainer.fit(Plain(), *loaders())


def test_a_logger_that_takes_none_is_named_once_and_the_others_have_them(tmp_path, caplog):
    broken = Broken()
    trainer, _ = fit(tmp_path, logger=[broken, csv_logger(tmp_path)], log_every_n_steps=EVERY)

    assert trainer.global_step == 12
    assert broken.calls == 1
    assert list(figures(tmp_path)) == [4, 8, 12]
    told = [record for record in caplog.records if "does not accept metrics" in record.getMessage()]
    assert [record.getMessage() for record in told] == [
        "Broken does not accept metrics of snapshots: OSError: the disk is full"
    ]


@pytest.mark.parametrize("step", [4, 5])
def test_what_a_logger_draws_belongs_to_the_step_that_is_captured(tmp_path, step):
    settings = {"logger": Drawing(), "log_every_n_steps": EVERY}
    whole = finish(*fit(tmp_path / "whole", **settings))
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path / "cut", DieAt(step, raising(ZeroDivisionError())), **settings)

    assert finish(*fit(tmp_path / "cut", seed=99, **settings)) == whole
