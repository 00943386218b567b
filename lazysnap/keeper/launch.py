"""Starting a keeper process, and connecting to one."""

import os
import pathlib
import socket
import subprocess
import sys
import threading
from dataclasses import dataclass

from lazysnap import faults
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.messages import Connection

_CONNECT_S = 1.0
_starting = threading.Lock()
"""A process that is forked while a keeper is started would keep the keeper's end of the connection open."""
os.register_at_fork(before=_starting.acquire, after_in_parent=_starting.release, after_in_child=_starting.release)


def try_connect(identity: JobIdentity) -> Connection | None:
    """Return a connection to whoever has the name of the keeper, ``None`` if nobody has.

    Nothing may be said there before both have proven themselves (``greeting.prove``). Blocks: at most a second.
    """
    address = identity.address
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(_CONNECT_S)
    try:
        sock.connect(address)
    except (ConnectionRefusedError, FileNotFoundError, BlockingIOError, TimeoutError):
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

    The new process has the job's name from now on, before it runs: no other keeper can come between. It also holds what
    is sent there, descriptors included. Whose process is at the other end is not known before it answers.
    Raises: OSError, if no process can be started, or if another one has the name.
    """
    faults.point("client.start_keeper")
    root = str(pathlib.Path(__file__).resolve().parents[2])
    path = os.environ.get("PYTHONPATH")
    with _starting, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        try:
            listener.bind(identity.address)
        except OSError as error:
            raise OSError(error.errno, "another process has its name, and does not listen yet") from error
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with theirs:
                sockets = f"--listener={listener.fileno()}", f"--trainer={theirs.fileno()}"
                process = subprocess.Popen(
                    [sys.executable, "-m", "lazysnap.keeper", *identity.arguments, *sockets],
                    env={
                        **os.environ,
                        **identity.environment,
                        "PYTHONPATH": f"{root}{os.pathsep}{path}" if path else root,
                    },
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    cwd="/",
                    start_new_session=True,
                    pass_fds=(listener.fileno(), theirs.fileno()),
                )
        except BaseException:
            ours.close()
            raise
    reaper = threading.Thread(target=process.wait, name="lazysnap-reap", daemon=True)
    reaper.start()
    connection = Connection(ours)
    connection.peer_pid = 0
    return Starting(connection, process, reaper)
