"""What Lightning's checkpoint leaves out: flags of modules, hidden buffers, private fields of callbacks."""

from typing import Any

import torch

from lazysnap.state.scalars import pack, unpack

_ANYWHERE = (
    "_last_global_step_saved",
    "_defer_save_until_validation",
    "current_score",
    "_latest_update_step",
    "_latest_update_epoch",
)
"""Private fields of ModelCheckpoint and WeightAveraging."""
_SAME_DIRECTORY = (
    "_last_checkpoint_saved",
    "best_k_models",
    "best_model_path",
    "best_model_score",
    "kth_best_model_path",
    "kth_value",
    "last_model_path",
)
"""Fields of ModelCheckpoint that name files: worth something only while it writes to the same directory."""


def collect_callbacks(trainer: Any) -> dict[str, Any]:
    """Fields of callbacks that their ``state_dict`` omits, or ``load_state_dict`` drops."""
    found = {}
    for callback in trainer.callbacks:
        values = {name: getattr(callback, name) for name in (*_ANYWHERE, *_SAME_DIRECTORY) if name in vars(callback)}
        if values:
            found[callback.state_key] = pack({**values, "dirpath": _directory(callback)})
    return found


def restore_callbacks(trainer: Any, state: dict[str, Any]) -> None:
    """Put back what ``collect_callbacks`` found."""
    for callback in trainer.callbacks:
        values = unpack(state.get(callback.state_key, {}), trainer.strategy.root_device)
        is_same = values.get("dirpath") == _directory(callback)
        for name, value in values.items():
            if name in _ANYWHERE or (is_same and name in _SAME_DIRECTORY):
                setattr(callback, name, value)


def _directory(callback: Any) -> str | None:
    path = getattr(callback, "dirpath", None)
    return None if path is None else str(path)


class ModuleExtras:
    """Flags of a module, and buffers that its ``state_dict`` omits, once they changed since the fit began."""

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
