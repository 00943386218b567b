"""The processes that fill checkpoint directories, found by their current directories."""

import os
from pathlib import Path

from support.waiting import until

from lazysnap.exports.folder import UNFINISHED

TIMEOUT_S = 250
"""The processes have a low priority: on a busy machine they get little."""


def stopped_in(checkpoint: Path) -> int:
    """Block until a process that fills this directory is stopped at a fault point; its number."""
    return until(lambda: [pid for pid in _in(checkpoint) if _state(pid) == "T"], timeout_s=TIMEOUT_S)[0]


def _in(checkpoint: Path) -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{name}/cwd") == str(checkpoint / UNFINISHED):
                found.append(int(name))
        except OSError:  # it ended, or is another user's
            continue
    return found


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""
