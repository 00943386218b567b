"""Loads the state of a module, and checks at the first boundary that a restart can load it.

``load_state_dict`` refuses unknown names, such as ``weight.absmax`` of a 4-bit weight, and buffers of another shape.
Some modules have such names in their ``state_dict``, or change the shape of a buffer in training. Names may differ by
``torch.compile``, and tensors by their memory order.
"""

import logging
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from lazysnap.console import some_of
from lazysnap.errors import StateError
from lazysnap.shard.strides import order_of
from lazysnap.state.wrappers import without_compiled

logger = logging.getLogger(__name__)

_SHOWN = 3
"""Maximum names in a message."""


# ---------------------------------------------------------------- checks, and loading


@dataclass
class LoadedNames:
    """The names that ``load_state_dict`` of a module reads, as far as known without calling it."""

    required: set[str] = field(default_factory=set)
    """Names that it requires."""
    accepted: set[str] = field(default_factory=set)
    """Names that it reads; all others are refused."""
    open_prefixes: list[str] = field(default_factory=list)
    """Prefixes of names that custom code reads."""

    @classmethod
    def of(cls, module: torch.nn.Module) -> "LoadedNames":
        """Return the names of a module and of all modules in it."""
        names = cls()
        hooked = any(part._load_state_dict_post_hooks for part in module.modules())
        if hooked or _overrides(module, "load_state_dict"):
            names.open_prefixes.append("")
        else:
            names._add(module, "")
        names.accepted |= names.required
        return names

    def _add(self, module: torch.nn.Module, prefix: str) -> None:
        if module._load_state_dict_pre_hooks or _overrides(module, "_load_from_state_dict"):
            self.open_prefixes.append(prefix)
            return
        for name, parameter in module._parameters.items():
            if parameter is not None:
                self.required.add(prefix + name)
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                self.required.add(prefix + name)
        if _overrides(module, "get_extra_state") or _overrides(module, "set_extra_state"):
            self.accepted.add(f"{prefix}_extra_state")
        for name, child in module._modules.items():
            if child is not None:
                self._add(child, f"{prefix}{name}.")

    def unknown(self, names: Collection[str]) -> list[str]:
        """Return those of ``names`` that ``load_state_dict`` refuses."""
        prefixes = tuple(self.open_prefixes)
        return [name for name in names if name not in self.accepted and not name.startswith(prefixes)]


def _overrides(module: torch.nn.Module, method: str) -> bool:
    """True if the class of a module, or the module itself, overrides a method."""
    return method in vars(module) or getattr(type(module), method) is not getattr(torch.nn.Module, method)


def check_loads(path: str, module: torch.nn.Module, captured: Mapping[str, Any]) -> None:
    """Check that a restart can load the captured state of a module, without changing anything.

    Raises: StateError, naming what is missing, and what ``load_state_dict`` does not know and no tensor of the module
    holds.
    """
    names = LoadedNames.of(module)
    missing = sorted(names.required.difference(captured))
    unknown = names.unknown(captured)
    if unknown:
        loadable = set(_live_entries(module))
        for name, _ in _quantised_entries(module, unknown):
            loadable.add(name)
        unknown = [name for name in unknown if name not in loadable]
    if not missing and not unknown:
        return
    reasons = []
    if missing:
        reasons.append(f"load_state_dict() needs {some_of(missing, _SHOWN)}, which state_dict() does not return")
    if unknown:
        reasons.append(f"state_dict() returns {some_of(unknown, _SHOWN)}, which load_state_dict() does not know")
    advice = "Let state_dict() return what load_state_dict() reads, or override both"
    if "state_dict" in vars(module):
        advice = (
            "The program replaced state_dict() of this model by a function of its own: remove that line (frozen "
            "weights are stored once, not in every snapshot), or replace load_state_dict() accordingly"
        )
    raise StateError(f"{path}: no restart could load this model: {'; '.join(reasons)}. {advice}")


