"""Loads the state of an optimizer: checks it first, then loads it with the dtypes and strides of the snapshot."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from lazysnap.errors import StateError
from lazysnap.shard.manifest import EXTRAS
from lazysnap.shard.strides import Order, order_of
from lazysnap.state.modules import can_be_filled
from lazysnap.state.sharding import local_of
from lazysnap.state.source import OPTIMIZERS, StateSource, parameters_of
from lazysnap.state.wrappers import stepping

_ADVICE = (
    "Nothing of the optimizer was loaded. Use the optimizer of the snapshot; to continue with another one, load only "
    "the model with lazysnap.load_weights(place), or begin with the weights of an exported checkpoint"
)


def class_of(optimizer: torch.optim.Optimizer) -> str:
    """Return module and name of an optimizer's class; for a wrapper those of its base of the same name."""
    name = type(optimizer).__name__
    module = ""
    for kind in type(optimizer).__mro__:
        if kind.__name__ == name:
            module = kind.__module__
    return f"{module}.{name}"


def check_optimizers(
    source: StateSource, state: Mapping[str, Any], parameters: Mapping[str, Sequence[str]] | None
) -> None:
    """Compare every optimizer with its state in a snapshot, without changing anything.

    ``parameters``: as for ``check_order``. Raises: StateError, if classes, parameter groups, their keys, or the order
    of parameters differ.
    """
    recorded = _recorded(state)
    for path, optimizer in source.named_optimizers().items():
        saved = _at(state, path)
        if path in recorded:
            _check_class(path, str(recorded[path].get("class")), class_of(optimizer))
        # Without groups the state is missing, or has another format.
        if isinstance(saved, Mapping) and isinstance(saved.get("param_groups"), list):
            if path not in recorded or not _fills_groups(optimizer):
                _check_keys(path, optimizer, saved)
            _check_state(path, optimizer, saved)
            _check_groups(path, optimizer, saved)
    check_order(source, parameters)


def classes_of(source: StateSource) -> dict[str, dict[str, str]]:
    """Return the class of every optimizer by its path: part of every snapshot, compared by ``check_optimizers``."""
    return {path: {"class": class_of(optimizer)} for path, optimizer in source.named_optimizers().items()}


