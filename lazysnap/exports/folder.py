"""A checkpoint directory in Accelerate's layout: filled in place, and complete by its last act.

New files are written into a subdirectory, ``lazysnap-unfinished``. When they are durable, they are moved up one by one,
and ``lazysnap-export.json`` goes last. A directory with that subdirectory and without that file is unfinished. Other
files stay: scripts keep their own files beside a checkpoint. An earlier checkpoint in the same directory stays complete
until the moves begin.

The subdirectory is found again wherever a program moves its parent to. A new save deletes the one of an earlier save,
whose writer then fails: it has no files to move.
"""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from typing import Any

from lazysnap import faults
from lazysnap.errors import ConfigError
from lazysnap.exports.target import MARK, check_outside, sync
from lazysnap.levels.files import make_directories, sync_directory
from lazysnap.shard.limits import load_json

STOCK_FILE = re.compile(
    r"(model|pytorch_model|optimizer|scheduler|sampler|dl_state_dict)(_[0-9]{1,9})?\.(safetensors|bin)|scaler\.pt"
    r"|random_states_[0-9]{1,9}\.pkl|custom_checkpoint_[0-9]{1,9}\.pkl|" + re.escape(MARK)
)
"""Files that Accelerate writes, or this module."""
UNFINISHED = "lazysnap-unfinished"
_EARLIER = ".earlier"
_MOST_MARK_BYTES = 1 << 20
_MARK_NESTING = 4


@contextlib.contextmanager
def filled(path: str, facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield a directory to write a checkpoint into; on success its files become those of ``path``, durably.

    On an error ``path`` is as it was before, unless its files could not be moved. Only this process can use the yielded
    path; ``os.readlink`` returns one for others. It names the same directory even if a newer save replaces it.
    ``facts``: plain values for ``lazysnap-export.json``. Blocks. Raises: ConfigError, as ``begin``; OSError.
    """
    inner = begin(path)
    handle = os.open(inner, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{handle}"
        finish(f"/proc/self/fd/{handle}", facts)
    except BaseException:
        if os.path.exists(inner) and os.path.samestat(os.stat(inner), os.fstat(handle)):
            give_up(os.path.dirname(inner))
        raise
    finally:
        os.close(handle)


def begin(path: str) -> str:
    """Make a checkpoint's directory with an empty subdirectory for new files, and return the latter's path.

    Blocks. Raises: ConfigError, if ``path`` is a file or lies in a snapshot of a level; OSError.
    """
    path = os.path.realpath(path)
    check_outside(path)
    if os.path.lexists(path) and not os.path.isdir(path):
        raise ConfigError(f"{path} is a file: choose another name")
    make_directories(path)
    inner = os.path.join(path, UNFINISHED)
    shutil.rmtree(inner, ignore_errors=True)
    os.mkdir(inner)
    sync_directory(path)
    faults.point("export.folder.begun")
    return inner


def finish(inner: str, facts: Mapping[str, Any]) -> None:
    """Make the files in ``inner`` those of the directory that holds it: the earlier checkpoint there is replaced.

    Blocks. Raises: OSError; FileNotFoundError, if a program deleted ``inner``, or a newer save did.
    """
    new, path, earlier = sorted(_files(inner)), os.path.join(inner, os.pardir), os.path.join(inner, _EARLIER)
    sync(inner)
    faults.point("export.folder.whole")
    # Earlier files go into ``inner``. That fails if ``inner`` is deleted, so a writer that was replaced harms nothing.
    os.mkdir(earlier)
    with contextlib.suppress(FileNotFoundError):
        os.rename(os.path.join(path, MARK), os.path.join(earlier, MARK))
        sync_directory(path)
    with open(os.path.join(inner, MARK), "x", encoding="utf-8") as mark:
        json.dump({"lazysnap": "export", **facts, "files": new}, mark)
    sync(mark.name)
    for name in set(filter(STOCK_FILE.fullmatch, os.listdir(path))).difference(new):
        os.rename(os.path.join(path, name), os.path.join(earlier, name))
    for name in new:
        faults.point("export.folder.moved")
        target = os.path.join(path, name)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.replace(os.path.join(inner, name), target)
        sync_directory(os.path.dirname(target))
    sync_directory(path)
    os.replace(os.path.join(inner, MARK), os.path.join(path, MARK))
    sync_directory(path)
    faults.point("export.folder.named")
    shutil.rmtree(os.path.join(path, UNFINISHED), ignore_errors=True)


def give_up(path: str) -> None:
    """Remove what ``begin`` made in the directory ``path``, and that one if nothing else is in it. Blocks.

    If files were moved already, nothing is removed, and the directory stays unfinished: it may hold files of two
    checkpoints.
    """
    inner = os.path.join(path, UNFINISHED)
    if os.path.exists(os.path.join(inner, MARK)):
        return
    shutil.rmtree(inner, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.rmdir(path)


def is_unfinished(path: str) -> bool:
    """True if a checkpoint was begun in a directory, and there is no complete one. Blocks."""
    return os.path.exists(os.path.join(path, UNFINISHED)) and mark_of(path) is None


def discard(path: str) -> None:
    """Delete a checkpoint's directory and everything in it; first it becomes unfinished. Blocks. Raises: OSError."""
    os.makedirs(os.path.join(path, UNFINISHED), exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(path, MARK))
    faults.point("export.folder.discarded")
    shutil.rmtree(path)


def mark_of(path: str) -> dict[str, Any] | None:
    """Return the content of ``lazysnap-export.json`` in a directory; ``None`` if there is none. Blocks."""
    try:
        with open(os.path.join(path, MARK), "rb") as file:
            found = load_json(file.read(_MOST_MARK_BYTES), _MARK_NESTING)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("lazysnap") == "export" else None


def _files(path: str) -> Iterator[str]:
    """Yield paths below a directory, relative to it, of everything that is not a directory."""
    for at, directories, names in os.walk(path):
        links = [name for name in directories if os.path.islink(os.path.join(at, name))]
        yield from (os.path.relpath(os.path.join(at, name), path) for name in [*names, *links])
