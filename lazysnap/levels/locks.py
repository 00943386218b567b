"""Locks on open files that show whether a writer lives: the kernel drops them with their process.

Only ``flock`` is used. Over NFS it becomes a lock of the whole file at the server, so it holds between hosts. There it
also conflicts with ``lockf`` of the same process. No lock is ever waited for.

==================  =========  ==================================================================================
who                 lock       from, to
==================  =========  ==================================================================================
writer              exclusive  creation of its file, publication
writer              shared     publication, end of its commit: over NFS this takes a lost lock again
sweep               exclusive  an instant, to see whether a writer is there
==================  =========  ==================================================================================
"""

import errno
import fcntl

_NO_LOCKS = (errno.EOPNOTSUPP, errno.ENOLCK, errno.ENOSYS, errno.EINVAL)


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
    """Take the exclusive lock of an open file. True if it was taken; ``None`` where the file system has no locks."""
    return _flock(handle, fcntl.LOCK_EX)


def share(handle: int) -> bool | None:
    """Change the lock of an open file to a shared one. True if it was taken; ``None`` where there are no locks."""
    return _flock(handle, fcntl.LOCK_SH)
