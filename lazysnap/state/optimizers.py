"""An optimizer's state put back: checked against its groups, laid out in memory as its parameters are."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from lazysnap.errors import StateMismatch
from lazysnap.state.sharding import like, local_of
from lazysnap.state.source import StateSource


def check_groups(name: str, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Raises: StateMismatch, if a state has other parameter groups than the live optimizer."""
    if not isinstance(saved.get("param_groups"), list):
        return  # an optimizer with a format of its own
    there = [len(group["params"]) for group in saved["param_groups"]]
    here = [len(group["params"]) for group in optimizer.param_groups]
    if there != here:
        raise StateMismatch(
            f"{name}: the snapshot has {_groups(there)}, the live {type(optimizer).__qualname__} has {_groups(here)}. "
            "Groups that were added in the middle of the training (add_param_group) have to be "
            'there before the restore: engine.fetch("latest").step tells how far it had come'
        )


def check_order(source: StateSource, there: Mapping[str, Sequence[str]] | None) -> None:
    """Raises: StateMismatch, if a live optimizer has as many parameters as in a snapshot, but in other places.

    ``there``: names by optimizer. An optimizer's state knows its parameters by their number alone.
    """
    known = source.parameter_names()
    for path, parameters in source.optimizer_parameters().items():
        listed, here = (there or {}).get(path, ()), [known.get(id(parameter)) for parameter in parameters]
        if len(listed) != len(here) or None in here:
            continue
        number = next((i for i, pair in enumerate(zip(listed, here, strict=True)) if pair[0] != pair[1]), None)
        if number is not None:
            raise StateMismatch(
                f"{path}: parameter {number} is {here[number]}, in the snapshot it is {listed[number]}: it would get "
                "the state of another one. Nothing of the optimizer was loaded. Give it its parameters in the order in "
                "which it had them"
            )


def _groups(sizes: list[int]) -> str:
    return f"{len(sizes)} parameter group{'s' * (len(sizes) != 1)} of {', '.join(map(str, sizes)) or 0} parameters"


def laid_out(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> dict[str, Any]:
    """``saved`` with every tensor of a parameter's shape in that parameter's order of dimensions.

    A shard is row-major; fused optimizers walk parameter and moments side by side in memory, and look at no strides.
    """
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = saved.get("state")
    if not isinstance(state, dict):
        return dict(saved)
    return {**saved, "state": {key: _laid_out(parameters, key, values) for key, values in state.items()}}


def _laid_out(parameters: list[torch.Tensor], key: Any, values: Any) -> Any:
    if type(key) is not int or not 0 <= key < len(parameters) or not isinstance(values, dict):
        return values
    return {name: _as_placed(parameters[key], value) for name, value in values.items()}


def _as_placed(parameter: torch.Tensor, value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
        return value
    if isinstance(value, DTensor) != isinstance(parameter, DTensor):
        return value
    place, local = local_of(parameter), local_of(value)
    if place.shape != local.shape or place.stride() == local.stride():
        return value
    copy = torch.empty_like(place, dtype=local.dtype, device=local.device, memory_format=torch.preserve_format)
    copy.copy_(local)
    return like(value, copy) if isinstance(value, DTensor) else copy
