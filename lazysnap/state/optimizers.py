"""Loading the state of an optimizer: check it first, then load it with the dtypes and strides of the snapshot."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from lazysnap.errors import StateError
from lazysnap.shard.strides import Order, order_of
from lazysnap.state.sharding import local_of
from lazysnap.state.source import KEY, OPTIMIZERS, StateSource, parameters_of
from lazysnap.state.wrappers import stepping

_ELSE = (
    "Nothing of the optimizer was loaded. Use the optimizer of the snapshot; to go on with another one, load the model "
    "alone with lazysnap.load_weights(place), or begin with the weights of an exported checkpoint"
)


def class_of(optimizer: torch.optim.Optimizer) -> str:
    """Return module and name of an optimizer's class. Of a wrapper's class: those of its base of the same name."""
    name = type(optimizer).__name__
    origin = [kind for kind in type(optimizer).__mro__ if kind.__name__ == name][-1]
    return f"{origin.__module__}.{name}"


def check_optimizers(
    source: StateSource, state: Mapping[str, Any], parameters: Mapping[str, Sequence[str]] | None
) -> None:
    """Compare every optimizer with what a snapshot has for it; nothing is changed.

    ``parameters``: as for ``check_order``. Raises: StateError, if classes, parameter groups, their keys, or the
    order of parameters differ.
    """
    known = _recorded(state)
    for path, optimizer in source.named_optimizers().items():
        saved = _at(state, path)
        if path in known:
            _check_class(path, str(known[path].get("class")), class_of(optimizer))
        # Without groups it is not in the snapshot, or has its own format.
        if isinstance(saved, Mapping) and isinstance(saved.get("param_groups"), list):
            if path not in known or not _fills_groups(optimizer):
                _check_keys(path, optimizer, saved)
            _check_state(path, optimizer, saved)
            _check_groups(path, optimizer, saved)
    check_order(source, parameters)


def classes_of(source: StateSource) -> dict[str, dict[str, str]]:
    """Return the class of every optimizer by its path: part of every snapshot, compared by ``check_optimizers``."""
    return {path: {"class": class_of(optimizer)} for path, optimizer in source.named_optimizers().items()}


def _recorded(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the result of ``classes_of`` for the optimizers of a snapshot."""
    own = state.get(KEY)
    fields = own.get(OPTIMIZERS) if isinstance(own, dict) else None
    listed = fields.items() if isinstance(fields, dict) else ()
    return {path: one for path, one in listed if isinstance(one, dict)}


def _at(state: Any, path: str) -> Any:
    if isinstance(state, Mapping) and path in state:
        return state[path]
    for part in path.split("."):
        if isinstance(state, Mapping):
            state = state.get(part)
        else:
            found = isinstance(state, list) and part.isdecimal() and int(part) < len(state)
            state = state[int(part)] if found else None
    return state


def _check_class(path: str, there: str, here: str) -> None:
    # Modules move and get other names. But a class of torch never equals another package's class of that name.
    def kind(name: str) -> tuple[str, bool]:
        return name.rpartition(".")[2], name.startswith("torch.")

    if kind(there) != kind(here):
        raise StateError(f"{path}: the snapshot is of {there}, the live optimizer is {here}. {_ELSE}")


def _fills_groups(optimizer: torch.optim.Optimizer) -> bool:
    """True if the class itself adds missing settings when it loads the state of an older version."""
    kind, base = type(optimizer), torch.optim.Optimizer
    return kind.__setstate__ is not base.__setstate__ or kind.load_state_dict is not base.load_state_dict


