"""A training over a data loader that draws random numbers of its own between batches; every step is noted."""

import copy
import random

import numpy
import pytest
import torch
from torch.utils.data import Dataset

from lazysnap import ResumableLoader
from lazysnap.data import make_resumable
from lazysnap.data.streams import collect_rng, restore_rng

EPOCHS = 3
FEW_CUTS = (1, 6, 9)
"""A first batch, an epoch's last one, and one in the middle, for loaders that start processes each time."""
FEW_STRIDES = (2, 0, 0, 4, 1)
"""A chain with the same: in an epoch, twice before a first batch, and at the end of an epoch."""


class Numbers(Dataset):
    """Each item is its number and random augmentation from every generator that there is."""

    def __init__(self, length):
        self.length = length
        self.generator = numpy.random.default_rng(torch.initial_seed() % 1000)

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        draws = [torch.rand(()).item(), random.random(), numpy.random.rand(), self.generator.random()]
        return torch.tensor([float(index), *draws], dtype=torch.float64)


def position_of(loader):
    return loader if isinstance(loader, ResumableLoader) else make_resumable(loader)


class Run:
    """One start of it: ``make`` makes the loader; ``set_epoch`` is called with it and the epoch before each loop."""

    def __init__(self, make, seed, set_epoch=lambda loader, epoch: None):
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed)
        self.loader = make()
        self.set_epoch = set_epoch
        self.trace = []
        self.epoch = 0

    def train(self, cut=None, saved=()):
        """To the batch ``cut``; ``saved``: a dictionary that gets the states behind the batches that are its keys."""
        while self.epoch < EPOCHS:
            self.set_epoch(self.loader, self.epoch)
            for batch in self.loader:
                draws = [torch.rand(()).item(), random.random(), numpy.random.rand()]
                self.trace.append([self.epoch, batch.tolist(), draws])
                if len(self.trace) in saved:
                    saved[len(self.trace)] = self.save()
                if len(self.trace) == cut:
                    self.saved = self.save()
                    return self
            self.epoch += 1
        return self

    def begin(self):
        """Begin an iteration, and no more."""
        self.set_epoch(self.loader, self.epoch)
        self.iterator = iter(self.loader)
        self.saved = self.save()

    def save(self):
        state = {"loader": position_of(self.loader).state_dict(), "rng": collect_rng(), "epoch": self.epoch}
        return copy.deepcopy(state)

    def load(self, state):
        self.epoch = state["epoch"]
        position_of(self.loader).load_state_dict(state["loader"])
        restore_rng(state["rng"])


def check_cuts(make, cuts, set_epoch=lambda loader, epoch: None):
    """A training that was cut after any of ``cuts`` batches goes on as the one that was not; returns that one."""
    whole, saved = Run(make, 1, set_epoch).train().trace, dict.fromkeys(cuts)
    again = Run(make, 1, set_epoch).train(saved=saved)
    assert again.trace == whole, "it does not repeat itself"
    for cut in [cut for cut in cuts if cut <= len(whole)]:
        after = Run(make, 2, set_epoch)
        after.load(saved[cut])
        assert after.train().trace == whole[cut:], f"cut after {cut}"
    return whole


def check_chain(make, strides, set_epoch=lambda loader, epoch: None):
    """Each start goes on from the one before and is cut after so many batches; 0: when its iteration has begun."""
    whole = Run(make, 1, set_epoch).train().trace
    run, trace = Run(make, 1, set_epoch).train(strides[0]), []
    for number, stride in enumerate((*strides[1:], None), 2):
        trace += run.trace
        assert trace == whole[: len(trace)], f"start {number - 1}"
        state, run = run.saved, Run(make, number, set_epoch)
        run.load(state)
        if stride == 0:
            run.begin()
        else:
            run.train(stride)
    assert trace + run.trace == whole


def workers_are_slow(kinds):
    """The names of loaders, as cases of a test: the quick tier leaves out those that start processes."""
    return [pytest.param(kind, marks=pytest.mark.slow if "workers" in kind else ()) for kind in kinds]
