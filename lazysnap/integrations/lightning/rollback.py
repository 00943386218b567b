"""Going back inside a running fit: what returns to the step of a snapshot, and what goes on.

Where batches are repeated everything goes back, as in a restart. Where they are skipped, model, optimizers, schedules
that count steps, scaler, random numbers, metrics, callbacks and the counter of steps go back. The data and all that
counts it go on: loaders and their generators, batches, epochs, schedules that count epochs, and callbacks that measure
time.
"""

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from lazysnap.engine.losses import LossWatch
from lazysnap.errors import ConfigError
from lazysnap.integrations.lightning.extras import restore_callbacks, restore_metrics
from lazysnap.integrations.lightning.framework import overrides
from lazysnap.integrations.lightning.loaders import LoaderPositions
from lazysnap.state.modules import fitted
from lazysnap.state.optimizers import owned, put_back
from lazysnap.state.scalars import unpack
from lazysnap.state.source import KEY

_TIMERS = ("Timer",)
"""Callbacks whose state is a time that goes on."""


def judge(watch: LossWatch, trainer: Any, outputs: Any) -> bool:
    """Judge the output of a batch; a bad one ends its accumulation in a rollback. Whether training went back.

    Collective. Raises: as ``LossWatch.go_back``.
    """
    watch.is_bad(outputs.get("loss") if isinstance(outputs, dict) else outputs)
    # The whole accumulation is dropped: its other batches belong to the same step.
    if not watch.is_spoilt or trainer.fit_loop.epoch_loop._should_accumulate():
        return False
    watch.go_back()
    # The loop counts the batch that just ended once more, when this returns.
    trainer.fit_loop.epoch_loop._batches_that_stepped -= 1
    return True


def check_repeatable(trainer: Any, loaders: LoaderPositions) -> None:
    """Raises: ConfigError, for data that a running fit cannot give again."""
    if trainer.reload_dataloaders_every_n_epochs:
        raise ConfigError(
            'LazySnapshotCallback: data="repeat" cannot go back to data loaders that '
            'Trainer(reload_dataloaders_every_n_epochs=...) has replaced: use data="skip"'
        )
    loaders.check_repeatable()


def put_back_fit(trainer: Any, optimizers: list[torch.optim.Optimizer], state: dict[str, Any], *, data: bool) -> None:
    """Put a collected state back, at the end of a batch, but what ``LightningState`` holds of its own. Not collective.

    ``data``: the loops go back, too, by ``LightningState``. Calls the ``on_load_checkpoint`` hooks of the program.
    Raises: what they and ``load_state_dict`` raise.
    """
    connector, module = trainer._checkpoint_connector, trainer.lightning_module
    checkpoint = {name: value for name, value in state.items() if name != KEY}
    callbacks = unpack(checkpoint["callbacks"])
    kept = () if data else _TIMERS
    checkpoint["callbacks"] = {key: value for key, value in callbacks.items() if not key.startswith(kept)}
    if any(overrides(one, "on_load_checkpoint") for one in (module, *trainer.callbacks)):
        checkpoint = tree_map_only(torch.Tensor, owned, checkpoint)  # the program may keep what it sees
    connector._loaded_checkpoint = checkpoint
    try:
        module.on_load_checkpoint(checkpoint)
        module.load_state_dict(fitted(module, checkpoint["state_dict"]), strict=module.strict_loading)
        connector.restore_callbacks()
        connector.restore_precision_plugin_state()
    finally:
        connector._loaded_checkpoint = {}
    if not data:
        _put_back_some(trainer, optimizers, checkpoint, state[KEY])
        return
    for config, saved in zip(trainer.lr_scheduler_configs, checkpoint["lr_schedulers"], strict=True):
        config.scheduler.load_state_dict(saved)
    for optimizer, saved in zip(optimizers, checkpoint["optimizer_states"], strict=True):
        put_back(optimizer, saved)


def _put_back_some(
    trainer: Any, optimizers: list[torch.optim.Optimizer], checkpoint: dict[str, Any], own: dict[str, Any]
) -> None:
    """Optimizers, schedules, counters and metrics, where the data goes on."""
    fit_loop, module, loops = trainer.fit_loop, trainer.lightning_module, checkpoint["loops"]["fit_loop"]
    epoch = loops["epoch_progress"]["current"]["processed"]
    is_same_epoch = epoch == fit_loop.epoch_progress.current.processed
    by_epoch = _put_back_schedules(trainer, checkpoint["lr_schedulers"])
    # At the last batch of an epoch the schedules have begun the next one.
    is_passed = not is_same_epoch or fit_loop.epoch_loop._num_ready_batches_reached()
    for optimizer, saved in zip(optimizers, checkpoint["optimizer_states"], strict=True):
        is_kept = is_passed and id(optimizer) in by_epoch
        settings = [{key: group[key] for key in group if key != "params"} for group in optimizer.param_groups]
        put_back(optimizer, saved)
        for group, before in zip(optimizer.param_groups, settings, strict=True):
            group.update(before if is_kept else {})
    _put_back_counters(fit_loop.epoch_loop, loops)
    if is_same_epoch:
        restore_metrics(trainer, module, own["metrics"], in_hook=True)
    else:
        fit_loop.epoch_loop._results.clear()
    restore_callbacks(trainer, own["callbacks"])


def _put_back_schedules(trainer: Any, saved: list[Any]) -> set[int]:
    """Those that count steps. The ids of the optimizers whose schedules all count epochs."""
    by_step: set[int] = set()
    by_epoch: set[int] = set()
    for config, state in zip(trainer.lr_scheduler_configs, saved, strict=True):
        counts_steps = config.interval == "step" or not trainer.lightning_module.automatic_optimization
        (by_step if counts_steps else by_epoch).add(id(config.scheduler.optimizer))
        if counts_steps:
            config.scheduler.load_state_dict(state)
    return by_epoch - by_step


def _put_back_counters(epoch_loop: Any, saved: dict[str, Any]) -> None:
    for path in ("automatic_optimization.optim_progress", "manual_optimization.optim_step_progress"):
        loop, name = path.split(".")
        getattr(getattr(epoch_loop, loop), name).load_state_dict(saved[f"epoch_loop.{path}"])
    epoch_loop.scheduler_progress.load_state_dict(saved["epoch_loop.scheduler_progress"])
    epoch_loop._batches_that_stepped = saved["epoch_loop.state_dict"]["_batches_that_stepped"]
