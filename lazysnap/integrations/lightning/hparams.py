"""The data and the hyperparameters of a fit, as the program gives them at its start."""

import contextlib
from collections.abc import Mapping
from typing import Any

from lazysnap.state.settings import plain

_MOST_LEVELS = 8


def collect_settings(trainer: Any) -> dict[str, Any]:
    """By name: sizes of the training data, and numbers and switches among the hyperparameters."""
    return _of_data(trainer) | _of_hparams("hparams", trainer.lightning_module.hparams_initial, _MOST_LEVELS)


def _of_data(trainer: Any) -> dict[str, Any]:
    combined = trainer.fit_loop._combined_loader
    # Loaders that are made anew after some epochs may well be of other sizes then.
    if combined is None or trainer.reload_dataloaders_every_n_epochs:
        return {}
    loaders = list(combined.flattened)
    return {
        "train_loader.dataset_length": [_length(getattr(loader, "dataset", None)) for loader in loaders],
        "train_loader.batch_size": [_batch_size(loader) for loader in loaders],
    }


def _length(dataset: Any) -> int | None:
    with contextlib.suppress(TypeError, NotImplementedError, AttributeError):
        return len(dataset)
    return None


def _batch_size(loader: Any) -> int | None:
    of_sampler = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    size = getattr(loader, "batch_size", None) or of_sampler
    return size if type(size) is int else None


def _of_hparams(prefix: str, values: Mapping[str, Any], levels: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and levels:
            found |= _of_hparams(f"{prefix}.{name}", value, levels - 1)
        elif (number := plain(value)) is not None:
            found[f"{prefix}.{name}"] = number
    return found
