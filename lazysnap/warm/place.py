"""The directories of warm parents: of their user, and of the process that each belongs to."""

import contextlib
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator


def user_directory() -> str:
    """Return the runtime directory, as ``keeper.runtime`` does. Raises: OSError, if somebody else could write there."""
    path = os.environ.get("LAZYSNAP_RUNTIME_DIR") or f"/tmp/lazysnap-{os.getuid()}"
    if not os.path.isabs(path):
        raise PermissionError(f"LAZYSNAP_RUNTIME_DIR must be an absolute path, got {path}")
    with contextlib.suppress(FileExistsError):
        os.makedirs(path, 0o700)
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(f"{path} must be a directory of user {os.getuid()} with mode 0700")
    return path


def owner_directory(pid: int) -> str:
    """Return the directory of process ``pid``. It is made, and those of dead processes are removed."""
    base = user_directory()
    for name in os.listdir(base):
        if name.startswith(f"{_pid_space()}.") and owner_of(name) is None:
            shutil.rmtree(os.path.join(base, name), ignore_errors=True)
    path = f"{base}/{_pid_space()}.{pid}.{started(pid)}"
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)
    return path


def owner_of(directory: str) -> int | None:
    """Return the process that a directory belongs to; ``None`` if it has ended or is in another PID namespace."""
    space, _, rest = os.path.basename(directory).partition(".")
    number, _, began = rest.partition(".")
    if space != _pid_space() or not number.isdigit() or began != started(int(number)):
        return None
    return int(number)


def started(pid: int) -> str | None:
    """Return the start of a process, in ticks since that of the machine; ``None`` if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[19].decode()
    except (OSError, IndexError):
        return None


@contextlib.contextmanager
def locked(directory: str) -> Iterator[int]:
    """Hold a lock on a directory; yield its descriptor. Blocks while another process has the lock."""
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield handle
    finally:
        os.close(handle)


def _pid_space() -> str:
    return str(os.stat("/proc/self/ns/pid").st_ino)
