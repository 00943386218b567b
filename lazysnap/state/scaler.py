"""The state of a ``GradScaler`` without waiting for the device: ``state_dict()`` would read two numbers there."""

from collections.abc import Mapping
from typing import Any

import torch


def state_of_scaler(scaler: torch.amp.GradScaler) -> dict[str, Any]:
    """Return ``scaler.state_dict()`` with the values on a device as tensors there. Does not block."""
    scale, growth = scaler._scale, scaler._growth_tracker
    if not scaler.is_enabled() or scale is None or growth is None or scale.device.type == "cpu":
        return scaler.state_dict()
    return {
        "scale": scale,
        "growth_factor": scaler.get_growth_factor(),
        "backoff_factor": scaler.get_backoff_factor(),
        "growth_interval": scaler.get_growth_interval(),
        "_growth_tracker": growth,
    }


def load_scaler(scaler: torch.amp.GradScaler, state: Mapping[str, Any]) -> None:
    """Load such a state, or one of ``state_dict()``. Blocks, where it holds tensors on a device."""
    scaler.load_state_dict(plain_numbers(state))


def plain_numbers(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what ``scaler.state_dict()`` returns. Blocks, where ``state`` holds tensors on a device."""
    return {key: value.item() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
