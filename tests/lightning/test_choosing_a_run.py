"""A fit that begins fresh in a used directory leaves the run there; ``ckpt_path="run:…"`` goes back to it, exactly."""

import pytest
from support.stored import snapshots_at
from support.waiting import until
from test_callback import DieAt, Plain, finish, fit, loaders, make_trainer, raising

from lazysnap import LazySnapshotCallback
from lazysnap.errors import ConfigError, SnapshotNotFound


def stored(directory):
    """Run and step of the complete snapshots there, the newest first."""
    return [(found.run_id, found.step) for found in snapshots_at(directory / "lazysnap")]


def test_a_run_that_a_fresh_fit_left_is_continued_by_its_name(tmp_path, caplog):
    whole = finish(*fit(tmp_path / "whole"))
    with pytest.raises(ZeroDivisionError):
        fit(tmp_path, DieAt(9, raising(ZeroDivisionError())))
    (tmp_path / "lazysnap").mkdir(exist_ok=True)
    until(lambda: any(step == 9 for _, step in stored(tmp_path)))
    old = stored(tmp_path)[0][0]
    caplog.clear()

    fit(tmp_path, ckpt_path=None, max_epochs=1)

    assert (stored(tmp_path)[0][1], (old, 9) in stored(tmp_path)) == (6, True)
    fresh = stored(tmp_path)[0][0]
    caplog.clear()

    assert finish(*fit(tmp_path, ckpt_path=f"run:{old}", seed=99)) == whole

    assert f"begins at step 9 of run {old[:8]}" in caplog.text
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
