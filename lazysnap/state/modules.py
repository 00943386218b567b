"""Loading the state of a module: names with or without ``torch.compile``, tensors with unusual strides."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from lazysnap.errors import StateError
from lazysnap.shard.strides import order_of
from lazysnap.state.wrappers import without_compiled


def is_uninitialised(tensor: torch.Tensor) -> bool:
    """True if its shape is not known before the first batch (``LazyLinear``)."""
    return bool(is_lazy(tensor))


def held_names(wanted: Iterable[str], held: Iterable[str]) -> dict[str, str]:
    """Map names of live tensors to names in a snapshot, also if only one of the two models was compiled.

    Tensors that the snapshot does not have are left out.
    """
    known = set(held)
    plain: dict[str, list[str]] = {}
    for name in known:
        plain.setdefault(without_compiled(name), []).append(name)
    found = {}
    for name in wanted:
        others = plain.get(without_compiled(name), [])
        if name in known:
            found[name] = name
        elif len(others) == 1:
            found[name] = others[0]
    return found


def check_loadable(expected: Mapping[str, torch.Tensor], where: str) -> None:
    """Raises: StateError, if live tensors have no memory to load values into."""
    empty = [name for name, tensor in expected.items() if tensor.device.type == "meta"]
    if empty:
        raise StateError(
            f"{where} cannot be loaded: {len(empty)} tensors of the live model ({empty[0]}, …) are on the meta device. "
            "Nothing was loaded. Give the model memory first, with model.to_empty(device=...), then restore"
        )


def fitted(module: torch.nn.Module, saved: Mapping[str, Any]) -> "OrderedDict[str, Any]":
    """Return ``saved`` in the form that ``module.load_state_dict`` expects. Expanded tensors of the module are filled
    here, and its tensors get the memory order of those in ``saved`` that are not row-major.

    Raises: StateError, for values that differ where the live tensor has only one; nothing was changed then.
    """
    live = entries_of(module)
    names = held_names(live, saved)
    taken = {held: name for name, held in names.items()}
    state = OrderedDict((taken.get(name, name), value) for name, value in saved.items())
    # The format versions of the modules: without them some assume the state of an old torch.
    state._metadata = getattr(live, "_metadata", OrderedDict())  # type: ignore[attr-defined]
    expanded = {name: tensor for name, tensor in live.items() if name in names and _is_expanded(tensor)}
    for name, tensor in expanded.items():
        _check_expanded(name, tensor, state[name])
    with torch.no_grad():
        for name, tensor in expanded.items():
            once = _once(tensor)
            tensor[once].copy_(state[name][once])
            # load_state_dict copies it onto itself, which torch allows for an expanded tensor.
            state[name] = tensor
    for name, tensor in live.items():
        if name in names and name not in expanded:
            take_order(tensor, state[name])
    return state


def take_order(live: Any, saved: Any) -> None:
    """Give a live tensor the strides of ``saved``, if those are not row-major. The caller loads its values afterwards.

    It keeps its memory. A view of larger memory and a part of a sharded tensor keep their strides.
    """
    if not _is_plain(live) or not _is_plain(saved) or live.shape != saved.shape or live.stride() == saved.stride():
        return
    if order_of(saved.shape, saved.stride()) is not None and live.untyped_storage().nbytes() == live.nbytes:
        live.data = live.data.as_strided(live.shape, saved.stride())


def recorded_orders(module: torch.nn.Module, saved: Mapping[str, Any]) -> set[int]:
    """Return the ids of the live tensors of a module that are not row-major in ``saved``."""
    live = entries_of(module)
    return {
        id(live[name])
        for name, held in held_names(live, saved).items()
        if _is_plain(saved[held]) and order_of(saved[held].shape, saved[held].stride()) is not None
    }


def _is_plain(value: Any) -> bool:
    return (
        type(value) in (torch.Tensor, torch.nn.Parameter)
        and not is_uninitialised(value)
        and value.layout is torch.strided
    )


def entries_of(module: torch.nn.Module) -> Mapping[str, Any]:
    """Return ``state_dict()``, with the live tensors where it can."""
    try:
        return module.state_dict(keep_vars=True)
    except TypeError:  # an override with other parameters
        return module.state_dict()


def _is_expanded(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or is_uninitialised(value) or value.layout is not torch.strided:
        return False
    return any(stride == 0 and size > 1 for size, stride in zip(value.shape, value.stride(), strict=True))


def _once(tensor: torch.Tensor) -> tuple[slice, ...]:
    """Return the index of the part of an expanded tensor that covers each element in memory once."""
    return tuple(slice(0, 1) if stride == 0 else slice(None) for stride in tensor.stride())


def _check_expanded(name: str, tensor: torch.Tensor, value: Any) -> None:
    if not isinstance(value, torch.Tensor) or value.shape != tensor.shape:
        return  # load_state_dict reports it
    whole, repeated = value.contiguous(), value[_once(tensor)].expand_as(value).contiguous()
    if not torch.equal(whole.view(torch.uint8), repeated.view(torch.uint8)):
        raise StateError(
            f"{name}: the live tensor is expanded (strides {list(tensor.stride())}), and the values in the snapshot "
            "differ where it has one place. Nothing was loaded. Make it a tensor of its own first, with .contiguous()"
        )
