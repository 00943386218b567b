"""A batch that makes the loss NaN leaves no trace, and the loop knows nothing of it; what cannot work is refused."""

import random

import pytest
import torch
from accelerate import DataLoaderConfiguration
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

from lazysnap import LazyAccelerator, MemoryLevel, NonFinite, PersistentLevel, SnapshotConfig
from lazysnap.errors import ConfigError, RollbackFailed

STEPS, BAD = 50, 23


def train(directory, values, policy, accumulation=1):
    level = PersistentLevel(str(directory), every_n_steps=10)
    config = SnapshotConfig(levels=(level,), memory=MemoryLevel(linger_s=5), keeper_timeout_s=60)
    accelerator = LazyAccelerator(
        cpu=True, snapshots=config, rollback_on=policy, gradient_accumulation_steps=accumulation
    )
    torch.manual_seed(5)
    model = torch.nn.Sequential(
        torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 3)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    model, optimizer, schedule, loader = accelerator.prepare(model, optimizer, schedule, DataLoader(values, 4))
    assert accelerator.engine.wait_ready(60)
    try:
        for batch in loader:
            with accelerator.accumulate(model):
                accelerator.backward((model(batch) - batch).square().mean())
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
    *wanted, rollbacks = train(tmp_path / "without", without, NonFinite())
    assert rollbacks == 0
    values[4 * BAD : 4 * (BAD + 1)] = float("nan")
    *found, rollbacks = train(tmp_path / "with", values, NonFinite())
    assert rollbacks == 1
    assert found == wanted


def test_within_an_accumulation_the_micro_batches_of_the_step_so_far_are_dropped(tmp_path):
    values = batches()
    # Steps of two micro batches; the second one of a step is bad.
    without = torch.cat([values[: 4 * 24], values[4 * 26 :]])
    *wanted, _ = train(tmp_path / "without", without, NonFinite(), accumulation=2)
    values[4 * 25] = float("nan")
    *found, rollbacks = train(tmp_path / "with", values, NonFinite(), accumulation=2)
    assert rollbacks == 1
    assert found == wanted


class Noisy(torch.utils.data.Dataset):
    def __len__(self):
        return 4 * BATCHES

    def __getitem__(self, index):
        return index, torch.tensor([index / 10, random.random(), float(torch.rand(()))])


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from (Noisy()[index] for index in range(len(Noisy())))


class Progress(dict):
    state_dict = dict.copy
    load_state_dict = dict.update


LOADERS = {
    "shuffled": lambda: DataLoader(Noisy(), 4, shuffle=True),
    "workers": lambda: DataLoader(Noisy(), 4, shuffle=True, num_workers=2),
    "own generator": lambda: DataLoader(Noisy(), 4, shuffle=True, generator=torch.Generator().manual_seed(3)),
    "iterable": lambda: DataLoader(Stream(), 4),
}
BATCHES, EPOCHS = 6, 3


def repeat(directory, make, spoilt=(), *, times=1, accumulation=1, policy=None, stored_at=None, **settings):
    """The batches that were trained, and how it ended; the loss is NaN ``times`` times for the batches ``spoilt``.

    At the batch ``stored_at`` it waits until storage has what was captured.
    """
    level = PersistentLevel(str(directory), every_n_steps=5)
    config = SnapshotConfig(levels=(level,), memory=MemoryLevel(linger_s=5), keeper_timeout_s=60)
    set_seed(7)
    accelerator = LazyAccelerator(
        cpu=True,
        snapshots=config,
        rollback_on=policy or NonFinite(data="repeat"),
        gradient_accumulation_steps=accumulation,
        dataloader_config=DataLoaderConfiguration(**settings),
    )
    model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, make())
    progress = Progress(epoch=0, batch=0)
    accelerator.register_for_checkpointing(progress)
    assert accelerator.engine.wait_ready(60)
    left, seen = dict.fromkeys(spoilt, times), []
    try:
        while progress["epoch"] < EPOCHS:
            for numbers, values in loader:
                with accelerator.accumulate(model):
                    loss = model(values).square().mean() + random.random()
                    at = (progress["epoch"], progress["batch"])
                    assert at != stored_at or accelerator.engine.flush(240)
                    left[at] = left.get(at, 0) - 1
                    accelerator.backward(loss * float("nan") if left[at] >= 0 else loss)
                    optimizer.step()
                    optimizer.zero_grad()
                seen.append((*at, numbers.tolist(), values.tolist(), loss.item()))
                progress["batch"] += 1
            progress.update(epoch=progress["epoch"] + 1, batch=0)
            seen.append(("epoch", progress["epoch"], loader.iteration, random.random()))
    finally:
        accelerator.engine.abandon()
    tensors = [*model.state_dict().values()]
    tensors += [one for state in optimizer.state_dict()["state"].values() for one in state.values()]
    ended = [one.numpy().tobytes() for one in tensors], torch.rand(2).tolist(), random.random(), dict(progress)
    return seen, ended, accelerator.statistics().rollbacks


