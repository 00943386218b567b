"""A fit whose captures cannot go into memory goes on, and says so; or it does not begin."""

import logging

import lightning.pytorch as pl
import pytest
from harness import Net
from lightning.pytorch.callbacks import Callback
from test_callback import finish, loaders, make_trainer

from lazysnap import LazySnapshotCallback, MemoryLevel, PersistentLevel, SnapshotConfig
from lazysnap.memory.budget import MemoryBoundExceeded


class Steps(Callback):
    """Waits until it is known that there is no memory, and fails at a step, if that is asked for."""

    def __init__(self, lazy, fail_at=None):
        self.lazy, self.fail_at, self.seen = lazy, fail_at, []

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if self.lazy.engine.statistics().unprotected is None:
            assert not self.lazy.engine._wait_ready(60)
        if trainer.global_step == self.fail_at:
            raise ZeroDivisionError
        self.seen.append(trainer.global_step)


def fit(directory, *, seed=1, fail_at=None, require_memory=False):
    pl.seed_everything(seed, verbose=False)
    level = PersistentLevel(str(directory / "level"), every_n_steps=3)
    config = SnapshotConfig(
        levels=(level,), memory=MemoryLevel(max_bytes=1 << 16, spill_dir=""), require_memory=require_memory
    )
    lazy = LazySnapshotCallback(config=config)
    steps = Steps(lazy, fail_at)
    trainer, model = make_trainer(directory, lazy, steps), Net()
    trainer.fit(model, *loaders(), ckpt_path="latest")
    return finish(trainer, model), steps.seen


def test_a_fit_without_memory_trains_to_its_end_and_says_that_nothing_was_captured(tmp_path, caplog):
    _, steps = fit(tmp_path)

    assert steps == list(range(12))
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any("NOT protected in memory" in text and "max_bytes" in text for text in warned)
    assert any("step 12, the last that was due, is not captured" in text for text in warned)


def test_a_fit_that_requires_memory_raises_before_its_first_step(tmp_path):
    with pytest.raises(MemoryBoundExceeded, match="max_bytes"):
        fit(tmp_path, require_memory=True, fail_at=0)
