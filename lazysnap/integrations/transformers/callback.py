"""``LazyTrainerCallback``: a snapshot of a ``Trainer`` at every optimizer step, and exact restarts.

Methods of that one trainer are replaced while it trains, and restored. The boundary is just before the batches of the
next optimizer step are fetched (``get_batch_samples``). Step k is then complete: schedule, callbacks, logs, evaluation,
stock checkpoints, the end of an epoch. Step k+1 has not begun. At an epoch's start ``on_epoch_begin`` has run; a
restart in mid-epoch runs it again, as stock does.
"""

import logging
import os
import sys
from collections.abc import Callable
from functools import wraps
from typing import Any

from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback

from lazysnap.config import KeepBest, SnapshotConfig
from lazysnap.data import with_position
from lazysnap.errors import ConfigError, StateError
from lazysnap.integrations.arguments import Arguments, check_path, place_beside
from lazysnap.integrations.frameworks import Patches
from lazysnap.integrations.session import WithEngine
from lazysnap.integrations.transformers.state import TrainingState
from lazysnap.resolver import means_snapshot
from lazysnap.restore.snapshot import Snapshot

logger = logging.getLogger(__name__)

HOW = 'trainer.train(resume_from_checkpoint="latest")'
_DIRECTORY = "_lazysnap"
"""The directory of snapshots in ``output_dir``. ``push_to_hub`` uploads no names that begin with an underscore."""
_HOOKS = (
    "get_train_dataloader",
    "_init_training_state",
    "_prepare_for_training",
    "_run_epoch",
    "get_batch_samples",
    "_evaluate",
    "_load_rng_state",
    "_finalize_training",
)
"""Methods of a ``Trainer`` that are replaced while it trains."""
_INSTEAD = "make the Trainer first, then call lazysnap.attach(trainer), or attach(trainer) of the callback"


