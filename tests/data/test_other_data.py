"""Data that a restart cannot read as before are named; generators are found wherever a dataset keeps them."""

import functools
import logging
import random
import weakref
from collections.abc import Mapping

import pytest
import torch
from loader_run import Run, check_cuts
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, get_worker_info

from lazysnap import ResumableLoader, SnapshotEngine, StateError
from lazysnap.data import generators

LENGTH, BATCH = 22, 4
OF_THE_MODULE = random.Random(9)


class OfTheClass(Dataset):
    generator = random.Random(9)

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return torch.tensor([float(index), self.draw()], dtype=torch.float64)

    def draw(self):
        return self.generator.random()


class InADict(OfTheClass):
    def __init__(self):
        self.generators = {"crop": random.Random(9)}

    def draw(self):
        return self.generators["crop"].random()


class InALongList(OfTheClass):
    def __init__(self):
        self.parts = [*range(500), *(OfTheClass() for _ in range(100)), {"last": random.Random(9)}]

    def draw(self):
        return self.parts[-1]["last"].random()


class InAClosure(OfTheClass):
    def __init__(self):
        generator = random.Random(9)
        self.transform = lambda: generator.random()

    def draw(self):
        return self.transform()


class InAPartial(OfTheClass):
    def __init__(self):
        self.transform = functools.partial(random.Random.random, random.Random(9))

    def draw(self):
        return self.transform()


class InASlot(OfTheClass):
    class Transform:
        __slots__ = ("generator",)

        def __init__(self):
            self.generator = random.Random(9)

    def __init__(self):
        self.transform = self.Transform()

    def draw(self):
        return self.transform.generator.random()


class InTheModule(OfTheClass):
    def __getitem__(self, index):
        return torch.tensor([float(index), OF_THE_MODULE.random()], dtype=torch.float64)


class Drawn(IterableDataset):
    """A pipeline that shuffles with a generator which only its arguments hold."""

    def __init__(self, make):
        self.stages = [{"rng": make()}]

    def __iter__(self):
        order = list(range(LENGTH))
        self.stages[0]["rng"].shuffle(order)
        yield from (torch.tensor([float(number)]) for number in order)


def loader(data, **settings):
    return ResumableLoader(DataLoader(data, BATCH, **settings))


PLACES = [OfTheClass, InADict, InALongList, InAClosure, InAPartial, InASlot, InTheModule]


@pytest.mark.slow
@pytest.mark.parametrize("kind", PLACES)
def test_a_generator_is_found_wherever_a_dataset_keeps_it(kind):
    def make():
        OF_THE_MODULE.seed(9)  # as at the start of a process
        OfTheClass.generator.seed(9)
        return loader(kind(), shuffle=True)

    check_cuts(make, (1, 5, 9))


def test_a_pipeline_that_shuffles_with_a_generator_of_its_own_is_read_again_exactly():
    check_cuts(lambda: loader(Drawn(lambda: random.Random(4))), (1, 5, 9))


@pytest.mark.slow
def test_parts_beyond_the_search_are_named(caplog):
    class Large(InADict):
        def __init__(self):
            super().__init__()
            self.samples = [{"text": [number]} for number in range(40_000)]

    next(iter(loader(Large())))

    assert "so many parts that not all were searched for random generators" in caplog.text


def test_a_logger_of_a_dataset_does_not_lead_the_search_to_all_loggers(caplog, monkeypatch):
    class Logged(InADict):
        def __init__(self):
            super().__init__()
            self.logger = logging.getLogger(__name__)

    monkeypatch.setattr(generators, "MOST_VISITS", 100)
    monkeypatch.setattr(
        logging.getLogger("another"), "parts", [{"text": [number]} for number in range(50)], raising=False
    )

    next(iter(loader(Logged())))

    assert "not all were searched" not in caplog.text


class OnDisk(Mapping):
    """Reads a value at each access, as a file of HDF5 does."""

    def __len__(self):
        return LENGTH

    def __iter__(self):
        return iter(range(LENGTH))

    def __getitem__(self, index):
        raise AssertionError("the search read the data")


def test_the_search_for_generators_reads_no_data_and_enters_no_set():
    search = generators.GeneratorSearch({})
    search.run([[OnDisk()], {"in order": random.Random(1)}, {random.Random(2), random.Random(3)}])

    assert list(search.generators) == ["1.in order"]


def test_the_search_for_generators_passes_weak_proxies_whose_object_is_gone():
    search = generators.GeneratorSearch({})
    gone = weakref.proxy(OfTheClass())
    search.run([{"gone": gone, "in order": random.Random(1)}])

    assert list(search.generators) == ["0.in order"]


class Endless(OfTheClass):
    """With a sampler of its own nothing asks for its length, which Python cannot hold."""

    def __len__(self):
        return 1 << 64


def test_a_length_that_cannot_be_asked_for_is_not_known():
    first = next(iter(loader(Endless(), sampler=range(LENGTH))))

    assert first[:, 0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("indices", "is_named"), [(range(1, 17), True), (range(16), False)])
def test_a_subset_of_other_samples_is_named(caplog, indices, is_named):
    state = Run(lambda: loader(Subset(OfTheClass(), list(range(16)))), 1).train(2).saved
    after = Run(lambda: loader(Subset(OfTheClass(), list(indices))), 2)
    after.load(state)

    assert ("its Subset has other indices than in the snapshot" in caplog.text) is is_named


class Divided(IterableDataset):
    """Its workers share the numbers."""

    def __iter__(self):
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        yield from (torch.tensor([float(number), 0.0]) for number in range(first, LENGTH, step))


@pytest.mark.slow
@pytest.mark.parametrize("workers", [(2, 3), (0, 2), (2, 0)])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_another_number_of_workers_in_mid_epoch_keeps_the_order_or_is_named(caplog, workers):
    before, now = workers
    run = Run(lambda: loader(OfTheClass(), shuffle=True, num_workers=before), 1).train(3)
    after = Run(lambda: loader(OfTheClass(), shuffle=True, num_workers=now), 2)
    after.load(run.saved)
    trained = [row[0] for number, batch, _ in [*run.trace, *after.train().trace] if number == 0 for row in batch]
    assert sorted(trained) == list(range(LENGTH))
    assert f"num_workers is {now}, in the snapshot {before}: the order of the samples is resumed exactly" in caplog.text

    state = Run(lambda: loader(Divided(), num_workers=before), 1).train(3).saved
    after = Run(lambda: loader(Divided(), num_workers=now), 2)
    after.load(state)
    assert list(after.loader)
    assert f"num_workers is {now}, in the snapshot {before}: workers divide the data" in caplog.text


@pytest.mark.slow
def test_an_iterator_that_exists_before_restore_is_refused_and_nothing_is_loaded(tmp_path):
    def start():
        model = torch.nn.Linear(2, 1)
        batches = loader(OfTheClass())
        return model, batches, SnapshotEngine(tmp_path, {"model": model, "loader": batches})

    model, batches, engine = start()
    with engine:
        engine.restore("latest")
        for batch in batches:
            model(batch.float()).sum().backward()
            with torch.no_grad():
                model.weight.add_(1.0)
            engine.boundary()
            break
        weight = model.weight.clone()

    model, batches, engine = start()
    with torch.no_grad():
        model.weight.zero_()
    early = iter(batches)
    with engine:
        with pytest.raises(StateError, match="an iterator over this loader exists already"):
            engine.restore("latest")
        assert not model.weight.any()
        del early
        engine.restore("latest")
        assert torch.equal(model.weight, weight)
