"""A batch that makes the loss NaN leaves no trace, and the loop knows nothing of it; what cannot work is refused."""

import pytest
import torch
from torch.utils.data import DataLoader

from lazysnap import LazyAccelerator, MemoryLevel, PersistentLevel, SnapshotConfig
from lazysnap.errors import ConfigError

STEPS, BAD = 50, 23


def train(directory, values, accumulation=1):
    level = PersistentLevel(str(directory), every_n_steps=10)
    config = SnapshotConfig(levels=(level,), memory=MemoryLevel(linger_s=5), io_timeout_s=60)
    accelerator = LazyAccelerator(cpu=True, snapshots=config, gradient_accumulation_steps=accumulation)
    torch.manual_seed(5)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 3)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, DataLoader(values, 4))
    assert accelerator.engine._wait_ready(60)
    try:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = (model(batch) - batch).square().mean()
                accelerator.backward(loss)
                if not loss.isfinite():
                    accelerator.rollback()
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
    finally:
        rollbacks = accelerator.statistics().rollbacks
        accelerator.engine.abandon()
    tensors = [*model.state_dict().values()]
    tensors += [one for state in optimizer.state_dict()["state"].values() for one in state.values()]
    return [one.numpy().tobytes() for one in tensors], schedule.scheduler.last_epoch, torch.rand(2).tolist(), rollbacks


def batches():
    return torch.randn(4 * STEPS, 3, generator=torch.Generator().manual_seed(1))


def test_a_bad_batch_is_as_if_it_had_never_been_seen(tmp_path):
    values = batches()
    without = torch.cat([values[: 4 * BAD], values[4 * (BAD + 1) :]])
    *wanted, rollbacks = train(tmp_path / "without", without)
    assert rollbacks == 0
    values[4 * BAD : 4 * (BAD + 1)] = float("nan")
    *found, rollbacks = train(tmp_path / "with", values)
    assert rollbacks == 1
    assert found == wanted


def test_within_an_accumulation_the_micro_batches_of_the_step_so_far_are_dropped(tmp_path):
    values = batches()
    # Steps of two micro batches; the second one of a step is bad.
    without = torch.cat([values[: 4 * 24], values[4 * 26 :]])
    *wanted, _ = train(tmp_path / "without", without, accumulation=2)
    values[4 * 25] = float("nan")
    *found, rollbacks = train(tmp_path / "with", values, accumulation=2)
    assert rollbacks == 1
    assert found == wanted


@pytest.mark.parametrize("snapshots", [5, ["a"], {}, ""])
def test_what_is_no_place_for_snapshots_is_refused(snapshots):
    with pytest.raises(ConfigError, match="path or URL"):
        LazyAccelerator(cpu=True, snapshots=snapshots)


@pytest.mark.parametrize("which", [True, 1.5, ["latest"]])
def test_what_chooses_no_snapshot_is_refused(tmp_path, which):
    accelerator = LazyAccelerator(cpu=True, snapshots=tmp_path)
    with pytest.raises(ConfigError, match=r'"latest", a step, a name or a run'):
        accelerator.load_state(which)
