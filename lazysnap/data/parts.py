"""The parts of a data loader: the loader of torch inside others, its samplers and datasets, and their counters."""

from collections.abc import Sequence
from typing import Any

from torch.utils.data.dataloader import _DatasetKind

_INNER = ("base_dataloader", "_dataloader")
"""Attributes of Accelerate's and Fabric's loaders with the loader of torch."""
_COUNTERS = ("iteration", "_num_iter_calls")
"""Counters of iterations of such a loader; their samplers are seeded with them."""
_SAMPLERS = ("batch_sampler", "sampler")
_SEEDS = ("epoch", "seed", "initial_seed")
_DEPTH = 4


def attributes_of(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, if any."""
    return getattr(value, "__dict__", {})


def base_of(loader: Any) -> Any:
    """Return the loader of torch inside ``loader``, or ``loader`` itself."""
    for name in _INNER:
        if name in attributes_of(loader):
            return base_of(attributes_of(loader)[name])
    return loader


def is_iterable(base: Any) -> bool:
    """True if the loader reads an iterable dataset."""
    return getattr(base, "_dataset_kind", None) == _DatasetKind.Iterable


def parts_of(loaders: Sequence[Any]) -> list[Any]:
    """Return the samplers and datasets of a loader, in a fixed order."""
    samplers: list[Any] = []
    level = list(loaders)
    for _ in range(_DEPTH):
        inner: list[Any] = []
        for part in level:
            for name in _SAMPLERS:
                sampler = attributes_of(part).get(name)
                is_known = any(sampler is listed for listed in samplers)
                if sampler is not None and not is_known:
                    inner.append(sampler)
        samplers.extend(inner)
        level = inner
    datasets = [attributes_of(loader)["dataset"] for loader in loaders if "dataset" in attributes_of(loader)]
    return [*samplers, *datasets]


def counts_of(loaders: Sequence[Any]) -> dict[str, Any]:
    """Return the counters of a loader, and the numbers that its samplers are seeded with."""
    counters = {}
    for loader in loaders:
        for name in _COUNTERS:
            if name in attributes_of(loader):
                counters[name] = attributes_of(loader)[name]
    return {"counters": counters, "samplers": [_seeds(sampler) for sampler in _seeded(loaders)]}


def set_counts(loaders: Sequence[Any], counts: dict[str, Any]) -> None:
    """Restore the result of ``counts_of``."""
    for loader in loaders:
        for name, count in counts["counters"].items():
            if name in attributes_of(loader):
                setattr(loader, name, count)
    for sampler, seeds in zip(_seeded(loaders), counts["samplers"], strict=False):
        for name, value in seeds.items():
            if name in _seeds(sampler):
                setattr(sampler, name, value)


def _seeded(loaders: Sequence[Any]) -> list[Any]:
    return [part for part in parts_of(loaders) if _seeds(part)]


def _seeds(sampler: Any) -> dict[str, int]:
    seeds = {}
    for name in _SEEDS:
        value = attributes_of(sampler).get(name)
        if type(value) is int:
            seeds[name] = value
    return seeds
