"""Rollback in a running fit: restores everything except the data."""

from typing import Any

import torch

from lazysnap.integrations.lightning.extras import collect_metrics
from lazysnap.integrations.lightning.loops import collect_loops
from lazysnap.shard.manifest import EXTRAS

_TIMERS = ("Timer",)
"""Callbacks whose state is a time, which is not restored."""
_OF_STEPS = (
    "epoch_loop.automatic_optimization.optim_progress",
    "epoch_loop.manual_optimization.optim_step_progress",
    "epoch_loop.scheduler_progress",
    "epoch_loop.state_dict",
)
"""Parts of the fit loop's state that count steps."""


def with_present_data(trainer: Any, optimizers: list[torch.optim.Optimizer], state: dict[str, Any]) -> dict[str, Any]:
    """Return ``state`` with the current data and its counters, at the end of a batch."""
    fit_loop = trainer.fit_loop
    saved_loop = state["loops"]["fit_loop"]
    loop = dict(fit_loop.state_dict())
    for name in _OF_STEPS:
        loop[name] = saved_loop[name]
    callbacks = dict(state["callbacks"])
    for key in state["callbacks"]:
        if str(key).startswith(_TIMERS):
            del callbacks[key]
    extra = dict(state[EXTRAS])
    is_same_epoch = saved_loop["epoch_progress"]["current"]["processed"] == fit_loop.epoch_progress.current.processed
    if not is_same_epoch:
        extra["metrics"] = {**collect_metrics(trainer, trainer.lightning_module), "results": []}
    extra["loops"] = collect_loops(trainer)
    extra["streams"] = {**extra["streams"], "owned": []}  # the generators of loaders stay with the data
    schedules, by_epoch = _schedules(trainer, state["lr_schedulers"])
    # At the last batch of an epoch the schedules have begun the next one.
    has_next_epoch_begun = not is_same_epoch or fit_loop.epoch_loop._num_ready_batches_reached()
    optimizer_states = []
    for optimizer, saved in zip(optimizers, state["optimizer_states"], strict=True):
        if has_next_epoch_begun and id(optimizer) in by_epoch:
            optimizer_states.append(_with_present_settings(optimizer, saved))
        else:
            optimizer_states.append(saved)
    return {
        **state,
        "callbacks": callbacks,
        "loops": {**state["loops"], "fit_loop": loop},
        "lr_schedulers": schedules,
        "optimizer_states": optimizer_states,
        EXTRAS: extra,
    }


def _schedules(trainer: Any, saved: list[Any]) -> tuple[list[Any], set[int]]:
    """Return the states to load, and the ids of the optimizers whose schedules all count epochs."""
    states = []
    by_step: set[int] = set()
    by_epoch: set[int] = set()
    for config, saved_state in zip(trainer.lr_scheduler_configs, saved, strict=True):
        optimizer_id = id(config.scheduler.optimizer)
        if config.interval == "step" or not trainer.lightning_module.automatic_optimization:
            by_step.add(optimizer_id)
            states.append(saved_state)
        else:
            by_epoch.add(optimizer_id)
            states.append(config.scheduler.state_dict())
    return states, by_epoch - by_step


def _with_present_settings(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """Return a saved state with the current settings of the optimizer, such as its learning rates."""
    groups = []
    for saved_group, group in zip(saved["param_groups"], optimizer.param_groups, strict=True):
        groups.append({**saved_group, **group, "params": saved_group["params"]})
    return {**saved, "param_groups": groups}
