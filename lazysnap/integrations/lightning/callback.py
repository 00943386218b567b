"""``LazySnapshotCallback``: a snapshot of a Lightning fit at every optimizer step, and exact restarts.

Methods of the trainer's loops are replaced while it runs, and restored. The boundary of step k is just before the
batches of step k + 1 are fetched: step k is complete, and the next one has not begun.
"""

import logging
import math
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from rich.progress import Progress
from torch.nn.utils.prune import is_pruned

from lazysnap.config import KeepBest, SnapshotConfig
from lazysnap.engine import SnapshotEngine
from lazysnap.errors import ConfigError, StateError
from lazysnap.integrations.arguments import Arguments, place_beside
from lazysnap.integrations.frameworks import Patches
from lazysnap.integrations.lightning.framework import callback_bases, class_of_program, extended, new_of_class
from lazysnap.integrations.lightning.latest import HOW, Latest
from lazysnap.integrations.lightning.loops import ended_within_epoch
from lazysnap.integrations.lightning.state import LightningState
from lazysnap.integrations.lightning.strategies import check_parts, check_strategy
from lazysnap.integrations.session import Session, WithEngine

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from lightning.pytorch import Callback
else:
    Callback = type("Callback", callback_bases(), {"__module__": __name__})


class LazySnapshotCallback(WithEngine, Callback):
    """Captures the training state at optimizer steps while training continues.

    A fit resumes with ``ckpt_path="latest"``, or with ``ckpt_path="run:1f3a"`` for the run whose id begins so::

        snapshots = LazySnapshotCallback("runs/a", keep_best=KeepBest("val_loss"))
        trainer = L.Trainer(callbacks=[snapshots])
        trainer.fit(model, data, ckpt_path="latest")

    Args:
        dirpath: a path or fsspec URL for snapshots on storage; by default ``<trainer.default_root_dir>/lazysnap``.
        every_n_steps: optimizer steps between captures into memory; by default 1.
        persist_every_n_steps: optimizer steps between snapshots on storage, instead of a time.
        config: all other settings, instead of the three above.
        keep_best: keeps the best snapshots by a metric of ``trainer.callback_metrics``: after each validation, or
            after each epoch without validation.

    Raises: ConfigError, for invalid settings, or if one of the three contradicts ``config``.
    """

    def __init__(
        self,
        dirpath: "str | os.PathLike[str] | None" = None,
        *,
        every_n_steps: int | None = None,
        persist_every_n_steps: int | None = None,
        config: SnapshotConfig | None = None,
        keep_best: KeepBest | None = None,
    ) -> None:
        # A trainer takes callbacks only of its own package, which the program has imported by now.
        self.__class__ = extended(type(self))
        super().__init__()
        self._arguments = Arguments(
            "LazySnapshotCallback", dirpath, every_n_steps, persist_every_n_steps, config, keep_best
        )
        self._reset()

    def _reset(self) -> None:
        self._session = None
        self._trainer: Any = None
        self._state: LightningState | None = None
        self._is_fit = False
        """True in a fit that is captured; False in an evaluation."""
        self._patches = Patches()
        self._failed_loggers: set[int] = set()
        """Loggers that raised: each is reported once, and gets no more metrics."""

    def __getstate__(self) -> dict[str, Any]:
        return {"_arguments": self._arguments, "_new_run_id": self._new_run_id}

    def __reduce__(self) -> tuple[Any, ...]:
        return new_of_class, (class_of_program(self),), self.__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__class__ = extended(type(self))
        self.__dict__.update(state)
        self._reset()

    # ---------------------------------------------------------------- hooks

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Prepare one run of the trainer. Raises: ConfigError, for a strategy that cannot be captured."""
        self._leave()
        if not trainer.fast_dev_run:
            check_strategy(trainer)
        state = LightningState(trainer)
        self._trainer = trainer
        self._state = state
        latest = Latest(trainer, state, self._opened_engine)
        self._patches = Patches(self._is_in_trainer)
        connector = trainer._checkpoint_connector
        self._patches.replace(connector, "resume_start", latest.resume_start)
        self._patches.replace(connector, "resume_end", latest.resume_end)
        self._patches.replace(trainer.strategy, "load_model_state_dict", state.load_model)
        if stage == "fit" and not trainer.fast_dev_run:
            self._patches.replace(connector, "restore_training_state", latest.restore_training_state)
            self._patches.replace(trainer.fit_loop.epoch_loop, "reset", latest.reset_epoch)
            self._is_fit = True
            self._hook(trainer.fit_loop)

    def _hook(self, fit_loop: Any) -> None:
        """Replace the methods of the loops."""
        epoch_loop = fit_loop.epoch_loop
        self._patches.replace(fit_loop, "_load_combined_loader_states", self._before_loaders)
        self._patches.replace(fit_loop, "run", self._run)
        self._patches.replace(fit_loop, "on_advance_start", self._before_epoch)
        self._patches.replace(epoch_loop, "on_run_start", self._start_epoch)
        self._patches.replace(epoch_loop, "_on_before_fetch", self._before_fetch)
        self._patches.replace(epoch_loop, "on_advance_end", self._end_batch)
        self._patches.replace(epoch_loop.val_loop, "run", self._gated)
        self._patches.replace(fit_loop, "on_advance_end", self._end_epoch)
        self._patches.replace(fit_loop, "on_run_end", self._end_run)

    def _is_in_trainer(self) -> bool:
        """False in the fit of a tuner, which removes this callback temporarily."""
        return self in self._trainer.callbacks

    def on_sanity_check_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to handle preemption."""
        if self._is_fit:
            _listen(trainer, self._opened_engine())

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start the keeper in the background."""
        if not self._is_fit:
            return
        session = self._opened()
        state = self._running_state()
        _listen(trainer, session.engine)

        def prepare() -> None:
            check_parts(trainer)
            state.start()
            session.report_start(trainer._checkpoint_connector._ckpt_path, HOW, trainer.global_step)

        session.start(trainer.global_step, prepare)

    def rollback(self, steps: int = 1) -> None:
        """Restore, in this process, the newest snapshot at least ``steps`` older than the current step.

        Call it on all ranks, from ``training_step`` or ``on_train_batch_end``. The fit goes back when the batch ends,
        with all batches of an accumulation, and continues with the next batch. Callbacks before this one in the
        trainer's list see the undone step; checkpoint callbacks do not.

        Raises: ConfigError, also outside of a training. The fit raises SnapshotNotFound, if there is no such snapshot;
        StateError, after ``ModelPruning``; or WaitTimeout.
        """
        self._running_session().request_rollback(steps)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Roll back if the program requested it. Raises: as ``SnapshotEngine.rollback``."""
        self._roll_back_if_requested()

    def _roll_back_if_requested(self) -> None:
        session = self._session
        if session is None or not session.rollback_requested:
            return
        epoch_loop = self._trainer.fit_loop.epoch_loop
        # The whole accumulation is dropped: its other batches belong to the same step.
        if epoch_loop._should_accumulate():
            return
        try:
            session.roll_back()
        except StateError as error:
            if not is_pruned(self._trainer.lightning_module):
                raise
            raise StateError(
                "rollback: the module is pruned, and ModelPruning leaves the masks out of checkpoints, so that no "
                "snapshot has them. Nothing was changed. Start the training again, which resumes and prunes again, or "
                "use ModelPruning(..., make_pruning_permanent=False)"
            ) from error
        # The loop counts the batch that just ended again at its end.
        epoch_loop._batches_that_stepped -= 1

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Keep the snapshot if it is among the best. Collective. Raises: ConfigError, if the metric is not logged."""
        if not trainer.sanity_checking:
            self._keep_if_best(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Keep the snapshot as ``on_validation_end`` does, in a fit without validation."""
        if not trainer.enable_validation:
            self._keep_if_best(trainer)

    def _keep_if_best(self, trainer: Any) -> None:
        setting = self._arguments.keep_best
        if self._session is None or setting is None or not self._is_fit:
            return
        metrics = trainer.callback_metrics

        def check() -> None:
            # Other ranks need not have it: rank 0's value counts (``log(..., rank_zero_only=True)``).
            if trainer.is_global_zero and setting.monitor not in metrics:
                raise ConfigError(
                    f"LazySnapshotCallback.keep_best: nothing logs {setting.monitor!r}; logged are {sorted(metrics)}"
                )

        self._session.engine._together("keeping the best", check)
        self._session.keep_best(setting, metrics.get(setting.monitor, math.nan))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Abandon the engine: the keeper has the newest capture for a restart."""
        try:
            if self._session is not None:
                self._session.engine.abandon(exception)
        finally:
            self._leave()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Close the engine: the last snapshot becomes durable, the keeper exits.

        Blocks: until then, at most ``drain_timeout_s``.
        """
        try:
            if self._session is not None and self._is_fit:
                rich_display = getattr(trainer.progress_bar_callback, "progress", None)
                if isinstance(rich_display, Progress):
                    rich_display.stop()  # two live displays of rich conflict
                self._session.engine.close()
            elif self.engine is not None:
                self.engine.abandon()  # an evaluation only reads, and keeps the memory for a later fit
        finally:
            self._leave()

    # ---------------------------------------------------------------- engine

    def _opened(self) -> Session:
        """Return the session of this run of the trainer, which the first call begins. Collective then."""
        if self._session is not None:
            return self._session
        default_url = place_beside(self._trainer.default_root_dir)
        return self._begin(self._running_state(), default_url, only_reads=not self._is_fit)

    def _opened_engine(self) -> SnapshotEngine:
        return self._opened().engine

    def _running_state(self) -> LightningState:
        assert self._state is not None
        return self._state

    def _leave(self) -> None:
        """End the training: see ``WithEngine._leave``. Restore the methods and loaders of the trainer."""
        if self._is_fit:  # not of an evaluation
            super()._leave()
        self._patches.undo()
        if self._state is not None:
            self._state.loaders.forget()
        self._reset()

    # ---------------------------------------------------------------- in place of the methods of loops, in their order

    def _before_loaders(self, original: Callable[[], Any]) -> None:
        state = self._running_state()
        # A restart takes positions from the snapshot; Lightning drops them if loaders are set up early.
        if not state.is_resuming:
            original()
        state.prepare_loaders()

    def _run(self, original: Callable[[], Any]) -> None:
        original()
        state = self._running_state()
        if state.is_finished():
            state.put_averages_into_model()

    def _before_epoch(self, original: Callable[[], Any]) -> None:
        self._gate()
        state = self._running_state()
        if state.is_resuming and not state.resumes_in_epoch:
            state.finish_resume()
        original()

    def _start_epoch(self, original: Callable[[Any], Any], fetcher: Any) -> None:
        state = self._running_state()
        state.watch_loaders()
        original(fetcher)
        if state.is_resuming:
            state.finish_resume()

    def _before_fetch(self, original: Callable[[], Any]) -> None:
        fetcher = self._trainer.fit_loop._data_fetcher
        # Inside iter() a loader without length fetches one batch ahead: no batch of the epoch is counted yet.
        if fetcher.length is not None or fetcher.fetched:
            self._capture()
        original()

    def _end_batch(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._roll_back_if_requested()  # a hook after this callback's own may have requested it
        return original(*args, **kwargs)

    def _gated(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._gate()
        return original(*args, **kwargs)

    def _end_epoch(self, original: Callable[[], Any]) -> None:
        self._gate()
        if ended_within_epoch(self._trainer):
            # Before the epoch is counted: a fit with a higher `max_steps` continues within it.
            self._capture(is_last=True)
        original()

    def _end_run(self, original: Callable[[], Any]) -> None:
        self._gate()
        # Before hooks at the end of training swap weights (averages): a later fit must continue from these.
        self._capture(is_last=True)
        original()

    # ---------------------------------------------------------------- boundaries

    def _capture(self, *, is_last: bool = False) -> None:
        session = self._session
        trainer = self._trainer
        if session is None:
            return
        last_step = session.step
        if not session.finish_step(trainer.global_step):
            return
        # Before the step is captured: random numbers that a logger draws belong to it.
        interval = trainer.log_every_n_steps
        if trainer.is_global_zero and interval and session.step // interval != last_step // interval:
            self._log(trainer.loggers, session)
        session.capture(is_last=is_last)

    def _log(self, loggers: list[Any], session: Session) -> None:
        values = session.figures()
        if not values:
            return
        for target in loggers:
            if id(target) in self._failed_loggers:
                continue
            try:
                target.log_metrics(metrics=dict(values), step=session.step)
                target.save()
            except Exception as error:  # noqa: BLE001  figures are not worth a training
                self._failed_loggers.add(id(target))
                text = f"{type(error).__name__}: {error}"
                logger.warning("%s does not accept metrics of snapshots: %s", type(target).__name__, text)


def _listen(trainer: Any, engine: SnapshotEngine) -> None:
    """Handle preemption, which ends the fit as Lightning would, except for the exit code. Idempotent.

    Lightning's own handler of SIGTERM calls a collective, which hangs if not all ranks get the signal. It also waits
    for the end of the batch, and the program exits with code 0. The handler from before the fit is called, but the fit
    ends anyway, as with Lightning's handler.
    """
    if engine._preemption.listens:
        return
    connector = trainer._signal_connector
    handler_before_fit = getattr(connector, "_original_handlers", {}).get(signal.SIGTERM, signal.SIG_DFL)
    is_main_thread = threading.current_thread() is threading.main_thread()
    is_of_lightning = type(signal.getsignal(signal.SIGTERM)).__name__ == "_HandlersCompose"
    if is_main_thread and is_of_lightning:
        # At the end of the fit Lightning restores the handler from before the fit.
        signal.signal(signal.SIGTERM, handler_before_fit)
    loop = sys.modules[type(trainer.fit_loop.epoch_loop).__module__]
    exception: type[BaseException] = getattr(loop, "SIGTERMException", SystemExit)

    def end_of_fit(code: int) -> BaseException:
        # As Lightning's handler does. Only now: its loops would call their collective.
        connector.received_sigterm = True
        return exception(code)

    engine._preemption.listen(end_of_fit, overrules_handler=is_of_lightning)
    if trainer.received_sigterm:  # it was received after Lightning's handler was installed
        connector.received_sigterm = False
        signal.raise_signal(signal.SIGTERM)
