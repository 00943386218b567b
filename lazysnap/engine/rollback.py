"""Rollback in place: the same process and keeper continue from an earlier snapshot of this training.

If no capture is newer than that snapshot, it is only loaded. Otherwise a new run begins, and the loaded state is
captured at once: from then on ``"latest"`` means the new run, even if newer snapshots of the old run exist.
"""

import dataclasses
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lazysnap import faults
from lazysnap.console import duration
from lazysnap.engine.boundaries import Boundaries
from lazysnap.engine.messages import MessageKind
from lazysnap.engine.recorder import Recorder
from lazysnap.engine.report import places, source_of
from lazysnap.engine.run import Run
from lazysnap.errors import ConfigError, SnapshotNotFound
from lazysnap.ranks.checks import together
from lazysnap.restore.restart import fetch_back, reseed
from lazysnap.restore.snapshot import Snapshot
from lazysnap.shard.names import id_after, new_id
from lazysnap.state.sharding import local_of
from lazysnap.state.source import StateSource
from lazysnap.state.walk import walk


@dataclass(frozen=True)
class Rollback:
    """The result of ``SnapshotEngine.rollback``."""

    step: int
    """The restored step. The next boundary is that of the step after it."""
    from_step: int
    """The step in progress at the call: the one after the last boundary."""
    level: str
    """``memory``, ``parity`` (in the memory of other nodes) or the URL of the level from which it was read."""
    seconds: float
    """Duration of the call."""


def roll_back(run: Run, boundaries: Boundaries, steps: int, reason: str) -> Rollback:
    """See ``SnapshotEngine.rollback``. Collective. Blocks."""
    started = time.perf_counter()
    recorder = run.recorder
    world = run.restart.world
    _await_newest(run, boundaries)
    from_step = _step_in_progress(recorder)
    snapshot = _find(run, steps)
    branch = _branch(run, snapshot)
    faults.point("engine.rollback.found")
    if branch is not None:
        kept = snapshot.run_id, snapshot.step
        run.drop("engine.rollback.drop", lambda entry: (entry.run_id, entry.step) > kept)
    faults.point("engine.rollback.load")
    together(world, "rolling back", partial(_load, run.restart.source, snapshot))
    faults.point("engine.rollback.loaded")
    if snapshot.world_size != world.size:
        reseed(snapshot, world)
    if branch is None:
        recorder.go_back(snapshot.step)
    else:
        recorder.memory.follow_keeper()  # steps that became durable by now count for the old run
        run.continue_from(snapshot, branch)
        run.begin(snapshot.step, source_of(snapshot))
        _capture_branch(run, boundaries, snapshot.step)
    done = Rollback(snapshot.step, from_step, snapshot.level, time.perf_counter() - started)
    reason_text = ""
    if reason:
        reason_text = f" ({reason})"
    recorder.messages.tell(
        MessageKind.ROLLED_BACK,
        reason=reason_text,
        took=duration(done.seconds),
        from_step=from_step,
        step=done.step,
        level=source_of(snapshot),
    )
    return done


def check_steps(steps: object) -> None:
    """Raises: ConfigError, if training cannot go back by ``steps``."""
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ConfigError(f"rollback: steps must be an integer of at least 1, got {steps!r}")


def _await_newest(run: Run, boundaries: Boundaries) -> None:
    """Block until the newest capture is whole: a device may still be copying it."""
    boundaries.gate()
    newest_step = run.recorder.last_step
    if newest_step is not None:
        boundaries.wait_captured(newest_step, run.restart.config.io_timeout_s)


def _step_in_progress(recorder: Recorder) -> int:
    return (recorder.seen_step or 0) + 1


