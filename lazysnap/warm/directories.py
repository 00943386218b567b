"""The directories in which processes of this user connect: the runtime directory, and in it one per owner of warm
parents.

The runtime directory is also that of keepers: ``keeper.runtime``. It is here because a start of a program imports
nothing of lazysnap but this package.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import time
from collections.abc import Iterator

ENVIRONMENT = "LAZYSNAP_RUNTIME_DIR"
_PAUSE_S = 0.005


def runtime_directory() -> str:
    """Return the directory, created if necessary. Raises: PermissionError, if another user could write there."""
    path = os.environ.get(ENVIRONMENT) or f"/tmp/lazysnap-{os.getuid()}"
    try:
        problem = _problem_of(path)
    except OSError as error:
        problem = str(error)
    if problem:
        raise PermissionError(
            f"{path} cannot be the runtime directory, by which the processes of a job find their keeper: {problem}; "
            f"set {ENVIRONMENT} to a directory of mode 0700 that belongs to user {os.getuid()}, the same for all "
            "processes and starts of the job"
        )
    return path


def _problem_of(path: str) -> str:
    """Make the directory if it is missing. Returns: the reason why it cannot be used, or an empty string."""
    if not os.path.isabs(path):
        return "its path is not absolute"
    with contextlib.suppress(FileExistsError):
        os.makedirs(path, 0o700)
    status = os.lstat(path)
    if not stat.S_ISDIR(status.st_mode):
        return "it is not a directory"
    if status.st_uid != os.getuid():
        return f"it belongs to user {status.st_uid}"
    if status.st_mode & 0o077:
        return f"its mode is {stat.S_IMODE(status.st_mode):04o}, expected 0700"
    return ""


def owner_directory(pid: int) -> str:
    """Return the directory of process ``pid``, created if necessary. Directories of dead processes are removed."""
    base = runtime_directory()
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
    """Return the start of a process, in ticks since the start of the machine; ``None`` if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[19].decode()
    except (OSError, IndexError):
        return None


@contextlib.contextmanager
def locked(directory: str, timeout_s: float) -> Iterator[int]:
    """Hold a lock on a directory; yield its descriptor. Where the file system has no locks, nothing is held.

    Blocks: at most ``timeout_s``, while another process has the lock. Raises: TimeoutError, after that; OSError.
    """
    handle = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    deadline_s = time.monotonic() + timeout_s
    try:
        while not _try_lock(handle):
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"{directory}: another process has had its lock for {timeout_s:g} s")
            time.sleep(_PAUSE_S)
        yield handle
    finally:
        os.close(handle)


def _try_lock(handle: int) -> bool:
    """Take the lock of an open directory. ``False`` if another process has it."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # some file systems have no locks
    return True


def _pid_space() -> str:
    return str(os.stat("/proc/self/ns/pid").st_ino)
