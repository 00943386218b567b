"""Loads the state of a module, and checks at the first boundary that a restart can load it.

``load_state_dict`` refuses unknown names, such as ``weight.absmax`` of a 4-bit weight, and buffers of another shape.
Some modules have such names in their ``state_dict``, or change the shape of a buffer in training.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lazysnap.console import some_of
from lazysnap.errors import StateError
from lazysnap.state.modules import entries_of, fill, fitted, is_expanded, is_uninitialised

_SHOWN = 3
"""Maximum names in a message."""


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
