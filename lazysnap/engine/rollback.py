"""Going back in place: the same process and the same keeper go on from an earlier snapshot of this training.

Where no capture is newer than that snapshot, loading it is all. Otherwise a new run begins there, and the loaded state
is captured at once: from then on ``"latest"`` means the new run, wherever newer snapshots of the old one are.
"""

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch

from lazysnap.engine.recorder import Recorder
from lazysnap.engine.report import duration, places
from lazysnap.errors import ConfigError, SnapshotNotFound
from lazysnap.levels.redaction import shown
from lazysnap.resolver import RestartPlan
from lazysnap.restore.restart import Restart, fetch_back
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


class Lineage:
    """The snapshots that led to the present state: by run, oldest run first, up to which step."""

    def __init__(self) -> None:
        self._steps: dict[str, int] = {}

    def go_on(self, present: str, run_id: str, step: int) -> None:
        """Record that training continues from ``step`` of ``run_id``; ``present`` is the run until now."""
        if run_id not in (present, *self._steps):
            self._steps.clear()  # a restart from elsewhere
        runs = list(self._steps)
        for later in runs[runs.index(run_id) :] if run_id in runs else ():
            del self._steps[later]
        self._steps[run_id] = step

    def has(self, plan: RestartPlan, present: str) -> bool:
        """True if a snapshot is of the present run, or one that it came from."""
        return plan.run_id == present or plan.step <= self._steps.get(plan.run_id, -1)


class Rollbacks:
    """Finds and loads snapshots for the rollbacks of one engine. Training thread."""

    def __init__(self, restart: Restart, recorder: Recorder) -> None:
        self._restart = restart
        self._recorder = recorder
        self.lineage = Lineage()

    @property
    def from_step(self) -> int:
        """The step in progress."""
        return (self._recorder.seen_step or 0) + 1

    def find(self, steps: int) -> Snapshot:
        """The newest snapshot at least ``steps`` older than the step in progress: in memory, else on storage.

        One whose trained weights or optimizer state are not finite is passed over. Collective. Blocks.
        Raises: ConfigError; SnapshotNotFound; as ``SnapshotEngine.fetch``.
        """
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ConfigError(f"rollback: steps must be an integer of at least 1, got {steps!r}")
        limit, present = self.from_step - steps, self._recorder.meta.run_id

        def is_wanted(plan: RestartPlan) -> bool:
            return plan.step <= limit and self.lineage.has(plan, present)

        def flaw(snapshot: Snapshot) -> str:
            name = first_not_finite(self._restart.source, snapshot.state)
            return f"{name} holds NaN or infinity" if name else ""

        levels = self._restart.config.levels
        # Storage only where memory has none: listing it takes longer than the rest.
        for has_storage in (False, True) if levels else (False,):
            restart = dataclasses.replace(self._restart, has_storage=has_storage)
            snapshot = fetch_back(restart, is_wanted, flaw)
            if snapshot is not None:
                return snapshot
        where = places(level.url for level in levels)
        raise SnapshotNotFound(
            f"rollback: this training has no usable snapshot that is {steps} steps older than step {self.from_step}, "
            f"which is in progress, {where} (every_n_steps is {self._restart.config.every_n_steps}). There is none "
            "right after a fresh start, or if memory was lost before storage had one. Nothing was changed; a restart "
            'with "latest" takes what storage has'
        )

    def branch(self, snapshot: Snapshot) -> str | None:
        """The id of the run that has to begin at ``snapshot``, the same on all ranks; ``None``, if no rank captured
        anything newer. Collective.
        """
        meta, last = self._recorder.meta, self._recorder.last_step
        is_newest = snapshot.run_id == meta.run_id and (last is None or last <= snapshot.step)
        told = self._restart.world.exchange("rolling back", [is_newest, new_id()])
        if all(newest for newest, _ in told):
            return None
        _, run_id = told[0]
        return id_after(run_id, meta.run_id)

    def load(self, snapshot: Snapshot) -> None:
        """Put the state back in place but for the data, and clear the gradients. Raises: what its objects raise."""
        source = self._restart.source
        source.load(snapshot.state, data=False)
        for optimizer in source.optimizers():
            optimizer.zero_grad()


def line_of(done: Rollback, reason: str) -> str:
    """Return the line that reports a rollback."""
    return (
        f"rolled back from step {done.from_step} to step {done.step}{f' ({reason})' if reason else ''}: restored from "
        f"{shown(done.level)} in {duration(done.seconds)}; the batches since step {done.step} are skipped"
    )


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
