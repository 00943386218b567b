"""Named fault points, for tests only: a process dies, or an operation fails, exactly there.

A point costs one comparison while the environment variable ``LAZYSNAP_FAULT`` is unset. It is read once, at import:

``LAZYSNAP_FAULT="keeper.persist.before_rename:2:kill"``
    the second time that a process passes this point, do the action:
    ``kill`` (SIGKILL this process), ``kill-peer`` (SIGKILL the other one: the trainer's keeper, the keeper's
    trainer), ``kill-both``, ``raise`` (OSError EIO), ``enospc`` (OSError ENOSPC), ``hang`` (this thread, forever),
    ``stop`` (SIGSTOP this process; SIGCONT lets it continue).
``LAZYSNAP_FAULT_LOG=/path``
    append the name of every point that is passed; a dry run counts them.
"""

import errno
import os
import signal
import threading

_LOG_PATH = os.environ.get("LAZYSNAP_FAULT_LOG")
_SPEC = os.environ.get("LAZYSNAP_FAULT")
_ARMED = bool(_LOG_PATH or _SPEC)
_ACTIONS = ("kill", "kill-peer", "kill-both", "raise", "enospc", "hang", "stop")
_counts: dict[str, int] = {}
_peer_pid: list[int] = []


def set_peer(pid: int) -> None:
    """Set the process that ``kill-peer`` and ``kill-both`` kill."""
    _peer_pid[:] = [pid]


def point(name: str) -> None:
    """Pass the fault point ``name``: nothing in production, an injected death or error in a test."""
    if _ARMED:
        _pass(name)


def _pass(name: str) -> None:
    count = _counts.get(name, 0) + 1
    _counts[name] = count
    if _LOG_PATH:
        # One short O_APPEND write is atomic between the processes of a job.
        handle = os.open(_LOG_PATH, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.write(handle, f"{name}\n".encode())
        os.close(handle)
    if not _SPEC:
        return
    armed_name, armed_count, action = _SPEC.split(":")
    if action not in _ACTIONS:
        raise ValueError(f"LAZYSNAP_FAULT: unknown action {action!r}, expected one of {_ACTIONS}")
    if armed_name != name or int(armed_count) != count:
        return
    if action in ("kill-peer", "kill-both") and _peer_pid:
        os.kill(_peer_pid[0], signal.SIGKILL)
    if action in ("kill", "kill-both"):
        os.kill(os.getpid(), signal.SIGKILL)
    if action == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if action == "hang":
        threading.Event().wait()
    if action == "raise":
        raise OSError(errno.EIO, f"injected at {name}")
    if action == "enospc":
        raise OSError(errno.ENOSPC, f"injected at {name}")
