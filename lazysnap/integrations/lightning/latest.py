"""``ckpt_path="latest"``: the freshest snapshot in the place of a checkpoint file."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from lazysnap.engine.snapshot import Snapshot
from lazysnap.errors import JobBusy, SnapshotNotFound
from lazysnap.integrations.lightning.framework import neighbour
from lazysnap.integrations.lightning.loops import WorldChange
from lazysnap.integrations.lightning.state import LightningState
from lazysnap.integrations.lightning.strategies import is_sharded, load_model, load_optimizers
from lazysnap.levels.redaction import shown
from lazysnap.state.modules import fitted
from lazysnap.state.optimizers import check_groups, check_order, laid_out

logger = logging.getLogger(__name__)

LATEST = "latest"


class Latest:
    """What one run of a trainer does about ``"latest"``."""

    def __init__(self, trainer: Any, state: LightningState, engine: Callable[[], Any]) -> None:
        self._trainer = trainer
        self._state = state
        self._engine = engine
        self._checkpoint: dict[str, Any] | None = None
        self._parameters: Mapping[str, Sequence[str]] | None = None

    def resume_start(self, original: Callable[..., Any], path: Any, *args: Any, **kwargs: Any) -> None:
        """In place of the connector's ``resume_start``: any other path goes to the original.

        Blocks: reads and verifies one snapshot. Raises: SnapshotNotFound, if there is none and nothing to train;
        StateMismatch, if it is of another model; JobBusy, if this training runs already.
        """
        if path != LATEST:
            original(path, *args, **kwargs)
            return
        connector = self._trainer._checkpoint_connector
        connector._ckpt_path = None
        if self._trainer.fast_dev_run:
            logger.info('fast_dev_run: ckpt_path="latest" is ignored')
            return
        is_fit = self._trainer.state.fn == "fit"
        snapshot = self._engine().fetch() if is_fit else self._fetch_to_read()
        requeued = self._requeued(connector, snapshot) if is_fit else None
        if requeued is not None:
            logger.warning("%s is newer than the latest snapshot: resuming from it", requeued)
            original(requeued, *args, **kwargs)
            return
        if snapshot is None:
            self._miss(is_fit)
            return
        checkpoint = self._state.admit(snapshot.state, self._change(snapshot) if is_fit else None)
        self._parameters = snapshot.parameters
        connector._loaded_checkpoint = neighbour(connector, "_pl_migrate_checkpoint")(checkpoint, LATEST)
        connector._ckpt_path = LATEST
        if is_fit:
            self._checkpoint = dict(connector._loaded_checkpoint)
            self._engine().resume(snapshot)

    def _change(self, snapshot: Snapshot) -> WorldChange | None:
        engine, now = self._engine(), self._trainer.world_size
        if snapshot.world_size == now:
            return None
        return WorldChange(snapshot.world_size, now, partial(engine.part_ways, snapshot))

    def _fetch_to_read(self) -> Snapshot | None:
        """As the engine's ``fetch``; what a running training keeps in memory is its own, what is on storage is not."""
        engine = self._engine()
        try:
            found: Snapshot | None = engine.fetch()
        except JobBusy:
            logger.info("the training runs: reading its newest snapshot on storage")
            found = engine.fetch_stored()
        return found

    def restore_training_state(self, original: Callable[[], Any]) -> None:
        """In place of the connector's: tuners that run first (LR finder) restore their own file and forget ours."""
        connector = self._trainer._checkpoint_connector
        if connector._loaded_checkpoint and connector._ckpt_path != LATEST:
            original()  # the tuner's own file, in the middle of its work
            return
        checkpoint, self._checkpoint = self._checkpoint, None
        if checkpoint is not None and not connector._loaded_checkpoint:
            connector._loaded_checkpoint, connector._ckpt_path = checkpoint, LATEST
            connector.restore_datamodule()
            connector.restore_model()
            connector.restore_callbacks()
        original()

    def load_model(self, original: Callable[..., None], checkpoint: Any, *, strict: bool = True) -> None:
        """In place of the strategy's: a sharded one would expect that its own files were read before."""
        if self._is_ours():
            state = fitted(self._trainer.lightning_module, checkpoint["state_dict"])
            checkpoint = {**checkpoint, "state_dict": state}
        if is_sharded(self._trainer.strategy) and self._is_ours():
            load_model(self._trainer.strategy, checkpoint, strict=strict)
        else:
            original(checkpoint, strict=strict)

    def load_optimizers(self, original: Callable[[], None]) -> None:
        """In place of the connector's ``restore_optimizers_and_schedulers``.

        Collective. Raises: StateMismatch, if an optimizer has other parameter groups than in the snapshot, on any rank.
        """
        connector = self._trainer._checkpoint_connector
        if self._is_ours() and connector._loaded_checkpoint:
            optimizers, checkpoint = self._state.optimizers(), connector._loaded_checkpoint
            states = list(zip(optimizers, checkpoint["optimizer_states"], strict=False))

            def check() -> None:
                check_order(self._state, self._parameters)
                for number, (optimizer, state) in enumerate(states):
                    check_groups(f"optimizer {number}", optimizer, state)

            self._engine().together("checking the optimizers", check)
            checkpoint["optimizer_states"] = [laid_out(optimizer, state) for optimizer, state in states]
            if is_sharded(self._trainer.strategy):
                load_optimizers(optimizers, checkpoint)
        original()

    def _is_ours(self) -> bool:
        return bool(self._trainer._checkpoint_connector._ckpt_path == LATEST)

    def _miss(self, is_fit: bool) -> None:
        where = ", ".join(shown(level.url) for level in self._engine().config.levels) or "memory"
        if not is_fit:
            raise SnapshotNotFound(
                f'ckpt_path="latest": no whole snapshot in {where} or in memory; fit with this callback first, or give '
                "the path of a checkpoint"
            )
        logger.warning('ckpt_path="latest": no snapshot in %s yet: starting fresh', where)

    def _requeued(self, connector: Any, snapshot: Any) -> str | None:
        """SLURM's auto-requeue checkpoint, if it is newer; Lightning itself looks for it only without a path."""
        if not neighbour(connector, "SLURMEnvironment").detect() or connector._hpc_resume_path is None:
            return None
        path = str(connector._hpc_resume_path)
        if snapshot is None:
            return path
        if os.path.exists(path) and os.stat(path).st_mtime_ns < snapshot.run_started_ns:
            return None
        step = self._trainer.strategy.load_checkpoint(path).get("global_step", 0)
        return path if step > snapshot.step else None
