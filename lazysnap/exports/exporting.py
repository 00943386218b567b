"""``lazysnap.export``: a snapshot of any number of ranks in the format of another tool."""

import os
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from lazysnap.config import checked_url
from lazysnap.exports.job import ExportJob
from lazysnap.exports.named import Named, filled, named_in
from lazysnap.exports.target import ACCELERATE, FORMATS, format_of, named_when_whole, parents_made
from lazysnap.levels.store import open_storage
from lazysnap.resolver import LATEST, RestartPlan
from lazysnap.snapshots.assembly import WholeSnapshot
from lazysnap.snapshots.catalogue import Catalogue
from lazysnap.snapshots.reader import open_snapshot, retry_if_deleted


@dataclass(frozen=True)
class Exported:
    """The result of an export."""

    url: str
    """The level."""
    step: int
    run_id: str
    path: str
    """The absolute path of the result: ``url`` is absolute, too."""
    format: str
    size_bytes: int
    """The size of the exported files together."""
    notes: tuple[str, ...] = ()
    """One line for each kind of value that differs from the snapshot or is missing."""


def export(
    place: "str | os.PathLike[str]",
    target: "str | os.PathLike[str]",
    *,
    which: "str | int" = LATEST,
    format: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
) -> Exported:
    """Write a snapshot in the format of another tool, as ``lazysnap export`` does.

    Blocks. Sharded tensors are whole, bit for bit. Memory stays below 1 GB for any size. The training that writes to
    the level may continue; no keeper and no process group is needed. The result gets its name when it is complete and
    durable.

    Args:
        place: the path or URL of a level, as in ``PersistentLevel``.
        target: a local path that does not exist yet.
        which: ``"latest"``, a step, a name given by ``keep``, or ``"run:1f3a@200"``.
        format: ``safetensors``, ``huggingface``, ``ckpt``, ``dcp`` or ``accelerate``; default: the format of the
            suffix of ``target`` (``.safetensors``; ``.ckpt``, ``.pt``; none: ``dcp``).
        storage_options: options for the file system of the level, as in ``PersistentLevel``.

    Returns: step, run, path, format and size of the export.

    Raises: SnapshotNotFound; FormatError; StateError, for a value that the format cannot hold; ConfigError, also if the
    target exists; LevelError; OSError.

    Example::

        lazysnap.export("runs/lazysnap", "model", which="best", format="huggingface")
    """
    path = os.fspath(target)
    job = ExportJob(path=path, format=format_of(path, format))
    storage = open_storage(checked_url("export", place), options=storage_options)
    named = named_in(path)

    def attempt(catalogue: Catalogue) -> Exported:
        return write(catalogue, catalogue.find(which), job, named)

    return retry_if_deleted(storage, attempt)


def write(catalogue: Catalogue, plan: RestartPlan, job: ExportJob, named: Named | None = None) -> Exported:
    """Write one snapshot of a catalogue. Blocks. Raises: as ``export``; FileNotFoundError, if a file vanished.

    ``named``: the snapshot that the target names, if that is a directory of ``save_state(directory)``.
    """
    module_name, function_name = FORMATS[job.format].split(":")
    module = import_module(f"lazysnap.exports.{module_name}")
    writer: Callable[[WholeSnapshot, ExportJob, str], list[str]] = getattr(module, function_name)
    path = os.path.abspath(job.path)
    if named is not None and job.format == ACCELERATE and (named.run, named.step) == (plan.run_id, plan.step):
        place = filled(path, named)
    else:
        place = named_when_whole(job.path)
    with parents_made(path), place as temp, closing(open_snapshot(catalogue, plan)) as snapshot:
        notes = writer(WholeSnapshot(snapshot), job, temp)
        size_bytes = _size_of(temp)
    return Exported(catalogue.storage.url, plan.step, plan.run_id, path, job.format, size_bytes, tuple(notes))


def _size_of(path: str) -> int:
    """Return the bytes of a file, or of all files in a directory."""
    if not os.path.isdir(path):
        return os.path.getsize(path)
    size_bytes = 0
    for directory, _, names in os.walk(path):
        for name in names:
            size_bytes += os.path.getsize(os.path.join(directory, name))
    return size_bytes
