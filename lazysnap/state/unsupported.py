"""Refuses models and optimizers that cannot be captured.

Some packages shard them in their own way, so that ``state_dict()`` returns a part, or needs collectives. With local SGD
ranks have different weights between two averagings. A capture would be wrong, which only a restart would show. None of
these packages is imported here.
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
_INNER_ATTRIBUTES = ("_optimizer", "optimizer", "optim")
"""Attributes in which wrappers hold an optimizer."""


def check_supported(objects: Mapping[str, Any]) -> None:
    """Refuse unsupported objects: modules, optimizers and others, by name. Walks all modules.

    Raises: StateError, if FSDP 1, DeepSpeed or a similar package shards one of them, or a module in it, or if one of
    them is trained by local SGD.
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
    advice = _SHARD
    if package == _LOCAL_SGD:
        advice = _AVERAGE
    return StateError(
        f"{path}: {type(part).__qualname__} ({package}) cannot be captured: {_WHY[package]}, so a restart would not "
        f"restore what was trained. {advice}"
    )


def _package_of(part: Any) -> str | None:
    for cls in type(part).__mro__:
        if cls.__name__ in _CLASSES:
            return _CLASSES[cls.__name__]
    if isinstance(part, torch.Tensor):
        for mark, package in _MARKS.items():
            if hasattr(part, mark):
                return package
    if _has_local_sgd_hook(part):
        return _LOCAL_SGD
    if hasattr(type(part), "consolidate_state_dict"):
        return _ZERO  # also classes with other names
    return None


def _has_local_sgd_hook(part: Any) -> bool:
    if not isinstance(part, DistributedDataParallel):
        return False
    return any(getattr(hook, "__name__", "") == "post_localSGD_hook" for hook, _ in part._comm_hooks)


def _parts(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield ``value`` and its parts by path: wrappers before parameters, because their names say more."""
    if isinstance(value, torch.nn.Module):
        for path, module in value.named_modules():
            yield ".".join(filter(None, (name, path))), module
        for path, parameter in value.named_parameters():
            yield f"{name}.{path}", parameter
        return
    layers = list(_layers(value))
    for layer in layers:
        yield name, layer
    for layer in layers:
        if isinstance(layer, torch.optim.Optimizer):
            for number, parameter in enumerate(parameters_of(layer)):
                yield f"{name}, parameter {number}", parameter


def _layers(value: Any) -> Iterator[Any]:
    """Yield ``value`` and the optimizers in it, the outermost first."""
    seen = set[int]()
    while value is not None and id(value) not in seen:
        yield value
        seen.add(id(value))
        value = _inner_optimizer(value)


def _inner_optimizer(wrapper: Any) -> Any:
    # Not getattr: a proxy would return an attribute of what it wraps.
    attributes = getattr(wrapper, "__dict__", {})
    for name in _INNER_ATTRIBUTES:
        inner = attributes.get(name)
        if inner is not None and hasattr(inner, "state_dict"):
            return inner
    return None
