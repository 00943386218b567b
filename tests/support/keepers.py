"""Keepers, found by their job, or by the test in whose environment they were started."""

import contextlib
import os
import pathlib
import signal

from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.launch import try_connect

_KEEPER = b"\0-m\0lazysnap.keeper\0"


def keeper_of(identity: JobIdentity) -> int | None:
    """Return the process that is the keeper of a job; ``None`` if there is none, 0 if it just died."""
    connection = try_connect(identity)
    if connection is None:
        return None
    with contextlib.closing(connection):
        return connection.peer_pid


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
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended meanwhile, or is another user's
            if _KEEPER not in (process / "cmdline").read_bytes():
                continue
            lines = (process / "environ").read_bytes().split(b"\0")
            if of_worker <= {*lines} and any(line.startswith(wanted) for line in lines):
                os.kill(int(process.name), signal.SIGKILL)
