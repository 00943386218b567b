"""Going back inside a running fit past batches that are skipped: what goes on, and is not put back.

Model, optimizers, schedules that count steps, scaler, random numbers, metrics, callbacks and the counter of steps go
back. The data and all that counts it go on: loaders and their generators, batches, epochs, schedules that count epochs,
and callbacks that measure time.
"""

from typing import Any

import torch

from lazysnap.integrations.lightning.extras import collect_metrics
from lazysnap.integrations.lightning.loops import collect_loops
from lazysnap.state.source import KEY

_TIMERS = ("Timer",)
"""Callbacks whose state is a time that goes on."""
_OF_STEPS = (
    "epoch_loop.automatic_optimization.optim_progress",
    "epoch_loop.manual_optimization.optim_step_progress",
    "epoch_loop.scheduler_progress",
    "epoch_loop.state_dict",
)
"""Parts of the fit loop's state that count steps."""


def with_present_data(trainer: Any, optimizers: list[torch.optim.Optimizer], state: dict[str, Any]) -> dict[str, Any]:
    """Return ``state`` with the current data and its counters, at the end of a batch."""
    fit_loop, own, then = trainer.fit_loop, state[KEY], state["loops"]["fit_loop"]
    now = fit_loop.state_dict()
    is_same_epoch = then["epoch_progress"]["current"]["processed"] == fit_loop.epoch_progress.current.processed
    metrics = own["metrics"]
    if not is_same_epoch:
        metrics = {**collect_metrics(trainer, trainer.lightning_module), "results": []}
    # At the last batch of an epoch the schedules have begun the next one.
    is_passed = not is_same_epoch or fit_loop.epoch_loop._num_ready_batches_reached()
    schedules, by_epoch = _schedules(trainer, state["lr_schedulers"])
    return {
        **state,
        "callbacks": {key: one for key, one in state["callbacks"].items() if not str(key).startswith(_TIMERS)},
        "loops": {**state["loops"], "fit_loop": {**now, **{name: then[name] for name in _OF_STEPS}}},
        "lr_schedulers": schedules,
        "optimizer_states": [
            _with_present_settings(one, saved) if is_passed and id(one) in by_epoch else saved
            for one, saved in zip(optimizers, state["optimizer_states"], strict=True)
        ],
        KEY: {
            **own,
            "loops": collect_loops(trainer),
            "metrics": metrics,
            "streams": {**own["streams"], "owned": []},  # those that loaders own stay with the data
        },
    }


def _schedules(trainer: Any, saved: list[Any]) -> tuple[list[Any], set[int]]:
    """The states to load, and the ids of the optimizers whose schedules all count epochs."""
    states = []
    by_step: set[int] = set()
    by_epoch: set[int] = set()
    for config, state in zip(trainer.lr_scheduler_configs, saved, strict=True):
        counts_steps = config.interval == "step" or not trainer.lightning_module.automatic_optimization
        (by_step if counts_steps else by_epoch).add(id(config.scheduler.optimizer))
        states.append(state if counts_steps else config.scheduler.state_dict())
    return states, by_epoch - by_step


def _with_present_settings(optimizer: torch.optim.Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    settings = [{key: group[key] for key in group if key != "params"} for group in optimizer.param_groups]
    groups = [{**group, **own} for group, own in zip(saved["param_groups"], settings, strict=True)]
    return {**saved, "param_groups": groups}
