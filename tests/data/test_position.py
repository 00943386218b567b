"""A loader goes on exactly where it was: order, augmentation, and what training draws afterwards."""

import random

import accelerate
import loader_run
import pytest
import torch
from accelerate import Accelerator
from loader_run import EPOCHS, FEW_CUTS, FEW_STRIDES, Run, check_chain, check_cuts, workers_are_slow
from torch.utils.data import DataLoader, IterableDataset, WeightedRandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from lazysnap import ResumableLoader, SnapshotEngine
from lazysnap.data import make_resumable
from lazysnap.errors import ConfigError

LENGTH = 22
BATCH = 4


class Numbers(loader_run.Numbers):
    def __init__(self):
        super().__init__(LENGTH)


class Stream(IterableDataset):
    def __iter__(self):
        yield from (torch.tensor([float(number), random.random()]) for number in range(LENGTH))


class Shuffled(torch.utils.data.Sampler):
    def __iter__(self):
        order = list(range(LENGTH))
        random.shuffle(order)
        return iter(order)

    def __len__(self):
        return LENGTH


def by_accelerate(loader, **settings):
    accelerator = Accelerator(cpu=True, dataloader_config=accelerate.DataLoaderConfiguration(**settings))
    prepared = accelerator.prepare(loader)
    make_resumable(prepared)
    return prepared


def by_fabric(loader):
    from lightning.fabric import Fabric  # seconds, in each worker

    return ResumableLoader(Fabric(accelerator="cpu", devices=1).setup_dataloaders(loader))


def shuffled(**settings):
    return DataLoader(Numbers(), batch_size=BATCH, shuffle=True, **settings)


LOADERS = {
    "shuffled": lambda: ResumableLoader(shuffled()),
    "in place": lambda: in_place(shuffled()),
    "own generator": lambda: ResumableLoader(shuffled(generator=torch.Generator().manual_seed(torch.initial_seed()))),
    "weighted": lambda: ResumableLoader(
        DataLoader(Numbers(), batch_size=BATCH, sampler=WeightedRandomSampler([1.0] * LENGTH, LENGTH))
    ),
    "own sampler": lambda: ResumableLoader(DataLoader(Numbers(), batch_size=BATCH, sampler=Shuffled())),
    "workers": lambda: ResumableLoader(shuffled(num_workers=2)),
    "persistent workers": lambda: ResumableLoader(shuffled(num_workers=2, persistent_workers=True)),
    "iterable": lambda: ResumableLoader(DataLoader(Stream(), batch_size=BATCH)),
    "iterable in workers": lambda: ResumableLoader(DataLoader(Stream(), batch_size=BATCH, num_workers=2)),
    "stateful": lambda: ResumableLoader(StatefulDataLoader(Numbers(), batch_size=BATCH, shuffle=True)),
    "stateful, weighted": lambda: ResumableLoader(
        StatefulDataLoader(Numbers(), batch_size=BATCH, sampler=WeightedRandomSampler([1.0] * LENGTH, LENGTH))
    ),
    "stateful workers": lambda: ResumableLoader(
        StatefulDataLoader(Numbers(), batch_size=BATCH, shuffle=True, num_workers=2)
    ),
    "accelerate": lambda: by_accelerate(shuffled(), use_seedable_sampler=True),
    "accelerate, no seedable sampler": lambda: by_accelerate(shuffled(), use_seedable_sampler=False),
    "accelerate, stateful": lambda: by_accelerate(shuffled(), use_stateful_dataloader=True),
    "accelerate, dispatching": lambda: by_accelerate(shuffled(), dispatch_batches=True),
    "accelerate, iterable": lambda: by_accelerate(DataLoader(Stream(), batch_size=BATCH)),
    "fabric": lambda: by_fabric(shuffled()),
}
KINDS = workers_are_slow(LOADERS)


def import_drawing(kind):
    """Import what draws random numbers at its import."""
    if kind == "fabric":
        import lightning.fabric  # noqa: F401


