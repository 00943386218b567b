"""``lazysnap.export``: a snapshot of any number of ranks in the format of another tool."""

import os
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from lazysnap.config import checked_url
from lazysnap.errors import ConfigError
from lazysnap.exports.folder import filled
from lazysnap.exports.job import ExportOptions, Job
from lazysnap.exports.target import format_of, parents_made, replaced_when_whole
from lazysnap.levels import open_store
from lazysnap.resolver import RestartPlan
from lazysnap.runs import LATEST
from lazysnap.snapshots.assembly import WholeSnapshot
from lazysnap.snapshots.catalogue import Catalogue
from lazysnap.snapshots.reader import look_again, open_snapshot

ACCELERATE = "accelerate"
_WRITERS = {
    "safetensors": "safetensors:write_safetensors",
    "huggingface": "huggingface:write_folder",
    "ckpt": "checkpoint:write_checkpoint",
    "dcp": "dcp:write_distributed",
    ACCELERATE: "accelerate:write_stock",
}
"""The module and the function that write each format. Most import torch, which takes seconds."""


@dataclass(frozen=True)
class Exported:
    """The result of an export."""

    url: str
    """The level."""
    step: int
    run_id: str
    path: str
    format: str
    size_bytes: int
    """The size of all files together."""
    notes: tuple[str, ...] = ()
    """One line for each kind of value that is not as in the snapshot, or that is missing."""


def export(
    url: "str | os.PathLike[str]",
    which: "str | int" = LATEST,
    *,
    to: "str | os.PathLike[str]",
    format: str | None = None,
    options: ExportOptions | None = None,
) -> Exported:
    """Write a snapshot in the format of another tool, as ``lazysnap export`` does.

    ``url``: a level, as in ``PersistentLevel``. ``which``: ``"latest"``, a step, a name given by ``keep``, or
    ``"run:1f3a@200"``. ``to``: a local path. ``format``: ``safetensors``, ``huggingface``, ``ckpt``, ``dcp`` or
    ``accelerate``; default: what the suffix of ``to`` says (``.safetensors``; ``.ckpt``, ``.pt``; none: ``dcp``).

    Sharded tensors are whole, bit for bit. Memory stays below 1 GB whatever the size. The training that writes there
    may go on; no keeper and no process group is needed. The result has its name when it is whole and durable.
    Blocks. Raises: SnapshotNotFound; FormatError; StateError, for a value that the format cannot hold;
    StateError; ConfigError; LevelError; OSError.
    """
    options = options or ExportOptions()
    job = Job(os.fspath(to), format_of(os.fspath(to), format), options)
    options.check(job.format)
    store = open_store(checked_url("export", url), options=options.storage_options)
    return look_again(store, lambda catalogue: write(catalogue, catalogue.find(which), job))


def write(catalogue: Catalogue, plan: RestartPlan, job: Job) -> Exported:
    """Write one snapshot of a catalogue. Blocks. Raises: as ``export``; FileNotFoundError, if a file vanished."""
    module, name = _WRITERS[job.format].split(":")
    writer: Callable[[WholeSnapshot, Job, str], list[str]] = getattr(import_module(f"lazysnap.exports.{module}"), name)
    path = os.path.abspath(job.path)
    if job.format == ACCELERATE:
        is_free = not os.path.lexists(path) or (os.path.isdir(path) and not os.listdir(path))
        if not (is_free or job.options.force):
            raise ConfigError(f"{path} exists: choose the option `force` to replace its checkpoint, or another name")
        place = filled(path, stock_facts(plan))
    else:
        place = replaced_when_whole(job.path, force=job.options.force)
    with parents_made(path), place as temp, closing(open_snapshot(catalogue, plan)) as snapshot:
        notes = writer(WholeSnapshot(snapshot), job, temp)
    size = sum(map(os.path.getsize, _files(path)))
    return Exported(catalogue.store.url, plan.step, plan.run_id, path, job.format, size, tuple(notes))


def stock_facts(plan: RestartPlan) -> dict[str, Any]:
    """Return what ``lazysnap-export.json`` says of a checkpoint in Accelerate's layout."""
    return {"layout": ACCELERATE, "step": plan.step, "run_id": plan.run_id}


def _files(path: str) -> list[str]:
    return [os.path.join(at, name) for at, _, names in os.walk(path) for name in names] or [path]
