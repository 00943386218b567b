"""``ckpt_path="latest"`` and ``"run:<id>"``: a snapshot in the place of a checkpoint file."""

import logging
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from lazysnap.console import say
from lazysnap.engine import report
from lazysnap.engine.snapshot import Snapshot
from lazysnap.integrations.choice import LATEST, check_path, means_snapshot
from lazysnap.integrations.lightning.framework import neighbour
from lazysnap.integrations.lightning.loops import WorldChange
from lazysnap.integrations.lightning.state import LightningState
from lazysnap.shard.names import id_time_ns
from lazysnap.state.modules import fitted
from lazysnap.state.optimizers import put_back

logger = logging.getLogger(__name__)

HOW = 'trainer.fit(..., ckpt_path="latest")'
_NOT_RESUMABLE = "You're resuming from a checkpoint that ended before the epoch ended"


class Latest:
    """What one run of a trainer does about ``"latest"``, and about a run that was chosen."""

    def __init__(self, trainer: Any, state: LightningState, engine: Callable[[], Any]) -> None:
        self._trainer = trainer
        self._connector = trainer._checkpoint_connector
        self._state = state
        self._engine = engine
        self._checkpoint: dict[str, Any] | None = None
        self._path: str | None = None
        """The ``ckpt_path`` that was restored from, if it means a snapshot."""
        self._parameters: Mapping[str, Sequence[str]] | None = None
        self._snapshot: Snapshot | None = None
        self._position = ""
        self._loading_s = 0.0

    def resume_start(self, original: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> None:
        """In place of the connector's ``resume_start``: any other path goes to the original.

        Blocks: reads and verifies one snapshot. Raises: SnapshotNotFound, if there is none and nothing to train, or if
        a run was chosen that is not there; ConfigError, as ``means_snapshot`` and ``check_path``; StateMismatch, if it
        is of another model; JobBusy, if this training runs already.
        """
        if not means_snapshot(path):
            check_path(path, "Lightning", 'ckpt_path="latest"', "--to FILE.ckpt")
            original(path, *args, **kwargs)
            return
        connector, engine = self._connector, self._engine
        connector._ckpt_path = None
        if self._trainer.fast_dev_run:
            logger.info("fast_dev_run: ckpt_path=%r is ignored", path)
            return
        is_fit = self._trainer.state.fn == "fit"
        snapshot = engine().fetch(path) if is_fit else engine().fetch_to_read(path)
        # As with a file: what was chosen by name is meant, whatever Lightning saved before a requeue.
        requeued = self._requeued(snapshot) if is_fit and path == LATEST else None
        if requeued is not None:
            logger.warning("%s is newer than the latest snapshot: resuming from it", requeued)
            original(requeued, *args, **kwargs)
            return
        if snapshot is None:
            engine().tell_start()
            return
        checkpoint = self._state.admit(snapshot.state, self._change(snapshot) if is_fit else None)
        self._parameters = snapshot.parameters
        connector._loaded_checkpoint = neighbour(connector, "_pl_migrate_checkpoint")(checkpoint, path)
        connector._ckpt_path = self._path = path
        self._snapshot = snapshot
        if is_fit:
            is_moved = snapshot.world_size != self._trainer.world_size
            self._position = "" if is_moved else self._state.position_of(snapshot.state)
            self._checkpoint = dict(connector._loaded_checkpoint)

    def resume_end(self, original: Callable[[], None]) -> None:
        """In place of the connector's, which would only say "Restored all states from the checkpoint at latest".

        Collective. Blocks: all ranks have loaded what they restore. Raises: as ``SnapshotEngine.resume``.
        """
        snapshot = self._snapshot
        if snapshot is None or not self._is_ours():
            original()
            return
        self._connector._ckpt_path, self._snapshot = None, None
        try:
            original()
        finally:
            self._connector._ckpt_path = self._path
        if self._trainer.state.fn == "fit":
            seconds = snapshot.seconds + self._loading_s
            self._engine().resume(snapshot, position=self._position, seconds=seconds)
        elif self._trainer.is_global_zero:
            say(report.loaded(snapshot, time.time_ns()))

    def reset_epoch(self, original: Callable[[], None]) -> None:
        """In place of the epoch loop's ``reset``: the position in the data is restored, whatever the loader can do."""
        with warnings.catch_warnings():
            if self._state.restores_position():
                warnings.filterwarnings("ignore", message=_NOT_RESUMABLE)
            original()

    def restore_training_state(self, original: Callable[[], Any]) -> None:
        """In place of the connector's: tuners that run first (LR finder) restore their own file and forget ours."""
        connector = self._connector
        if connector._loaded_checkpoint and not self._is_ours():
            original()  # the tuner's own file, in the middle of its work
            return
        checkpoint, self._checkpoint = self._checkpoint, None
        if checkpoint is not None and not connector._loaded_checkpoint:
            connector._loaded_checkpoint, connector._ckpt_path = checkpoint, self._path
            connector.restore_datamodule()
            connector.restore_model()
            connector.restore_callbacks()
        started = time.perf_counter()
        original()
        self._loading_s += time.perf_counter() - started

    def load_model(self, original: Callable[..., None], checkpoint: Any, *, strict: bool = True) -> None:
        """In place of the strategy's: a sharded one would expect that its own files were read before."""
        if not self._is_ours():
            original(checkpoint, strict=strict)
            return
        started, module = time.perf_counter(), self._trainer.lightning_module
        module.load_state_dict(fitted(module, checkpoint["state_dict"]), strict=strict)
        self._loading_s += time.perf_counter() - started

    def load_optimizers(self, original: Callable[[], None]) -> None:
        """In place of the connector's ``restore_optimizers_and_schedulers``.

        Collective. Raises: StateMismatch, if an optimizer is of another class than in the snapshot, or has other
        parameter groups, on any rank.
        """
        checkpoint = self._connector._loaded_checkpoint
        if not checkpoint or not self._is_ours():
            original()
            return
        self._engine().together(
            "checking the optimizers", lambda: self._state.check_optimizers(checkpoint, self._parameters)
        )
        for optimizer, saved in zip(self._state.optimizers(), checkpoint["optimizer_states"], strict=False):
            put_back(optimizer, saved)
        self._connector.restore_lr_schedulers()

    def _change(self, snapshot: Snapshot) -> WorldChange | None:
        if snapshot.world_size == self._trainer.world_size:
            return None
        return WorldChange(partial(self._engine().part_ways, snapshot))

    def _is_ours(self) -> bool:
        return self._path is not None and self._connector._ckpt_path == self._path

    def _requeued(self, snapshot: Snapshot | None) -> str | None:
        """SLURM's auto-requeue checkpoint, if it is newer; Lightning itself looks for it only without a path."""
        connector = self._connector
        if not neighbour(connector, "SLURMEnvironment").detect() or connector._hpc_resume_path is None:
            return None
        path = str(connector._hpc_resume_path)
        if snapshot is None:
            return path
        if os.path.exists(path) and os.stat(path).st_mtime_ns < id_time_ns(snapshot.run_id):
            return None
        step = self._trainer.strategy.load_checkpoint(path).get("global_step", 0)
        return path if step > snapshot.step else None
