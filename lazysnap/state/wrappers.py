"""The module or the optimizer inside the wrappers of DDP, ``torch.compile``, Fabric and Accelerate."""

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

_COMPILED = "_orig_mod"


def _wrapped(value: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield the modules in wrappers with their names there, the outermost first."""
    while isinstance(value, torch.nn.Module):
        name = _COMPILED
        if isinstance(value, DistributedDataParallel):
            name = "module"
        elif _is_of_fabric(value):
            name = "_original_module"
        value = getattr(value, name, None)
        if isinstance(value, torch.nn.Module):
            yield name, value


def unwrapped(value: Any) -> Any:
    """Return the module inside the wrappers of DDP, ``torch.compile`` and Fabric. Snapshots use its names."""
    for _, inner in _wrapped(value):
        value = inner
    return value


def wrapper_prefix(module: torch.nn.Module) -> str:
    """Return the prefix that these wrappers add to the names of weights."""
    prefix = ""
    for name, _ in _wrapped(module):
        prefix += f"{name}."
    return prefix


def _is_of_fabric(module: torch.nn.Module) -> bool:
    """True if Lightning Fabric wrapped it (``fabric.setup``), without importing Fabric."""
    return type(module).__name__ == "_FabricModule" and type(module).__module__.endswith("fabric.wrappers")


def without_compiled(name: str) -> str:
    """Return a name in a model without the parts that ``torch.compile`` adds."""
    if _COMPILED not in name:
        return name
    return ".".join(part for part in name.split(".") if part != _COMPILED)


def ddp_of(value: object) -> DistributedDataParallel | None:
    """Return the ``DistributedDataParallel`` that ``value`` is, or that ``torch.compile`` or Fabric wrapped."""
    inner: Any = getattr(value, _COMPILED, value)
    if isinstance(inner, torch.nn.Module) and _is_of_fabric(inner):
        inner = getattr(inner._forward_module, _COMPILED, inner._forward_module)
    if isinstance(inner, DistributedDataParallel):
        return inner
    return None


def stepping(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """Return the optimizer whose steps can be hooked: ``optimizer``, or the one that Accelerate or Fabric wrapped.

    These wrappers are subclasses of ``Optimizer`` without hooks or state of their own; their ``state_dict`` is that of
    the inner optimizer. Other wrappers have their own hooks and state, and are returned unchanged.
    """
    while "_optimizer_step_pre_hooks" not in vars(optimizer):
        # Accelerate has it as `optimizer`, Fabric as `_optimizer`.
        attributes = vars(optimizer)
        inner = attributes.get("optimizer", attributes.get("_optimizer"))
        if not isinstance(inner, torch.optim.Optimizer):
            break
        optimizer = inner
    return optimizer
