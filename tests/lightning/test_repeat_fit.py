"""A loss that is bad once: the batches since the snapshot come again, and the fit ends as one that never had it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import (
    BATCH_SIZE,
    BATCHES,
    SIZE,
    Accumulated,
    Case,
    Dying,
    Manual,
    OneCycle,
    Plateau,
    Recorder,
    Shuffled,
    Storing,
    Unsized,
    _run,
)
from test_exact_resume import (
    AccumulationSchedule,
    Averaged,
    Mid,
    OwnGenerators,
    StatefulWorkers,
    TwoLoaders,
    UnsizedWorkers,
    Workers,
)
from test_further_cases import EpochSampler
from test_workers import Persistent
from torch.utils.data import DataLoader

from lazysnap import LazySnapshotCallback, LossSpike, NonFinite
from lazysnap.errors import ConfigError, RollbackFailed

pytestmark = pytest.mark.filterwarnings("ignore:Encountered `nan` values in tensor:UserWarning")  # torchmetrics


class Spoiler:
    """Makes the loss of one batch bad, the first ``times`` times."""

    def __init__(self, epoch, batch, times, factor):
        self.at, self.left, self.factor = (epoch, batch), times, factor

    def __call__(self, module, batch_idx, loss):
        if (module.current_epoch, batch_idx) != self.at or not self.left:
            return loss
        self.left -= 1
        return loss * self.factor


def train(kind, directory, *, at=(0, 0), times=0, factor=float("nan"), policy=None, store_at=None):
    spoiler = Spoiler(*at, times, factor)

    class Spoilt(kind):
        class module(kind.module):
            def loss(self, batch):
                loss = super().loss(batch)
                if self.training:
                    loss = spoiler(self, self.trainer.fit_loop.epoch_loop.batch_idx, loss)
                    self.seen_loss = loss.detach()
                return loss

            def training_step(self, batch, batch_idx):
                result = super().training_step(batch, batch_idx)
                return self.seen_loss if result is None else result

    recorder = Recorder()
    policy = policy or NonFinite(data="repeat")
    lazy = LazySnapshotCallback(directory / "snapshots", rollback_on=policy)
    done = _run(Spoilt(), directory, 1, recorder, [lazy, Dying(lazy, 1 << 30), Storing(store_at)])
    done.final["callbacks"] = done.final["callbacks"].replace(str(directory), "")
    return done, lazy.statistics().rollbacks


def check(kind, tmp_path, at, **settings):
    policy = settings.pop("policy", NonFinite(data="repeat"))
    whole, never = train(kind, tmp_path / "a", policy=policy)
    again, once = train(kind, tmp_path / "b", at=at, times=1, policy=policy, **settings)
    assert (never, once) == (0, 1)
    assert again.final == whole.final
    # From the first batch of the bad step on, what came again is what an undisturbed run does there.
    batches = [entry for entry in whole.trace if entry[0] == "batch"]
    [bad] = [entry for entry in batches if entry[1:3] == at]
    first = next(entry for entry in batches if entry[3] == bad[3])
    left = len(whole.trace) - whole.trace.index(first)
    assert again.trace[-left:] == whole.trace[-left:]
    assert again.trace.count(bad) == 2


KINDS = [
    Accumulated,
    AccumulationSchedule,
    Averaged,
    EpochSampler,
    Manual,
    Mid,
    OneCycle,
    OwnGenerators,
    StatefulWorkers,
    TwoLoaders,
    UnsizedWorkers,
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_a_loss_that_is_bad_once_leaves_no_trace(kind, tmp_path):
    check(kind, tmp_path, (1, 3))


@pytest.mark.parametrize(
    ("kind", "at"),
    [(Shuffled, (0, 1)), (Shuffled, (1, 0)), (Unsized, (0, BATCHES - 1)), (Shuffled, (1, BATCHES - 1))],
)
def test_at_either_end_of_an_epoch_or_of_the_fit(kind, at, tmp_path):
    check(kind, tmp_path, at)


def test_workers_that_are_kept_give_the_same_batches(tmp_path):
    check(Persistent, tmp_path, (0, 3))


def test_a_spike_is_undone(tmp_path):
    check(Shuffled, tmp_path, (1, 2), factor=1e4, policy=LossSpike(factor=50.0, window=3, data="repeat"))


@pytest.mark.parametrize("kind", [Plateau, Unsized, Workers], ids=lambda kind: kind.__name__)
def test_over_captured_steps_into_the_epoch_before(kind, tmp_path):
    """A new run begins there; its first capture is what a restart takes."""
    policy = NonFinite(steps=4, data="repeat")
    whole, _ = train(kind, tmp_path / "a", policy=policy)
    again, rollbacks = train(kind, tmp_path / "b", at=(1, 1), times=1, policy=policy, store_at=3)
    assert rollbacks == 1
    assert again.final == whole.final


@pytest.mark.timeout(300)
def test_a_loss_that_is_bad_on_one_of_two_ranks_is_repeated_on_both(tmp_path):
    def fit(name, *bad):
        place = tmp_path / name
        place.mkdir()
        program = [sys.executable, str(Path(__file__).with_name("repeating_ranks.py")), str(place), *bad]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return [json.loads((place / str(rank)).read_text()) for rank in range(2)]

    for one, other in zip(fit("never"), fit("once", "1", "4"), strict=True):
        assert (one["rollbacks"], other["rollbacks"]) == (0, 1)
        assert other["ended"] == one["ended"]
        left = len(one["seen"]) - next(at for at, line in enumerate(one["seen"]) if line[1] == 4)
        assert other["seen"][-left:] == one["seen"][-left:]
        assert len(other["seen"]) == len(one["seen"]) + 2  # a whole accumulation


def test_it_gives_up_when_the_same_batch_stays_bad(tmp_path):
    with pytest.raises(RollbackFailed, match="after 2 rollbacks without a step beyond 3"):
        train(Shuffled, tmp_path, at=(0, 3), times=9, policy=NonFinite(max_rollbacks=2, data="repeat"))


class Reloaded(Case):
    def settings(self):
        return {"max_epochs": 2, "reload_dataloaders_every_n_epochs": 1}


class Once(Case):
    def train_loader(self):
        return iter(DataLoader([(number, number) for number in range(SIZE)], BATCH_SIZE))


@pytest.mark.parametrize(("kind", "name"), [(Reloaded, "reload_dataloaders_every_n_epochs"), (Once, "is an iterator")])
def test_data_that_cannot_come_again_is_refused_before_the_first_step(kind, name, tmp_path):
    with pytest.raises(ConfigError, match=f'data="repeat".*{name}'):
        train(kind, tmp_path)
