"""State that Lightning's checkpoints leave out: logged values, states of metrics, what callbacks hold beside their
``state_dict``, and flags and hidden buffers of modules.
"""

from dataclasses import fields
from pathlib import PurePath
from typing import Any

import torch
from torchmetrics import Metric

from lazysnap.integrations.lightning.framework import neighbour
from lazysnap.state.metrics import collect_metric, restore_metric
from lazysnap.state.modules import fill
from lazysnap.state.scalars import pack, unpack

_CONNECTOR = ("_progress_bar_metrics", "_logged_metrics", "_callback_metrics", "_current_fx", "_first_loop_iter")
_LIVE = _CONNECTOR[-2:]
"""The connector's record of the hook that runs now."""
_LAST_FILE = "_last_checkpoint_saved"
_FIELDS = (
    _LAST_FILE,
    "_last_global_step_saved",
    "_defer_save_until_validation",
    "current_score",
    "_latest_update_epoch",
)
"""Fields of ModelCheckpoint and WeightAveraging that their ``state_dict`` omits, or ``load_state_dict`` drops."""


def collect_metrics(trainer: Any, module: torch.nn.Module) -> dict[str, Any]:
    """Return the current metrics of training; nothing is computed, reset or synchronised."""
    connector = trainer._logger_connector
    return {
        "results": [[key, _collect_result(item)] for key, item in trainer.fit_loop.epoch_loop._results.items()],
        "connector": {name: pack(getattr(connector, name)) for name in _CONNECTOR},
        "modules": {name: collect_metric(item) for name, item in module.named_modules() if isinstance(item, Metric)},
    }


def restore_metrics(trainer: Any, module: torch.nn.Module, state: dict[str, Any], *, in_hook: bool = False) -> None:
    """Put back what ``collect_metrics`` found; ``in_hook``: but what the connector knows of the hook that runs now."""
    device = trainer.strategy.root_device
    connector = trainer._logger_connector
    for name, value in state["connector"].items():
        if not in_hook or name not in _LIVE:
            setattr(connector, name, unpack(value, device))
    metrics = {name: item for name, item in module.named_modules() if isinstance(item, Metric)}
    for name in metrics.keys() & state["modules"].keys():
        restore_metric(metrics[name], state["modules"][name])
    results = trainer.fit_loop.epoch_loop._results
    results.clear()
    for key, item in state["results"]:
        results[key] = _make_result(trainer, results, item, metrics)


def _collect_result(item: Any) -> dict[str, Any]:
    meta, sync = item.meta, item.meta.sync
    return {
        **{field.name: getattr(meta, field.name) for field in fields(meta) if field.name != "_sync"},
        # The reductions are functions and bound methods of the strategy: they are built anew, never stored.
        "reduce_fx": meta.reduce_fx.__name__,
        "sync_dist": sync.should,
        "rank_zero_only": sync.rank_zero_only,
        "is_tensor": item.is_tensor,
        "has_reset": item.has_reset,
        "metric": collect_metric(item),
    }


def _make_result(trainer: Any, results: Any, state: dict[str, Any], metrics: dict[str, Metric]) -> Any:
    kind = neighbour(results, "_Metadata")
    meta = kind(**{field.name: state[field.name] for field in fields(kind) if field.name in state})
    meta.sync = neighbour(results, "_Sync")(
        _should=state["sync_dist"], fn=trainer.strategy.reduce, rank_zero_only=state["rank_zero_only"]
    )
    item = neighbour(results, "_ResultMetric")(meta, state["is_tensor"])
    item.to(trainer.strategy.root_device)
    restore_metric(item, state["metric"])
    item.has_reset = state["has_reset"]
    if not state["is_tensor"]:
        item.value = metrics.get(state["metric_attribute"])
    return item


def key_of(callback: Any) -> Any:
    """Return the ``state_key`` of a callback; of a class, its name, since a snapshot holds no classes."""
    key = callback.state_key
    return f"{key.__module__}.{key.__qualname__}" if isinstance(key, type) else key


def collect_callbacks(trainer: Any) -> dict[str, Any]:
    """Those of ``_FIELDS`` that callbacks have."""
    found = {
        key_of(callback): {name: pack(vars(callback)[name]) for name in _FIELDS if name in vars(callback)}
        for callback in trainer.callbacks
    }
    return {key: values for key, values in found.items() if values}


def restore_callbacks(trainer: Any, state: dict[str, Any]) -> None:
    """Put back what ``collect_callbacks`` found."""
    for callback in trainer.callbacks:
        values = unpack(state.get(key_of(callback), {}), trainer.strategy.root_device)
        for name in values.keys() & set(_FIELDS):
            # A file means nothing to a callback that writes to another directory now.
            if name != _LAST_FILE or _is_below(values[name], callback.dirpath):
                setattr(callback, name, values[name])


def _is_below(path: object, directory: object) -> bool:
    """True if a path or URL names something in a directory, or deeper."""
    return PurePath(str(directory)) in PurePath(str(path)).parents


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
        """Flags as text, one character each; buffers that changed."""
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
                    fill(buffer, saved)
                else:
                    owner, _, leaf = name.rpartition(".")
                    self._module.get_submodule(owner)._buffers[leaf] = saved.to(buffer.device)
