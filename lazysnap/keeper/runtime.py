"""The runtime directory, in which the processes of a job on this node connect.

::

    <runtime directory>/     mode 0700: no other user can connect
        keeper-KEY.lock      the process that holds a lock on it (flock) is the keeper, or starts the keeper
        keeper-KEY.sock      the keeper listens here
        keeper-KEY.log       errors of the keeper
        events-RUN-….jsonl   events of a run whose first level is at a URL (``keeper.event_file``)
        SPACE.PID.START/     the warm parents of a process, with its PID namespace and start (``warm.directories``)
        PROGRAM.imports      the modules that a warm start of a program imports first
        PROGRAM.left-out     the modules that it must not import first

KEY is a digest of job, user and node. The directory is the value of ``LAZYSNAP_RUNTIME_DIR``, else
``/tmp/lazysnap-UID``. It does not depend on ``HOME``, ``TMPDIR`` or ``XDG_RUNTIME_DIR``: the next start of a job may
have other values (a shell, cron, a service), and must find the same keeper. The directory of a login session is also
deleted at the logout, which a training may outlive.
"""

import contextlib
import fcntl
import os
import pathlib
import re
import socket
import time

from lazysnap.errors import KeeperError
from lazysnap.shard.names import parse_events_file_name
from lazysnap.warm import directories
from lazysnap.warm.directories import ENVIRONMENT

_LONGEST_PATH = 107
"""Maximum bytes of the path of a socket."""
REFRESH_S = 3600.0
"""Seconds between two updates of file times: clean-up programs spare files that changed lately."""
_KEPT_S = 7 * 86400.0
"""Seconds without a change after which files of ended jobs are removed."""
_FILE_NAME = re.compile(r"keeper-[0-9a-f]{16}\.(lock|log)")


def runtime_directory() -> pathlib.Path:
    """Return the directory, created if necessary. Raises: KeeperError, if another user could write there."""
    try:
        return pathlib.Path(directories.runtime_directory())
    except PermissionError as error:
        raise KeeperError(str(error)) from error


class KeeperFiles:
    """The files of one job on this node."""

    def __init__(self, directory: pathlib.Path, key: str) -> None:
        self.lock_path = directory / f"keeper-{key}.lock"
        self.socket_path = directory / f"keeper-{key}.sock"
        self.log_path = directory / f"keeper-{key}.log"

    @classmethod
    def of_socket(cls, path: str) -> "KeeperFiles":
        """Return the files that belong to that socket."""
        socket_path = pathlib.Path(path)
        return cls(socket_path.parent, socket_path.stem.removeprefix("keeper-"))

    def try_lock(self) -> "KeeperLock | None":
        """Take the lock. Returns: ``None`` if another process has it. Raises: OSError; KeeperError."""
        if len(os.fsencode(self.socket_path)) > _LONGEST_PATH:
            raise KeeperError(
                f"{self.socket_path} is too long for the path of a socket (at most {_LONGEST_PATH} bytes): set "
                f"{ENVIRONMENT} to a directory with a shorter path"
            )
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        descriptor = os.open(self.lock_path, flags, 0o600)
        lock = KeeperLock(self, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            return None
        except BaseException:
            lock.close()
            raise
        if not lock.is_current():  # a keeper that ended removed the file after it was opened here
            lock.close()
            return None
        return lock


class KeeperLock:
    """The lock of a job on this node. It is held while any process has the descriptor open."""

    def __init__(self, files: KeeperFiles, descriptor: int) -> None:
        self._files = files
        self.descriptor = descriptor

    def is_current(self) -> bool:
        """True if the locked file is still at its path."""
        try:
            return os.path.samestat(os.fstat(self.descriptor), os.lstat(self._files.lock_path))
        except FileNotFoundError:
            return False

    def bind(self) -> socket.socket:
        """Return a socket at the path of the job. It does not listen yet. Raises: OSError."""
        # The file of a killed keeper: a live one would have the lock.
        self._files.socket_path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(str(self._files.socket_path))
        except BaseException:
            listener.close()
            raise
        return listener

    def refresh(self) -> None:
        """Update the times of the files, so that clean-up programs spare them. Call this every ``REFRESH_S``."""
        with contextlib.suppress(OSError):  # the file system may have become read-only
            os.utime(self.descriptor)
            os.utime(self._files.socket_path)

    def remove(self) -> None:
        """Remove socket and lock. Raises: OSError."""
        if self.is_current():  # otherwise they belong to another keeper
            self._files.socket_path.unlink(missing_ok=True)
            self._files.lock_path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the descriptor of this process."""
        os.close(self.descriptor)


def remove_old_files() -> None:
    """Remove files of jobs that ended long ago. Raises: OSError; KeeperError."""
    directory = runtime_directory()
    for path in directory.iterdir():
        if _FILE_NAME.fullmatch(path.name) is None and parse_events_file_name(path.name) is None:
            continue
        with contextlib.suppress(OSError):
            if time.time() - path.stat().st_mtime > _KEPT_S:
                _remove_old(path)


def _remove_old(path: pathlib.Path) -> None:
    if path.suffix in (".log", ".jsonl"):
        path.unlink()
        return
    lock = KeeperFiles.of_socket(str(path)).try_lock()
    if lock is not None:
        try:
            lock.remove()
        finally:
            lock.close()
