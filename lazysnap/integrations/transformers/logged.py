"""The runs of the callbacks of a ``Trainer`` that log: they begin with training, when the snapshot is known."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

from lazysnap.integrations import logged_run
from lazysnap.integrations.logged_run import Entry, careful, kind_of

_WANDB, _MLFLOW, _TENSORBOARD = "WandbCallback", "MLflowCallback", "TensorBoardCallback"
_VARIABLES = {_WANDB: "WANDB_RUN_ID", _MLFLOW: "MLFLOW_RUN_ID"}
"""Variables of the environment that give a callback the id of its run; a program may set them, too."""


class LoggedRuns:
    """The runs of the callbacks of one trainer."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.saved: list[Entry] = []
        """Runs of a snapshot that did not go on yet."""

    def known(self) -> list[tuple[Any, str]]:
        """Return the callbacks that log to a run, each with its kind."""
        callbacks, kinds = self._trainer.callback_handler.callbacks, (_WANDB, _MLFLOW, _TENSORBOARD)
        return [(one, kind) for one in callbacks if (kind := kind_of(one, kinds))]

    def collect(self) -> list[Entry]:
        """Return the runs that have begun."""
        return logged_run.entries_of((kind, partial(self._run_of, one, kind)) for one, kind in self.known())

    def _run_of(self, one: Any, kind: str) -> str | None:
        if not self._trainer.is_world_process_zero():
            return None
        if kind == _TENSORBOARD:
            return None if one.tb_writer is None else os.path.relpath(one.logging_dir, self._trainer.args.output_dir)
        return _active(kind) if one._initialized else None

    def on_train_begin(
        self, one: Any, original: Callable[..., Any], args: Any, state: Any, *rest: Any, **more: Any
    ) -> Any:
        """Replace the method of the callback ``one``; its run goes on behind the step of ``state``, if it is ``saved``.

        Raises: what the original raises that begins a new run.
        """
        kind, begin = next(pair[1] for pair in self.known() if pair[0] is one), partial(original, args, state, *rest)
        entry = logged_run.taken(self.saved, kind) if state.is_world_process_zero else None
        if entry is not None:
            go_on = self._tensorboard if kind == _TENSORBOARD else _with_id
            with careful(kind):
                return go_on(one, entry, state.global_step + 1, partial(begin, **more))
        return begin(**more)

    def _tensorboard(self, one: Any, entry: Entry, first_step: int, begin: Callable[[], Any]) -> Any:
        directory = os.path.join(self._trainer.args.output_dir, entry["id"])
        if one.tb_writer is None and one.logging_dir is None:
            one.logging_dir = os.path.normpath(directory)
        result = begin()
        if os.path.realpath(one.logging_dir or "") == os.path.realpath(directory):
            logged_run.purge(one.tb_writer, first_step)
        return result


def _with_id(one: Any, entry: Entry, first_step: int, begin: Callable[[], Any]) -> Any:
    """Call ``begin`` while a variable holds the id of the run of ``entry``, unless the program chose another."""
    kind, run = entry["kind"], entry["id"]
    chosen = os.environ.get(_VARIABLES[kind])
    now = _active(kind) or chosen
    if now not in (None, run):
        if now != chosen:
            logged_run.warn_begun(kind, str(now), run)
        return begin()
    if kind == _MLFLOW:
        logged_run.reopen_mlflow(sys.modules["mlflow"].MlflowClient(), run, first_step)
    with _environment({_VARIABLES[kind]: run, "WANDB_RESUME": "allow"}):
        result = begin()
    if kind == _WANDB:
        logged_run.mark_wandb(sys.modules["wandb"].run, first_step)
    return result


def _active(kind: str) -> str | None:
    """The id of the run of this process that callbacks of a ``kind`` log to; ``None`` before there is one."""
    if kind == _WANDB:
        run = sys.modules["wandb"].run
        return None if run is None else str(run.id)
    run = sys.modules["mlflow"].active_run()
    return None if run is None else str(run.info.run_id)


@contextlib.contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """While it lasts, those of the ``variables`` that are not set are."""
    new = {name: value for name, value in variables.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            os.environ.pop(name, None)
