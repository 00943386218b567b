"""The parts of a data loader: the loader of torch inside others, its samplers and datasets, and their counters."""

from collections.abc import Sequence
from typing import Any

from torch.utils.data.dataloader import _DatasetKind

_INNER = ("base_dataloader", "_dataloader")
"""Attributes in which Accelerate's and Fabric's loaders hold the one of torch."""
_COUNTERS = ("iteration", "_num_iter_calls")
"""Counters of iterations of such a loader; their samplers are seeded with them."""
_SAMPLERS = ("batch_sampler", "sampler")
_SEEDS = ("epoch", "seed", "initial_seed")
_DEPTH = 4


def held(value: Any) -> dict[str, Any]:
    """Return the attributes of an object; none, if it keeps none."""
    return getattr(value, "__dict__", {})


def base_of(loader: Any) -> Any:
    """Return the loader of torch inside ``loader``, or that itself."""
    base = loader
    while (inner := next((held(base)[name] for name in _INNER if name in held(base)), None)) is not None:
        base = inner
    return base


def is_iterable(base: Any) -> bool:
    """True if the loader reads an iterable dataset."""
    return getattr(base, "_dataset_kind", None) == _DatasetKind.Iterable


def parts_of(loaders: Sequence[Any]) -> list[Any]:
    """Return the samplers and datasets of a loader, in a fixed order."""
    found: list[Any] = []
    level = [*loaders]
    for _ in range(_DEPTH):
        inner = (held(one).get(name) for one in level for name in _SAMPLERS)
        level = [one for one in inner if one is not None and not any(one is other for other in found)]
        found.extend(level)
    return [*found, *(held(one)["dataset"] for one in loaders if "dataset" in held(one))]


def counts_of(loaders: Sequence[Any]) -> dict[str, Any]:
    """Return the counters of a loader, and the numbers that its samplers are seeded with."""
    counters = {name: held(one)[name] for one in loaders for name in _COUNTERS if name in held(one)}
    return {"counters": counters, "samplers": [_seeds(sampler) for sampler in _seeded(loaders)]}


def set_counts(loaders: Sequence[Any], counts: dict[str, Any]) -> None:
    """Put back what ``counts_of`` returned."""
    for one in loaders:
        for name, count in counts["counters"].items():
            if name in held(one):
                setattr(one, name, count)
    for sampler, seeds in zip(_seeded(loaders), counts["samplers"], strict=False):
        for name, value in seeds.items():
            if name in _seeds(sampler):
                setattr(sampler, name, value)


def _seeded(loaders: Sequence[Any]) -> list[Any]:
    return [one for one in parts_of(loaders) if _seeds(one)]


def _seeds(sampler: Any) -> dict[str, int]:
    return {name: value for name, value in held(sampler).items() if name in _SEEDS and type(value) is int}