def _recorded(state: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the result of ``classes_of`` for the optimizers of a snapshot."""
    extras = state.get(EXTRAS)
    if not isinstance(extras, dict):
        return {}
    optimizers = extras.get(OPTIMIZERS)
    if not isinstance(optimizers, dict):
        return {}
    return {path: fields for path, fields in optimizers.items() if isinstance(fields, dict)}


def _at(state: Any, path: str) -> Any:
    if isinstance(state, Mapping) and path in state:
        return state[path]
    for part in path.split("."):
        if isinstance(state, Mapping):
            state = state.get(part)
        elif isinstance(state, list) and part.isdecimal() and int(part) < len(state):
            state = state[int(part)]
        else:
            return None
    return state


def _check_class(path: str, saved: str, live: str) -> None:
    # Modules are moved and renamed. But a class of torch never equals another package's class of that name.
    has_same_name = saved.rpartition(".")[2] == live.rpartition(".")[2]
    if not has_same_name or saved.startswith("torch.") != live.startswith("torch."):
        raise StateError(f"{path}: the snapshot is of {saved}, the live optimizer is {live}. {_ADVICE}")


def _fills_groups(optimizer: torch.optim.Optimizer) -> bool:
    """True if the class itself adds missing settings when it loads the state of an older version."""
    kind = type(optimizer)
    base = torch.optim.Optimizer
    return kind.__setstate__ is not base.__setstate__ or kind.load_state_dict is not base.load_state_dict


def _check_keys(path: str, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Check that no setting is missing. Switches may be missing: torch adds some with each release.

    Raises: StateError.
    """
    missing = set()
    present = set()
    for group in saved["param_groups"]:
        present.update(group)
        for key, value in optimizer.defaults.items():
            is_switch = value is None or isinstance(value, bool)
            if key not in group and not is_switch:
                missing.add(key)
    if missing:
        raise StateError(
            f"{path}: the live {type(optimizer).__qualname__} needs {', '.join(sorted(missing))} in every parameter "
            f"group, the snapshot has {', '.join(sorted(present - {'params'}))}. {_ADVICE}"
        )


def _check_state(path: str, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Check that the states have a key in common, if both are not empty. Raises: StateError."""
    live_keys = _state_keys(optimizer.state)
    saved_keys = _state_keys(saved.get("state"))
    if live_keys and saved_keys and not live_keys & saved_keys:
        raise StateError(
            f"{path}: the live {type(optimizer).__qualname__} holds {', '.join(sorted(live_keys))} for its parameters, "
            f"the snapshot {', '.join(sorted(saved_keys))}. {_ADVICE}"
        )


def _state_keys(state: Any) -> set[str]:
    keys = set[str]()
    if isinstance(state, Mapping):
        for values in state.values():
            if isinstance(values, Mapping):
                keys.update(map(str, values))
    return keys - {"step"}


def _check_groups(name: str, optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    saved_sizes = _group_sizes(saved["param_groups"])
    live_sizes = _group_sizes(optimizer.param_groups)
    if saved_sizes != live_sizes:
        raise StateError(
            f"{name}: the snapshot has {_listed_groups(saved_sizes)}, the live {type(optimizer).__qualname__} has "
            f"{_listed_groups(live_sizes)}. "
            "Groups that were added in the middle of the training (add_param_group) have to be there before the "
            "restore: engine.all_steps() tells how far it had come"
        )


def _group_sizes(groups: Sequence[Mapping[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]


def _listed_groups(sizes: list[int]) -> str:
    noun = "groups"
    if len(sizes) == 1:
        noun = "group"
    return f"{len(sizes)} parameter {noun} of {', '.join(map(str, sizes)) or 0} parameters"


def check_order(source: StateSource, saved_names: Mapping[str, Sequence[str]] | None) -> None:
    """Check the order of parameters, because the state of an optimizer only numbers them.

    ``saved_names``: the names of the parameters of each optimizer in the snapshot. An optimizer with another number of
    parameters is not checked. Raises: StateError.
    """
    if saved_names is None:
        return
    names = source.parameter_names()
    for path, parameters in source.optimizer_parameters().items():
        saved_order = saved_names.get(path, ())
        live_order = [names.get(id(parameter)) for parameter in parameters]
        if len(saved_order) != len(live_order) or None in live_order:
            continue
        for number, (saved, live) in enumerate(zip(saved_order, live_order, strict=True)):
            if saved != live:
                raise StateError(
                    f"{path}: parameter {number} is {live}, in the snapshot it is {saved}: it would get the state of "
                    "another one. Nothing of the optimizer was loaded. Give it its parameters in the old order"
                )


def check_memory_orders(path: str, optimizer: torch.optim.Optimizer, reordered: Mapping[str, torch.Tensor]) -> None:
    """Check that no parameter is ``reordered`` if the optimizer may ignore strides.

    State is restored in the memory order of the snapshot. Fused optimizers read a parameter and its state in memory
    order, so they would combine wrong values.

    Args:
        path: the name of the optimizer, for the message.
        optimizer: the live one.
        reordered: see ``modules.reordered_tensors``.

    Raises: StateError.
    """
    if not _may_ignore_strides(optimizer):
        return
    names = {id(tensor): name for name, tensor in reordered.items()}
    for parameter in parameters_of(optimizer):
        if id(parameter) in names:
            raise StateError(
                f"{path}: {names[id(parameter)]} has another memory order than in the snapshot, and "
                f"{type(optimizer).__qualname__} may ignore strides: it would take values from wrong offsets. Give the "
                "model that order before the restore, such as model.to(memory_format=torch.channels_last)"
            )


def _may_ignore_strides(optimizer: torch.optim.Optimizer) -> bool:
    """False for optimizers of torch that compute element by element. Kernels of other packages are unknown."""
    is_of_torch = type(optimizer).__module__.startswith("torch.")
    return not is_of_torch or any(group.get("fused") for group in optimizer.param_groups)


def put_back(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Load ``saved``: every tensor gets the dtype, the values and the strides of the snapshot.

    If the optimizer holds tensors of the same kind, they are filled in place. This needs no memory for a second state,
    and captures keep their plan.
    """
    inner = stepping(optimizer)
    places = _places(inner, saved)
    if places is None:
        groups = list(map(dict, inner.param_groups))
        optimizer.load_state_dict(dict(saved))
        _put_exact(inner, saved, groups)
        return
    with torch.no_grad():
        for container, key, value in places:
            if isinstance(value, torch.Tensor):
                container[key].copy_(value)
            else:
                container[key] = value


def _put_exact(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any], before: Sequence[Mapping[str, Any]]) -> None:
    """Undo what ``load_state_dict`` does to values: torch's casts floating state to the dtype of its parameter.

    ``before``: the parameter groups until now. Tensors in them stay on their devices.
    """
    state = saved.get("state")
    groups = saved.get("param_groups")
    if not isinstance(state, dict) or not isinstance(groups, list):
        return  # the optimizer has another format
    parameters = parameters_of(optimizer)
    for number, values in state.items():
        if type(number) is int and 0 <= number < len(parameters) and parameters[number] in optimizer.state:
            _exact(optimizer.state[parameters[number]], values)
    for group, values, former in zip(optimizer.param_groups, groups, before, strict=True):
        for key, value in former.items():
            loaded = group.get(key)
            if key != "params" and isinstance(value, torch.Tensor) and isinstance(loaded, torch.Tensor):
                group[key] = loaded.to(value.device)
        _exact(group, _settings_of(values))


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    settings = dict(group)
    settings.pop("params", None)
    return settings


def _exact(loaded: Any, saved: Any) -> Any:
    """Return ``saved`` on the device of ``loaded`` if loading changed it. Containers are changed in place."""
    if isinstance(saved, torch.Tensor) and isinstance(loaded, torch.Tensor):
        if loaded.dtype == saved.dtype or loaded.shape != saved.shape:
            return loaded
        return saved.to(loaded.device)
    if isinstance(saved, str):
        return saved  # torch treats a string as a list, and changes it
    if isinstance(saved, dict) and isinstance(loaded, dict):
        for key in saved.keys() & loaded.keys():
            loaded[key] = _exact(loaded[key], saved[key])
    elif isinstance(saved, (list, tuple)) and type(saved) is type(loaded) and len(saved) == len(loaded):
        items = list(map(_exact, loaded, saved))
        if isinstance(loaded, list):
            loaded[:] = items
        else:
            return tuple(items)
    return loaded


def _places(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> list[tuple[Any, Any, Any]] | None:
    """Return container, key and value for each saved value; ``None`` if one has no live place of the same kind."""
    state = saved.get("state")
    groups = saved.get("param_groups")
    if _has_own_loading(optimizer) or not isinstance(state, dict) or not isinstance(groups, list):
        return None
    parameters = parameters_of(optimizer)
    if set(state) != {number for number, parameter in enumerate(parameters) if parameter in optimizer.state}:
        return None
    pairs = []
    for number, values in state.items():
        live_values = optimizer.state[parameters[number]]
        if live_values.keys() != values.keys():
            return None
        pairs.append((live_values, values))
    if len(groups) != len(optimizer.param_groups):
        return None
    for live_group, group in zip(optimizer.param_groups, groups, strict=True):
        pairs.append((live_group, _settings_of(group)))
    places: list[tuple[Any, Any, Any]] = []
    for live, values in pairs:
        if not _find_places(live, values, places):
            return None
    return places


def _has_own_loading(optimizer: torch.optim.Optimizer) -> bool:
    if type(optimizer).load_state_dict is not torch.optim.Optimizer.load_state_dict:
        return True
    return bool(optimizer._optimizer_load_state_dict_pre_hooks or optimizer._optimizer_load_state_dict_post_hooks)


def _find_places(live: Any, saved: Any, places: list[tuple[Any, Any, Any]]) -> bool:
    """Add a place in ``live`` to ``places`` for each value of ``saved``; ``False`` if one has none of the same kind."""
    items: Iterable[tuple[Any, Any]] = enumerate(saved)
    if isinstance(saved, dict):
        items = saved.items()
    for key, value in items:
        live_value = live.get(key) if isinstance(live, dict) else live[key]
        if isinstance(value, torch.Tensor):
            if not _has_form_of(live_value, value):
                return False
            places.append((live, key, value))
        elif not _holds_tensors(value) and not _holds_tensors(live_value):
            places.append((live, key, value))
        elif not _is_like_container(live_value, value) or not _find_places(live_value, value, places):
            return False
    return True


def _is_like_container(live: Any, saved: Any) -> bool:
    """True if both are lists of one length, or dicts with the same keys."""
    if type(live) is not type(saved):
        return False
    if isinstance(saved, dict):
        return bool(live.keys() == saved.keys())
    return isinstance(saved, list) and len(live) == len(saved)


def _has_form_of(live: Any, saved: torch.Tensor) -> bool:
    """True if ``live`` can be filled, and is of the same type and memory order: elements share no memory."""
    if type(live) is not type(saved) or not can_be_filled(live, saved):
        return False
    order = _order(live)
    if order != _order(saved):
        return False
    return order is not None or local_of(live).is_contiguous()


def _order(tensor: torch.Tensor) -> Order | None:
    """Return the memory order of this rank's part of a tensor."""
    local = local_of(tensor)
    return order_of(local.shape, local.stride())


def _holds_tensors(value: Any) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves(value))
