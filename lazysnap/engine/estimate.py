"""How large a shard will be, before the optimizer has made its state: lets memory be prepared from the start."""

from collections.abc import Collection, Iterable

import torch

from lazysnap.state.modules import is_uninitialised
from lazysnap.state.source import StateSource

_STATE_COPIES = {"Adam": 2, "AdamW": 2, "NAdam": 2, "RAdam": 2, "Adamax": 2, "Adadelta": 2, "Adagrad": 1, "Rprop": 2}
"""Tensors of the size of a parameter that an optimizer keeps for it."""
_HEADER_BYTES_PER_TENSOR = 160


def estimate_image_bytes(source: StateSource, apart: Collection[str] = ()) -> int:
    """Bytes of the shard once every optimizer has made its state; too low for optimizers that are not known.

    Tensors whose names are in ``apart`` are stored elsewhere.
    """
    expected = {name: tensor for name, tensor in source.expected().items() if not is_uninitialised(tensor)}
    sizes = [tensor.nbytes for tensor in _unique(expected[name] for name in expected if name not in apart)]
    total, count = sum(sizes), len(sizes)
    for optimizer in source.optimizers():
        copies = _STATE_COPIES.get(type(optimizer).__name__, 0)
        for group in optimizer.param_groups:
            held = copies + bool(group.get("amsgrad")) + bool(group.get("momentum"))
            trained = [
                parameter
                for parameter in group["params"]
                if parameter.requires_grad and not is_uninitialised(parameter)
            ]
            total += sum(parameter.nbytes for parameter in trained) * held
            count += len(trained) * (held + 1)
    return total + count * _HEADER_BYTES_PER_TENSOR + (1 << 20)


def _unique(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    found: dict[tuple[int, int], torch.Tensor] = {}
    for tensor in tensors:
        found.setdefault((tensor.data_ptr(), tensor.nbytes), tensor)
    return list(found.values())
