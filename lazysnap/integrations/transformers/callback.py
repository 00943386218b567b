"""``LazyTrainerCallback``: a snapshot of a ``Trainer`` at every optimizer step, and exact restarts."""

import os
import sys
from types import FrameType
from typing import Any

from transformers import TrainerCallback

from lazysnap.config import SnapshotConfig
from lazysnap.errors import ConfigError
from lazysnap.integrations.arguments import EVERY_N_STEPS, PERSIST_EVERY_N_STEPS, Arguments
from lazysnap.integrations.session import WithEngine
from lazysnap.integrations.transformers.training import Training


class LazyTrainerCallback(WithEngine, TrainerCallback):  # type: ignore[misc]
    """Captures the training state at optimizer steps while training goes on, and makes
    ``trainer.train(resume_from_checkpoint="latest")`` work, and ``"run:1f3a"`` for the run whose id begins so.

    Give it to the constructor: ``Trainer(..., callbacks=[LazyTrainerCallback()])``. To a ``Trainer`` that was made
    already it is given by ``attach_trainer``: a callback that is added later gets no reference to its trainer before
    training begins, which is too late for ``"latest"``.

    ``dirpath``: a path or fsspec URL for snapshots on storage; default ``<args.output_dir>/lazysnap``.
    ``every_n_steps``: optimizer steps between captures into memory. ``persist_every_n_steps``: optimizer steps between
    snapshots on storage. ``config``: everything else; it replaces the three.
    Raises: ConfigError, for settings that cannot work, or a shorthand that contradicts ``config``.
    """

    def __init__(
        self,
        dirpath: "str | os.PathLike[str] | None" = None,
        *,
        every_n_steps: int = EVERY_N_STEPS,
        persist_every_n_steps: int = PERSIST_EVERY_N_STEPS,
        config: SnapshotConfig | None = None,
    ) -> None:
        super().__init__()
        self._arguments = Arguments(dirpath, every_n_steps, persist_every_n_steps, config, "LazyTrainerCallback")
        self._training: Training | None = None

    def attach(self, trainer: Any) -> None:
        """Let ``trainer.train`` take snapshots and understand ``"latest"``. Replaces methods of this one object.

        Raises: ConfigError, for a trainer that cannot be attached to, or if the callback belongs to another one.
        """
        if self._training is not None and self._training.trainer is not trainer:
            raise ConfigError("LazyTrainerCallback: it belongs to another Trainer already; make one for each")
        if self._training is None:
            self._training = Training(trainer, self)

    # ---------------------------------------------------------------- hooks

    def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Find the trainer that is being made. Raises: ConfigError, as ``attach``."""
        trainer = self._caller()
        if trainer is not None:
            self.attach(trainer)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Raises: ConfigError, if no trainer was found when it was made."""
        if self._training is None or not self._training.is_running:
            raise ConfigError(
                "LazyTrainerCallback was added to a Trainer that was made already: give it to the constructor, as "
                "Trainer(..., callbacks=[LazyTrainerCallback()]), or call lazysnap.attach(trainer) instead"
            )

    def _caller(self) -> Any:
        """The trainer whose event is running: no event is given it, but its method is the caller."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            found = frame.f_locals.get("self")
            if self in getattr(getattr(found, "callback_handler", None), "callbacks", ()):
                return found
            frame = frame.f_back
        return None


def attach_trainer(
    trainer: Any, snapshots: "SnapshotConfig | str | os.PathLike[str] | None" = None
) -> LazyTrainerCallback:
    """Let a ``Trainer`` that was made already take snapshots, and understand ``resume_from_checkpoint="latest"``.

    ``snapshots``: settings, or a path or URL for snapshots on storage; default ``<args.output_dir>/lazysnap``. The same
    as ``LazyTrainerCallback`` in the constructor of the trainer, for where other code makes that. Returns the callback,
    also one that the trainer had already.
    Raises: ConfigError, for settings that cannot work, also beside a callback that is there already.
    """
    for item in trainer.callback_handler.callbacks:
        if isinstance(item, LazyTrainerCallback):
            if snapshots is not None:
                raise ConfigError("attach: the Trainer has a LazyTrainerCallback already; give snapshots= to that one")
            item.attach(trainer)
            return item
    if isinstance(snapshots, SnapshotConfig):
        callback = LazyTrainerCallback(config=snapshots)
    else:
        callback = LazyTrainerCallback(snapshots)
    callback.attach(trainer)
    trainer.add_callback(callback)
    return callback
