"""The counters and flags of Lightning's loops: collected at a boundary, restored by a restart."""

import time
from typing import Any

from lazysnap.shard.manifest import EXTRAS


def recount(fit_loop: Any, state: dict[str, Any], passed: int) -> None:
    """Convert the batch count of the current epoch to the new ranks. Counts of earlier epochs stay the same.

    Args:
        fit_loop: the loop whose counter is set.
        state: the restored state of the fit loop, changed in place.
        passed: the batches that the loaders skip.
    """
    progress = state["epoch_loop.batch_progress"]
    progress["current"] = dict.fromkeys(progress["current"], passed)
    fit_loop.epoch_loop.batch_progress.load_state_dict(progress)


def collect_loops(trainer: Any) -> dict[str, Any]:
    """Return the attributes that the loops' own ``state_dict`` omits."""
    fit_loop = trainer.fit_loop
    state = {
        "should_stop": trainer.should_stop,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "train_dl_reload_epoch": fit_loop._last_train_dl_reload_epoch,
        "skip_next_val": fit_loop.epoch_loop._skip_next_val,
        "since_validation_s": None,
    }
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        state["since_validation_s"] = time.monotonic() - trainer._last_val_time
    return state


def is_between_epochs(trainer: Any) -> bool:
    """True if no epoch has begun that has not ended."""
    epochs = trainer.fit_loop.epoch_progress.current
    return bool(epochs.processed == epochs.ready)


def reason_of_end(trainer: Any, state: dict[str, Any]) -> str:
    """Return the reason why nothing is left to train after a collected state; empty if something is left.

    The limits are those of the current trainer.
    """
    fit_loop = trainer.fit_loop
    step = state["global_step"]
    num_epochs = state["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]
    reached_limit = ""
    if _has_reached(fit_loop.max_steps, step):
        reached_limit = f"max_steps={fit_loop.max_steps}"
    elif _has_reached(fit_loop.max_epochs, num_epochs):
        reached_limit = f"max_epochs={fit_loop.max_epochs}"
    if reached_limit:
        return (
            f"this training had ended ({reached_limit}, at step {step}): raise that limit to continue, or begin "
            'fresh in another directory or without ckpt_path="latest"'
        )
    was_between_epochs = state[EXTRAS]["position"] is None
    if state[EXTRAS]["loops"]["should_stop"] and was_between_epochs:
        return (
            f"this training had been stopped early, after step {step} (EarlyStopping, or trainer.should_stop): to "
            'continue anyway, fit from a checkpoint instead of "latest"'
        )
    return ""


def _has_reached(limit: int | None, count: int) -> bool:
    return limit is not None and limit != -1 and count >= limit


def ended_within_epoch(trainer: Any) -> bool:
    """True if ``max_steps`` ends the fit before the last batch of the epoch."""
    fit_loop = trainer.fit_loop
    has_limit = fit_loop.max_steps != -1
    is_reached = has_limit and trainer.global_step >= fit_loop.max_steps
    return is_reached and not fit_loop.epoch_loop._num_ready_batches_reached()


def restore_loops(trainer: Any, fit_loop_state: dict[str, Any], extra: dict[str, Any]) -> None:
    """Restore counters, and drop Lightning's flags of a restart, because this fit continues exactly."""
    fit_loop = trainer.fit_loop
    reload_epoch = fit_loop._last_train_dl_reload_epoch
    fit_loop.load_state_dict(fit_loop_state)
    _drop_restart_flags(fit_loop)
    fit_loop._combined_loader_states_to_load = []
    trainer.should_stop = extra["should_stop"]
    trainer.accumulate_grad_batches = extra["accumulate_grad_batches"]
    fit_loop._last_train_dl_reload_epoch = min(reload_epoch, extra["train_dl_reload_epoch"])
    fit_loop.epoch_loop._skip_next_val = extra["skip_next_val"]
    if extra["since_validation_s"] is not None and hasattr(trainer, "_last_val_time"):
        trainer._last_val_time = time.monotonic() - extra["since_validation_s"]


def _drop_restart_flags(loop: Any) -> None:
    """Call ``on_iteration_done`` of a loop and of the loops within it."""
    loop.on_iteration_done()
    for child in list(vars(loop).values()):
        if hasattr(child, "_restarting"):
            _drop_restart_flags(child)
