"""The accumulated state of metrics of torchmetrics, which their ``state_dict`` omits by default."""

import sys
from collections.abc import Mapping
from typing import Any

import torch

from lazysnap.errors import StateError
from lazysnap.state.scalars import pack, unpack

METRICS = "metrics"
"""The key below ``EXTRAS`` for the metrics of each module, by the module's name in the state."""


def metrics_in(module: torch.nn.Module) -> dict[str, Any]:
    """Return the metrics in a module, by name, without importing torchmetrics."""
    torchmetrics = sys.modules.get("torchmetrics")
    metric_class = getattr(torchmetrics, "Metric", None)  # absent while the package is being imported
    if metric_class is None:
        return {}
    return {name: part for name, part in module.named_modules() if isinstance(part, metric_class)}


def collect_metric(metric: Any) -> dict[str, Any]:
    """Return the accumulated state of a ``torchmetrics.Metric``; nothing is computed, reset or synchronised."""
    return {
        "states": {name: pack(getattr(metric, name)) for name in metric._defaults},
        "update_count": metric._update_count,
        "computed": pack(metric._computed),
        "forward_cache": pack(metric._forward_cache),
    }


def restore_metric(metric: Any, state: dict[str, Any]) -> None:
    """Restore the result of ``collect_metric``."""
    for name, value in state["states"].items():
        setattr(metric, name, unpack(value, metric.device))
    metric._update_count = state["update_count"]
    metric._computed = unpack(state["computed"], metric.device)
    metric._forward_cache = unpack(state["forward_cache"], metric.device)


def collect_metrics(modules: Mapping[str, torch.nn.Module]) -> dict[str, Any]:
    """Return the state of all metrics in ``modules``, by module; modules without a metric are skipped."""
    state: dict[str, Any] = {}
    for module_name, module in modules.items():
        for name, metric in metrics_in(module).items():
            state.setdefault(module_name, {})[name] = collect_metric(metric)
    return state


def check_metrics(modules: Mapping[str, torch.nn.Module], state: Mapping[str, Any]) -> None:
    """Check the metrics before anything is loaded.

    Raises: StateError, if a metric is not in the snapshot, or has other states in it.
    """
    for module_name, module in modules.items():
        saved = state.get(module_name, {})
        for name, metric in metrics_in(module).items():
            path = module_name
            if name:
                path += f".{name}"
            if name not in saved:
                raise StateError(
                    f"{path}: the snapshot has no state of this metric ({type(metric).__qualname__}). Nothing was "
                    "loaded. Give the state the metrics that it had when the snapshot was taken"
                )
            expected = sorted(metric._defaults)
            present = sorted(saved[name]["states"])
            if expected != present:
                raise StateError(
                    f"{path}: this {type(metric).__qualname__} has the states {expected}, in the snapshot it has "
                    f"{present}. Nothing was loaded. Make the metric with the arguments of the earlier start"
                )


def restore_metrics(modules: Mapping[str, torch.nn.Module], state: Mapping[str, Any]) -> None:
    """Restore the result of ``collect_metrics``. The metrics keep the tensors of ``state``.

    Metrics that shared a tensor (the groups of a ``MetricCollection``) share it again.
    """
    for module_name, module in modules.items():
        for name, metric in metrics_in(module).items():
            restore_metric(metric, state[module_name][name])
