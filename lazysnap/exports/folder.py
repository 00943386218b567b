"""A checkpoint directory in Accelerate's layout: written beside its place, and moved there when it is durable.

Unlike ``target``, other files in the place stay: scripts keep their own files beside a checkpoint. Only the files of an
earlier checkpoint are replaced. Without other files that is one atomic exchange. Else the mark is deleted first, the
files are moved one by one, and the mark is written last.
"""

import contextlib
import ctypes
import errno
import json
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping
from typing import Any

from lazysnap import faults
from lazysnap.errors import ConfigError
from lazysnap.exports.target import MARK, check_outside, sync
from lazysnap.levels.files import TEMPORARY, sync_directory, temp_name
from lazysnap.levels.locks import lock, share
from lazysnap.shard.limits import load_json

STOCK_FILE = re.compile(
    r"(model|pytorch_model|optimizer|scheduler|sampler|dl_state_dict)(_[0-9]{1,9})?\.(safetensors|bin)|scaler\.pt"
    r"|random_states_[0-9]{1,9}\.pkl|custom_checkpoint_[0-9]{1,9}\.pkl|" + re.escape(MARK)
)
"""Files that Accelerate writes, or this module."""
_OWNER = ".lazysnap-owner"
"""A file in an unfinished directory, locked by its writer. The kernel drops the lock when the writer dies."""
_held: list[int] = []
"""Descriptors of such files of this process."""
UNFINISHED = "lazysnap-unfinished.json"
"""A file in a directory that was asked for, until its checkpoint is complete."""
_ABANDONED_AFTER_S = 86400.0
_MOST_MARK_BYTES = 1 << 20
_MARK_NESTING = 4
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_CANNOT_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EBUSY, errno.EPERM, errno.EACCES)


@contextlib.contextmanager
def in_place_when_whole(path: str, facts: Mapping[str, Any], *, made: int | None = None) -> Iterator[str]:
    """A new directory to write into; on success its files become those of ``path``, durably.

    On any error it is removed, and ``path`` is unchanged. What a dead process left for ``path`` is removed first.
    ``facts``: plain values for the mark. ``made``: a descriptor of the directory that ``mark_unfinished`` made at
    ``path``; it is filled where the program moved it to (``place_now``), and nothing is written if it is gone.
    Blocks. Raises: ConfigError, if ``path`` is a file or lies in a snapshot of a level; OSError;
    FileNotFoundError, if ``path`` is gone.
    """
    asked = path
    path = _checked(_found(asked, made))
    temp = _side_directory(path, is_made=made is not None)
    try:
        yield temp
        files = sorted(set(_files(temp)) - {_OWNER})
        with open(os.path.join(temp, MARK), "x", encoding="utf-8") as mark:
            json.dump({"lazysnap": "export", **facts, "files": files}, mark)
        sync(temp)
        faults.point("export.folder.whole")
        path = _checked(_found(asked, made))
        _put(temp, path, is_made=made is not None)
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(path, _OWNER))  # last: until then a sweep can remove what a dead process left
        sync_directory(os.path.dirname(path))
        faults.point("export.folder.named")
    finally:
        shutil.rmtree(temp, ignore_errors=True)


def mark_unfinished(path: str) -> None:
    """Make the directory of a checkpoint that will be filled later, marked as unfinished.

    A directory that is not empty is left alone: it may be an earlier checkpoint.
    Blocks. Raises: ConfigError, as ``in_place_when_whole``; OSError.
    """
    path = _checked(path)
    os.makedirs(path, exist_ok=True)
    if not os.listdir(path):
        with open(os.path.join(path, UNFINISHED), "w", encoding="utf-8") as mark:
            json.dump({"lazysnap": "unfinished"}, mark)


def handle_of(path: str) -> int:
    """A descriptor of a directory, for ``place_now``; it neither reads nor writes. Raises: OSError."""
    return os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)


