"""An export in a process of its own, which outlives the training."""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import threading
from collections.abc import Sequence

from lazysnap.config import PersistentLevel
from lazysnap.errors import LazySnapError
from lazysnap.exports.exporting import Exported, write
from lazysnap.exports.job import ExportJob
from lazysnap.exports.named import delete_checkpoint, named_in
from lazysnap.exports.target import ACCELERATE
from lazysnap.levels.redaction import Redaction
from lazysnap.levels.store import open_storage
from lazysnap.snapshots.catalogue import Catalogue
from lazysnap.snapshots.reader import retry_if_deleted

_NICE = 10  # a tenth of a busy core; 19 would give a seventieth, and the process first imports torch
_PROGRAM = "import sys; from lazysnap.exports.process import main; sys.exit(main())"


def start_export(directory: str, level: PersistentLevel, superseded: Sequence[str]) -> "subprocess.Popen[str]":
    """Start a detached process of low priority that puts a checkpoint into a directory of ``save_state(directory)``.

    ``level``: the level that has the snapshot of the directory. ``superseded``: directories of older checkpoints, which
    the process deletes first. The process writes an error to its standard output, and exits with another code than 0.
    Does not block for more than some milliseconds. Raises: OSError.
    """
    arguments = {
        "directory": os.path.abspath(directory),
        "place": level.url,
        "storage_options": dict(level.storage_options or {}),
        "superseded": [os.path.abspath(path) for path in superseded],
    }
    search_path = str(pathlib.Path(__file__).resolve().parents[2])
    inherited_path = os.environ.get("PYTHONPATH")
    if inherited_path:
        search_path = f"{search_path}{os.pathsep}{inherited_path}"
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM],
        env={**os.environ, "PYTHONPATH": search_path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
        text=True,
    )
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, process.pid, _NICE)
    assert process.stdin is not None
    with contextlib.suppress(OSError), process.stdin:  # other users cannot read the options of the storage from a pipe
        json.dump(arguments, process.stdin)
    threading.Thread(target=process.wait, name="lazysnap-reap", daemon=True).start()
    return process


def main() -> int:
    """Export to the directory that standard input names, unless it was deleted. Return the exit code. Blocks.

    Superseded checkpoints are deleted first, as Accelerate does: their space may be needed.
    """
    arguments = json.load(sys.stdin)
    for path in arguments["superseded"]:
        delete_checkpoint(path)
    directory = arguments["directory"]
    options = arguments["storage_options"]
    named = named_in(directory)
    if named is None:
        return 0
    job = ExportJob(path=directory, format=ACCELERATE)

    def attempt(catalogue: Catalogue) -> Exported:
        # With the name that was read first: if it is gone by now, the directory was deleted, and is not made again.
        return write(catalogue, catalogue.find(named.which), job, named)

    try:
        retry_if_deleted(open_storage(arguments["place"], options=options), attempt)
    except (LazySnapError, OSError) as error:
        if named_in(directory) == named:
            sys.stdout.write(Redaction(options).clean(error))
            return 1
    return 0
