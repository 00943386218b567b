"""Parts of trainings that write down what they do: data with random augmentation, and a network."""

import random

import numpy
import torch
from torch.utils.data import Dataset, IterableDataset

LENGTH = 27


class Augmented(Dataset):
    """Each sample knows its number, with random noise of all three generators."""

    def __len__(self):
        return LENGTH

    def __getitem__(self, index):
        noise = torch.rand(4) + random.random() + numpy.random.rand()
        return index, torch.full((4,), float(index)) / LENGTH + 0.1 * noise


class Stream(IterableDataset):
    """The same samples without noise and without a length."""

    def __iter__(self):
        yield from ((number, torch.full((4,), number / LENGTH)) for number in range(LENGTH))


class SavingStream(Stream):
    """The same, and it saves its position."""

    def __init__(self):
        self.given = 0

    def __iter__(self):
        while self.given < LENGTH:
            self.given += 1
            yield self.given - 1, torch.full((4,), (self.given - 1) / LENGTH)
        self.given = 0

    def state_dict(self):
        return {"given": self.given}

    def load_state_dict(self, state):
        self.given = state["given"]


class Progress(dict):
    """What a loop counts."""

    def state_dict(self):
        return dict(self)

    def load_state_dict(self, state):
        self.update(state)


def network():
    """Buffers that change in forward, and random numbers there."""
    return torch.nn.Sequential(
        torch.nn.Linear(4, 16), torch.nn.BatchNorm1d(16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 4)
    )


def seed_all(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


def draws():
    """The next number of each generator."""
    return [torch.rand(2).tolist(), random.random(), float(numpy.random.rand())]
