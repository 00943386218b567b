"""The faults of ``lazysnap chaos``. Each strikes a training that runs, and says what it did."""

import contextlib
import pathlib
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

from lazysnap.cli.chaos_disk import Disk, DiskFault
from lazysnap.cli.chaos_training import Training
from lazysnap.cli.output import count_of

_GRACE_S = 30.0
_TOGETHER_S = 1.0
_LOGS = (".jsonl", ".log", ".csv", ".txt")
"""Names of files that a training only appends to end like this: no checkpoint is in them."""


@dataclass(frozen=True)
class Strike:
    """The needs of a fault."""

    training: Training
    dice: random.Random
    window_s: float
    """Duration of a fault that passes."""
    patience_s: float
    """Longest time until there is something to strike: a file, a write."""
    damage: str | None
    """The files in which bits are flipped; ``None``: all but logs."""
    disk: Disk | None

    def pause(self, longest_s: float) -> float:
        """Block until the window is over or the command ended. Return the seconds."""
        began_s = time.monotonic()
        self.training.wait_ended(began_s + longest_s)
        return time.monotonic() - began_s


def _kill(strike: Strike) -> str:
    strike.training.end(strike.training.trainers)
    return "training killed"


def _keeper(strike: Strike) -> str:
    pids = strike.training.processes()[1]
    strike.training.signal(signal.SIGKILL, pids)
    return "keeper killed" if pids else "no keeper ran at that moment"


def _both(strike: Strike) -> str:
    strike.training.end(strike.training.all)
    return "training and keeper killed"


def _stop(strike: Strike) -> str:
    return f"training stopped for {_stopped(strike, strike.training.trainers()):.1f} s"


def _stop_keeper(strike: Strike) -> str:
    return f"keeper stopped for {_stopped(strike, strike.training.processes()[1]):.1f} s"


def _stopped(strike: Strike, pids: list[int]) -> float:
    strike.training.signal(signal.SIGSTOP, pids)
    try:
        return strike.pause(strike.window_s)
    finally:
        strike.training.signal(signal.SIGCONT, pids)


def _term(strike: Strike) -> str:
    strike.training.signal(signal.SIGTERM, strike.training.trainers())
    took_s = strike.pause(_GRACE_S)
    code = strike.training.code
    strike.training.end(strike.training.trainers)
    ended = f"it ended with code {code} after {took_s:.1f} s" if code is not None else f"killed after {took_s:.0f} s"
    return f"SIGTERM; {ended}"


def _flip(strike: Strike) -> str:
    """Damage is found by reading: so nothing may be left in memory."""
    strike.training.wait(lambda: bool(_files(strike)), time.monotonic() + strike.patience_s)
    strike.training.end(strike.training.all)
    newest = _files(strike)
    if not newest:
        return "all killed; there was no file to damage"
    share, bit, path = strike.dice.random(), strike.dice.randrange(8), strike.dice.choice(newest)
    at = int(share * path.stat().st_size)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0] ^ 1 << bit
        file.seek(at)
        file.write(bytes([byte]))
    return f"all killed; bit {bit} of byte {at} of {path.relative_to(strike.training.files)} flipped"


def _files(strike: Strike) -> list[pathlib.Path]:
    """Return the newest file, and those written with it in the same directory."""
    times_s: dict[pathlib.Path, float] = {}
    with contextlib.suppress(FileNotFoundError):  # the training deletes files, too
        for path in sorted(strike.training.files.glob(strike.damage or "**/*")):
            if strike.damage is None and path.suffix in _LOGS:
                continue
            if path.is_file() and not path.is_symlink() and path.stat().st_size:
                times_s[path] = path.stat().st_mtime
    newest = max(times_s, key=lambda path: times_s[path], default=pathlib.Path())
    return [one for one in times_s if one.parent == newest.parent and times_s[newest] - times_s[one] < _TOGETHER_S]


def _full(strike: Strike) -> str:
    return f"disk full for {_disk(strike, DiskFault.FULL, is_killed=True)}, then killed"


def _slow(strike: Strike) -> str:
    return f"disk slow (4 MB/s) for {_disk(strike, DiskFault.SLOW, is_killed=True)}, then killed"


def _hang(strike: Strike) -> str:
    return f"disk hung for {_disk(strike, DiskFault.HANG, is_killed=False)}"


def _disk(strike: Strike, fault: DiskFault, *, is_killed: bool) -> str:
    assert strike.disk is not None
    disk = strike.disk
    disk.set(fault)
    try:
        strike.training.wait(lambda: disk.calls > 0, time.monotonic() + strike.patience_s)
        took_s = strike.pause(strike.window_s)
        if is_killed:
            strike.training.end(strike.training.trainers)
        return f"{took_s:.1f} s ({count_of(disk.calls, 'write')} met it)"
    finally:
        disk.set(DiskFault.NONE)


FAULTS: dict[str, Callable[[Strike], str]] = {
    "kill": _kill,
    "keeper": _keeper,
    "both": _both,
    "stop": _stop,
    "stop-keeper": _stop_keeper,
    "term": _term,
    "flip": _flip,
    "full": _full,
    "slow": _slow,
    "hang": _hang,
}
NEED_KEEPER = ("keeper", "both", "stop-keeper")
NEED_DISK = ("full", "slow", "hang")
