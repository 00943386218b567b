"""Killed after a step, a training goes on as if nothing had happened.

``test_versions.py`` has the plainest cases, two of them cut after every step; most of those here are cut after every
third, and all of them within an epoch and at the end of one.
"""

import pytest
import torch
from harness import (
    BATCH_SIZE,
    SIZE,
    Accumulated,
    Case,
    Net,
    Numbers,
    Unsized,
    check_exact,
    run,
    run_real,
)
from lightning.pytorch.callbacks import EMAWeightAveraging, GradientAccumulationScheduler, WeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader, DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader


class OwnGenerators(Case):
    def train_loader(self):
        return DataLoader(Numbers(SIZE), BATCH_SIZE, shuffle=True, generator=torch.Generator().manual_seed(3))

    def validation_loader(self):
        return DataLoader(Numbers(8), 4, shuffle=True, generator=torch.Generator().manual_seed(4))


class PersistentWorkers(Case):
    """Workers, also those of the validation, start before a restart has told them anything."""

    cuts = slice(4, 7)  # in the first epoch, at the very start of the second one, and inside it

    def train_loader(self):
        data = Numbers(SIZE, noisy=False)
        return DataLoader(data, BATCH_SIZE, shuffle=True, num_workers=1, persistent_workers=True)

    def validation_loader(self):
        return DataLoader(Numbers(8, noisy=False), 4, shuffle=True, num_workers=1, persistent_workers=True)


class EpochSamplerAndWorkers(Case):
    cuts = PersistentWorkers.cuts

    def train_loader(self):
        data = Numbers(SIZE)
        return DataLoader(data, BATCH_SIZE, sampler=DistributedSampler(data, 1, 0, seed=3), num_workers=1)


class StatefulWorkers(Case):
    """Augmentation in workers draws from generators of all three libraries, and from one of the dataset's own.

    Between two states of a worker, batches are read again.
    """

    cuts = slice(3, 6, 2)  # torchdata takes seconds to start and stop workers

    def train_loader(self):
        data = NumbersOfTheirOwn(SIZE)
        return StatefulDataLoader(data, BATCH_SIZE, shuffle=True, num_workers=1, snapshot_every_n_steps=3)


class NumbersOfTheirOwn(Numbers):
    def __init__(self, size):
        super().__init__(size)
        self.generator = torch.Generator().manual_seed(8)

    def __getitem__(self, index):
        number, values = super().__getitem__(index)
        return number, values + 0.01 * torch.rand(3, generator=self.generator)


class TwoLoaders(Case):
    """The shorter one starts again in the middle of the epoch, and the batches come as a list."""

    def train_loader(self):
        loaders = [DataLoader(Numbers(size), BATCH_SIZE, shuffle=True) for size in (SIZE, SIZE // 2)]
        return CombinedLoader([loaders[0], loaders[1]], "max_size_cycle")

    class module(Net):
        def on_before_batch_transfer(self, batch, dataloader_idx):
            return [torch.cat([batch[0][i], batch[1][i]]) for i in (0, 1)] if isinstance(batch[0], list) else batch


class AccumulatedUnsized(Unsized):
    cuts = slice(None)
    dies_at = 3

    def settings(self):
        return {"max_epochs": 2, "accumulate_grad_batches": 4}


class AccumulationSchedule(Case):
    dies_at = 7

    def callbacks(self, directory):
        return [GradientAccumulationScheduler({0: 1, 1: 3})]


class MaxSteps(Case):
    def settings(self):
        return {"max_steps": 9}


class Mid(Case):
    def settings(self):
        return {"max_epochs": 2, "val_check_interval": 2}


class AcrossEpochs(Case):
    def settings(self):
        return {"max_epochs": 2, "val_check_interval": 4, "check_val_every_n_epoch": None}


class Limited(Case):
    cuts = slice(1, None, 2)
    dies_at = 5

    def settings(self):
        return {"max_epochs": 2, "limit_train_batches": 4, "num_sanity_val_steps": 0}


class Averaged(Case):
    def settings(self):
        return {"max_epochs": 2, "val_check_interval": 3}

    def callbacks(self, directory):
        return [EMAWeightAveraging(decay=0.8)]


class AveragedPerEpoch(Case):
    def callbacks(self, directory):
        class PerEpoch(WeightAveraging):
            def should_update(self, step_idx=None, epoch_idx=None):
                return epoch_idx is not None

        return [PerEpoch()]


class Clipped(Case):
    def settings(self):
        return {"max_epochs": 2, "gradient_clip_val": 0.1, "precision": "bf16-mixed"}


class Half(Case):
    """Lightning converts the module behind the restore of a checkpoint; a snapshot is of the converted module."""

    cuts = slice(1, None, 4)

    class module(Net):
        """A module for batches of any dtype, with one buffer that stays float32."""

        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.tensor(1 / 3))

        def loss(self, batch):
            values = self.trainer.precision_plugin.convert_input(batch[1])
            return super().loss((batch[0], values)) * self.scale

        def training_step(self, batch, batch_idx):
            self.scale += 1e-4
            return super().training_step(batch, batch_idx)

        def _apply(self, fn, recurse=True):
            scale = self.scale
            super()._apply(fn, recurse)
            self.scale = scale
            return self

    def settings(self):
        return {"max_epochs": 2, "precision": "bf16-true"}


class HalfByTheProgram(Half):
    class module(Half.module):
        def configure_model(self):
            self.layers.bfloat16()

        def loss(self, batch):
            return super().loss((batch[0], batch[1].bfloat16()))

    def settings(self):
        return {"max_epochs": 2}


class Scaled(Case):
    def settings(self):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        return {"max_epochs": 2, "plugins": [MixedPrecision("16-mixed", "cpu", scaler=scaler)]}


CASES = [
    Scaled,
    OwnGenerators,
    PersistentWorkers,
    EpochSamplerAndWorkers,
    StatefulWorkers,
    TwoLoaders,
    AccumulatedUnsized,
    AccumulationSchedule,
    MaxSteps,
    Mid,
    AcrossEpochs,
    Limited,
    Averaged,
    AveragedPerEpoch,
    Clipped,
    Half,
    HalfByTheProgram,
]
"""Further loaders are cut in tests/data, of which the callback knows nothing."""


@pytest.mark.parametrize("kind", CASES, ids=lambda kind: kind.__name__)
def test_resumed_within_an_epoch_and_at_its_end_it_ends_bit_for_bit_as_uninterrupted(kind, tmp_path):
    check_exact(kind(), tmp_path)


@pytest.mark.parametrize(
    "kind",
    [Accumulated, Averaged, Half],
    ids=lambda kind: kind.__name__,
)
def test_resumed_from_the_keepers_memory_it_ends_bit_for_bit_as_uninterrupted(kind, tmp_path):
    """State of each sort through the real engine: gradients, averages, other dtypes."""
    whole = run(kind(), tmp_path, snapshots=False)
    with pytest.raises(ZeroDivisionError):
        run_real(kind(), tmp_path, seed=1, die_at=kind.dies_at)
    resumed = run_real(kind(), tmp_path, seed=99)
    assert 0 < len(resumed.trace) < len(whole.trace)
    assert resumed.trace == whole.trace[-len(resumed.trace) :]
    assert {**resumed.final, "callbacks": None} == {**whole.final, "callbacks": None}
