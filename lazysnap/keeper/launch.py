"""Starting a keeper process, and connecting to one."""

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass

from lazysnap import faults
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.messages import Connection
from lazysnap.keeper.runtime import KeeperLock

_CONNECT_S = 1.0
_LAST_STANDARD_DESCRIPTOR = 2
_starting = threading.Lock()
"""A process that is forked while a keeper is started would keep the keeper's end of the connection open."""
os.register_at_fork(before=_starting.acquire, after_in_parent=_starting.release, after_in_child=_starting.release)


class KeeperBusy(OSError):
    """Another process is the keeper, or starts it, and does not answer."""


def try_connect(identity: JobIdentity) -> Connection | None:
    """Return a connection to the keeper, ``None`` if there is none. Blocks: at most a second.

    Raises: KeeperError, if there is no runtime directory, or the keeper is not of this user.
    """
    path = str(identity.files.socket_path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(_CONNECT_S)
    try:
        sock.connect(path)
    except OSError:
        sock.close()
        return None
    sock.settimeout(None)
    return Connection(sock)


@dataclass(frozen=True)
class Starting:
    """A keeper that is being started."""

    connection: Connection
    process: "subprocess.Popen[bytes]"
    """Ends at once, when the keeper is detached from it."""
    reaper: threading.Thread
    """Ends with ``process``."""

    def failure(self) -> str:
        """The error of the process that starts it; empty, if it did not, or has not ended yet."""
        status = self.process.returncode
        return f" ({sys.executable} ended with status {status})" if status else ""


def start_keeper(identity: JobIdentity) -> Starting:
    """Start a keeper, detached from this process: other session, no parent, no other descriptors.

    The new process holds the job's lock before it runs: no other keeper can come between. It also holds what is sent
    to the connection, descriptors included. Whose process is at the other end is not known before it answers.
    Raises: KeeperBusy, if another process has the lock; OSError, if no process can be started.
    """
    faults.point("client.start_keeper")
    with _starting, _standard_descriptors_taken():
        lock = identity.files.try_lock()
        if lock is None:
            raise KeeperBusy(f"another process has the lock {identity.files.lock_path}, and does not answer")
        try:
            with lock.bind() as listener:
                ours, process = _spawn(identity, lock, listener)
        finally:
            lock.close()  # the new process has it; if none was started, it is free
    reaper = threading.Thread(target=process.wait, name="lazysnap-reap", daemon=True)
    reaper.start()
    connection = Connection(ours)
    connection.peer_pid = 0
    return Starting(connection, process, reaper)


@contextlib.contextmanager
def _standard_descriptors_taken() -> Iterator[None]:
    """Keep 0, 1 and 2 in use: a new process replaces them, so what it inherits must have other numbers.

    They are free where the program was started with its standard descriptors closed (``<&- >&- 2>&-``).
    """
    placeholders = [os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)]
    while placeholders[-1] <= _LAST_STANDARD_DESCRIPTOR:
        placeholders.append(os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC))
    try:
        yield
    finally:
        for descriptor in placeholders:
            os.close(descriptor)


def _spawn(
    identity: JobIdentity, lock: KeeperLock, listener: socket.socket
) -> "tuple[socket.socket, subprocess.Popen[bytes]]":
    """Start the process. Returns: this end of a connection to it, and the process."""
    root = str(pathlib.Path(__file__).resolve().parents[2])
    path = os.environ.get("PYTHONPATH")
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    descriptors = (lock.descriptor, listener.fileno(), theirs.fileno())
    names = ("--lock", "--listener", "--trainer")
    inherited = [f"{name}={descriptor}" for name, descriptor in zip(names, descriptors, strict=True)]
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "lazysnap.keeper", *identity.arguments, *inherited],
            env={**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{path}" if path else root},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
            pass_fds=descriptors,
        )
    except BaseException:
        ours.close()
        raise
    finally:
        theirs.close()
    return ours, process
