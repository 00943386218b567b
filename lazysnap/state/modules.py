"""Loads the state of a module: names with or without ``torch.compile``, tensors in another memory order."""

import logging
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from lazysnap.errors import StateError
from lazysnap.shard.strides import order_of
from lazysnap.state.wrappers import without_compiled

logger = logging.getLogger(__name__)


def is_uninitialised(tensor: torch.Tensor) -> bool:
    """True if its shape is not known before the first batch (``LazyLinear``)."""
    return bool(is_lazy(tensor))


def saved_names(live: Iterable[str], saved: Iterable[str]) -> dict[str, str]:
    """Map names of live tensors to names in a snapshot, also if only one of the models was compiled.

    Tensors that the snapshot does not have are skipped.
    """
    exact = set(saved)
    compiled: dict[str, list[str]] = {}
    for name in exact:
        compiled.setdefault(without_compiled(name), []).append(name)
    names = {}
    for name in live:
        candidates = compiled.get(without_compiled(name), [])
        if name in exact:
            names[name] = name
        elif len(candidates) == 1:
            names[name] = candidates[0]
    return names


def check_loadable(expected: Mapping[str, torch.Tensor], where: str) -> None:
    """Check that live tensors have memory to load values into. Raises: StateError."""
    empty = [name for name, tensor in expected.items() if tensor.device.type == "meta"]
    if empty:
        raise StateError(
            f"{where} cannot be loaded: {len(empty)} tensors of the live model ({empty[0]}, …) are on the meta device. "
            "Nothing was loaded. Give the model memory first, with model.to_empty(device=...), then restore"
        )


def fitted(module: torch.nn.Module, saved: Mapping[str, Any]) -> "OrderedDict[str, Any]":
    """Return ``saved`` in the form that ``module.load_state_dict`` expects."""
    live = entries_of(module)
    live_names = {}
    for name, saved_name in saved_names(live, saved).items():
        live_names[saved_name] = name
    state = OrderedDict[str, Any]()
    for name, value in saved.items():
        state[live_names.get(name, name)] = value
    # The format versions of the modules: without them some assume the state of an old torch.
    state._metadata = getattr(live, "_metadata", OrderedDict())  # type: ignore[attr-defined]
    return state


def can_be_filled(live: Any, saved: Any) -> bool:
    """True if both are tensors, and the live one can take the values of the saved one (``fill``)."""
    if not isinstance(live, torch.Tensor) or not isinstance(saved, torch.Tensor):
        return False
    return live.shape == saved.shape and live.dtype == saved.dtype


def fill(live: torch.Tensor, value: torch.Tensor) -> None:
    """Copy values of the same shape into a live tensor, also into an expanded one. The caller disables gradients.

    An expanded tensor whose memory cannot hold the values gets memory of its own.
    """
    if not is_expanded(live):
        live.copy_(value)
        return
    # torch refuses to copy to a tensor with overlapping elements, so each address is filled once.
    places = []
    for stride in live.stride():
        if stride == 0:
            places.append(slice(0, 1))
        else:
            places.append(slice(None))
    live[tuple(places)].copy_(value[tuple(places)])
    if not torch.equal(_bytes_of(live), _bytes_of(value.to(live.device, live.dtype))):
        live.data = live.new_empty(live.shape)
        live.copy_(value)


def is_expanded(value: torch.Tensor) -> bool:
    """True if several elements of a tensor share an address, as after ``expand``."""
    if is_uninitialised(value) or value.layout is not torch.strided:
        return False
    return any(stride == 0 and size > 1 for size, stride in zip(value.shape, value.stride(), strict=True))


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def reordered_tensors(module: torch.nn.Module, saved: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the live tensors of a module that have another memory order than in ``saved``, by name.

    Parts of sharded tensors are not compared.
    """
    live = entries_of(module)
    reordered = {}
    for name, saved_name in saved_names(live, saved).items():
        tensor = live[name]
        value = saved[saved_name]
        if not _is_plain(tensor) or not _is_plain(value) or tensor.shape != value.shape:
            continue
        if order_of(tensor.shape, tensor.stride()) != order_of(value.shape, value.stride()):
            reordered[name] = tensor
    return reordered


def warn_of_reordered(names: Collection[str]) -> None:
    """Warn once if live tensors have another memory order than in the snapshot."""
    if names:
        logger.warning(
            "%s has another memory order (strides) than in the snapshot, %d tensors in all: the values are the same, "
            "but the next steps may differ in their last bits. Give the model that order before the restore",
            next(iter(names)),
            len(names),
        )


def _is_plain(value: Any) -> bool:
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and not is_uninitialised(value)
        and value.layout is torch.strided
    )


def entries_of(module: torch.nn.Module) -> Mapping[str, Any]:
    """Return ``state_dict()``, with the live tensors if possible."""
    try:
        return module.state_dict(keep_vars=True)
    except TypeError:  # an override with other parameters
        return module.state_dict()
