"""Starts a keeper process, or connects to a running one."""

import contextlib
import os
import pathlib
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lazysnap import faults
from lazysnap.core.messages import TrainerState
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.runtime import KeeperLock
from lazysnap.keeper.wire import Channel

_CONNECT_S = 1.0
_LAST_STANDARD_DESCRIPTOR = 2
_FORK_WAIT_S = 5.0
_starting = threading.Lock()
"""Protects forks during the start of a keeper: a child would keep the keeper's end of the connection open."""
_forking = threading.local()


def _before_fork() -> None:
    """Wait while a keeper is started, which takes milliseconds. A start that hangs does not delay training."""
    _forking.has_lock = _starting.acquire(timeout=_FORK_WAIT_S)


def _after_fork_in_parent() -> None:
    if _forking.has_lock:
        _starting.release()


def _after_fork_in_child() -> None:
    global _starting
    _starting = threading.Lock()  # the parent's thread holds the other lock


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


class KeeperBusy(OSError):
    """Another process is or starts the keeper, and does not answer."""


def try_connect(identity: JobIdentity) -> Channel | None:
    """Return a connection to the keeper; None without one. Blocks: at most a second.

    Raises: KeeperError, without a runtime directory; WireError, if the keeper is of another user.
    """
    path = str(identity.files.socket_path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(_CONNECT_S)
    try:
        sock.connect(path)
    except OSError:
        sock.close()
        return None
    return Channel(sock)


@dataclass(frozen=True)
class StartingKeeper:
    """A keeper that is being started."""

    channel: Channel
    process: "subprocess.Popen[bytes]"
    """Ends as soon as the keeper is detached from it."""
    reaper: threading.Thread
    """Ends with ``process``."""

    def failure(self) -> str:
        """Return the error of the process that starts the keeper; empty if there is none yet."""
        status = self.process.returncode
        if not status:
            return ""
        return f" ({sys.executable} ended with status {status})"


def start_keeper(identity: JobIdentity, state: TrainerState, descriptors: Sequence[int] = ()) -> StartingKeeper:
    """Start a keeper, detached from this process: other session, no parent, no other descriptors.

    The new process holds the job's lock before it runs, so no other keeper can start. It also holds the state of this
    trainer and its slots, so no memory is lost if this process dies now. ``peer_pid`` of the channel is 0: the first
    ``KeeperState`` has the process id of the keeper.

    Args:
        identity: identity of the job.
        state: state of this trainer. ``Channel.flush`` sends the rest of a long one.
        descriptors: the descriptors of the slots, in the order of ``state.slots``.

    Raises: KeeperBusy, if another process has the lock; WireError, if the state is too large; OSError, if no process
        can be started.
    """
    faults.point("client.start_keeper")
    with _starting, _standard_descriptors_taken():
        lock = identity.files.try_lock()
        if lock is None:
            raise KeeperBusy(f"another process has the lock {identity.files.lock_path}, and does not answer")
        trainer_end, keeper_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        channel = Channel(trainer_end)
        channel.peer_pid = 0
        try:
            channel.send(state, descriptors)
            with lock.bind() as listener:
                process = _spawn(identity, lock, listener, keeper_end)
        except BaseException:
            channel.close()
            raise
        finally:
            keeper_end.close()
            lock.close()  # the new process has the lock; if none was started, it is free
    reaper = threading.Thread(target=process.wait, name="lazysnap-reap", daemon=True)
    reaper.start()
    return StartingKeeper(channel, process, reaper)


@contextlib.contextmanager
def _standard_descriptors_taken() -> Iterator[None]:
    """Keep descriptors 0, 1 and 2 in use: a new process replaces them, so inherited descriptors need other numbers.

    They are free if the program was started with closed standard descriptors (``<&- >&- 2>&-``).
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
    identity: JobIdentity, lock: KeeperLock, listener: socket.socket, trainer: socket.socket
) -> "subprocess.Popen[bytes]":
    """Start the process with the keeper's end of a connection."""
    root = str(pathlib.Path(__file__).resolve().parents[2])
    path = os.environ.get("PYTHONPATH")
    inherited = {"--lock": lock.descriptor, "--listener": listener.fileno(), "--trainer": trainer.fileno()}
    arguments = [f"{name}={descriptor}" for name, descriptor in inherited.items()]
    return subprocess.Popen(
        [sys.executable, "-m", "lazysnap.keeper", *identity.arguments, *arguments],
        env={**os.environ, "PYTHONPATH": f"{root}{os.pathsep}{path}" if path else root},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd="/",
        start_new_session=True,
        pass_fds=tuple(inherited.values()),
    )
