"""The program of a process that fills one checkpoint directory from a stored snapshot.

Its current directory is the one that ``folder.begin`` made, which it finds wherever a program moves the checkpoint to.
Its standard input is a JSON object with the arguments of ``fill``. It outlives the training. Exit codes: 0, if the
checkpoint is complete; ``GONE``, if the program deleted it, or a newer save replaced it; 1 with the reason as output.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from typing import Any

from lazysnap.errors import LazySnapError, LevelError, SnapshotNotFound
from lazysnap.exports.exporting import ACCELERATE, stock_facts
from lazysnap.exports.folder import finish
from lazysnap.exports.job import Job
from lazysnap.levels import open_store
from lazysnap.levels.redaction import Redaction
from lazysnap.levels.store import SnapshotStore
from lazysnap.snapshots.assembly import WholeSnapshot
from lazysnap.snapshots.catalogue import Catalogue
from lazysnap.snapshots.reader import look_again, open_snapshot

GONE = 3
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0


def fill(url: str, name: str, options: Mapping[str, Any], wait_s: float) -> None:
    """Fill the current directory from a snapshot, complete the checkpoint, and take the name from the snapshot.

    ``url``, ``options``: the level; ``name``: given by ``SnapshotEngine.keep``; ``wait_s``: the time that the level has
    to store the snapshot.
    Blocks. Raises: SnapshotNotFound, if the level has not stored it in time; FormatError; LevelError; StateError;
    OSError, also if the current directory was deleted.
    """
    store = open_store(url, options=options or None)
    of_hooks = set(os.listdir())
    _wait(store, name, time.monotonic() + wait_s)
    run_id = look_again(store, lambda catalogue: _fill(catalogue, name, of_hooks))
    with contextlib.suppress(LevelError):  # the engine of a living training takes the name, too
        store.release(run_id, name)


def _wait(store: SnapshotStore, name: str, deadline: float) -> None:
    pause_s = _FIRST_PAUSE_S
    while time.monotonic() + pause_s <= deadline:
        os.getcwd()  # raises, if the directory was deleted
        with contextlib.suppress(SnapshotNotFound, LevelError):
            if next(Catalogue(store).meant(name), None) is not None:
                return
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)


def _fill(catalogue: Catalogue, name: str, of_hooks: set[str]) -> str:
    """Return the id of the snapshot's run."""
    from lazysnap.exports.accelerate import write_stock  # imports torch, which takes seconds

    plan = catalogue.find(name)
    for left in set(os.listdir()) - of_hooks:  # by an attempt whose snapshot vanished while it was read
        os.unlink(left)
    with closing(open_snapshot(catalogue, plan)) as snapshot:
        write_stock(WholeSnapshot(snapshot), Job(path=os.curdir, format=ACCELERATE), os.curdir)
    finish(os.curdir, stock_facts(plan))
    return plan.run_id


def main() -> int:
    """Call ``fill`` with the arguments on standard input. Return the exit code. Blocks."""
    arguments = json.load(sys.stdin)
    try:
        fill(**arguments)
    except (LazySnapError, OSError) as error:
        try:
            os.getcwd()
        except FileNotFoundError:
            return GONE
        sys.stdout.write(Redaction({"secret": list(arguments["options"].values())}).clean(error))
        return 1
    return 0