def _live_entries(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the tensors of ``state_dict()`` that the module stores, not those that it makes for each call."""
    entries = entries_of(module)
    entries_again = entries_of(module)  # while the first exists, so that a new tensor has other memory
    live = {}
    for name, tensor in entries.items():
        again = entries_again.get(name)
        if not isinstance(tensor, torch.Tensor) or not isinstance(again, torch.Tensor):
            continue
        if tensor.device.type != "meta" and tensor.data_ptr() == again.data_ptr():
            live[name] = tensor
    return live


def resizable_names(module: torch.nn.Module) -> set[str]:
    """Return the names of tensors that may have another shape in a snapshot: buffers, and names that
    ``load_state_dict`` does not know.
    """
    buffers = dict(module.named_buffers(remove_duplicate=False))
    unknown = LoadedNames.of(module).unknown(entries_of(module))
    return {*buffers, *unknown}


def load_module(module: torch.nn.Module, saved: Mapping[str, Any], *, strict: bool = True) -> None:
    """Load the values of a snapshot. Buffers get the shapes of the snapshot.

    Raises: StateError, for scales of other shapes than in the model; as ``load_state_dict``.
    """
    state = fitted(module, saved)
    extras = {}
    for name in LoadedNames.of(module).unknown(state):
        extras[name] = state.pop(name)
    for name, buffer in module.named_buffers(remove_duplicate=False):
        value = state.get(name)
        if is_uninitialised(buffer) or not isinstance(value, torch.Tensor):
            continue  # load_state_dict gives an uninitialised tensor its shape
        if value.shape != buffer.shape:
            buffer.data = buffer.new_empty(value.shape)
    _fill_expanded(module, state)
    module.load_state_dict(state, strict=strict)
    if extras:
        _load_extras(module, extras)


def _fill_expanded(module: torch.nn.Module, state: dict[str, Any]) -> None:
    """Fill the expanded tensors of a module, which torch cannot copy to, and insert them into ``state``."""
    for name, tensor in entries_of(module).items():
        value = state.get(name)
        if not isinstance(value, torch.Tensor) or not isinstance(tensor, torch.Tensor):
            continue
        if is_expanded(tensor) and value.shape == tensor.shape:
            with torch.no_grad():
                fill(tensor, value)
            state[name] = tensor  # load_state_dict copies it onto itself, which torch allows


def _load_extras(module: torch.nn.Module, extras: Mapping[str, Any]) -> None:
    pending = dict(extras)
    with torch.no_grad():
        for name, tensor in _live_entries(module).items():
            value = pending.get(name)
            if isinstance(value, torch.Tensor) and (value.shape, value.dtype) == (tensor.shape, tensor.dtype):
                tensor.copy_(value)
                del pending[name]
    entries = entries_of(module)
    different = [name for name, value in pending.items() if not _are_equal(entries.get(name), value)]
    requantised = {parameter for _, parameter in _quantised_entries(module, different)}
    for parameter in sorted(requantised):
        _requantise(module, parameter, extras)
        different = [name for name in different if not name.startswith(f"{parameter}.")]
    if different:
        raise StateError(
            f"the live model has other values than the snapshot for {some_of(different, _SHOWN)}, and "
            "load_state_dict() does not load them: quantise the model as when the snapshot was taken"
        )


def _are_equal(live: Any, saved: Any) -> bool:
    if not isinstance(live, torch.Tensor) or not isinstance(saved, torch.Tensor):
        return False
    return live.shape == saved.shape and live.dtype == saved.dtype and torch.equal(live, saved.to(live.device))


def _quantised_entries(module: torch.nn.Module, names: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield those of ``names`` that describe a weight of bitsandbytes, each with the name of that weight."""
    quantised = set()
    for name, parameter in module.named_parameters():
        if hasattr(getattr(parameter, "quant_state", None), "from_dict"):
            quantised.add(name)
    for name in names:
        parts = name.split(".")
        for length in range(len(parts) - 1, 0, -1):
            weight = ".".join(parts[:length])
            if weight in quantised:
                yield name, weight
                break


def _requantise(module: torch.nn.Module, parameter: str, extras: Mapping[str, Any]) -> None:
    """Give a weight of bitsandbytes the scales of a snapshot. Its numbers are part of one packed entry."""
    prefix = f"{parameter}."
    entries = {}
    for name, value in extras.items():
        if name.startswith(prefix):
            entries[name.removeprefix(prefix)] = value.clone()
    weight: Any = module.get_parameter(parameter)
    weight.quant_state = type(weight.quant_state).from_dict(entries, weight.device)
    layer: Any = module.get_submodule(parameter.rpartition(".")[0])
    if getattr(layer, "quant_state", None) is not None:
        layer.quant_state = weight.quant_state


# ---------------------------------------------------------------- names, values and memory order of tensors


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
