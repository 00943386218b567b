"""The counters and flags of Lightning's loops: collected at a boundary, put back by a restart."""

import time
from typing import Any

from lazysnap.state.source import KEY


def recount(fit_loop: Any, state: dict[str, Any], passed: int) -> None:
    """Count the batches of the present epoch as the new ranks do; those of epochs before stay as they were.

    ``state``: the fit loop's, changed in place; ``passed``: batches that the loaders pass over.
    """
    progress = state["epoch_loop.batch_progress"]
    progress["current"] = {name: passed for name in progress["current"]}
    fit_loop.epoch_loop.batch_progress.load_state_dict(progress)


def collect_loops(trainer: Any) -> dict[str, Any]:
    """Attributes that the loops' own ``state_dict`` leaves out."""
    fit_loop = trainer.fit_loop
    epochs = fit_loop.epoch_progress.current
    state = {
        "between_epochs": epochs.processed == epochs.ready,
        "should_stop": trainer.should_stop,
        "accumulate_grad_batches": trainer.accumulate_grad_batches,
        "train_dl_reload_epoch": fit_loop._last_train_dl_reload_epoch,
        "skip_next_val": fit_loop.epoch_loop._skip_next_val,
        "since_validation_s": None,
    }
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        state["since_validation_s"] = time.monotonic() - trainer._last_val_time
    return state


def reason_of_end(trainer: Any, state: dict[str, Any]) -> str:
    """Why nothing is left to train of a collected state, as the trainer is set now; empty, if something is."""
    fit_loop = trainer.fit_loop
    epochs = state["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"]
    for name, done, limit in (
        ("max_steps", state["global_step"], fit_loop.max_steps),
        ("max_epochs", epochs, fit_loop.max_epochs),
    ):
        if limit is not None and limit != -1 and done >= limit:
            return (
                f"this training had ended ({name}={limit}, at step {state['global_step']}): raise that limit to go on, "
                'or begin fresh in another directory or without ckpt_path="latest"'
            )
    loops = state[KEY]["loops"]
    if loops["should_stop"] and loops["between_epochs"]:
        return (
            f"this training had been stopped early, after step {state['global_step']} (EarlyStopping, or "
            'trainer.should_stop): to go on all the same, fit from a checkpoint instead of "latest"'
        )
    return ""


def ended_within_epoch(trainer: Any) -> bool:
    """True if ``max_steps`` ends the fit although batches of the epoch are left."""
    fit_loop = trainer.fit_loop
    has_limit = fit_loop.max_steps != -1
    is_reached = has_limit and trainer.global_step >= fit_loop.max_steps
    return is_reached and not fit_loop.epoch_loop._num_ready_batches_reached()


def restore_loops(trainer: Any, fit_loop_state: dict[str, Any], extra: dict[str, Any]) -> None:
    """Put counters back, and drop Lightning's flags of a restart: this one goes on exactly where it was."""
    fit_loop = trainer.fit_loop
    reload_epoch = fit_loop._last_train_dl_reload_epoch
    fit_loop.load_state_dict(fit_loop_state)
    for loop in _tree(fit_loop):
        loop.on_iteration_done()
    fit_loop._combined_loader_states_to_load = []
    trainer.should_stop = extra["should_stop"]
    trainer.accumulate_grad_batches = extra["accumulate_grad_batches"]
    fit_loop._last_train_dl_reload_epoch = min(reload_epoch, extra["train_dl_reload_epoch"])
    fit_loop.epoch_loop._skip_next_val = extra["skip_next_val"]
    if extra["since_validation_s"] is not None and hasattr(trainer, "_last_val_time"):
        trainer._last_val_time = time.monotonic() - extra["since_validation_s"]


def _tree(loop: Any) -> list[Any]:
    found = [loop]
    for child in vars(loop).values():
        if hasattr(child, "_restarting"):
            found.extend(_tree(child))
    return found
