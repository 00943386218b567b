"""What the ``state_dict`` of a module leaves out: flags, hidden buffers, and the states of metrics."""

from typing import Any

import torch

from lazysnap.state.scalars import pack, unpack


class ModuleExtras:
    """Flags of a module, and buffers that its ``state_dict`` omits, once they changed since this was made."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._first = {name: (buffer.data_ptr(), buffer._version) for name, buffer in self._hidden()}

    def _hidden(self) -> list[tuple[str, torch.Tensor]]:
        return [
            (f"{prefix}.{name}" if prefix else name, owner._buffers[name])
            for prefix, owner in self._module.named_modules()
            for name in owner._non_persistent_buffers_set
            if isinstance(owner._buffers.get(name), torch.Tensor)
        ]

    def collect(self) -> dict[str, Any]:
        """Flags as text, one character each; changed buffers as they are."""
        return {
            "training": "".join("01"[item.training] for item in self._module.modules()),
            "requires_grad": "".join("01"[item.requires_grad] for item in self._module.parameters()),
            "buffers": {
                name: buffer
                for name, buffer in sorted(self._hidden())
                if self._first.get(name) != (buffer.data_ptr(), buffer._version)
            },
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Put back what ``collect`` found, where the module still has the same parts."""
        modules, parameters = list(self._module.modules()), list(self._module.parameters())
        if len(modules) == len(state["training"]):
            for module, flag in zip(modules, state["training"], strict=True):
                module.training = flag == "1"
        if len(parameters) == len(state["requires_grad"]):
            for parameter, flag in zip(parameters, state["requires_grad"], strict=True):
                parameter.requires_grad_(flag == "1")
        with torch.no_grad():
            for name, buffer in self._hidden():
                saved = state["buffers"].get(name)
                if saved is None:
                    continue
                if saved.shape == buffer.shape and saved.dtype == buffer.dtype:
                    buffer.copy_(saved)
                else:
                    owner, _, leaf = name.rpartition(".")
                    self._module.get_submodule(owner)._buffers[leaf] = saved.to(buffer.device)


def collect_metric(metric: Any) -> dict[str, Any]:
    """What a ``torchmetrics.Metric`` has accumulated; nothing is computed, reset or synchronised."""
    return {
        "states": {name: pack(getattr(metric, name)) for name in metric._defaults},
        "update_count": metric._update_count,
        "computed": pack(metric._computed),
        "forward_cache": pack(metric._forward_cache),
    }


def restore_metric(metric: Any, state: dict[str, Any]) -> None:
    """Put back what ``collect_metric`` found."""
    for name, value in state["states"].items():
        setattr(metric, name, unpack(value, metric.device))
    metric._update_count = state["update_count"]
    metric._computed = unpack(state["computed"], metric.device)
    metric._forward_cache = unpack(state["forward_cache"], metric.device)
