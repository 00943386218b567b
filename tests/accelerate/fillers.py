"""The processes that put checkpoints into directories, found by the directory that each has open."""

import os
from pathlib import Path

from support.waiting import until

TIMEOUT_S = 250
"""The processes have a low priority: on a busy machine they get little."""


def stopped_in(directory: Path) -> int:
    """Block until a process that fills this directory is stopped at a fault point; its number."""
    return until(lambda: [pid for pid in _in(directory) if _state(pid) == "T"], timeout_s=TIMEOUT_S)[0]


def _in(directory: Path) -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            places = [os.readlink(f"/proc/{name}/fd/{number}") for number in os.listdir(f"/proc/{name}/fd")]
        except OSError:  # it ended, or is another user's
            continue
        if str(directory) in places:
            found.append(int(name))
    return found


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""
