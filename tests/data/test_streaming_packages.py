"""``StreamingDataset`` of litdata and of MosaicML go on exactly, through their own loaders, as any of that kind.

Neither package is installed with the others of the tests: both want a torchvision that fits the torch of the tests.
``pip install litdata mosaicml-streaming``, then this file; docs/data.md says when it ran.
"""

import functools
import importlib

import numpy
import pytest
import torch
from loader_run import check_chain, check_cuts

from lazysnap import ResumableLoader

BATCHES = 10
BATCH = 4
CUTS = (1, 3, 9, 10, 11, 15, 21)
"""Within epochs, at their ends, and before the first batch of one."""


def needs(package):
    try:
        return importlib.import_module(package)
    except (ImportError, RuntimeError, ValueError) as error:
        pytest.skip(f"{package}: {error}")


def values(samples):
    return torch.tensor([float(sample["x"]) for sample in samples])


def sample(number):
    return {"x": numpy.int64(number)}


class Late(torch.utils.data.DataLoader):
    """Saves its position, and makes torch's iterator, which draws a seed, with its first batch: as both packages do."""

    given = passes = 0

    def __iter__(self):
        self.given, self.passes = self.passes, 0
        for number, batch in enumerate(super().__iter__()):
            if number >= self.given:
                self.given += 1
                yield batch

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.passes = state["given"]


class Numbers(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(range(BATCH * BATCHES))


def of_this_file(*, is_stream):
    return ResumableLoader(Late(Numbers() if is_stream else range(BATCH * BATCHES), BATCH))


@pytest.mark.parametrize("is_stream", [True, False])
def test_a_loader_that_makes_its_iterator_with_the_first_batch_goes_on_exactly(is_stream):
    """The seed that it draws then must not move the random numbers of the training."""
    make = functools.partial(of_this_file, is_stream=is_stream)
    check_cuts(make, CUTS)
    check_chain(make, (3, 4, 0, 8, 2))


@pytest.fixture(scope="module")
def of_litdata(tmp_path_factory):
    litdata = needs("litdata")
    root = str(tmp_path_factory.mktemp("litdata") / "data")
    litdata.optimize(sample, list(range(BATCH * BATCHES)), root, chunk_size=8, num_workers=1)

    def make(shuffle, workers):
        data = litdata.StreamingDataset(root, shuffle=shuffle, seed=3)
        how = {"batch_size": BATCH, "num_workers": workers, "collate_fn": values}
        return ResumableLoader(litdata.StreamingDataLoader(data, **how))

    return make


@pytest.fixture(scope="module")
def of_mosaicml(tmp_path_factory):
    streaming = needs("streaming")
    root = str(tmp_path_factory.mktemp("mosaicml") / "data")
    with streaming.MDSWriter(out=root, columns={"x": "int"}, size_limit=256) as writer:
        for number in range(BATCH * BATCHES):
            writer.write({"x": number})

    def make(shuffle, workers):
        streaming.base.util.clean_stale_shared_memory()
        how = {"batch_size": BATCH, "shuffle": shuffle, "shuffle_seed": 3, "num_canonical_nodes": 1}
        data = streaming.StreamingDataset(local=root, **how)
        how = {"batch_size": BATCH, "num_workers": workers, "collate_fn": values}
        return ResumableLoader(streaming.StreamingDataLoader(data, **how))

    return make


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("package", ["litdata", "mosaicml"])
def test_it_goes_on_exactly_after_any_batch(package, shuffle, workers, request):
    make = request.getfixturevalue(f"of_{package}")
    check_cuts(lambda: make(shuffle, workers), CUTS)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("package", ["litdata", "mosaicml"])
def test_restart_after_restart_is_exact_or_named(package, shuffle, workers, request, caplog):
    """The third of these starts begins an iteration and is cut before its first batch."""
    make = request.getfixturevalue(f"of_{package}")
    forgets = package == "litdata" and shuffle and workers
    if not forgets:
        check_chain(lambda: make(shuffle, workers), (3, 4, 0, 8, 2))
        assert "litdata with workers forgets" not in caplog.text
        return
    with pytest.raises(AssertionError):
        check_chain(lambda: make(shuffle, workers), (3, 4, 0, 8, 2))
    assert "litdata with workers forgets a shuffled order at the second restart" in caplog.text