def place_now(path: str, handle: int) -> str | None:
    """The path of a directory that was at ``path``, wherever a program moved it to; ``None`` if it was removed.

    ``handle``: its ``handle_of``.
    """
    with contextlib.suppress(OSError):
        found = os.readlink(f"/proc/self/fd/{handle}")
        is_there = os.path.samestat(os.stat(found), os.fstat(handle))
        if is_there and not TEMPORARY.fullmatch(os.path.basename(found)):  # else ``discard`` or an exchange has it
            return found
    # A copy that was put here in one exchange made it another directory.
    return os.path.realpath(path) if mark_of(path) is not None else None


def _found(path: str, made: int | None) -> str:
    found = path if made is None else place_now(path, made)
    if found is None:
        raise FileNotFoundError(errno.ENOENT, "the program removed it", path)
    return found


def give_up(path: str) -> None:
    """Remove what ``mark_unfinished`` made, unless something else is in it. Blocks. Raises nothing."""
    with contextlib.suppress(OSError):
        if os.listdir(path) == [UNFINISHED]:
            os.unlink(os.path.join(path, UNFINISHED))
            os.rmdir(path)


def is_unfinished(path: str) -> bool:
    """True if a directory was asked for and has no complete checkpoint yet. Blocks."""
    return os.path.exists(os.path.join(path, UNFINISHED)) and mark_of(path) is None


def _side_directory(path: str, *, is_made: bool) -> str:
    """Make a directory beside ``path``, owned by this process; what dead processes left for ``path`` is removed."""
    parent = _room(path)
    if not is_made:
        os.makedirs(parent, exist_ok=True)
    sweep(parent, os.path.basename(path))
    temp = os.path.join(parent, temp_name(os.path.basename(path)))
    os.mkdir(temp)
    _own(temp)
    faults.point("export.folder.made")
    return temp


def discard(path: str) -> None:
    """Delete a checkpoint's directory and everything in it: it is renamed first. Blocks. Raises: OSError."""
    _own(path)
    hidden = os.path.join(os.path.dirname(path), temp_name(os.path.basename(path)))
    os.rename(path, hidden)
    faults.point("export.folder.hidden")
    shutil.rmtree(hidden)


def mark_of(path: str) -> dict[str, Any] | None:
    """The content of the mark in the directory ``path``; ``None`` if there is none. Blocks."""
    try:
        with open(os.path.join(path, MARK), "rb") as file:
            found = load_json(file.read(_MOST_MARK_BYTES), _MARK_NESTING)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) and found.get("lazysnap") == "export" else None