class LazyTrainerCallback(WithEngine, TrainerCallback):  # type: ignore[misc]
    """Captures the training state at optimizer steps while training continues.

    A training resumes with ``resume_from_checkpoint="latest"``, or with ``"run:1f3a"`` for the run whose id begins so.
    Use ``attach`` to add the callback to a ``Trainer``, not the argument of its constructor: a callback gets no
    reference to its trainer before training begins, which is too late for ``"latest"``::

        snapshots = LazyTrainerCallback("runs/a", keep_best=KeepBest("eval_loss"))
        snapshots.attach(trainer)
        trainer.train(resume_from_checkpoint="latest")

    Args:
        dirpath: a path or fsspec URL for snapshots on storage; by default ``<args.output_dir>/_lazysnap``.
        every_n_steps: optimizer steps between captures into memory; by default 1.
        persist_every_n_steps: optimizer steps between snapshots on storage, instead of a time.
        config: all other settings, instead of the three above.
        keep_best: keeps the best snapshots by a metric of the evaluations, with or without ``eval_``.

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
        super().__init__()
        self._arguments = Arguments(
            "LazyTrainerCallback", dirpath, every_n_steps, persist_every_n_steps, config, keep_best
        )
        self._trainer: Any = None
        self._is_running = False
        self._patches = Patches()

    def attach(self, trainer: Any) -> None:
        """Add snapshots and ``"latest"`` to ``trainer.train``, by replacing methods of this object.

        Raises: ConfigError, for a trainer with an unknown loop or with such a callback, or if this one belongs to
        another trainer.
        """
        if self._trainer not in (None, trainer):
            raise ConfigError("LazyTrainerCallback: it belongs to another Trainer already; make one for each")
        if any(isinstance(item, LazyTrainerCallback) and item is not self for item in _callbacks_of(trainer)):
            raise ConfigError("LazyTrainerCallback: the Trainer has one already")
        if self._trainer is None:
            self._replace_train(trainer)
        if self not in _callbacks_of(trainer):
            trainer.add_callback(self)

    def _replace_train(self, trainer: Any) -> None:
        loop = "_inner_training_loop"
        if getattr(type(trainer), loop, None) is not getattr(Trainer, loop):
            raise ConfigError(
                f"{type(trainer).__qualname__} has a training loop of its own, which lazysnap does not know: take "
                "snapshots in it with lazysnap.SnapshotEngine"
            )
        self._trainer = trainer
        original = trainer.train
        self._reset()

        @wraps(original)
        def train(resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
            return self._train(original, resume_from_checkpoint, *args, **kwargs)

        trainer.train = train

    def _default_place(self) -> str | None:
        if self._trainer is None:
            return None
        return place_beside(self._trainer.args.output_dir, _DIRECTORY)

    def _reset(self) -> None:
        self._is_running = False
        self._state = TrainingState(self._trainer)
        self._checkpoint: Any = None
        """The ``resume_from_checkpoint`` of this call."""
        self._snapshot: Snapshot | None = None
        self._loader: Any = None
        self._iterator: Any = None

    # ---------------------------------------------------------------- hooks

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Refuse the use as a constructor argument, which gives the callback no trainer. Raises: ConfigError."""
        raise ConfigError(f"LazyTrainerCallback is no argument of the constructor of a Trainer: {_INSTEAD}")

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Raises: ConfigError, if it was added without ``attach``."""
        if not self._is_running:
            raise ConfigError(f"LazyTrainerCallback was added by add_callback: {_INSTEAD}")

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any = None, **_: Any) -> None:
        """Keep the snapshot if it is among the best. Collective. Raises: ConfigError, for an unknown metric."""
        setting = self._arguments.keep_best
        if setting is None or self._session is None:
            return
        values = metrics or {}
        name = setting.monitor
        if name not in values:
            name = f"eval_{setting.monitor}"
        if name in values:
            self._session.keep_best(setting, values[name])
        elif "eval_runtime" in values and not isinstance(self._trainer.eval_dataset, dict):
            # Not for an evaluation by the program itself, or of one of several datasets with separate metrics.
            raise ConfigError(
                f"LazyTrainerCallback.keep_best: no evaluation gives {setting.monitor!r}; there are {sorted(values)}"
            )

    # ---------------------------------------------------------------- one call of train

    def _train(self, original: Callable[..., Any], which: Any, *args: Any, **kwargs: Any) -> Any:
        trial = kwargs.get("trial", args[0] if args else None)
        if trial is not None:
            logger.warning("a search for hyperparameters runs: no snapshots are taken of its trials")
        _check(self._trainer)
        how = 'resume_from_checkpoint="latest"'
        exported = "the weights for from_pretrained, no checkpoint to resume"
        check_path(which, "Transformers", how, "--to DIRECTORY --format huggingface", exported)
        self._patches.undo()
        self._reset()
        self._checkpoint = which
        self._is_running = True
        try:
            if trial is None:
                self._hook()
            checkpoint = which
            if means_snapshot(which):
                checkpoint = None
            result = original(checkpoint, *args, **kwargs)
            if self._session is not None:
                self._session.engine.close()
            return result
        finally:
            if self.engine is not None:
                self.engine.abandon(sys.exc_info()[1])  # nothing after close
            self._leave()
            self._patches.undo()
            self._reset()

    def _hook(self) -> None:
        trainer = self._trainer
        for name in _HOOKS:
            self._patches.replace(trainer, name, getattr(self, f"_{name.removeprefix('_')}"))
        for name in ("evaluate", "predict"):  # they may swap in averaged weights
            self._patches.replace(trainer, name, self._gated)
        for item in trainer.callback_handler.callbacks:
            if not isinstance(item, (PrinterCallback, ProgressCallback)):  # lines on the console stay as they were
                self._patches.replace(item, "on_log", self._on_log)
        self._patches.replace(sys.modules[Trainer.__module__], "skip_first_batches", self._skip_first_batches)

    # ---------------------------------------------------------------- in place of the trainer's methods

    def _get_train_dataloader(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._loader, self._state.position = with_position(original(*args, **kwargs))
        return self._loader

    def _init_training_state(
        self, original: Callable[..., Any], max_steps: int, steps_in_epoch: int, num_epochs: int, *rest: Any
    ) -> Any:
        """Blocks: reads one snapshot. Raises: as ``SnapshotEngine._fetch``; StateError."""
        position = original(max_steps, steps_in_epoch, num_epochs, *rest)
        self._state.begin()
        engine = self._begin(self._state, place_beside(self._trainer.args.output_dir, _DIRECTORY)).engine
        self._snapshot = None
        if means_snapshot(self._checkpoint):
            self._snapshot = engine._fetch(self._checkpoint)
        if self._snapshot is None:
            return position
        if self._snapshot.world_size != self._trainer.args.world_size:
            raise StateError(
                f"the snapshot is of a training with {self._snapshot.world_size} processes, this one has "
                f"{self._trainer.args.world_size}: resume it with as many, or begin with its weights "
                "(lazysnap.load_weights)"
            )
        state = self._state
        state.accept(self._snapshot.state)
        epoch, num_batches = state.start_position(steps_in_epoch)
        if not state.end_reason:
            return epoch, num_batches
        if self._trainer.is_world_process_zero():
            logger.warning("nothing is left to train: %s", state.end_reason)
        return num_epochs, 0

    def _prepare_for_training(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Load the rest of the snapshot. Collective. Blocks. Raises: as ``SnapshotEngine.restore``."""
        prepared = original(*args, **kwargs)
        session = self._session
        state = self._state
        snapshot = self._snapshot
        assert session is not None
        state.prepare()
        if snapshot is None:
            session.report_start(self._checkpoint, HOW)
        else:
            session.engine._load(snapshot, position=state.position_text)
            self._snapshot = None
        session.start(self._trainer.state.global_step)
        return prepared

    def _run_epoch(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        options = self._trainer.args
        self._state.epoch = kwargs["epoch"]
        ignores = options.ignore_data_skip
        if self._state.is_resuming:
            # The loop skips the batches that were trained only if it resumes a checkpoint.
            kwargs["resume_from_checkpoint"] = self._checkpoint
            options.ignore_data_skip = False
        try:
            result = original(*args, **kwargs)
        finally:
            options.ignore_data_skip = ignores
        if not self._trainer.control.should_training_stop:
            self._iterator = None
        return result

    def _skip_first_batches(self, original: Callable[..., Any], loader: Any, num_batches: int = 0) -> Any:
        """Skip nothing in a restored loader, whose next iteration continues after these batches."""
        if self._state.is_resuming and loader is self._loader:
            return loader
        return original(loader, num_batches)

    def _load_rng_state(self, original: Callable[..., Any], checkpoint: Any) -> None:
        if not means_snapshot(checkpoint):
            original(checkpoint)

    def _evaluate(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        # The evaluation of args.eval_on_start took place before the first step of the run that is resumed.
        if self._state.is_resuming:
            return {}
        return original(*args, **kwargs)

    def _gated(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._gate()
        return original(*args, **kwargs)

    def _get_batch_samples(self, original: Callable[..., Any], iterator: Any, *args: Any, **kwargs: Any) -> Any:
        self._iterator = iterator  # its position is read after the last epoch, too
        if self._state.is_resuming:
            self._state.finish_resume()
        else:
            self._capture()
        return original(iterator, *args, **kwargs)

    def _finalize_training(self, original: Callable[..., Any], trial: Any, num_samples: Any, start_time: float) -> Any:
        if self._state.is_resuming:
            self._state.finish_resume()
        self._capture(is_last=True)  # before the best weights are loaded
        self._iterator = None
        return original(trial, num_samples, start_time - self._state.earlier_s)

    def _on_log(
        self, original: Callable[..., Any], args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any
    ) -> Any:
        """Add metrics to a log, without changing the program's own dictionary."""
        values: dict[str, float] = {}
        if logs:
            values = self.figures()
            logs.update(values)
        result = original(args, state, control, logs=logs, **kwargs)
        for name in values:
            logs.pop(name, None)
        return result

    # ---------------------------------------------------------------- boundaries

    def _capture(self, *, is_last: bool = False) -> None:
        session = self._session
        if session is None or not session.finish_step(self._trainer.state.global_step):
            return
        session.capture(is_last=is_last)
        if any(callable(getattr(optimizer, "train", None)) for optimizer in self._state.optimizers()):
            session.engine.gate()  # schedule-free optimizers swap the weights before the next step, after an evaluation


def attach_trainer(
    trainer: Any,
    snapshots: "SnapshotConfig | str | os.PathLike[str] | None" = None,
    keep_best: KeepBest | None = None,
) -> LazyTrainerCallback:
    """Make a ``LazyTrainerCallback`` and attach it to ``trainer``. Return it, or the one that the trainer has already.

    Args:
        trainer: the trainer.
        snapshots: settings, or a path or URL for snapshots on storage; default ``<args.output_dir>/_lazysnap``.
        keep_best: keeps the best snapshots by a metric of the evaluations.

    Raises: ConfigError, for invalid settings, or if the trainer has such a callback with other settings.
    """
    for item in _callbacks_of(trainer):
        if isinstance(item, LazyTrainerCallback) and snapshots is None and keep_best is None:
            item.attach(trainer)
            return item
    if isinstance(snapshots, SnapshotConfig):
        callback = LazyTrainerCallback(config=snapshots, keep_best=keep_best)
    else:
        callback = LazyTrainerCallback(snapshots, keep_best=keep_best)
    callback.attach(trainer)
    return callback


def _callbacks_of(trainer: Any) -> list[Any]:
    callbacks: list[Any] = trainer.callback_handler.callbacks
    return callbacks


def _check(trainer: Any) -> None:
    """Raises: ConfigError, for a trainer that cannot be captured."""
    refused = {
        "DeepSpeed": trainer.is_deepspeed_enabled,
        "FSDP": trainer.is_fsdp_enabled,
        "a model that from_pretrained has sharded": getattr(trainer, "is_distributed_loading_by_transformers", False),
        "XLA": trainer.accelerator.distributed_type.name in ("XLA", "TPU"),
        "auto_find_batch_size=True": trainer.args.auto_find_batch_size,
    }
    for feature, is_used in refused.items():
        if is_used:
            raise ConfigError(f"LazyTrainerCallback: {feature} is not supported; leave it out, or the callback")
