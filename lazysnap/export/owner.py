"""Which process writes a directory: its signature in it tells."""

import functools
import json
import os
import socket
from enum import Enum, auto

from lazysnap.shard.limits import MAX_SMALL_OBJECT_BYTES, load_json

_NESTING = 1
"""Of a signature: one object."""


class OwnerState(Enum):
    """What can be said from here of the process that made an object."""

    SELF = auto()
    DEAD = auto()
    UNKNOWN = auto()
    """On another host, in another container, or alive: only the object's age tells."""


def _started(pid: int) -> str:
    """When a process started, in ticks since boot; empty if that cannot be known."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


@functools.cache
def _place() -> tuple[str, str]:
    """Where process ids mean the same as here: host and boot, namespace. Empty if that cannot be known."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{socket.gethostname()} {file.read().strip()}", str(os.stat("/proc/self/ns/pid").st_ino)
    except OSError:
        return "", ""


def sign(purpose: str) -> bytes:
    """The content of an object that this process holds; no two are the same."""
    host, namespace = _place()
    pid = os.getpid()
    facts = {
        "lazysnap": purpose,
        "host": host,
        "namespace": namespace,
        "pid": pid,
        "started": _started(pid),
        "token": os.urandom(8).hex(),
    }
    return json.dumps(facts).encode() + b"\n"


def state_of(signed: bytes) -> OwnerState:
    """The state of the process that signed; anything that is not a signature is of an unknown one."""
    try:
        if len(signed) > MAX_SMALL_OBJECT_BYTES:
            return OwnerState.UNKNOWN
        facts = load_json(signed, _NESTING)
        place, pid, started = (facts["host"], facts["namespace"]), facts["pid"], facts["started"]
    except (ValueError, TypeError, KeyError):
        return OwnerState.UNKNOWN
    if place != _place() or not all(place) or not started or not isinstance(pid, int) or pid < 1:
        return OwnerState.UNKNOWN
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return OwnerState.DEAD
    except (OSError, OverflowError):
        return OwnerState.UNKNOWN
    found = _started(pid)
    if found and found != started:
        return OwnerState.DEAD  # the number was given to another one
    return OwnerState.SELF if found and pid == os.getpid() else OwnerState.UNKNOWN
