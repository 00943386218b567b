"""A digest of every bit of a state, to compare two trainings by."""

import hashlib
import random
from typing import Any

import numpy as np
import torch


def digest(value: Any) -> str:
    """SHA-256 over every bit of a nest of tensors and plain values. Collective for DTensors."""
    total = hashlib.sha256()

    def add(item: Any) -> None:
        if isinstance(item, torch.Tensor):
            item = item.full_tensor() if hasattr(item, "full_tensor") else item
            total.update(str((item.dtype, tuple(item.shape))).encode())
            total.update(item.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        elif isinstance(item, dict):
            for key, inner in item.items():
                total.update(repr(key).encode())
                add(inner)
        elif isinstance(item, (list, tuple)):
            for inner in item:
                add(inner)
        elif isinstance(item, np.ndarray):
            total.update(item.tobytes())
        else:
            total.update(repr(item).encode())

    add(value)
    return total.hexdigest()[:16]


def rng_digest() -> str:
    return digest([random.getstate(), np.random.get_state(), torch.get_rng_state()])
