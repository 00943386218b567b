"""One logged run over all starts of a training: how the run of a logger goes on at a restart.

A snapshot holds the ids of the runs that the loggers write to, and the first step that is logged again after a restart.
The adapters of the frameworks collect the ids, and hand them back before a logger begins a run. The packages of the
loggers are imported only by the program, or by its framework.
"""

import contextlib
import csv
import io
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from lazysnap.integrations.figures import PREFIX

logger = logging.getLogger(__name__)

Entry = dict[str, str]
"""One logger in a snapshot: its ``kind``, and the ``id`` of its run."""
RESUMED_STEP = PREFIX + "resumed_step"
"""The mark of a restart in a run that cannot be cut: the value is the first step that is logged again."""


@contextlib.contextmanager
def careful(name: str, fails: str = "does not go on with its run") -> Iterator[None]:
    """While it lasts, an error becomes a warning: no logger is worth a training."""
    try:
        yield
    except Exception as error:  # noqa: BLE001  a logger may raise anything
        logger.warning("%s %s: %s: %s", name, fails, type(error).__name__, error)


def log_carefully(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    """Replace a method that logs parameters: MLflow refuses other values than those that its run has."""
    with careful("MLflow", "keeps the parameters of the first start"):
        original(*args, **kwargs)


def entries_of(found: Iterable[tuple[str, Callable[[], str | None]]]) -> list[Entry]:
    """Return the entries of ``found``: pairs of a kind, and of what returns the id of a run (``None``: it has none)."""
    entries: list[Entry] = []
    for kind, make in found:
        # A logger whose run has no id to read begins a new one after a restart, as without snapshots.
        with contextlib.suppress(Exception):
            run = make()
            entries += [] if run is None else [{"kind": kind, "id": run}]
    return entries


def warn_begun(name: str, run: str, earlier: str) -> None:
    """Warn that ``run`` began too early to go on with ``earlier``, the run of the snapshot."""
    logger.warning(
        "%s logs to a new run (%s), not to that of the snapshot (%s): it began before the snapshot was found; use the "
        "logger only after that, or give it this id",
        name,
        run,
        earlier,
    )


def taken(entries: list[Entry], kind: str) -> Entry | None:
    """Remove the first entry of a ``kind`` from ``entries``, and return it."""
    found = next((entry for entry in entries if entry["kind"] == kind), None)
    if found is not None:
        entries.remove(found)
    return found


def kind_of(one: Any, kinds: Collection[str]) -> str:
    """The class among ``kinds``, by name, that ``one`` is of; empty if there is none."""
    return next((base.__name__ for base in type(one).__mro__ if base.__name__ in kinds), "")


# ---------------------------------------------------------------- MLflow


def check_mlflow(client: Any, run_id: str) -> Any:
    """Return a run. Raises: what the client raises; LookupError, if the run was deleted."""
    run = client.get_run(run_id)
    if run.info.lifecycle_stage == "deleted":
        raise LookupError(f"run {run_id} was deleted")
    return run


def reopen_mlflow(client: Any, run_id: str, first_step: int | None) -> None:
    """Let an MLflow run be RUNNING again, without what was logged from ``first_step`` on.

    Only a file store can be cut. The tag ``lazysnap/resumed_step`` marks the restart in any store.
    Raises: as ``check_mlflow``.
    """
    run = check_mlflow(client, run_id)
    client.update_run(run_id, status="RUNNING")
    if first_step is None:
        return
    client.set_tag(run_id, RESUMED_STEP, str(first_step))
    place = urlsplit(client.tracking_uri)
    if place.scheme in ("", "file"):
        path = unquote(place.path) if place.scheme else client.tracking_uri
        _cut_metrics(Path(path, run.info.experiment_id, run_id), first_step)


def _cut_metrics(run: Path, first_step: int) -> None:
    """Each file under ``metrics`` is one metric; each of its lines is a time, a value and a step."""
    for path in (run / "metrics").rglob("*"):
        lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
        kept = [line for line in lines if int(line.split()[2]) < first_step]
        if kept and len(kept) < len(lines):
            # In another directory: each file in this one is a metric.
            _replace(path, "".join(kept), run / "lazysnap.cut")
        elif lines and not kept:
            path.unlink()  # MLflow refuses a metric without values


# ---------------------------------------------------------------- W&B


def mark_wandb(run: Any, first_step: int | None, **at: Any) -> None:
    """Mark the restart in the next row of a W&B ``run``, or in that ``at`` a step: rows cannot be removed."""
    if first_step is not None:
        run.log({RESUMED_STEP: first_step}, **(at or {"commit": False}))


# ---------------------------------------------------------------- TensorBoard


def purge(writer: Any, first_step: int | None) -> None:
    """Let TensorBoard ignore what was written to the directory of ``writer`` from ``first_step`` on, until now."""
    if first_step is not None:
        writer.purge_step = first_step
        writer.close()
        writer._get_file_writer()  # a new file, which begins with this step
        writer.purge_step = None  # tensorboardX would purge again whenever it opens a file


# ---------------------------------------------------------------- CSV


def cut_rows(text: str, first_step: int) -> tuple[str, list[str]]:
    """Return the rows of a CSV file whose column ``step`` is below ``first_step``, and the names of its columns."""
    reader = csv.DictReader(io.StringIO(text, newline=""))
    columns, kept = list(reader.fieldnames or ()), io.StringIO(newline="")
    writer = csv.DictWriter(kept, columns)
    writer.writeheader()
    # A row that the dead process could not finish has no step.
    writer.writerows(row for row in reader if (row.get("step") or "").isdigit() and int(row["step"]) < first_step)
    return kept.getvalue(), columns


@contextlib.contextmanager
def kept_rows(path: Path, first_step: int) -> Iterator[list[str]]:
    """While it lasts, the CSV file ``path`` is out of reach: a logger that begins deletes it. Then it is cut.

    Yields the names of its columns. A process that dies meanwhile loses no row.
    """
    aside = path.with_name(path.name + ".lazysnap")
    columns: list[str] = []
    if aside.exists() and not path.exists():
        aside.replace(path)
    text = path.read_bytes().decode() if path.exists() else None
    if text is not None:
        text, columns = cut_rows(text, first_step)
        path.replace(aside)
    try:
        yield columns
    finally:
        if text is not None:
            _replace(path, text, path.with_name(path.name + ".cut"))
            aside.unlink()


def _replace(path: Path, text: str, temporary: Path) -> None:
    """Write ``text`` to ``path`` in one act; ``temporary`` is on the same file system."""
    temporary.write_bytes(text.encode())
    os.replace(temporary, path)
