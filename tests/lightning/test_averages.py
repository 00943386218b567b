"""Averaged weights that a callback swaps in by ``.data``, which no version of a tensor shows."""

import lightning.pytorch as pl
import pytest
import torch
from test_callback import Plain, finish, fit

from lazysnap import LazySnapshotCallback


class Large(Plain):
    """A transposed parameter is copied last; that takes longer than to get to the next validation."""

    def __init__(self):
        torch.manual_seed(3)
        super().__init__()
        self.large = torch.nn.Parameter(torch.zeros(1 << 11, 1 << 13).t())


class Averages(pl.Callback):
    """Validates averages in place of the weights."""

    def on_validation_start(self, trainer, module):
        self.trained = [one.data.clone() for one in module.parameters()]
        for one in module.parameters():
            one.data.fill_(0.5)

    def on_validation_end(self, trainer, module):
        for one, value in zip(module.parameters(), self.trained, strict=True):
            one.data.copy_(value)


def test_averages_that_are_swapped_in_for_a_validation_are_never_captured(tmp_path):
    step = 3
    often = {"accumulate_grad_batches": 2, "val_check_interval": 1}
    whole = finish(*fit(tmp_path / "whole", Averages(), model=Large(), **often))

    class DieBehindValidation(Averages):
        def on_validation_end(self, trainer, module):
            [engine] = [one.engine for one in trainer.callbacks if isinstance(one, LazySnapshotCallback)]
            assert trainer.global_step < step or engine.wait(until="captured", timeout_s=60)
            super().on_validation_end(trainer, module)
            # The first validation behind a boundary is that in the middle of the next accumulation.
            if trainer.global_step == step and not trainer.fit_loop.epoch_loop._accumulated_batches_reached():
                raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit(tmp_path / "cut", DieBehindValidation(), model=Large(), **often)

    assert finish(*fit(tmp_path / "cut", Averages(), model=Large(), seed=99, **often)) == whole
