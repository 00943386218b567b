"""State that Lightning's checkpoints omit: logged values, states of metrics, further fields of callbacks, flags and
non-persistent buffers of modules.
"""

from dataclasses import fields
from pathlib import PurePath
from typing import Any

import torch

from lazysnap.capture.plan import version_of
from lazysnap.integrations.lightning.framework import neighbour
from lazysnap.state.metrics import collect_metric, metrics_in, restore_metric
from lazysnap.state.modules import fill
from lazysnap.state.scalars import pack, unpack

_CONNECTOR = ("_progress_bar_metrics", "_logged_metrics", "_callback_metrics", "_current_fx", "_first_loop_iter")
_LIVE = _CONNECTOR[-2:]
"""The connector's record of the current hook."""
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
    results = []
    for key, result in trainer.fit_loop.epoch_loop._results.items():
        results.append([key, _collect_result(result)])
    return {
        "results": results,
        "connector": {name: pack(getattr(connector, name)) for name in _CONNECTOR},
        "modules": {name: collect_metric(metric) for name, metric in metrics_in(module).items()},
    }


def restore_metrics(trainer: Any, module: torch.nn.Module, state: dict[str, Any], *, in_hook: bool = False) -> None:
    """Restore the result of ``collect_metrics``.

    ``in_hook``: keep the connector's record of the current hook.
    """
    device = trainer.strategy.root_device
    connector = trainer._logger_connector
    for name, value in state["connector"].items():
        if not in_hook or name not in _LIVE:
            setattr(connector, name, unpack(value, device))
    metrics = metrics_in(module)
    for name in metrics.keys() & state["modules"].keys():
        restore_metric(metrics[name], state["modules"][name])
    results = trainer.fit_loop.epoch_loop._results
    results.clear()
    for key, result in state["results"]:
        results[key] = _make_result(trainer, results, result, metrics)


def _collect_result(result: Any) -> dict[str, Any]:
    meta = result.meta
    state = {}
    for field in fields(meta):
        if field.name != "_sync":
            state[field.name] = getattr(meta, field.name)
    # The reductions are functions and bound methods of the strategy: they are built again, never stored.
    state["reduce_fx"] = meta.reduce_fx.__name__
    state["sync_dist"] = meta.sync.should
    state["rank_zero_only"] = meta.sync.rank_zero_only
    state["is_tensor"] = result.is_tensor
    state["has_reset"] = result.has_reset
    state["metric"] = collect_metric(result)
    return state


def _make_result(trainer: Any, results: Any, state: dict[str, Any], metrics: dict[str, Any]) -> Any:
    kind = neighbour(results, "_Metadata")
    meta = kind(**{field.name: state[field.name] for field in fields(kind) if field.name in state})
    meta.sync = neighbour(results, "_Sync")(
        _should=state["sync_dist"], fn=trainer.strategy.reduce, rank_zero_only=state["rank_zero_only"]
    )
    result = neighbour(results, "_ResultMetric")(meta, state["is_tensor"])
    result.to(trainer.strategy.root_device)
    restore_metric(result, state["metric"])
    result.has_reset = state["has_reset"]
    if not state["is_tensor"]:
        result.value = metrics.get(state["metric_attribute"])
    return result


def key_of(callback: Any) -> Any:
    """Return the ``state_key`` of a callback; for a class its name, because a snapshot contains no classes."""
    key = callback.state_key
    if isinstance(key, type):
        return f"{key.__module__}.{key.__qualname__}"
    return key


def collect_callbacks(trainer: Any) -> dict[str, Any]:
    """Return the values of ``_FIELDS`` that callbacks have."""
    collected = {}
    for callback in trainer.callbacks:
        attributes = vars(callback)
        collected[key_of(callback)] = {name: pack(attributes[name]) for name in _FIELDS if name in attributes}
    return {key: values for key, values in collected.items() if values}


def restore_callbacks(trainer: Any, state: dict[str, Any]) -> None:
    """Restore the result of ``collect_callbacks``."""
    for callback in trainer.callbacks:
        values = unpack(state.get(key_of(callback), {}), trainer.strategy.root_device)
        for name in values.keys() & set(_FIELDS):
            # A callback that writes to another directory now has no such file.
            if name != _LAST_FILE or _is_below(values[name], callback.dirpath):
                setattr(callback, name, values[name])


def _is_below(path: object, directory: object) -> bool:
    """True if a path or URL names something in a directory, or deeper."""
    return PurePath(str(directory)) in PurePath(str(path)).parents


class ModuleExtras:
    """Flags of a module, and buffers that its ``state_dict`` omits, if they changed since this object was made."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._module = module
        self._versions_at_start = {name: _version_of(buffer) for name, buffer in self._hidden_buffers().items()}

    def _hidden_buffers(self) -> dict[str, torch.Tensor]:
        """Return the non-persistent buffers by name, sorted."""
        buffers = {}
        for prefix, owner in self._module.named_modules():
            for leaf in owner._non_persistent_buffers_set:
                buffer = owner._buffers.get(leaf)
                if isinstance(buffer, torch.Tensor):
                    buffers[f"{prefix}.{leaf}".removeprefix(".")] = buffer
        return dict(sorted(buffers.items()))

    def collect(self) -> dict[str, Any]:
        """Return flags as text, one character each, and the buffers that changed."""
        changed = {}
        for name, buffer in self._hidden_buffers().items():
            # torch counts no writes to a buffer that was made in inference mode.
            if buffer.is_inference() or self._versions_at_start.get(name) != _version_of(buffer):
                changed[name] = buffer
        return {
            "training": "".join("01"[module.training] for module in self._module.modules()),
            "requires_grad": "".join("01"[parameter.requires_grad] for parameter in self._module.parameters()),
            "buffers": changed,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the result of ``collect``, for parts that the module still has."""
        modules = list(self._module.modules())
        parameters = list(self._module.parameters())
        if len(modules) == len(state["training"]):
            for module, flag in zip(modules, state["training"], strict=True):
                module.training = flag == "1"
        if len(parameters) == len(state["requires_grad"]):
            for parameter, flag in zip(parameters, state["requires_grad"], strict=True):
                parameter.requires_grad_(flag == "1")
        with torch.no_grad():
            for name, buffer in self._hidden_buffers().items():
                saved = state["buffers"].get(name)
                if saved is None:
                    continue
                if saved.shape == buffer.shape and saved.dtype == buffer.dtype:
                    fill(buffer, saved)
                else:
                    owner, _, leaf = name.rpartition(".")
                    self._module.get_submodule(owner)._buffers[leaf] = saved.to(buffer.device)


def _version_of(buffer: torch.Tensor) -> tuple[int, int]:
    """Return a value that changes when the buffer is replaced, or written to and not made in inference mode."""
    return buffer.data_ptr(), version_of(buffer)
