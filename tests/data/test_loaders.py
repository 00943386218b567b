"""Each row of the table in docs/data.md: kinds of loaders, cut and resumed; what was trained is not fetched again."""

import importlib
import random

import pytest
import torch
from loader_run import FEW_CUTS, FEW_STRIDES, Numbers, Run, check_chain, check_cuts, workers_are_slow
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, RandomSampler, get_worker_info
from torchdata import nodes
from torchdata.stateful_dataloader import StatefulDataLoader

from lazysnap import ResumableLoader

LENGTH, BATCH = 22, 4
CUTS = (1, 2, 5, 6, 7, 9, 12, 14)
"""First batches, the last two of an epoch, and the same in the next ones."""

pytestmark = pytest.mark.filterwarnings("ignore:.set_vital. is deprecated")


class Stream(IterableDataset):
    """Saves its position, is divided among workers, and counts what it reads. ``packs``: numbers are packed in pairs
    of whole ones; what is left over waits for the next.
    """

    reads = 0

    def __init__(self, *, packs=False):
        self.index, self.packs, self.rest = 0, packs, []

    def __iter__(self):
        info = get_worker_info()
        number, workers = (0, 1) if info is None else (info.id, info.num_workers)
        while self.index * workers + number < LENGTH:
            Stream.reads += 1
            value = float(self.index * workers + number)
            self.index += 1
            if not self.packs:
                yield torch.tensor([value, random.random()])
                continue
            self.rest += [value] * (1 + self.index % 3)
            if len(self.rest) >= 2:
                packed, self.rest = self.rest[:2], self.rest[2:]
                yield torch.tensor(packed)
        self.index = 0

    def state_dict(self):
        return {"index": self.index, "rest": list(self.rest)}

    def load_state_dict(self, state):
        self.index, self.rest = state["index"], list(state["rest"])


class Unsaved(IterableDataset):
    """Saves nothing: it is read again. It packs as ``Stream`` does."""

    def __init__(self):
        self.stream = Stream(packs=True)

    def __iter__(self):
        self.stream.index, self.stream.rest = 0, []
        yield from self.stream


def loader(data, **settings):
    return ResumableLoader(DataLoader(data, BATCH, **settings))


def stateful(data, **settings):
    return ResumableLoader(StatefulDataLoader(data, BATCH, **settings))


def numbers(**settings):
    return loader(Numbers(LENGTH), **settings)


def seeded(number=5):
    return torch.Generator().manual_seed(number)


def graph():
    sampler = nodes.SamplerWrapper(RandomSampler(range(LENGTH), generator=seeded()))
    mapped = nodes.Mapper(sampler, lambda index: torch.tensor([float(index)]))
    return ResumableLoader(nodes.Loader(nodes.Mapper(nodes.Batcher(mapped, BATCH, drop_last=False), torch.stack)))


def distributed():
    return numbers(sampler=DistributedSampler(range(LENGTH), num_replicas=2, rank=1, seed=3))


LOADERS = {
    "replacement": lambda: numbers(sampler=RandomSampler(range(LENGTH), replacement=True)),
    "replacement, own generator": lambda: numbers(
        sampler=RandomSampler(range(LENGTH), replacement=True, generator=seeded())
    ),
    "stream": lambda: loader(Stream()),
    "stream, workers": lambda: loader(Stream(), num_workers=2),
    "stream, persistent workers": lambda: loader(Stream(), num_workers=2, persistent_workers=True),
    "stream, StatefulDataLoader": lambda: ResumableLoader(StatefulDataLoader(Stream(), BATCH)),
    "stream, StatefulDataLoader, workers": lambda: stateful(Stream(), num_workers=2, snapshot_every_n_steps=3),
    "stream, StatefulDataLoader, persistent workers": lambda: stateful(
        Stream(), num_workers=2, persistent_workers=True
    ),
    "StatefulDataLoader, persistent workers": lambda: stateful(
        Numbers(LENGTH), shuffle=True, num_workers=2, persistent_workers=True
    ),
    "StatefulDataLoader, own generator, workers": lambda: stateful(
        Numbers(LENGTH), shuffle=True, num_workers=2, generator=seeded()
    ),
    "packing, StatefulDataLoader, workers": lambda: stateful(Unsaved(), num_workers=2),
    "packing": lambda: loader(Unsaved()),
    "packing, saved": lambda: loader(Stream(packs=True)),
    "torchdata nodes": graph,
}


@pytest.mark.parametrize("kind", workers_are_slow(LOADERS))
def test_it_goes_on_exactly(kind):
    has_workers = "workers" in kind
    assert len(check_cuts(LOADERS[kind], FEW_CUTS if has_workers else CUTS)) > 12
    check_chain(LOADERS[kind], FEW_STRIDES if has_workers else (2, 0, 1, 3, 0, 2, 1))


@pytest.mark.slow
def test_a_distributed_sampler_goes_on_exactly():
    def set_epoch(loader, epoch):
        loader.sampler.set_epoch(epoch)

    check_cuts(distributed, (1, 2, 3, 4), set_epoch)


@pytest.mark.slow
def test_loaders_that_are_zipped_go_on_exactly():
    class Zipped(ResumableLoader):
        is_data_position = True

        def __init__(self):
            self.parts = numbers(shuffle=True), numbers(shuffle=True, num_workers=1)

        def __iter__(self):
            return (torch.cat(pair) for pair in zip(*self.parts, strict=True))

        def state_dict(self):
            return {"parts": [part.state_dict() for part in self.parts]}

        def load_state_dict(self, state):
            for part, saved in zip(self.parts, state["parts"], strict=True):
                part.load_state_dict(saved)

    check_cuts(Zipped, (1, 5, 8))


