"""0-dim tensors: metrics, and the state of a ``GradScaler``. A capture must not wait for the device to read them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from lazysnap.shard.limits import MAX_STATE_DEPTH, with_stack

_TAG = "__scalar__"
"""Metrics are new tensors at every step, which would change the plan, so they become plain values."""


def pack(value: Any) -> Any:
    """Return ``value`` with 0-dim CPU tensors as plain values, and those on a device as copies. Does not block."""
    return with_stack(_pack, value, MAX_STATE_DEPTH)


def _pack(value: Any, levels: int) -> Any:
    if not levels:
        return value  # the encoding refuses it with its path
    if isinstance(value, torch.Tensor):
        if value.dim():
            return value.detach()
        if value.device.type == "cpu":
            return {_TAG: str(value.dtype).removeprefix("torch."), "v": value.item()}
        # Metrics may share one tensor in one step and not in the next. A copy is never tied to another entry.
        return value.detach().clone()
    return convert_items(value, _pack, levels - 1)


def unpack(value: Any, device: torch.device | None = None) -> Any:
    """Unpack a value; tensors are moved to ``device`` if it is given."""
    if isinstance(value, torch.Tensor):
        if device is None:
            return value
        return value.to(device)
    if type(value) is dict and _TAG in value:
        return torch.tensor(value["v"], dtype=getattr(torch, value[_TAG]), device=device or "cpu")
    return convert_items(value, unpack, device)


def convert_items(value: Any, convert: Callable[..., Any], *args: Any) -> Any:
    """Return a dict, list or tuple of ``convert(item, *args)`` for each item; any other value unchanged."""
    if type(value) is dict:
        return {key: convert(item, *args) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)([convert(item, *args) for item in value])
    return value


def state_of_scaler(scaler: torch.amp.GradScaler) -> dict[str, Any]:
    """Return ``scaler.state_dict()`` with the values on a device as tensors there. Does not block."""
    scale = scaler._scale
    growth = scaler._growth_tracker
    if not scaler.is_enabled() or scale is None or growth is None or scale.device.type == "cpu":
        return scaler.state_dict()
    return {
        "scale": scale,
        "growth_factor": scaler.get_growth_factor(),
        "backoff_factor": scaler.get_backoff_factor(),
        "growth_interval": scaler.get_growth_interval(),
        "_growth_tracker": growth,
    }


def plain_numbers(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the result of ``scaler.state_dict()``. Blocks if ``state``, of ``state_of_scaler``, is on a device."""
    numbers = {}
    for key, value in state.items():
        if isinstance(value, torch.Tensor):
            value = value.item()
        numbers[key] = value
    return numbers