def in_place(loader):
    make_resumable(loader)
    return loader


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")
@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_exactly_after_any_batch(kind):
    import_drawing(kind)
    batches = -(-LENGTH // BATCH) * EPOCHS
    cuts = (*FEW_CUTS, batches) if "workers" in kind else range(1, batches + 1)
    assert len(check_cuts(LOADERS[kind], cuts)) >= batches


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")
@pytest.mark.parametrize("kind", KINDS)
def test_it_goes_on_exactly_from_start_to_start(kind):
    import_drawing(kind)
    if "workers" in kind:
        check_chain(LOADERS[kind], FEW_STRIDES)
    else:
        check_chain(LOADERS[kind], (6, 0, 0, 2, 1, 3, 0))
        check_chain(LOADERS[kind], (2, 0, 1, 1, 2, 0, 1, 1, 3))


def test_batches_that_were_trained_are_not_read_again():
    class Counting(Numbers):
        reads = 0

        def __getitem__(self, index):
            Counting.reads += 1
            return super().__getitem__(index)

    def make():
        return ResumableLoader(DataLoader(Counting(), batch_size=1, shuffle=True))

    state = Run(make, seed=1).train(20).saved
    Counting.reads = 0
    after = Run(make, seed=2)
    after.load(state)
    next(iter(after.loader))
    assert Counting.reads == 1


def test_an_iteration_that_was_left_begins_anew():
    def make():
        return ResumableLoader(shuffled())

    left = Run(make, seed=1)
    for _ in left.loader:
        break
    assert left.loader.position.given is None
    again = Run(make, seed=2)
    again.load(left.save())
    assert len(again.train().trace) == 3 * -(-LENGTH // BATCH)


def test_at_the_end_a_loop_that_was_left_stands_at_its_last_boundary_however_often_that_is_tried():
    run = Run(LOADERS["shuffled"], seed=1)
    for number, _ in enumerate(run.loader):
        if number == 3:  # a fourth batch, which is not trained
            break
        run.loader.position.note_boundary()
    run.loader.position.end()
    for _ in range(2):
        assert run.loader.state_dict()["given"] == 3
        run.loader.position.note_boundary()


def test_what_cannot_begin_anew_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="starts again"):
        SnapshotEngine(tmp_path, {"loader": ResumableLoader(iter([1, 2]))})
    with pytest.raises(ConfigError, match="DataLoader is needed"):
        make_resumable([1, 2])


@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_a_loader_in_the_state_that_is_not_wrapped_is_refused(kind, tmp_path):
    with pytest.raises(ConfigError, match=r"give lazysnap.ResumableLoader\(loader\) to the state, and iterate that"):
        SnapshotEngine(tmp_path, {"loader": kind([1, 2])})


class Buffered(IterableDataset):
    """Gives its numbers in a random order, from a buffer."""

    def __init__(self, generator):
        self.generator = generator

    def __iter__(self):
        held = list(range(LENGTH))
        while held:
            yield float(held.pop(int(self.generator.random() * len(held))))


def test_a_stream_that_saves_no_position_is_warned_of_once_with_what_makes_it_inexact(caplog):
    loader = ResumableLoader(DataLoader(Buffered(random), batch_size=BATCH))
    for _ in range(2):
        assert len(list(loader)) == -(-LENGTH // BATCH)

    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("Buffered saves no position: a restart reads the epoch again")
    assert "nor is one that it draws from the global random generators as it goes" in line


OF_A_LENGTH = [
    *("shuffled", "own generator", "own sampler", "stateful", "accelerate", "iterable", "fabric"),
    *("accelerate, no seedable sampler", "accelerate, stateful"),
]
"""Loaders that give each sample of an epoch once, in an order that does not follow from the size of batches."""
CHANGES = [(4, 8, 4, 0), (4, 8, 3, 4), (4, 16, 2, 8), (8, 5, 3, 0)]
"""Batch sizes then and now, batches that were trained, and samples that are trained twice: also where the first batch
holds more than was trained, and at the end of an epoch.
"""


def indices(trace, epoch):
    return [int(row[0]) for number, batch, _ in trace if number == epoch for row in batch]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")
@pytest.mark.parametrize(
    ("kind", "change"),
    # The end of an epoch is not known of a loader without a length.
    [
        *((kind, change) for kind in OF_A_LENGTH for change in (CHANGES[:3] if kind == "iterable" else CHANGES)),
        ("workers", CHANGES[2]),
    ],
)
def test_with_another_batch_size_no_sample_is_skipped_and_the_start_says_how_many_are_trained_twice(
    monkeypatch, caplog, kind, change
):
    then, now, cut, twice = change
    monkeypatch.setitem(globals(), "BATCH", then)
    before = Run(LOADERS[kind], seed=1).train(cut)
    monkeypatch.setitem(globals(), "BATCH", now)
    after = Run(LOADERS[kind], seed=2)
    after.load(before.saved)
    [line] = [record.getMessage() for record in caplog.records if "a batch has" in record.getMessage()]
    trace = after.train().trace

    trained = indices(before.trace, 0) + indices(trace, 0)
    assert set(trained) == set(range(LENGTH))
    assert len(trained) == LENGTH + twice
    assert f"a batch has {now} samples, in the snapshot {then}" in line
    assert f"{twice} of its samples are trained twice, none is skipped" in line
    assert sorted(indices(trace, 1)) == sorted(indices(trace, 2)) == list(range(LENGTH))


def test_a_position_that_is_captured_before_its_first_batch_is_counted_anew_once(monkeypatch):
    state = Run(LOADERS["shuffled"], seed=1).train(4).saved
    monkeypatch.setitem(globals(), "BATCH", 8)
    between = Run(LOADERS["shuffled"], seed=2)
    between.load(state)
    again = Run(LOADERS["shuffled"], seed=3)
    again.load(between.save())

    assert len(indices(again.train().trace, 0)) == LENGTH - 16


@pytest.mark.parametrize(("cut", "follows"), [(2, "this epoch continues after 2 batches"), (6, "from now on")])
def test_a_changed_length_of_the_data_is_named(monkeypatch, caplog, cut, follows):
    run = Run(LOADERS["shuffled"], seed=1)
    run.train(cut)
    if cut == 6:
        assert next(iter(run.loader), None) is not None
        run.saved = run.save()
    monkeypatch.setitem(globals(), "LENGTH", LENGTH + 10)
    after = Run(LOADERS["shuffled"], seed=2)
    after.load(run.saved)

    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("DataLoader: the data has 32 samples, in the snapshot 22: ")
    assert follows in line


def test_a_loop_in_which_a_position_is_restored_goes_on_and_the_next_one_begins_there(caplog):
    loader = ResumableLoader(DataLoader(list(range(8)), batch_size=None))
    batches = iter(loader)
    assert [next(batches), next(batches)] == [0, 1]
    state = loader.state_dict()
    assert next(batches) == 2

    loader.load_state_dict(state)

    assert "restored inside a loop over it" in caplog.text
    assert [*batches] == [3, 4, 5, 6, 7]
    assert [*loader] == [2, 3, 4, 5, 6, 7]
