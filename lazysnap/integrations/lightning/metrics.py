"""Everything logged: running results of an epoch, what callbacks and progress bars read, torchmetrics' states."""

from typing import Any

import torch
from torchmetrics import Metric

from lazysnap.integrations.lightning.framework import neighbour
from lazysnap.state.scalars import pack, unpack

_META = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "dataloader_idx",
    "metric_attribute",
)
_CONNECTOR = ("_progress_bar_metrics", "_logged_metrics", "_callback_metrics", "_current_fx", "_first_loop_iter")
_LIVE = _CONNECTOR[-2:]
"""What the connector knows of the hook that runs now."""


def collect_metrics(trainer: Any, module: torch.nn.Module) -> dict[str, Any]:
    """The metrics of training as they are now; nothing is computed, reset or synchronised."""
    connector = trainer._logger_connector
    return {
        "results": [[key, _collect_result(item)] for key, item in trainer.fit_loop.epoch_loop._results.items()],
        "connector": {name: pack(getattr(connector, name)) for name in _CONNECTOR},
        "modules": {name: _collect_metric(item) for name, item in module.named_modules() if isinstance(item, Metric)},
    }


def restore_metrics(trainer: Any, module: torch.nn.Module, state: dict[str, Any], *, in_hook: bool = False) -> None:
    """Put back what ``collect_metrics`` found; ``in_hook``: but what the connector knows of the hook that runs now."""
    device = trainer.strategy.root_device
    connector = trainer._logger_connector
    for name, value in state["connector"].items():
        if not in_hook or name not in _LIVE:
            setattr(connector, name, unpack(value, device))
    metrics = {name: item for name, item in module.named_modules() if isinstance(item, Metric)}
    for name, item in state["modules"].items():
        if name in metrics:
            _restore_metric(metrics[name], item)
    results = trainer.fit_loop.epoch_loop._results
    results.clear()
    for key, item in state["results"]:
        results[key] = _make_result(trainer, results, item, metrics)


def _collect_metric(metric: Metric) -> dict[str, Any]:
    return {
        "states": {name: pack(getattr(metric, name)) for name in metric._defaults},
        "update_count": metric._update_count,
        "computed": pack(metric._computed),
        "forward_cache": pack(metric._forward_cache),
    }


def _restore_metric(metric: Metric, state: dict[str, Any]) -> None:
    for name, value in state["states"].items():
        setattr(metric, name, unpack(value, metric.device))
    metric._update_count = state["update_count"]
    metric._computed = unpack(state["computed"], metric.device)
    metric._forward_cache = unpack(state["forward_cache"], metric.device)


def _collect_result(item: Any) -> dict[str, Any]:
    meta = item.meta
    state = {name: getattr(meta, name) for name in _META}
    state["reduce_fx"] = meta.reduce_fx.__name__
    state["sync_dist"] = meta.sync.should
    state["rank_zero_only"] = meta.sync.rank_zero_only
    state["is_tensor"] = item.is_tensor
    state["has_reset"] = item.has_reset
    state["metric"] = _collect_metric(item)
    return state


def _make_result(trainer: Any, results: Any, state: dict[str, Any], metrics: dict[str, Metric]) -> Any:
    # The reduction is a bound method of the strategy: it is built anew, never stored.
    reduce_fx = state["reduce_fx"]
    meta = neighbour(results, "_Metadata")(**{name: state[name] for name in _META}, reduce_fx=getattr(torch, reduce_fx))
    meta.sync = neighbour(results, "_Sync")(
        _should=state["sync_dist"],
        fn=trainer.strategy.reduce,
        rank_zero_only=state["rank_zero_only"],
    )
    item = neighbour(results, "_ResultMetric")(meta, state["is_tensor"])
    item.to(trainer.strategy.root_device)
    _restore_metric(item, state["metric"])
    item.has_reset = state["has_reset"]
    if not state["is_tensor"]:
        item.value = metrics.get(state["metric_attribute"])
    return item
