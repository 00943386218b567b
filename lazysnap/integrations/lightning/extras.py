"""What was logged, and what callbacks hold beside their ``state_dict``: Lightning's checkpoints leave both out."""

from dataclasses import fields
from typing import Any

import torch
from torchmetrics import Metric

from lazysnap.integrations.lightning.framework import neighbour
from lazysnap.state.extras import collect_metric, restore_metric
from lazysnap.state.scalars import pack, unpack

_CONNECTOR = ("_progress_bar_metrics", "_logged_metrics", "_callback_metrics", "_current_fx", "_first_loop_iter")
_LIVE = _CONNECTOR[-2:]
"""What the connector knows of the hook that runs now."""
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


def collect_metrics(trainer: Any, module: torch.nn.Module) -> dict[str, Any]:
    """The metrics of training as they are now; nothing is computed, reset or synchronised."""
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
