"""Going back in place: the same process and the same keeper go on from an earlier snapshot of this training.

Where no capture is newer than that snapshot, loading it is all. Otherwise a new run begins there, and the loaded state
is captured at once: from then on ``"latest"`` means the new run, wherever newer snapshots of the old one are.
"""

import dataclasses
import time
from dataclasses import dataclass
from typing import Any

import torch

from lazysnap import faults
from lazysnap.console import duration
from lazysnap.engine.boundaries import Boundaries
from lazysnap.engine.messages import Event
from lazysnap.engine.parts import Parts
from lazysnap.engine.report import places
from lazysnap.engine.run import Run
from lazysnap.errors import ConfigError, SnapshotNotFound
from lazysnap.ranks.checks import together
from lazysnap.resolver import RestartPlan
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
    """Training stands here again; the next boundary is that of the step after it."""
    from_step: int
    """The step that was in progress: the one after the last boundary."""
    level: str
    """``memory`` or the URL of the level it was read from."""
    seconds: float
    """Duration of the call."""


class Rollbacks:
    """Goes back in place. Used on the training thread."""

    def __init__(self, parts: Parts, run: Run, boundaries: Boundaries) -> None:
        self._parts = parts
        self._run = run
        self._boundaries = boundaries
        self._recorder = parts.recorder

    def go_back(self, steps: int, reason: str) -> Rollback:
        """See ``SnapshotEngine.rollback``. Collective. Blocks."""
        parts, recorder, started = self._parts, self._recorder, time.perf_counter()
        self._boundaries.gate()
        if recorder.last_step is not None:  # a device may still be copying
            self._boundaries.wait_captured(recorder.last_step, parts.config.io_timeout_s)
        from_step, snapshot = self._from_step, self._find(steps)
        branch = self._branch(snapshot)
        faults.point("engine.rollback.found")
        if branch is not None:
            kept = snapshot.run_id, snapshot.step
            self._run.drop("engine.rollback.drop", lambda item: (item.run_id, item.step) > kept)
        faults.point("engine.rollback.load")
        together(parts.world, "rolling back", lambda: self._load(snapshot))
        faults.point("engine.rollback.loaded")
        if snapshot.world_size != parts.world.size:
            reseed(snapshot, parts.world)
        if branch is None:
            recorder.go_back(snapshot.step)
        else:
            recorder.drain_events()  # what became durable by now is counted as of the run that is left
            self._run.go_on(snapshot, branch)
            self._run.begin()
            self._capture_branch(snapshot.step)
        done = Rollback(snapshot.step, from_step, snapshot.level, time.perf_counter() - started)
        why, took = f" ({reason})" if reason else "", duration(done.seconds)
        where = {"from_step": from_step, "step": done.step, "level": done.level}
        parts.messages.tell(Event.ROLLED_BACK, reason=why, took=took, **where)
        return done

    def _capture_branch(self, step: int) -> None:
        """Make the state that was loaded the newest snapshot. Collective. Blocks: until it is whole in memory."""
        self._recorder.stores_next = True
        faults.point("engine.rollback.capture")
        with self._boundaries.lock:
            began = self._boundaries.capture(step, time.perf_counter())
        is_held = began and self._boundaries.wait_captured(step, self._parts.config.io_timeout_s)
        faults.point("engine.rollback.captured")
        if not all(self._parts.world.exchange("capturing after a rollback", is_held)):
            self._parts.messages.tell(Event.NOT_CAPTURED_BACK, step=step)

    @property
    def _from_step(self) -> int:
        """The step in progress."""
        return (self._recorder.seen_step or 0) + 1

    def _find(self, steps: int) -> Snapshot:
        """Return the newest snapshot at least ``steps`` older than the step in progress: in memory, else on storage.

        One whose trained weights or optimizer state are not finite is passed over. Collective. Blocks.
        Raises: ConfigError; SnapshotNotFound; as ``SnapshotEngine._fetch``.
        """
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ConfigError(f"rollback: steps must be an integer of at least 1, got {steps!r}")
        limit, present, lineage = self._from_step - steps, self._recorder.meta.run_id, self._run.lineage

        def is_wanted(plan: RestartPlan) -> bool:
            return plan.step <= limit and lineage.has(plan, present)

        def flaw(snapshot: Snapshot) -> str:
            name = first_not_finite(self._parts.source, snapshot.state)
            return f"{name} holds NaN or infinity" if name else ""

        levels = self._parts.config.levels
        # Storage only where memory has none: listing it takes longer than the rest.
        for has_storage in (False, True) if levels else (False,):
            restart = dataclasses.replace(self._run.restart, has_storage=has_storage)
            snapshot = fetch_back(restart, is_wanted, flaw)
            if snapshot is not None:
                return snapshot
        where, age = places(level.url for level in levels), f"{steps} step{'s' * (steps != 1)}"
        raise SnapshotNotFound(
            f"rollback: this training has no usable snapshot that is {age} older than step {self._from_step}, "
            f"which is in progress, {where} (every_n_steps is {self._parts.config.every_n_steps}). There is none "
            "right after a fresh start, or if memory was lost before storage had one. Nothing was changed; a restart "
            'with "latest" takes what storage has'
        )

    def _branch(self, snapshot: Snapshot) -> str | None:
        """Return the id of the run that has to begin at ``snapshot``, the same on all ranks; ``None``, if no rank
        captured anything newer. Collective.
        """
        meta, last = self._recorder.meta, self._recorder.last_step
        is_newest = snapshot.run_id == meta.run_id and (last is None or last <= snapshot.step)
        told = self._parts.world.exchange("rolling back", [is_newest, new_id()])
        if all(newest for newest, _ in told):
            return None
        _, run_id = told[0]
        return id_after(run_id, meta.run_id)

    def _load(self, snapshot: Snapshot) -> None:
        """Put the state back in place but for the data, and clear the gradients. Raises: what its objects raise."""
        self._parts.source.load(snapshot.state, data=False)
        for optimizer in self._parts.source.optimizers():
            optimizer.zero_grad()


def first_not_finite(source: StateSource, state: dict[str, Any]) -> str:
    """The name of a trained weight with a NaN or an infinity, or of optimizer state with a NaN; empty: there is none.

    A finite loss can still give gradients that are not: then the snapshot after that step is bad, too.
    """
    lists = source.optimizer_parameters()
    trained = {local_of(parameter).data_ptr() for parameters in lists.values() for parameter in parameters}
    weights = {name for name, live in source.expected().items() if local_of(live).data_ptr() in trained}
    paths = tuple(f"{path}.state." for path in lists)
    walked = walk(state)
    for name, tensor in zip(walked.names, walked.tensors, strict=True):
        is_weight = name in weights
        if (is_weight or name.startswith(paths)) and _is_not_finite(local_of(tensor), counts_infinity=is_weight):
            return name
    return ""


def _is_not_finite(tensor: torch.Tensor, *, counts_infinity: bool) -> bool:
    if not tensor.is_floating_point() or tensor.itemsize == 1:
        return False
    # A sum takes no memory; only where it is odd is each element looked at.
    total = tensor.sum(dtype=torch.promote_types(tensor.dtype, torch.float32))
    if torch.isfinite(total):
        return False
    return not bool(torch.isfinite(tensor).all()) if counts_infinity else bool(torch.isnan(tensor).any())
