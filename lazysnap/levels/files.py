"""File operations: durable names, complete reads and writes, direct I/O where the file system has it."""

import contextlib
import ctypes
import errno
import os
import re
import stat

from lazysnap import faults
from lazysnap.errors import FormatError, LevelError
from lazysnap.levels.storage import level_error

TEMPORARY = re.compile(r"\.(.+)\.tmp-[0-9]{1,10}-[0-9a-f]{8}")
"""The names that ``temp_name`` makes, each with the name of the file that is being written."""
_NOT_SUPPORTED = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)
_libc = ctypes.CDLL(None, use_errno=True)

_GONE = "unmount it (umount -l) and mount it again"
_REFUSED = "check owner and mode of the directory for user {user} (NFS turns root into nobody unless no_root_squash)"
_GAVE_UP = "look into the kernel's log: the disk failed, or the server of a soft NFS mount is away"
_NEXT_STEPS = {
    errno.ENOTDIR: "a file is where a directory has to be: move it away, or give the level another directory",
    errno.ESTALE: f"the directory was replaced at the server: {_GONE}",
    errno.ENOTCONN: f"what serves this mount is gone: {_GONE}",
    errno.EROFS: "look into the kernel's log why it is mounted read-only, then remount it for writing",
    errno.EACCES: _REFUSED,
    errno.EPERM: _REFUSED,
    errno.EIO: _GAVE_UP,
    errno.ETIMEDOUT: _GAVE_UP,
}


def local_error(url: str, action: str, error: OSError) -> LevelError:
    """Return ``error`` as a LevelError that names the place, the operation, and the next step."""
    next_step = _NEXT_STEPS.get(error.errno or 0)
    if next_step is None:
        return level_error(url, action, error)
    next_step = next_step.format(user=os.geteuid())
    return LevelError(f"{url}: {action}: {error}; {next_step}")


def temp_name(name: str) -> str:
    """Return a hidden name for a file being written. It contains the process id, for debugging."""
    return f".{name}.tmp-{os.getpid()}-{os.urandom(4).hex()}"


def sync_directory(path: str) -> None:
    """Make the names in a directory durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync_handle(handle)
    finally:
        os.close(handle)


def sync_handle(directory: int) -> None:
    """Make the names in an open directory durable."""
    try:
        os.fsync(directory)
    except OSError as error:
        if error.errno not in _NOT_SUPPORTED:  # CIFS and some FUSE file systems cannot
            raise


def make_directories(path: str) -> None:
    """Make a directory and those above it, each durable in its parent before the next."""
    if os.path.isdir(path):
        return
    parent = os.path.dirname(path)
    if parent != path:
        make_directories(parent)
    with contextlib.suppress(FileExistsError):  # another process made it, or it is a file: then opening fails
        os.mkdir(path)
        faults.point("level.local.mkdir")
        sync_directory(parent)


def allocate(handle: int, size_bytes: int) -> None:
    """Reserve space, where the file system can. Raises: OSError(ENOSPC).

    ``posix_fallocate`` is not used: on file systems without that call, glibc writes into each block. Over NFS that is
    the whole file.
    """
    while size_bytes:
        try:
            if _libc.fallocate(handle, 0, ctypes.c_int64(0), ctypes.c_int64(size_bytes)):
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), "fallocate")
        except InterruptedError:
            continue
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
        return


def is_file(handle: int, path: str) -> bool:
    """True if ``path`` names this open file."""
    try:
        return os.path.samestat(os.fstat(handle), os.lstat(path))
    except FileNotFoundError:
        return False


def close(*handles: int) -> None:
    """Close the descriptors that are open (not -1)."""
    for handle in handles:
        if handle >= 0:
            with contextlib.suppress(OSError):  # NFS reports here what fsync reported before
                os.close(handle)


def open_direct(path: str, flags: int) -> int:
    """Open for direct I/O; -1 where that is not possible (the caller has a buffered descriptor)."""
    try:
        return os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return -1


def open_regular(path: str) -> int:
    """Open a regular file to read; never hangs on a pipe. Raises: FormatError, if it is something else."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise FormatError(f"{path}: not a regular file")
    return handle


def pwrite_all(handle: int, offset: int, data: memoryview) -> None:
    """Write all of ``data``."""
    while len(data):
        written = os.pwrite(handle, data, offset)
        offset += written
        data = data[written:]


def pread_all(handle: int, offset: int, out: memoryview) -> int:
    """Fill ``out`` up to the end of the file at most. Return the number of bytes read."""
    done = 0
    while done < len(out):
        count = os.preadv(handle, [out[done:]], offset + done)
        if count == 0:
            break
        done += count
    return done
