"""Handles ``ckpt_path="latest"`` and ``"run:<id>"``: a snapshot instead of a checkpoint file."""

import logging
import os
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lazysnap.console import say
from lazysnap.engine import report
from lazysnap.integrations.arguments import check_path
from lazysnap.integrations.lightning.framework import neighbour
from lazysnap.integrations.lightning.state import LightningState
from lazysnap.resolver import LATEST, means_snapshot
from lazysnap.restore.snapshot import Snapshot
from lazysnap.shard.names import id_time_ns

logger = logging.getLogger(__name__)

HOW = 'trainer.fit(..., ckpt_path="latest")'
_NOT_RESUMABLE = "You're resuming from a checkpoint that ended before the epoch ended"


class Latest:
    """Handles ``"latest"``, or a chosen run, in one run of a trainer."""

    def __init__(self, trainer: Any, state: LightningState, engine: Callable[[], Any]) -> None:
        self._trainer = trainer
        self._connector = trainer._checkpoint_connector
        self._state = state
        self._engine = engine
        self._path: str | None = None
        """The ``ckpt_path`` that meant the snapshot."""
        self._snapshot: Snapshot | None = None
        """The snapshot that is being restored."""

    def resume_start(self, original: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> None:
        """Replace the connector's ``resume_start``: any other path goes to the original.

        Blocks: reads and verifies one snapshot. Raises: SnapshotNotFound, if there is none and nothing to train, or if
        the chosen run does not exist; ConfigError, as ``means_snapshot`` and ``check_path``; StateError, if it
        is of another model; JobBusy, if this training runs already.
        """
        if not means_snapshot(path):
            check_path(path, "Lightning", 'ckpt_path="latest"', "--to FILE.ckpt")
            original(path, *args, **kwargs)
            return
        connector = self._connector
        connector._ckpt_path = None
        if self._trainer.fast_dev_run:
            logger.info("fast_dev_run: ckpt_path=%r is ignored", path)
            return
        self._convert_module()
        engine = self._engine()
        requeued = None
        if self._trainer.state.fn == "fit":
            snapshot = engine._fetch(path)
            # As with a file, a given run or step is used, even if a requeue saved something newer.
            if path == LATEST:
                requeued = self._requeued(snapshot)
        else:
            snapshot = engine._fetch_to_read(path)
        if requeued is not None:
            logger.warning("%s is newer than the latest snapshot: resuming from it", requeued)
            original(requeued, *args, **kwargs)
        elif snapshot is None:
            engine._run.tell_start()
        else:
            self._path = path
            connector._ckpt_path = path
            self._snapshot = snapshot
            self._state.accept(snapshot.state)

    def restore_training_state(self, original: Callable[[], Any]) -> None:
        """Replace the connector's method. Collective. Raises: as ``SnapshotEngine._load``."""
        connector = self._connector
        snapshot = self._snapshot
        # Tuners that run first (LR finder) restore a file of their own, and drop the state that was accepted.
        if snapshot is None or (connector._loaded_checkpoint and not self._state.is_loading):
            original()
            return
        if not connector._loaded_checkpoint:
            connector._ckpt_path = self._path
            self._state.accept(snapshot.state)
            connector.restore_datamodule()
            connector.restore_model()
            connector.restore_callbacks()
        # Hooks of the program may have changed the checkpoint.
        state = {**snapshot.state, **connector._loaded_checkpoint}
        self._engine()._load(replace(snapshot, state=state), position=self._state.position_of(state))

    def resume_end(self, original: Callable[[], None]) -> None:
        """Replace the connector's method, which would only log "Restored all states from the checkpoint at latest"."""
        snapshot = self._snapshot
        if snapshot is None or not self._state.is_loading:
            original()
            return
        self._connector._ckpt_path = None
        self._snapshot = None
        original()
        self._connector._ckpt_path = self._path
        if self._trainer.state.fn != "fit" and self._trainer.is_global_zero:
            say(report.loaded(snapshot, time.time_ns()))

    def reset_epoch(self, original: Callable[[], None]) -> None:
        """Replace the epoch loop's ``reset``: the position in the data is restored for every loader."""
        with warnings.catch_warnings():
            if self._state.resumes_in_epoch:
                warnings.filterwarnings("ignore", message=_NOT_RESUMABLE)
            original()

    def _convert_module(self) -> None:
        """Convert the module to its dtypes in training (``precision="bf16-true"``, ``"64-true"``), as Lightning does in
        ``Strategy.setup``.

        Most strategies restore before that. A module in other dtypes would not match its own snapshot, and would lose
        precision of float64.
        """
        strategy = self._trainer.strategy
        # Averages were copied from the current module, and stay in these dtypes.
        if not strategy.restore_checkpoint_after_setup and not self._state.averages():
            strategy.model = strategy.precision_plugin.convert_module(strategy.model)

    def _requeued(self, snapshot: Snapshot | None) -> str | None:
        """Return SLURM's auto-requeue checkpoint, if it is newer. Lightning itself uses it only without a path."""
        connector = self._connector
        if not neighbour(connector, "SLURMEnvironment").detect() or connector._hpc_resume_path is None:
            return None
        path = str(connector._hpc_resume_path)
        if snapshot is None:
            return path
        if os.path.exists(path) and os.stat(path).st_mtime_ns < id_time_ns(snapshot.run_id):
            return None
        step = self._trainer.strategy.load_checkpoint(path).get("global_step", 0)
        if step <= snapshot.step:
            return None
        return path
