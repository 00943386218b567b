"""Locks on open files that the kernel drops with their process: who lives is asked of it, never guessed.

Only ``flock``: over NFS it becomes a lock of the whole file at the server, so it holds between hosts, but there it
also conflicts with ``lockf`` of the same process. No lock is ever waited for.

==================  =========  ==================================================================================
who                 lock       from, to
==================  =========  ==================================================================================
writer              exclusive  creation of its file, publication
writer              shared     publication, end of its commit: readers may come, no sweep may
reader with lease   shared     as long as it reads
sweep, retention    exclusive  an instant, to see whether one of the above is there
==================  =========  ==================================================================================
"""

import contextlib
import errno
import fcntl
import os
from collections.abc import Iterator

_NO_LOCKS = (errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL)
_LEASE_ATTEMPTS = 3


def _flock(handle: int, operation: int) -> bool | None:
    try:
        fcntl.flock(handle, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        # EBADF: NFS wants a descriptor open for writing for an exclusive lock, and the file is not ours to write.
        if error.errno in (*_NO_LOCKS, errno.EBADF):
            return None
        raise
    return True


def lock(handle: int) -> bool | None:
    """Whether this open file got the exclusive lock; ``None`` where the file system knows no locks."""
    return _flock(handle, fcntl.LOCK_EX)


def share(handle: int) -> bool | None:
    """Whether this open file got a shared lock, in place of what it had; ``None`` where there are no locks."""
    return _flock(handle, fcntl.LOCK_SH)


@contextlib.contextmanager
def lease(path: str) -> Iterator[None]:
    """Hold a shared lock on ``path``, if there is one to be had; it ends with the process."""
    handle = -1
    with contextlib.suppress(OSError):  # reading tells why
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        # Again, because a retention that looks for leases holds the lock for an instant.
        for _ in range(_LEASE_ATTEMPTS):
            if share(handle):
                break
            os.sched_yield()
    try:
        yield
    finally:
        if handle >= 0:
            with contextlib.suppress(OSError):
                # Closing is not enough: a worker forked meanwhile has the descriptor too.
                fcntl.flock(handle, fcntl.LOCK_UN)
            os.close(handle)


def is_leased(path: str) -> bool:
    """Whether somebody holds a lease on ``path``; a writer is no reader.

    Raises: OSError.
    """
    try:
        handle = _open_to_lock(path)
    except FileNotFoundError:
        return False
    try:
        # Not even a shared lock: it is being written.
        return share(handle) is True and lock(handle) is False
    finally:
        os.close(handle)


def _open_to_lock(path: str) -> int:
    flags = os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        return os.open(path, os.O_RDWR | flags)  # NFS locks exclusively only what is open for writing
    except PermissionError:
        return os.open(path, os.O_RDONLY | flags)
    except OSError as error:
        if error.errno != errno.EROFS:
            raise
        return os.open(path, os.O_RDONLY | flags)
