"""A plain loop over torchdata's StatefulDataLoader, given to the engine as it is, resumes exactly at every cut."""

import random

import numpy
import pytest
import torch
from torch.utils.data import Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lazysnap import SnapshotEngine
from lazysnap.state.objects import ObjectState

LENGTH, BATCH = 22, 4
PER_EPOCH = 6
LAST = 15
"""Two epochs and a half."""
CUTS = (3, 6, 7, 12, LAST)

pytestmark = [
    pytest.mark.filterwarnings("ignore:.set_vital. is deprecated"),
    pytest.mark.slow,
]


class Numbers(Dataset):
    """Each item is its number, and augmentation from every generator that there is."""

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        return torch.tensor([float(index), torch.rand(()).item(), random.random(), numpy.random.rand()])


class Stream(IterableDataset):
    """Keeps no position: torchdata reads it again up to where it was."""

    def __iter__(self):
        for index in range(LENGTH):
            yield torch.tensor([float(index), 0.1, 0.2, 0.3])


def shuffled(**settings):
    return StatefulDataLoader(Numbers(), batch_size=BATCH, shuffle=True, **settings)


class Resumable(Stream):
    """Keeps its position itself."""

    def __init__(self):
        self.index = 0

    def __iter__(self):
        while self.index < LENGTH:
            self.index += 1
            yield torch.tensor([float(self.index), random.random(), torch.rand(()).item(), 0.3])
        self.index = 0

    def state_dict(self):
        return {"index": self.index}

    def load_state_dict(self, state):
        self.index = state["index"]


LOADERS = {
    "shuffled": shuffled,
    "own generator": lambda: shuffled(generator=torch.Generator().manual_seed(torch.initial_seed())),
    "2 workers": lambda: shuffled(num_workers=2),
    "persistent workers": lambda: shuffled(num_workers=2, persistent_workers=True),
    "iterable": lambda: StatefulDataLoader(Stream(), batch_size=BATCH),
    "iterable with a position": lambda: StatefulDataLoader(Resumable(), batch_size=BATCH),
}


class Run:
    """A training that draws random numbers of its own, too; every step is noted."""

    def __init__(self, make, seed, config=None):
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed)
        self.loader = make()
        self.unused = shuffled()
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.progress = {"epoch": 0}
        self.trace = []
        self.step = 0
        parts = {"model": self.model, "optimizer": self.optimizer, "loader": self.loader, "progress": self.progress}
        self.engine = None
        if config is not None:
            self.engine = SnapshotEngine(config, {**parts, "unused": self.unused})

    def train(self, last):
        while self.step < last:
            for batch in self.loader:
                loss = self.model(batch).square().mean()
                loss.backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                self.step += 1
                weights = [parameter.detach().numpy().tobytes() for parameter in self.model.parameters()]
                draws = [torch.rand(()).item(), random.random(), numpy.random.rand()]
                self.trace.append([self.progress["epoch"], batch.tolist(), loss.item(), weights, draws])
                if self.engine is not None:
                    assert self.engine._wait_ready(60)  # the second slot may still be made
                    assert self.engine.boundary()
                if self.step == last:
                    return
            self.progress["epoch"] += 1

    def train_epochs(self, last):
        """A boundary at the end of each epoch alone."""
        while self.progress["epoch"] < last:
            for batch in self.loader:
                self.trace.append([batch.tolist(), torch.rand(()).item(), random.random()])
            self.progress["epoch"] += 1
            if self.engine is not None:
                assert self.engine._wait_ready(60)
                assert self.engine.boundary()

    def restore(self):
        self.engine.restore("latest")
        self.step = self.engine.step


@pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS.keys())
def test_a_loader_that_keeps_its_position_goes_on_exactly_within_an_epoch_and_between_two(make, job):
    whole = Run(make, seed=1)
    whole.train(LAST)
    assert [entry[0] for entry in whole.trace] == [0] * PER_EPOCH + [1] * PER_EPOCH + [2] * 3

    done = 0
    for cut in CUTS:
        run = Run(make, seed=done + 1, config=job.config())
        if done:
            run.restore()
            assert run.step == done
        job.trainings.append(run)
        run.train(cut)
        assert run.trace == whole.trace[done:cut], f"steps to {cut}"
        run.engine.abandon()
        done = cut


@pytest.mark.parametrize("kind", ["persistent workers", "iterable with a position"])
def test_between_two_epochs_neither_is_repeated_or_lost(kind, job):
    make = LOADERS[kind]
    whole = Run(make, seed=1)
    whole.train_epochs(3)
    assert len(whole.trace) == 3 * PER_EPOCH

    trace = []
    for epoch in range(1, 4):
        run = Run(make, seed=epoch, config=job.config())
        job.trainings.append(run)
        run.restore()
        run.train_epochs(epoch)
        trace += run.trace
        run.engine.abandon()
    assert trace == whole.trace


def test_a_capture_draws_no_random_number_from_a_loader_that_is_not_iterated(job):
    run = Run(shuffled, seed=1, config=job.config())
    job.trainings.append(run)
    before = torch.get_rng_state()
    run.engine.boundary()

    assert torch.equal(torch.get_rng_state(), before)


def test_workers_of_a_data_set_that_takes_no_attributes_are_warned_of_once(job, caplog):
    loader = StatefulDataLoader(list(range(8)), 2, num_workers=1)
    training = job.start(extra={"loader": loader})
    training.run(1, 2)

    said = [record for record in caplog.records if "a list, which takes no attributes" in record.getMessage()]
    assert [record.levelname for record in said] == ["WARNING"]


def begin_worker(worker_id):
    pass


def test_after_the_end_a_loader_has_its_own_function_for_workers_again(job):
    loader = StatefulDataLoader(Numbers(), BATCH, num_workers=1, worker_init_fn=begin_worker)
    training = job.start(extra={"loader": loader}, ready=False)
    assert loader.worker_init_fn is not begin_worker
    training.engine.close()

    assert loader.worker_init_fn is begin_worker


def resumed_with_batches_of(size, make, cut):
    """The samples of the first epoch that two starts trained, the second with batches of another size."""
    model, trained = torch.nn.Linear(1, 1), []
    loader = make(BATCH)
    for number, batch in enumerate(loader, 1):
        trained += batch[:, 0].int().tolist()
        if number == cut:
            state = ObjectState({"model": model, "loader": loader}).collect()
            break
    again = make(size)
    ObjectState({"model": model, "loader": again}).load(state)
    return trained + [index for batch in again for index in batch[:, 0].int().tolist()]


def test_with_another_batch_size_each_sample_of_a_sampler_is_trained_once():
    def make(size):
        return StatefulDataLoader(Numbers(), batch_size=size, shuffle=True)

    assert sorted(resumed_with_batches_of(8, make, cut=3)) == list(range(LENGTH))
    assert sorted(resumed_with_batches_of(3, make, cut=3)) == list(range(LENGTH))


def test_with_another_batch_size_an_iterable_dataset_names_both_and_what_to_use_instead(caplog):
    trained = resumed_with_batches_of(6, lambda size: StatefulDataLoader(Stream(), batch_size=size), cut=3)

    assert len(trained) == LENGTH - 6
    assert "there are 6 samples in a batch, in the snapshot 4: some samples are skipped" in caplog.text
    assert "ResumableLoader" in caplog.text