def _check_keys(path: str, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Raises: StateError, if settings are missing. Switches may be missing: torch adds some with each release."""
    groups = saved["param_groups"]
    needed = {key for key, value in optimizer.defaults.items() if value is not None and not isinstance(value, bool)}
    missing = sorted(key for key in needed if any(key not in group for group in groups))
    if missing:
        raise StateError(
            f"{path}: the live {type(optimizer).__qualname__} needs {', '.join(missing)} in every parameter group, the "
            f"snapshot has {', '.join(sorted({key for group in groups for key in group} - {'params'}))}. {_ELSE}"
        )


def _check_state(path: str, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Raises: StateError, if both have state, and no key in common."""
    here, there = (_state_keys(state) for state in (optimizer.state, saved.get("state")))
    if here and there and not here & there:
        raise StateError(
            f"{path}: the live {type(optimizer).__qualname__} holds {', '.join(sorted(here))} for its parameters, the "
            f"snapshot {', '.join(sorted(there))}. {_ELSE}"
        )


def _state_keys(state: Any) -> set[str]:
    held = state.values() if isinstance(state, Mapping) else ()
    return {str(key) for one in held if isinstance(one, Mapping) for key in one} - {"step"}


def _check_groups(name: str, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    there = [len(group["params"]) for group in saved["param_groups"]]
    here = [len(group["params"]) for group in optimizer.param_groups]
    if there != here:
        raise StateError(
            f"{name}: the snapshot has {_groups(there)}, the live {type(optimizer).__qualname__} has {_groups(here)}. "
            "Groups that were added in the middle of the training (add_param_group) have to be "
            "there before the restore: engine.all_steps() tells how far it had come"
        )


def check_order(source: StateSource, there: Mapping[str, Sequence[str]] | None) -> None:
    """Raises: StateError, if a live optimizer has as many parameters as in a snapshot, but in other places.

    ``there``: names by optimizer. The state of an optimizer refers to parameters only by number.
    """
    known = source.parameter_names()
    for path, parameters in source.optimizer_parameters().items():
        listed, here = (there or {}).get(path, ()), [known.get(id(parameter)) for parameter in parameters]
        if len(listed) != len(here) or None in here:
            continue
        number = next((i for i, pair in enumerate(zip(listed, here, strict=True)) if pair[0] != pair[1]), None)
        if number is not None:
            raise StateError(
                f"{path}: parameter {number} is {here[number]}, in the snapshot it is {listed[number]}: it would get "
                "the state of another one. Nothing of the optimizer was loaded. Give it its parameters in the old order"
            )


def _groups(sizes: list[int]) -> str:
    return f"{len(sizes)} parameter group{'s' * (len(sizes) != 1)} of {', '.join(map(str, sizes)) or 0} parameters"


def check_memory_orders(path: str, optimizer: torch.optim.Optimizer, reordered: Mapping[str, torch.Tensor]) -> None:
    """Raises: StateError, if a parameter is ``reordered`` and the optimizer may ignore strides.

    State comes back in the memory order of the snapshot. Fused optimizers read a parameter and its state side by side
    in memory, so they would train something else.

    Args:
        path: the name of the optimizer, for the message.
        optimizer: the live one.
        reordered: see ``modules.reordered_tensors``.
    """
    if not _may_ignore_strides(optimizer):
        return
    names = {id(tensor): name for name, tensor in reordered.items()}
    for parameter in parameters_of(optimizer):
        if id(parameter) in names:
            raise StateError(
                f"{path}: {names[id(parameter)]} has another memory order than in the snapshot, and "
                f"{type(optimizer).__qualname__} may ignore strides: it would take values from wrong places. Give the "
                "model that order before the restore, such as model.to(memory_format=torch.channels_last)"
            )


def _may_ignore_strides(optimizer: torch.optim.Optimizer) -> bool:
    """False for those of torch that compute element by element. Kernels of other packages are not known."""
    is_of_torch = type(optimizer).__module__.startswith("torch.")
    return not is_of_torch or any(group.get("fused") for group in optimizer.param_groups)


def put_back(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Load ``saved``: every tensor gets the dtype, the values and the strides that it has there.

    If the optimizer holds tensors of the same kind, they are filled in place: it then needs no memory for a second
    state, and captures keep their plan.
    """
    inner = stepping(optimizer)
    places = _places(inner, saved)
    if places is None:
        groups = [dict(group) for group in inner.param_groups]
        optimizer.load_state_dict(dict(saved))
        _put_exact(inner, saved, groups)
        return
    with torch.no_grad():
        for held, key, value in places:
            if isinstance(value, torch.Tensor):
                held[key].copy_(value)
            else:
                held[key] = value


def _put_exact(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], before: Sequence[Mapping[str, Any]]) -> None:
    """Undo what ``load_state_dict`` does to values: torch's casts floating state to the dtype of its parameter.

    ``before``: the parameter groups until now. Tensors in them stay on their devices.
    """
    state, groups = saved.get("state"), saved.get("param_groups")
    if not isinstance(state, dict) or not isinstance(groups, list):
        return  # the optimizer has its own format
    parameters = parameters_of(optimizer)
    for number, values in state.items():
        if type(number) is int and 0 <= number < len(parameters) and parameters[number] in optimizer.state:
            _exact(optimizer.state[parameters[number]], values)
    for held, values, former in zip(optimizer.param_groups, groups, before, strict=True):
        for key, value in former.items():
            loaded = held.get(key)
            if key != "params" and isinstance(value, torch.Tensor) and isinstance(loaded, torch.Tensor):
                held[key] = loaded.to(value.device)
        _exact(held, {key: value for key, value in values.items() if key != "params"})


def _exact(loaded: Any, saved: Any) -> Any:
    """Return ``saved`` on the device of ``loaded`` if loading changed it. Containers are changed in place."""
    if isinstance(saved, torch.Tensor) and isinstance(loaded, torch.Tensor):
        is_same = loaded.dtype == saved.dtype or loaded.shape != saved.shape
        return loaded if is_same else saved.to(loaded.device)
    if isinstance(saved, str):
        return saved  # torch treats a text as a list, and changes it
    if isinstance(saved, dict) and isinstance(loaded, dict):
        for key in saved.keys() & loaded.keys():
            loaded[key] = _exact(loaded[key], saved[key])
    elif isinstance(saved, (list, tuple)) and type(saved) is type(loaded) and len(saved) == len(loaded):
        items = [_exact(*pair) for pair in zip(loaded, saved, strict=True)]
        if isinstance(loaded, list):
            loaded[:] = items
        else:
            return tuple(items)
    return loaded


def _places(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> list[tuple[Any, Any, Any]] | None:
    """Return container, key and value for each saved value; ``None`` if one of them has no place of the same kind."""
    hooks = (optimizer._optimizer_load_state_dict_pre_hooks, optimizer._optimizer_load_state_dict_post_hooks)
    state, groups = saved.get("state"), saved.get("param_groups")
    is_plain = type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict and not any(hooks)
    if not is_plain or not isinstance(state, dict) or not isinstance(groups, list):
        return None
    parameters = parameters_of(optimizer)
    if set(state) != {number for number, one in enumerate(parameters) if one in optimizer.state}:
        return None
    pairs = [(optimizer.state[parameters[number]], values) for number, values in state.items()]
    if any(held.keys() != values.keys() for held, values in pairs):
        return None
    if len(groups) != len(optimizer.param_groups):
        return None
    pairs += [
        (held, {key: value for key, value in values.items() if key != "params"})
        for held, values in zip(optimizer.param_groups, groups, strict=True)
    ]
    found: list[tuple[Any, Any, Any]] = []
    return found if all(_are_alike(held, values, found) for held, values in pairs) else None


def _are_alike(held: Any, values: Any, found: list[tuple[Any, Any, Any]]) -> bool:
    """True if each of ``values`` has a place of the same kind in ``held``; adds these places to ``found``."""
    for key, value in values.items() if isinstance(values, dict) else enumerate(values):
        there = held.get(key) if isinstance(held, dict) else held[key]
        if isinstance(value, torch.Tensor):
            if not _is_alike(there, value):
                return False
            found.append((held, key, value))
        elif not _holds_tensors(value) and not _holds_tensors(there):
            found.append((held, key, value))
        elif not _is_like_container(there, value) or not _are_alike(there, value, found):
            return False
    return True


def _is_like_container(held: Any, value: Any) -> bool:
    """True if both are lists of one length, or dicts with the same keys."""
    if type(held) is not type(value):
        return False
    return (
        held.keys() == value.keys() if isinstance(value, dict) else isinstance(value, list) and len(held) == len(value)
    )


def _is_alike(held: Any, value: torch.Tensor) -> bool:
    """True if ``held`` can be filled with ``value``: elements that share memory cannot."""
    return (
        type(held) is type(value)
        and (held.shape, held.dtype) == (value.shape, value.dtype)
        and _order(held) == _order(value)
        and (_order(held) is not None or local_of(held).is_contiguous())
    )


def _order(tensor: torch.Tensor) -> Order | None:
    """Return the memory order of this rank's part of a tensor."""
    local = local_of(tensor)
    return order_of(local.shape, local.stride())


def _holds_tensors(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value))
