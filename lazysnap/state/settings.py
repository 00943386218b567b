"""The settings of a training: part of every snapshot, so that a restart warns when the program uses others.

Values are recorded before the first step: schedules change them later.
"""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from lazysnap.data.share import length_of
from lazysnap.state.optimizers import class_of, named_optimizers, recorded
from lazysnap.state.source import StateSource

logger = logging.getLogger(__name__)

_NOT_SETTINGS = {"params", "param_names", "initial_lr", "foreach", "fused", "capturable", "differentiable"}
"""Keys of a parameter group that are no setting, or do not change the result."""
_MOST_ITEMS = 16
_MOST_LEVELS = 8
_MISSING = object()


def plain(value: Any) -> Any:
    """A number, a bool, or a short list of these; ``None`` for anything else."""
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        value = value.item()
    if isinstance(value, (list, tuple)) and len(value) <= _MOST_ITEMS:
        items = [plain(item) for item in value]
        return None if None in items else items
    is_number = type(value) in (bool, int, float) and value == value  # NaN equals nothing
    return value if is_number else None


def numbers(prefix: str, values: Mapping[str, Any], levels: int = _MOST_LEVELS) -> dict[str, Any]:
    """The plain values in ``values`` and the mappings in it, by dotted name behind ``prefix``."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and levels:
            found |= numbers(f"{prefix}{name}.", value, levels - 1)
        elif (number := plain(value)) is not None:
            found[f"{prefix}{name}"] = number
    return found


def sizes(prefix: str, loaders: Iterable[Any]) -> dict[str, Any]:
    """Lengths of the datasets of ``loaders``, and sizes of their batches, behind ``prefix``."""
    listed = list(loaders)
    return {
        f"{prefix}dataset_length": [length_of(getattr(loader, "dataset", None)) for loader in listed],
        f"{prefix}batch_size": [_batch_size(loader) for loader in listed],
    }


def _batch_size(loader: Any) -> int | None:
    of_sampler = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    size = getattr(loader, "batch_size", None) or of_sampler
    return size if type(size) is int else None


class OptimizerSettings:
    """Class and hyperparameters of each optimizer, by its path in the state."""

    def __init__(self) -> None:
        self.fields: dict[str, dict[str, Any]] = {}

    def note(self, source: StateSource) -> None:
        """Record the present settings of optimizers that are not known yet."""
        for path, optimizer in named_optimizers(source):
            if path not in self.fields:
                self.fields[path] = {"class": class_of(optimizer), "values": _values_of(optimizer)}

    def carry_on(self, state: Mapping[str, Any]) -> list[str]:
        """Take over the settings of a snapshot, as ``load_state_dict`` does; returns what was different before."""
        found = []
        for path, there in recorded(state).items():
            here, values = self.fields.get(path), there.get("values")
            if here is not None and isinstance(values, dict):
                found += differences(f"{path}.", values, here["values"])
                here["values"] = values
        return found


def _values_of(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return for each key its value in every parameter group, or one value if all are equal."""
    values = {}
    groups = optimizer.param_groups
    for key in dict.fromkeys(key for group in groups for key in group if key not in _NOT_SETTINGS):
        # A scheduler may have changed the rate already: this is the first one.
        first = "initial_lr" if key == "lr" else key
        of_groups = [plain(group.get(first, group.get(key))) for group in groups]
        if None not in of_groups:
            values[key] = of_groups[:1] if all(value == of_groups[0] for value in of_groups) else of_groups
    return values


def differences(prefix: str, there: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """The keys that both have, with different values, in words."""
    return [
        f"{prefix}{key} is {_text(here[key])}, in the snapshot {_text(value)}"
        for key, value in there.items()
        if here.get(key, _MISSING) not in (value, _MISSING)
    ]


def _text(value: Any) -> str:
    return str(value[0]) if isinstance(value, list) and len(value) == 1 else str(value)


def warn(*, restored: list[str], changed: list[str]) -> None:
    """One warning for all differences: for ``restored`` the snapshot applies, for ``changed`` the program."""
    if torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_rank():
        return
    parts = []
    if restored:
        parts.append(f"{'; '.join(restored)} (as in the snapshot from here on; to change it, set it after the restore)")
    if changed:
        parts.append(f"{'; '.join(changed)} (as in the program from here on)")
    if parts:
        logger.warning("the settings of the program differ from those of the snapshot: %s", "; ".join(parts))
