"""Deaths by SIGKILL, and the other package."""

import re
import signal
from pathlib import Path

import lightning.pytorch as pl
import pytest
from test_callback import Plain, finish, fit, loaders, make_trainer

from lazysnap import LazySnapshotCallback

HERE = Path(__file__).parent


@pytest.mark.parametrize("step", [pytest.param(2, marks=pytest.mark.quick), 6])
def test_killed_by_sigkill_it_goes_on_from_memory_and_ends_bit_for_bit_the_same(zygote, step, tmp_path, caplog):
    whole = finish(*fit(tmp_path / "whole"))
    arguments = [str(HERE / "killed.py"), str(tmp_path / "cut"), str(step)]
    assert zygote.run(arguments, {}, tmp_path / "output") == -signal.SIGKILL, (tmp_path / "output").read_text()
    with caplog.at_level("INFO", "lazysnap"):
        assert finish(*fit(tmp_path / "cut", seed=99)) == whole
    assert re.search(rf"resumed step {step} of run .* from memory", caplog.text)


@pytest.mark.filterwarnings("ignore")
def test_one_callback_class_serves_trainers_of_both_packages(tmp_path):
    import pytorch_lightning

    class Other(pytorch_lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.inside = Plain()

        def training_step(self, batch, batch_idx):
            return self.inside.loss(batch)

        def configure_optimizers(self):
            return self.inside.configure_optimizers()

    first, second = LazySnapshotCallback(), LazySnapshotCallback()
    make_trainer(tmp_path / "a", first).fit(Plain(), *loaders(), ckpt_path="latest")
    trainer = make_trainer(tmp_path / "b", second, package=pytorch_lightning)
    trainer.fit(Other(), loaders()[0], ckpt_path="latest")
    assert trainer.global_step == 12
    assert isinstance(second, (pl.Callback, pytorch_lightning.Callback))
    assert isinstance(second, pl.Callback)
    assert isinstance(second, pytorch_lightning.Callback)