class Read(Numbers):
    """Notes what is read, by any process."""

    def __init__(self, length, path):
        super().__init__(length)
        self.path = path

    def __getitem__(self, index):
        with self.path.open("a") as file:
            file.write(f"{index}\n")
        return super().__getitem__(index)


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "again"), [(0, 0), (2, 1)])
def test_what_was_trained_is_not_fetched_again(tmp_path, workers, again):
    """With workers fewer batches than there are workers are."""

    def make():
        return ResumableLoader(DataLoader(Read(60, tmp_path / "read"), 1, num_workers=workers))

    state = Run(make, 1).train(47).saved
    given = state["loader"]["given"]
    (tmp_path / "read").unlink()
    after = Run(make, 2)
    after.load(state)
    assert [int(batch[0][0]) for batch in after.loader] == list(range(given, 60))

    read = [int(line) for line in (tmp_path / "read").read_text().split()]
    assert sorted(read) == list(range(given - again, 60))


def test_a_stream_that_saves_its_position_is_not_read_again():
    state = Run(lambda: loader(Stream()), 1).train(4).saved
    after = Run(lambda: loader(Stream()), 2)
    after.load(state)
    Stream.reads = 0
    next(iter(after.loader))
    assert Stream.reads == BATCH


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_after_a_restart_the_own_state_of_a_stateful_loader_is_still_that_of_its_position(workers):
    """Checkpoints of the program contain it."""
    state = Run(lambda: stateful(range(LENGTH), num_workers=workers), 1).train(2).saved
    after = Run(lambda: stateful(range(LENGTH), num_workers=workers), 2)
    after.load(state)
    batches = iter(after.loader)
    next(batches)

    stock = StatefulDataLoader(range(LENGTH), BATCH, num_workers=workers)
    stock.load_state_dict(after.loader.loader.state_dict())

    assert [batch.tolist() for batch in stock] == [batch.tolist() for batch in batches]


class Packs(list):
    """A collate function that keeps samples for the next batch, and says so."""

    def __call__(self, samples):
        return torch.stack(samples)

    def state_dict(self):
        return {"samples": list(self)}

    def load_state_dict(self, state):
        self[:] = state["samples"]


def test_a_collate_function_that_keeps_a_state_is_named_once(caplog):
    Run(lambda: numbers(collate_fn=Packs()), 1).train()

    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("DataLoader: its collate_fn keeps a state from batch to batch")


@pytest.mark.slow
def test_workers_whose_batches_come_in_any_order_are_named(caplog):
    Run(lambda: numbers(num_workers=2, in_order=False), 1).train()

    assert "in_order=False" in caplog.text


def test_a_replay_says_how_long_it_takes(caplog, monkeypatch):
    monkeypatch.setattr("lazysnap.data.iteration._LONG_S", 0.0)
    state = Run(lambda: loader(Unsaved()), 1).train(5).saved
    after = Run(lambda: loader(Unsaved()), 2)
    after.load(state)
    iter(after.loader)

    lines = [record.getMessage() for record in caplog.records]
    [line] = [line for line in lines if "are read again" in line]
    assert line.startswith("DataLoader: 5 batches are read again, to continue after them: about ")
    assert "Unsaved does not save its position" in line


# ---------------------------------------------------------------- other packages


def needs(package):
    """Skip where the package is not there, or does not fit the torch that is."""
    try:
        return importlib.import_module(package)
    except (ImportError, RuntimeError) as error:
        pytest.skip(f"{package}: {error}")


def values(samples):
    return torch.tensor([[float(sample["x"]), float(sample.get("y", 0.0))] for sample in samples])


def noisy(sample):
    return {"x": sample["x"], "y": random.random()}


def hugging_face(*, streams=True, maps=False):
    data = needs("datasets").Dataset.from_dict({"x": [float(number) for number in range(LENGTH)]})
    data = data.to_iterable_dataset(num_shards=4) if streams else data
    return data.map(noisy) if maps else data


class ReadAgain(IterableDataset):
    """A stream whose own state is not asked for."""

    def __init__(self, stream):
        self.stream = stream

    def __iter__(self):
        yield from self.stream


HUGGING_FACE = {
    "map-style": lambda: loader(hugging_face(streams=False), shuffle=True, collate_fn=values),
    "streaming": lambda: loader(hugging_face(), collate_fn=values),
    "streaming, map": lambda: loader(hugging_face(maps=True), collate_fn=values),
    "streaming, workers": lambda: loader(hugging_face(maps=True), collate_fn=values, num_workers=2),
    "streaming, shuffle buffer, read again": lambda: loader(
        ReadAgain(hugging_face().shuffle(seed=3, buffer_size=6)), collate_fn=values
    ),
    "streaming, StatefulDataLoader": lambda: ResumableLoader(
        StatefulDataLoader(hugging_face(), BATCH, collate_fn=values)
    ),
    "streaming, StatefulDataLoader, workers": lambda: stateful(
        hugging_face(maps=True), collate_fn=values, num_workers=2
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", workers_are_slow(HUGGING_FACE))
def test_datasets_of_hugging_face_go_on_exactly(kind):
    check_cuts(HUGGING_FACE[kind], FEW_CUTS if "workers" in kind else CUTS)
    check_chain(HUGGING_FACE[kind], (2, 0, 1, 3))


@pytest.mark.slow
def test_a_stream_of_hugging_face_shuffles_each_epoch_by_its_number():
    def set_epoch(loader, epoch):
        loader.dataset.set_epoch(epoch)

    # Without a buffer: its samples are lost, as the package says when a state is loaded.
    check_cuts(lambda: loader(hugging_face().shuffle(seed=3, buffer_size=1), collate_fn=values), CUTS, set_epoch)
