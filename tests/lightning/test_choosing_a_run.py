"""A fit that begins fresh in a used directory says what it leaves; ``ckpt_path="run:…"`` goes back to it, exactly."""

import pytest
from lightning.pytorch.callbacks import Callback
from support.waiting import until
from test_callback import DieAt, Plain, finish, fit, loaders, make_trainer, raising

from lazysnap import LazySnapshotCallback
from lazysnap.errors import ConfigError, SnapshotNotFound
from lazysnap.levels import open_store
from lazysnap.resolver import candidates

TIMEOUT_S = 50


def stored(directory):
    """Run and step of the complete snapshots there, the newest first."""
    return [(plan.run_id, plan.step) for plan in candidates([open_store(str(directory / "lazysnap")).inventory()])]


class Hears(Callback):
    """Waits until the keeper has said what it has to say."""

    def __init__(self, is_said):
        self.is_said = is_said

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        [lazy] = [item for item in trainer.callbacks if isinstance(item, LazySnapshotCallback)]
        if trainer.global_step == 2:
            until(lambda: lazy.engine.statistics() is not None and self.is_said())


def test_a_run_that_a_fresh_fit_left_is_named_and_continued_by_its_name(tmp_path, caplog):
    whole = finish(*fit(tmp_path / "whole"))
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, DieAt(9, raising(ZeroDivisionError())))
    (tmp_path / "lazysnap").mkdir(exist_ok=True)
    until(lambda: any(step == 9 for _, step in stored(tmp_path)))
    old = stored(tmp_path)[0][0]
    caplog.clear()

    fit(tmp_path, Hears(lambda: "starts fresh, as run" in caplog.text), ckpt_path=None, max_epochs=1)

    [line] = [text for text in caplog.messages if "starts fresh, as run" in text]
    assert f"holds run {old[:8]}" in line
    assert "whose newest snapshot is step 9" in line
    assert f'ckpt_path="run:{old[:8]}' in line
    assert (stored(tmp_path)[0][1], (old, 9) in stored(tmp_path)) == (6, True)
    fresh = stored(tmp_path)[0][0]
    caplog.clear()

    assert finish(*fit(tmp_path, ckpt_path=f"run:{old}", seed=99)) == whole

    assert f"begins at step 9 of run {old[:8]}" in caplog.text
    assert "starts fresh" not in caplog.text
    (newest, step), *_ = stored(tmp_path)
    assert (step, newest in (old, fresh)) == (12, False)
    assert {(old, 9), (fresh, 6)} < set(stored(tmp_path))

    trainer = make_trainer(tmp_path, LazySnapshotCallback())
    trainer.validate(Plain(), loaders()[1], ckpt_path=f"run:{fresh}", verbose=False)
    assert trainer.ckpt_path == f"run:{fresh}"
    unknown = next(digit for digit in "0123456789abcdef" if digit not in {run[0] for run, _ in stored(tmp_path)})
    for path, error in (("run:xyz", ConfigError), (f"run:{unknown}", SnapshotNotFound)):
        with pytest.raises(error, match="run"):
            fit(tmp_path, ckpt_path=path)