def check_repeated(tmp_path, make, spoilt, **settings):
    whole, wanted, never = repeat(tmp_path / "whole", make, **settings)
    seen, ended, rollbacks = repeat(tmp_path / "spoilt", make, spoilt, **settings)
    assert (never, rollbacks) == (0, len(spoilt))
    assert ended == wanted
    epoch, batch = spoilt[-1]
    left = len(whole) - next(at for at, line in enumerate(whole) if line[:2] == (epoch, batch))
    assert seen[-left:] == whole[-left:]


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS.keys())
def test_repeated_batches_leave_no_trace_of_a_loss_that_was_nan_once(tmp_path, make):
    check_repeated(tmp_path, make, [(1, 3)])


def test_workers_that_are_kept_repeat_their_first_epoch(tmp_path):
    check_repeated(tmp_path, lambda: DataLoader(Noisy(), 4, num_workers=1, persistent_workers=True), [(0, 3)])


@pytest.mark.parametrize("at", [(0, BATCHES - 1), (1, 0), (EPOCHS - 1, BATCHES - 1)])
def test_they_are_repeated_at_either_end_of_an_epoch(tmp_path, at):
    check_repeated(tmp_path, LOADERS["shuffled"], [at])


@pytest.mark.parametrize("batch", [2, 3])
def test_a_whole_accumulation_is_repeated(tmp_path, batch):
    check_repeated(tmp_path, LOADERS["shuffled"], [(1, batch)], accumulation=2)


@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")
@pytest.mark.parametrize(
    "settings", [{"dispatch_batches": True}, {"use_stateful_dataloader": True}, {"use_seedable_sampler": True}]
)
def test_whatever_loader_accelerate_makes(tmp_path, settings):
    check_repeated(tmp_path, LOADERS["shuffled"], [(0, 3), (2, 4)], **settings)


@pytest.mark.parametrize("at", [(1, 1), (1, 5)])
def test_over_captured_steps_also_into_the_epoch_before(tmp_path, at):
    policy = NonFinite(steps=4, data="repeat")
    check_repeated(tmp_path, LOADERS["shuffled"], [at], policy=policy, stored_at=(0, 3))


def test_it_gives_up_when_the_repeated_batch_stays_bad(tmp_path):
    policy = NonFinite(max_rollbacks=2, data="repeat")
    with pytest.raises(RollbackFailed, match="2 rollbacks"):
        repeat(tmp_path, LOADERS["shuffled"], [(0, 3)], times=9, policy=policy)


def test_a_dataset_that_gives_its_data_once_is_refused(tmp_path):
    class Once(Stream):
        def __iter__(self):
            return self

        def __next__(self):
            return 0, torch.zeros(3)

    with pytest.raises(ConfigError, match="Once is an iterator"):
        repeat(tmp_path, lambda: DataLoader(Once(), 4))


@pytest.mark.parametrize("snapshots", [5, ["a"], {}, ""])
def test_what_is_no_place_for_snapshots_is_refused(snapshots):
    with pytest.raises(ConfigError, match="path or URL"):
        LazyAccelerator(cpu=True, snapshots=snapshots)


@pytest.mark.parametrize("which", [True, 1.5, ["latest"]])
def test_what_chooses_no_snapshot_is_refused(tmp_path, which):
    accelerator = LazyAccelerator(cpu=True, snapshots=tmp_path)
    with pytest.raises(ConfigError, match=r'"latest", a step, a name or a run'):
        accelerator.load_state(which)
