"""Starting a keeper process, and reaching one."""

import os
import pathlib
import socket
import subprocess
import sys
import time

from lazysnap import faults
from lazysnap.errors import KeeperUnavailable
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.messages import Connection

_RETRY_S = 0.01
_CONNECT_S = 1.0


def try_connect(identity: JobIdentity) -> Connection | None:
    """A connection to the keeper of ``identity``, ``None`` if there is none. Blocks: at most a second, if it hangs."""
    return connect_to(identity.address)


def connect_to(address: str) -> Connection | None:
    """As ``try_connect``."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(_CONNECT_S)
    try:
        sock.connect(address)
    except (ConnectionRefusedError, FileNotFoundError, BlockingIOError, TimeoutError):
        sock.close()
        return None
    sock.settimeout(None)
    return Connection(sock)


def start_keeper(identity: JobIdentity) -> None:
    """Start a keeper, detached from this process: other session, no parent, no descriptors. Two starters may race."""
    faults.point("client.start_keeper")
    root = str(pathlib.Path(__file__).resolve().parents[2])
    path = os.environ.get("PYTHONPATH")
    subprocess.run(
        [sys.executable, "-m", "lazysnap.keeper", "--address", identity.address.encode().hex()],
        env={**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{path}" if path else root},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
        check=False,
        timeout=60,
    )


def reach_keeper(identity: JobIdentity, deadline: float) -> Connection:
    """Connect, starting a keeper where there is none.

    Blocks: until ``deadline`` (``time.monotonic``). Raises: KeeperUnavailable.
    """
    started_at = float("-inf")
    while True:
        connection = try_connect(identity)
        if connection is not None:
            return connection
        if time.monotonic() > deadline:
            raise KeeperUnavailable(
                f"no keeper of job {identity.job_id!r} could be started; `python -m lazysnap.keeper --foreground "
                f"--address {identity.address.encode().hex()}` shows why"
            )
        if time.monotonic() - started_at > 10:
            started_at = time.monotonic()
            start_keeper(identity)
        time.sleep(_RETRY_S)
