"""The runs of an accelerator's trackers. They go on when ``init_trackers`` has begun new ones and ``load_state`` has
found a snapshot. The new ones, which nothing was logged to, are removed.
"""

import logging
import os
import shutil
import sys
from functools import partial
from typing import Any

from lazysnap.integrations import logged_run
from lazysnap.integrations.logged_run import Entry, careful, kind_of

logger = logging.getLogger(__name__)

_RUNS = {"WandBTracker": "run", "MLflowTracker": "active_run", "TensorBoardTracker": "writer"}
"""The attribute of each class of trackers that holds the run, once it has begun."""
_WRITTEN_AT_START = {
    "requirements.txt",
    "output.log",
    "config.yaml",
    "wandb-metadata.json",
    "wandb-summary.json",
    "conda-environment.yaml",
}
"""Files that W&B writes for a run by itself."""


class LoggedRuns:
    """The runs of the trackers of one ``accelerator``."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self._saved: list[Entry] = []
        """Runs of a snapshot that did not go on yet."""
        self._first_step: int | None = None
        """The first step that is logged behind that snapshot; ``None`` if the program numbers no steps."""
        self._next_step: int | None = None
        """The step behind the greatest one that was logged."""
        self.shown: set[str] = set()
        """Names of trackers that the program asked for: it may hold their runs."""

    def note(self, step: Any) -> None:
        """The program logged something at ``step``."""
        if isinstance(step, int):
            self._next_step = max(step + 1, self._next_step or 0)

    def _begun(self) -> list[tuple[Any, str, Any]]:
        """Trackers, their kinds and their runs. Only the main process has runs."""
        known = [(one, kind_of(one, _RUNS)) for one in self._accelerator.trackers]
        found = [(one, kind, getattr(one, _RUNS[kind], None)) for one, kind in known if kind]
        return [(one, kind, run) for one, kind, run in found if run is not None]

    def collect(self) -> dict[str, Any]:
        """Return the runs that have begun, and the first step that is logged behind this snapshot."""
        runs = logged_run.entries_of((kind, partial(_id_of, one, run)) for one, kind, run in self._begun())
        return {"first_step": self._next_step, "runs": runs}

    def restore(self, saved: dict[str, Any]) -> None:
        """Take over what ``collect`` returned at the step that is restored."""
        self._saved = list(saved["runs"])
        self._first_step = self._next_step = saved["first_step"]

    def go_on(self) -> None:
        """Let the trackers that have begun go on with the runs of the snapshot."""
        for tracker, kind, run in self._begun() if self._saved else ():
            if (entry := logged_run.taken(self._saved, kind)) is not None:
                with careful(kind):
                    {"wandb": self._wandb, "mlflow": self._mlflow}.get(tracker.name, self._tensorboard)(
                        tracker, run, entry
                    )

    def _tensorboard(self, tracker: Any, writer: Any, entry: Entry) -> None:
        if str(tracker.logging_dir) == entry["id"]:
            logged_run.purge(writer, self._first_step)

    def _mlflow(self, tracker: Any, run: Any, entry: Entry) -> None:
        mlflow: Any = sys.modules["mlflow"]
        client, new = mlflow.MlflowClient(), run.info.run_id
        if new != entry["id"]:
            is_used = client.get_run(new).data.metrics or client.list_artifacts(new)
            if tracker.nested_run or tracker.run_id or is_used:
                logged_run.warn_begun(tracker.name, new, entry["id"])
                return
        logged_run.reopen_mlflow(client, entry["id"], self._first_step)
        if new != entry["id"]:
            mlflow.end_run()
            tracker.active_run = mlflow.start_run(run_id=entry["id"])
            client.delete_run(new)

    def _wandb(self, tracker: Any, run: Any, entry: Entry) -> None:
        if run.id != entry["id"]:
            is_chosen = "id" in tracker.init_kwargs or "WANDB_RUN_ID" in os.environ
            if is_chosen or tracker.name in self.shown or run.step:
                logged_run.warn_begun(tracker.name, run.id, entry["id"])
                return
            config, directory, is_offline = dict(run.config), run.settings.sync_dir, run.offline
            given = tracker.init_kwargs
            run.finish()
            tracker.init_kwargs = {**given, "id": entry["id"], "resume": "allow"}
            try:
                tracker.start()
            except Exception:
                tracker.init_kwargs = given
                tracker.start()  # else the next log would raise
                raise
            tracker.store_init_configuration(config)
            if is_offline and os.path.basename(directory).endswith(f"-{run.id}") and _is_as_begun(directory):
                shutil.rmtree(directory)  # it holds this configuration only
            else:
                logger.info("W&B goes on with run %s; run %s, which has no steps, can be deleted", entry["id"], run.id)
        logged_run.mark_wandb(tracker.run, self._first_step, step=self._first_step)


def _is_as_begun(directory: str) -> bool:
    """True if an offline run of W&B holds no file of the program."""
    return not set(os.listdir(os.path.join(directory, "files"))) - _WRITTEN_AT_START


def _id_of(tracker: Any, run: Any) -> str:
    if tracker.name == "mlflow":
        return str(run.info.run_id)
    return str(run.id if tracker.name == "wandb" else tracker.logging_dir)