def _find(run: Run, steps: int) -> Snapshot:
    """Return the newest snapshot at least ``steps`` older than the step in progress: in memory, else on storage.

    Skips snapshots whose trained weights or optimizer state are not finite. Collective. Blocks.
    Raises: ConfigError; SnapshotNotFound; as ``SnapshotEngine._fetch``.
    """
    check_steps(steps)
    from_step = _step_in_progress(run.recorder)
    present = run.meta.run_id

    def is_wanted(run_id: str, step: int) -> bool:
        return step <= from_step - steps and run.lineage.has(run_id, step, present=present)

    def flaw(snapshot: Snapshot) -> str:
        name = first_not_finite(run.restart.source, snapshot.state)
        if not name:
            return ""
        return f"{name} holds NaN or infinity"

    config = run.restart.config
    # Read storage only if memory has none: listing it takes longest.
    memory_alone = dataclasses.replace(config, levels=())
    snapshot = fetch_back(dataclasses.replace(run.restart, config=memory_alone), is_wanted, flaw)
    if snapshot is None and config.levels:
        snapshot = fetch_back(run.restart, is_wanted, flaw)
    if snapshot is not None:
        return snapshot
    where = places(level.url for level in config.levels)
    age = f"{steps} step{'s' * (steps != 1)}"
    raise SnapshotNotFound(
        f"rollback: step {from_step} is in progress, and this training has no usable snapshot that is {age} older, "
        f"{where} (every_n_steps is {config.every_n_steps}). There is none "
        "right after a fresh start, or if memory was lost before storage had one. Nothing was changed; a restart "
        'with "latest" takes what storage has'
    )


def _branch(run: Run, snapshot: Snapshot) -> str | None:
    """Return the id of the new run at ``snapshot``, the same on all ranks; ``None`` if no rank has a newer capture.
    Collective.
    """
    newest_step = max(run.recorder.last_step or 0, run.recorder.check.step or 0)
    is_newest = snapshot.run_id == run.meta.run_id and newest_step <= snapshot.step
    answers = run.restart.world.exchange("rolling back", [is_newest, new_id()])
    if all(is_newest_there for is_newest_there, _ in answers):
        return None
    _, run_id = answers[0]
    return id_after(run_id, run.meta.run_id)


def _load(source: StateSource, snapshot: Snapshot) -> None:
    """Restore the state in place, except the data, and clear the gradients. Raises: errors of its objects."""
    source.load(snapshot.state, data=False)
    for optimizer in source.optimizers():
        optimizer.zero_grad()


def _capture_branch(run: Run, boundaries: Boundaries, step: int) -> None:
    """Capture the loaded state as the newest snapshot. Collective. Blocks: until it is whole in memory."""
    run.recorder.stores_next = True
    faults.point("engine.rollback.capture")
    with boundaries.lock:
        began = boundaries.capture(step, time.perf_counter())
    is_held = began and boundaries.wait_captured(step, run.restart.config.io_timeout_s)
    faults.point("engine.rollback.captured")
    if not all(run.restart.world.exchange("capturing after a rollback", is_held)):
        run.recorder.messages.tell(MessageKind.BRANCH_NOT_CAPTURED, step=step)


def first_not_finite(source: StateSource, state: dict[str, Any]) -> str:
    """Return the name of a trained weight with NaN or infinity, or of optimizer state with NaN; empty if there is none.

    A finite loss can have infinite gradients: then the snapshot after that step is bad, too.
    """
    trained = set()
    paths = []
    for path, parameters in source.optimizer_parameters().items():
        paths.append(f"{path}.state.")
        for parameter in parameters:
            trained.add(local_of(parameter).data_ptr())
    weights = {name for name, live in source.expected().items() if local_of(live).data_ptr() in trained}
    paths_of_states = tuple(paths)
    walked = walk(state)
    for name, tensor in zip(walked.names, walked.tensors, strict=True):
        is_weight = name in weights
        is_trained = is_weight or name.startswith(paths_of_states)
        if is_trained and _is_not_finite(local_of(tensor), counts_infinity=is_weight):
            return name
    return ""


def _is_not_finite(tensor: torch.Tensor, *, counts_infinity: bool) -> bool:
    has_numbers = tensor.is_floating_point() or tensor.is_complex()
    if not has_numbers or tensor.itemsize == 1:
        return False
    # A sum takes no memory. Each element is checked only if the sum is not finite.
    total = tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32))
    if torch.isfinite(total):
        return False
    if counts_infinity:
        return not bool(torch.isfinite(tensor).all())
    return bool(torch.isnan(tensor).any())
