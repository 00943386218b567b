"""Keepers, found by their job, or by the test in whose environment they were started."""

import contextlib
import os
import signal
from collections.abc import Iterator

from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.launch import try_connect
from support.waiting import stop

_KEEPER = b"\0-m\0lazysnap.keeper\0"


def keeper_of(identity: JobIdentity) -> int | None:
    """Return the process that is the keeper of a job; ``None`` if there is none, 0 if it just died."""
    connection = try_connect(identity)
    if connection is None:
        return None
    with contextlib.closing(connection):
        return connection.peer_pid


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Stop a keeper until the end of the block. It stands still from the beginning of the block on."""
    stop(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def end_keepers(test: str) -> None:
    """Kill all that were started while this process ran a test and a phase whose name begins so.

    Other workers of the same run may be in the middle of other tests of that module, and so may other runs.
    """
    wanted = f"PYTEST_CURRENT_TEST={test}".encode(errors="surrogateescape")
    of_worker = {
        f"{name}={os.environ[name]}".encode()
        for name in ("PYTEST_XDIST_WORKER", "LAZYSNAP_RUNTIME_DIR")
        if name in os.environ
    }
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
            if _KEEPER not in _read(f"/proc/{pid}/cmdline"):
                continue
            lines = _read(f"/proc/{pid}/environ").split(b"\0")
            if of_worker <= {*lines} and any(line.startswith(wanted) for line in lines):
                os.kill(int(pid), signal.SIGKILL)


def _read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:  # this is read behind each test, of all processes
        return file.readall()
