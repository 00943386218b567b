"""How long until the next batch, after a restart far in an epoch? `ResumableLoader`, beside a fresh loader."""

import argparse
import copy
import functools
import itertools
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from benchmarks.report import Report
from benchmarks.workers import Line
from lazysnap import ResumableLoader

LIMIT_S = 5.0
BATCH_SIZES = (1, 16)
LEFT = 1000
"""Batches of the epoch behind the one that is resumed."""


class Numbers(Dataset[int]):
    """A sample is its index: what is measured is the way to it."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset[int]):
    """The same as a stream that saves its position, or does not."""

    def __init__(self, length: int) -> None:
        self._length = length
        self._at = 0

    def __iter__(self) -> Iterator[int]:
        while self._at < self._length:
            self._at += 1
            yield self._at - 1
        self._at = 0


class SavedStream(Stream):
    def state_dict(self) -> dict[str, Any]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._at = state["at"]


LOADERS = ("sequential", "shuffled", "shuffled, 2 workers", "stream with a state", "stream without one")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--batches", type=int, default=1_000_000, help="that were trained before the restart")


def run(args: argparse.Namespace, report: Report) -> None:
    for name, size in itertools.product(LOADERS, BATCH_SIZES):
        report.take(f"{name}, {size}", functools.partial(measured, name, size, args.batches))
    for line in report.of("data"):
        if line["loader"] != LOADERS[-1]:
            text = f"{line['loader']}, batches of {line['batch']}: next batch, at batch {args.batches}"
            report.target(text, "<= {} s", LIMIT_S, line["resumed_s"])


def measured(name: str, size: int, batches: int) -> Iterator[Line]:
    """Train that many batches, go on with a new loader, and compare the batch that it gives first."""
    torch.manual_seed(0)
    loader = make(name, size, batches)
    began = time.perf_counter()
    iterator = iter(loader)
    next(iterator)
    fresh_s = time.perf_counter() - began
    for _ in range(batches - 1):
        next(iterator)
    all_s = time.perf_counter() - began
    state = copy.deepcopy(loader.state_dict())
    expected = next(iterator)
    torch.manual_seed(1)
    again = make(name, size, batches)
    again.load_state_dict(state)
    began = time.perf_counter()
    batch = next(iter(again))
    resumed_s = time.perf_counter() - began
    if batch != expected:
        raise RuntimeError(f"{name}: expected {expected}, got {batch}")
    yield {
        "measure": "data",
        "loader": name,
        "batch": size,
        "all_s": all_s,
        "fresh_s": fresh_s,
        "resumed_s": resumed_s,
    }


def make(name: str, size: int, batches: int) -> ResumableLoader:
    """A loader of that name whose epoch is a little longer than what is trained."""
    length = (batches + LEFT) * size
    settings: dict[str, Any] = {"batch_size": size, "collate_fn": list}
    dataset: Any = Numbers(length)
    if name == "stream with a state":
        dataset = SavedStream(length)
    elif name.startswith("stream"):
        dataset = Stream(length)
    if "shuffled" in name:
        settings["shuffle"] = True
    if "workers" in name:
        settings["num_workers"] = 2
    return ResumableLoader(DataLoader(dataset, **settings))
