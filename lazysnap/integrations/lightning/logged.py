"""The runs of the loggers of a fit: held back until the snapshot is found, then begun with the ids in it.

Lightning begins the run of each logger before the ``setup`` hooks of callbacks, and looks for the checkpoint after
them. ``ModelCheckpoint`` asks a logger for its version in ``setup``.
"""

import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from lazysnap.integrations import logged_run
from lazysnap.integrations.logged_run import Entry, careful, kind_of
from lazysnap.integrations.patches import Patches

_WANDB, _MLFLOW, _TENSORBOARD, _CSV = "WandbLogger", "MLFlowLogger", "TensorBoardLogger", "CSVLogger"
_IDS = {_WANDB: "_id", _MLFLOW: "_run_id", _TENSORBOARD: "_version", _CSV: "_version"}
"""The attribute of each class of loggers that holds the id of the run, also if the program gave it."""
_DIRECTORIES = (_TENSORBOARD, _CSV)
"""Loggers whose run is a directory below their ``root_dir``, named after a version."""


class _Held(list[Any]):
    """Loggers that the first loop over them, which would begin their runs, does not see."""

    def __init__(self, trainer: Any) -> None:
        super().__init__(trainer.loggers)
        self._trainer = trainer

    def __iter__(self) -> Iterator[Any]:
        if self._trainer.loggers is self:
            self._trainer.loggers = self[:]
            return iter(())
        return super().__iter__()


class LoggedRuns:
    """The runs of the loggers of one fit."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._chosen: dict[int, Any] = {}
        """Ids that the program gave, by the ``id()`` of the logger."""
        self._is_held = False
        self._delays, self._guards = Patches(), Patches()
        self._later: list[Callable[[], Any]] = []
        """The hooks ``setup`` of checkpoint callbacks, which wait for the loggers."""

    def _known(self) -> list[tuple[Any, str]]:
        return [(one, kind) for one in self._trainer.loggers[:] if (kind := kind_of(one, _IDS))]

    def hold(self) -> None:
        """A fit begins: no run begins before ``begin``."""
        with careful("a logger"):
            self._chosen = {id(one): _chosen(one, kind) for one, kind in self._known()}
            # Strategies that shard a model restore it after Lightning has logged the hyperparameters.
            self._is_held = bool(self._chosen) and not self._trainer.strategy.restore_checkpoint_after_setup
            if self._is_held:
                self._trainer.loggers = _Held(self._trainer)

    def delay_checkpoints(self) -> None:
        """Let checkpoint callbacks that write beside the logs wait for ``begin``, too."""
        for one in self._trainer.callbacks if self._is_held else ():
            if kind_of(one, ("ModelCheckpoint",)) and one.dirpath is None:
                self._delays.replace(one, "setup", self._delayed)

    def _delayed(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self._later.append(partial(original, *args, **kwargs))

    def collect(self) -> dict[str, Any]:
        """Return the runs that have begun, and the first step that is logged again by a restart from here."""
        runs = logged_run.entries_of((kind, partial(_run_of, one, kind)) for one, kind in self._known())
        return {"first_step": self._trainer.fit_loop.epoch_loop._batches_that_stepped, "runs": runs}

    def begin(self, saved: Mapping[str, Any] | None) -> None:
        """Begin all runs. Those of ``saved``, as ``collect`` returned it, go on.

        Raises: what a logger raises that begins a new run.
        """
        entries = [] if saved is None else list(saved["runs"])
        for one, kind in self._known():
            if saved is not None and (entry := logged_run.taken(entries, kind)) is not None:
                with careful(kind):
                    self._go_on(one, entry, saved["first_step"])
        if self._is_held:
            for one in sorted(self._trainer.loggers, key=lambda one: kind_of(one, _IDS) != _WANDB):
                _ = getattr(one, "experiment", None)
        self._delays.undo()
        while self._later:
            self._later.pop(0)()

    def _go_on(self, one: Any, entry: Entry, first_step: int) -> None:
        kind, run, chosen = entry["kind"], entry["id"], self._chosen.get(id(one))
        if not self._trainer.is_global_zero:
            return
        now = _run_of(one, kind)
        is_below = kind not in _DIRECTORIES or os.path.join(one.root_dir, os.path.basename(run)) == run
        if now is None and chosen in (None, run) and is_below:
            _begin(one, kind, run, first_step)
            now = run
        if now not in (None, run, chosen):
            logged_run.warn_begun(kind, str(now), run)
        if now != run:
            return
        if kind == _WANDB:
            logged_run.mark_wandb(one.experiment, first_step)
        elif kind == _TENSORBOARD:
            logged_run.purge(one.experiment, first_step)
        elif kind == _MLFLOW:
            logged_run.reopen_mlflow(one._mlflow_client, run, first_step)
            self._guards.replace(one, "log_hyperparams", logged_run.log_carefully)

    def leave(self) -> None:
        """The fit is over."""
        self._delays.undo()
        self._guards.undo()


def _chosen(one: Any, kind: str) -> str | None:
    """The id that a logger has: the program gave it, or its run has begun."""
    found = getattr(one, _IDS[kind])
    if kind == _WANDB:
        found = found or os.environ.get("WANDB_RUN_ID")
    if kind in _DIRECTORIES and found is not None:
        found = os.path.join(one.root_dir, found if isinstance(found, str) else f"version_{found}")
    return None if found is None else str(found)


def _run_of(one: Any, kind: str) -> str | None:
    """The id of the run; ``None`` before it begins."""
    run = one._initialized if kind == _MLFLOW else one._experiment
    if not run:
        return None
    return str(run.id) if kind == _WANDB else _chosen(one, kind)


def _begin(one: Any, kind: str, run: str, first_step: int) -> None:
    """Begin ``run``, of a CSV file without the rows from ``first_step`` on.

    Raises: what the logger raises; then it can begin a new run.
    """
    if kind == _CSV and "://" in run:
        raise LookupError(f"{run} is not a local directory")  # the logger would delete the rows there
    before, version = getattr(one, _IDS[kind]), os.path.basename(run)
    number = version.removeprefix("version_")
    setattr(one, _IDS[kind], int(number) if kind in _DIRECTORIES and number.isdigit() else version)
    if kind == _WANDB:
        one._wandb_init["id"] = run
    try:
        if kind == _CSV:
            path = Path(one.log_dir, "metrics.csv")
            with logged_run.kept_rows(path, first_step) as columns, warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Experiment logs directory")
                one.experiment.metrics_keys = columns
        elif kind == _MLFLOW:
            logged_run.check_mlflow(one._mlflow_client, run)
        _ = one.experiment
    except Exception:
        setattr(one, _IDS[kind], before)
        if kind == _WANDB:
            one._wandb_init["id"] = before
        raise
