"""File operations that say what they mean: durable names, whole reads and writes, direct I/O where there is such."""

import contextlib
import errno
import os
import stat

from lazysnap import faults
from lazysnap.errors import ShardCorrupt

PAGE = 4096
TEMP_MARK = ".tmp-"
_NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)


def temp_name(name: str) -> str:
    """A hidden name for a file being written; the process is told for the human who finds it."""
    return f".{name}{TEMP_MARK}{os.getpid()}-{os.urandom(4).hex()}"


def sync_directory(path: str) -> None:
    """Make the names in a directory durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:  # CIFS and some FUSE file systems have no such thing
            raise
    finally:
        os.close(handle)


def make_directories(path: str) -> None:
    """Make a directory and those above it, each durable in its parent before the next."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    if parent != path:
        make_directories(parent)
    with contextlib.suppress(FileExistsError):  # made by another one meanwhile, or a file: then opening fails
        os.mkdir(path)
        faults.point("level.local.mkdir")
        sync_directory(parent)


def allocate(handle: int, size_bytes: int) -> None:
    """Reserve space, where the file system can. Raises: OSError(ENOSPC)."""
    try:
        if size_bytes:
            os.posix_fallocate(handle, 0, size_bytes)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:
            raise


def open_direct(path: str, flags: int) -> int:
    """Open past the page cache; -1 where that is not possible (the caller has a buffered descriptor)."""
    try:
        return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return -1


def open_regular(path: str) -> int:
    """Open a regular file to read; never hangs on a pipe. Raises: ShardCorrupt, if it is something else."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ShardCorrupt(f"{path}: not a regular file")
    return handle


def pwrite_all(handle: int, offset: int, data: memoryview) -> None:
    """Write all of ``data``."""
    while len(data):
        written = os.pwrite(handle, data, offset)
        offset, data = offset + written, data[written:]


def pread_all(handle: int, offset: int, out: memoryview) -> int:
    """Fill ``out``, or as much as there is before the end of the file; returns the number of bytes."""
    done = 0
    while done < len(out):
        count = os.preadv(handle, [out[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done
