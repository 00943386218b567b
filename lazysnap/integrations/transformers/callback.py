"""``LazyTrainerCallback``: a snapshot of a ``Trainer`` at every optimizer step, and exact restarts."""

import os
from typing import Any, Literal

from transformers import TrainerCallback

from lazysnap.config import SnapshotConfig
from lazysnap.errors import ConfigError
from lazysnap.integrations.arguments import EVERY_N_STEPS, PERSIST_EVERY_N_STEPS, Arguments
from lazysnap.integrations.session import WithEngine
from lazysnap.integrations.transformers.training import Training

_INSTEAD = "make the Trainer first, then call lazysnap.attach(trainer), or attach(trainer) of the callback"


class LazyTrainerCallback(WithEngine, TrainerCallback):  # type: ignore[misc]
    """Captures the training state at optimizer steps while training goes on, and makes
    ``trainer.train(resume_from_checkpoint="latest")`` work, and ``"run:1f3a"`` for the run whose id begins so.

    ``attach`` gives it to a ``Trainer``. It is no argument of the constructor: a callback gets no reference to its
    trainer before training begins, which is too late for ``"latest"``.

    ``dirpath``: a path or fsspec URL for snapshots on storage; default ``<args.output_dir>/lazysnap``.
    ``every_n_steps``: optimizer steps between captures into memory, or ``"auto"``. ``persist_every_n_steps``: optimizer
    steps between snapshots on storage. ``config``: everything else; it replaces the three.
    Raises: ConfigError, for settings that cannot work, or a shorthand that contradicts ``config``.
    """

    def __init__(
        self,
        dirpath: "str | os.PathLike[str] | None" = None,
        *,
        every_n_steps: int | Literal["auto"] = EVERY_N_STEPS,
        persist_every_n_steps: int = PERSIST_EVERY_N_STEPS,
        config: SnapshotConfig | None = None,
    ) -> None:
        super().__init__()
        self._arguments = Arguments(dirpath, every_n_steps, persist_every_n_steps, config, "LazyTrainerCallback")
        self._training: Training | None = None

    def attach(self, trainer: Any) -> None:
        """Let ``trainer.train`` take snapshots and understand ``"latest"``. Replaces methods of this one object.

        Raises: ConfigError, for a trainer that cannot be attached to or has such a callback already, or if this one
        belongs to another trainer.
        """
        if self._training is not None and self._training.trainer is not trainer:
            raise ConfigError("LazyTrainerCallback: it belongs to another Trainer already; make one for each")
        if any(isinstance(item, LazyTrainerCallback) and item is not self for item in _callbacks_of(trainer)):
            raise ConfigError("LazyTrainerCallback: the Trainer has one already")
        if self._training is None:
            self._training = Training(trainer, self)
        if self not in _callbacks_of(trainer):
            trainer.add_callback(self)

    # ---------------------------------------------------------------- hooks

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Raises: ConfigError: the constructor of a trainer does not say which trainer that is."""
        raise ConfigError(f"LazyTrainerCallback is no argument of the constructor of a Trainer: {_INSTEAD}")

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Raises: ConfigError, if it was added without ``attach``."""
        if self._training is None or not self._training.is_running:
            raise ConfigError(f"LazyTrainerCallback was added by add_callback: {_INSTEAD}")


def attach_trainer(
    trainer: Any, snapshots: "SnapshotConfig | str | os.PathLike[str] | None" = None
) -> LazyTrainerCallback:
    """Make a ``LazyTrainerCallback`` and attach it to ``trainer``. Returns it, or the one that the trainer has already.

    ``snapshots``: settings, or a path or URL for snapshots on storage; default ``<args.output_dir>/lazysnap``.
    Raises: ConfigError, for settings that cannot work, also beside a callback that is there already.
    """
    known = next((item for item in _callbacks_of(trainer) if isinstance(item, LazyTrainerCallback)), None)
    if known is not None and snapshots is None:
        known.attach(trainer)
        return known
    if isinstance(snapshots, SnapshotConfig):
        callback = LazyTrainerCallback(config=snapshots)
    else:
        callback = LazyTrainerCallback(snapshots)
    callback.attach(trainer)
    return callback


def _callbacks_of(trainer: Any) -> list[Any]:
    found: list[Any] = trainer.callback_handler.callbacks
    return found
