"""Models and optimizers that cannot be captured: refused by name.

Some packages shard them in their own way, so that ``state_dict()`` returns a part, or needs collectives. With local SGD
ranks have different weights between two averagings, so that no step is common to all. A capture would be wrong, and
only a restart would show that. None of these packages is imported here.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from lazysnap.errors import StateError
from lazysnap.state.source import parameters_of

_FSDP1 = "FSDP 1"
_DEEPSPEED = "DeepSpeed"
_ZERO = "an optimizer that shards its state"
_LOCAL_SGD = "local SGD"
_CLASSES = {
    "FullyShardedDataParallel": _FSDP1,
    "XlaFullyShardedDataParallel": _FSDP1,
    "ZeroRedundancyOptimizer": _ZERO,
    "DeepSpeedEngine": _DEEPSPEED,
    "DeepSpeedOptimizer": _DEEPSPEED,
    "DeepSpeedOptimizerWrapper": _DEEPSPEED,
    "ZeROOptimizer": _DEEPSPEED,
    "DeepSpeedZeroOptimizer": _DEEPSPEED,
    "DeepSpeedZeroOptimizer_Stage3": _DEEPSPEED,
    "PostLocalSGDOptimizer": _LOCAL_SGD,
}
_MARKS = {"_fsdp_flattened": _FSDP1, "ds_tensor": _DEEPSPEED}
"""Attributes of parameters that these packages shard, also in a module without its wrapper."""
_WHY = {
    _FSDP1: "its parameters are pieces of one flat tensor, its state_dict() gathers them by collectives",
    _DEEPSPEED: "each process holds a part of weights and optimizer state that no state_dict() returns",
    _ZERO: "each process holds a part of it, and collectives gather it",
    _LOCAL_SGD: "the weights of ranks differ until they are averaged, and no step is common to all ranks",
}
_SHARD = (
    "Shard by FSDP2 (torch.distributed.fsdp.fully_shard) and give the optimizer its parameters, or use "
    "DistributedDataParallel with a plain optimizer"
)
_AVERAGE = (
    "Average the gradients at every optimizer step: DistributedDataParallel without such a hook, and no_sync() at most "
    "for the micro batches of an accumulation"
)
_INSIDE = ("_optimizer", "optimizer", "optim")
"""Attributes in which wrappers hold an optimizer."""


def check_supported(objects: Mapping[str, Any]) -> None:
    """Refuse what cannot be captured in ``objects``: modules, optimizers and others, by name. Walks all modules.

    Raises: StateError, if FSDP 1, DeepSpeed or a similar package shards one of them, or a module in it, or if
    one of them is trained by local SGD.
    """
    for name, value in objects.items():
        for path, part in _parts(name, value):
            package = _package_of(part)
            if package is not None:
                raise _refusal(path, part, package)


def check_averages_gradients(path: str, module: DistributedDataParallel) -> None:
    """Refuse a module that is within ``no_sync()`` at a boundary. Cheap: for every step. Raises: StateError."""
    if not module.require_backward_grad_sync:
        raise _refusal(path, module, _LOCAL_SGD)


def _refusal(path: str, part: object, package: str) -> StateError:
    return StateError(
        f"{path}: {type(part).__qualname__} ({package}) cannot be captured: {_WHY[package]}, so a restart would not "
        f"restore what was trained. {_AVERAGE if package == _LOCAL_SGD else _SHARD}"
    )


def _package_of(part: Any) -> str | None:
    known = (_CLASSES[cls.__name__] for cls in type(part).__mro__ if cls.__name__ in _CLASSES)
    marks = (package for mark, package in _MARKS.items() if isinstance(part, torch.Tensor) and hasattr(part, mark))
    shards = _ZERO if hasattr(type(part), "consolidate_state_dict") else None  # also classes with other names
    averages_weights = _LOCAL_SGD if _has_local_sgd_hook(part) else shards
    return next(known, None) or next(marks, averages_weights)


def _has_local_sgd_hook(part: Any) -> bool:
    hooks = part._comm_hooks if isinstance(part, DistributedDataParallel) else []
    return any(getattr(hook, "__name__", "") == "post_localSGD_hook" for hook, _ in hooks)


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield ``value`` and its parts by path: wrappers before parameters, because their names say more."""
    if isinstance(value, torch.nn.Module):
        yield from ((".".join(filter(None, (name, path))), module) for path, module in value.named_modules())
        yield from ((f"{name}.{path}", parameter) for path, parameter in value.named_parameters())
        return
    layers = list(_layers(value))
    yield from ((name, layer) for layer in layers)
    optimizers = [layer for layer in layers if isinstance(layer, torch.optim.Optimizer)]
    yield from ((f"{name}, parameter {n}", one) for held in optimizers for n, one in enumerate(parameters_of(held)))


def _layers(value: Any) -> Iterator[Any]:
    seen = set[int]()
    while value is not None and id(value) not in seen:
        yield value
        seen.add(id(value))
        # Not getattr: a proxy would return an attribute of what it wraps.
        held = getattr(value, "__dict__", {})
        inside = (held.get(name) for name in _INSIDE)
        value = next((one for one in inside if one is not None and hasattr(one, "state_dict")), None)