def _own(directory: str) -> None:
    """Hold a lock on a file in a directory until the directory is removed or this process ends."""
    for handle in [handle for handle in _held if not os.fstat(handle).st_nlink]:
        _held.remove(handle)
        os.close(handle)
    name = os.path.join(directory, _OWNER)
    new = f"{name}-{os.urandom(4).hex()}"
    handle = os.open(new, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    _held.append(handle)
    share(handle)
    os.rename(new, name)  # only now: a sweep takes an unlocked file for that of a dead process


def _checked(path: str) -> str:
    path = os.path.realpath(path)
    check_outside(path)
    if os.path.lexists(path) and not os.path.isdir(path):
        raise ConfigError(f"{path} is a file: choose another name")
    return path


def _room(path: str) -> str:
    """Return the parent of the temporary directory: that of ``path``, or ``path`` if only that is possible."""
    parent = os.path.dirname(path)
    if os.path.isdir(path) and (os.path.ismount(path) or not os.access(parent, os.W_OK)):
        return path
    return parent


def sweep(parent: str, name: str = "") -> None:
    """Remove what dead writers left in ``parent``. Where there are no locks, what did not change for a day counts.

    A directory without an owner is removed only if it was made for ``name``. Blocks; raises nothing.
    """
    with contextlib.suppress(OSError), os.scandir(parent) as entries:
        for entry in entries:
            match = TEMPORARY.fullmatch(entry.name)
            with contextlib.suppress(OSError):
                is_ours = match is not None and entry.is_dir(follow_symlinks=False)
                if match is not None and is_ours and _is_abandoned(entry, is_exact=match[1] == name):
                    shutil.rmtree(entry.path)


def _is_abandoned(entry: "os.DirEntry[str]", *, is_exact: bool) -> bool:
    is_old = time.time() - entry.stat(follow_symlinks=False).st_mtime > _ABANDONED_AFTER_S
    try:
        handle = os.open(os.path.join(entry.path, _OWNER), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return is_exact and is_old
    try:
        is_free = lock(handle)
    finally:
        os.close(handle)
    return is_old if is_free is None else is_free


def _put(temp: str, path: str, *, is_made: bool) -> None:
    is_current = os.path.isdir(path) and os.path.samefile(path, ".")  # it keeps its inode
    if not is_current and not is_made:
        try:
            os.rename(temp, path)  # also onto an empty directory
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST, errno.EBUSY, errno.EINVAL):
                raise
        else:
            return
    # A new directory that was asked for keeps its inode, too: by that it is found again where a program moves it to.
    is_new = is_made and mark_of(path) is None
    is_shared = is_current or is_new or any(True for _ in _others(path))
    if not is_shared:
        _own(path)  # if this process dies after the exchange, a sweep removes the old directory
        is_shared = not _exchange(temp, path)
        if is_shared:
            os.unlink(os.path.join(path, _OWNER))
    if is_shared:
        _move_in(temp, path)
        return
    # What other processes put into the old directory meanwhile is kept.
    for name in list(_others(temp)):
        os.makedirs(os.path.dirname(os.path.join(path, name)), exist_ok=True)
        os.rename(os.path.join(temp, name), os.path.join(path, name))


def _files(path: str) -> Iterator[str]:
    """Paths below a directory, relative to it, of everything that is not a directory."""
    with os.scandir(path) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from (os.path.join(entry.name, inner) for inner in _files(entry.path))
            else:
                yield entry.name


def _listed(path: str) -> set[str]:
    """The files that the mark in a directory names."""
    files = (mark_of(path) or {}).get("files")
    return {os.path.normpath(name) for name in files if isinstance(name, str)} if isinstance(files, list) else set()


def _others(path: str) -> Iterator[str]:
    """Files in a directory that are not part of a checkpoint, relative to it."""
    ours = _listed(path) | {_OWNER, UNFINISHED}
    return (name for name in _files(path) if name not in ours and not STOCK_FILE.fullmatch(name))


def _exchange(temp: str, path: str) -> bool:
    """Exchange two directories atomically; ``False`` where that is impossible."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        rename = libc.renameat2
    except AttributeError:
        return False
    if rename(_AT_FDCWD, os.fsencode(temp), _AT_FDCWD, os.fsencode(path), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _CANNOT_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), path)


def _move_in(temp: str, path: str) -> None:
    """Replace the checkpoint in ``path`` file by file. The mark, written last, shows that it is whole."""
    new = set(_files(temp)) - {_OWNER, MARK}
    there = {name for name in os.listdir(path) if STOCK_FILE.fullmatch(name)}
    old = _listed(path) | there
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(path, MARK))
    for name in sorted(old - new - {MARK}):
        _delete_old(path, name)
    sync_directory(path)
    for name in sorted(new):
        faults.point("export.folder.moved")
        target = os.path.join(path, name)
        if os.path.dirname(name):
            os.makedirs(os.path.dirname(target), exist_ok=True)
        os.replace(os.path.join(temp, name), target)
        sync_directory(os.path.dirname(target))
    sync_directory(path)
    os.rename(os.path.join(temp, MARK), os.path.join(path, MARK))
    with contextlib.suppress(FileNotFoundError):
        os.unlink(os.path.join(path, UNFINISHED))
    sync_directory(path)


def _delete_old(path: str, name: str) -> None:
    """Delete a file of an earlier checkpoint, and the directories below ``path`` that are empty then."""
    target = os.path.join(path, name)
    directory = os.path.dirname(target)
    # Nothing that a mark claims is believed: nothing outside of the directory is touched.
    if os.path.realpath(directory) != directory or os.path.commonpath([directory, path]) != path:
        return
    with contextlib.suppress(OSError):
        os.unlink(target)
        while directory != path:
            os.rmdir(directory)
            directory = os.path.dirname(directory)
