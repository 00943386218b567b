"""The faults of ``lazysnap chaos``. Each strikes a training that runs, and says what it did."""

import argparse
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
    pids = strike.training.keepers()
    strike.training.signal(signal.SIGKILL, pids)
    return "keeper killed" if pids else "no keeper ran at that moment"


def _both(strike: Strike) -> str:
    strike.training.end(strike.training.all)
    return "training and keeper killed"


def _stop(strike: Strike, who: str, pids: list[int]) -> str:
    strike.training.signal(signal.SIGSTOP, pids)
    try:
        return f"{who} stopped for {strike.pause(strike.window_s):.1f} s"
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
    has_ended = strike.training.code is not None
    strike.training.end(strike.training.all)
    newest = [] if has_ended else _files(strike)  # else it would be the result
    if not newest:
        return f"{'it ended' if has_ended else 'all killed'}; there was no file to damage"
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


def _disk(strike: Strike, what: str, fault: DiskFault, *, is_killed: bool = True) -> str:
    assert strike.disk is not None
    disk = strike.disk
    disk.set(fault)
    try:
        strike.training.wait(lambda: disk.calls > 0, time.monotonic() + strike.patience_s)
        took_s = strike.pause(strike.window_s)
        if is_killed:
            strike.training.end(strike.training.trainers)
        then = ", then killed" if is_killed else ""
        return f"{what} for {took_s:.1f} s ({count_of(disk.calls, 'write')} met it){then}"
    finally:
        disk.set(DiskFault.NONE)


FAULTS: dict[str, Callable[[Strike], str]] = {
    "kill": _kill,
    "keeper": _keeper,
    "both": _both,
    "stop": lambda strike: _stop(strike, "training", strike.training.trainers()),
    "stop-keeper": lambda strike: _stop(strike, "keeper", strike.training.keepers()),
    "term": _term,
    "flip": _flip,
    "full": lambda strike: _disk(strike, "disk full", DiskFault.FULL),
    "slow": lambda strike: _disk(strike, "disk slow (4 MB/s)", DiskFault.SLOW),
    "hang": lambda strike: _disk(strike, "disk hung", DiskFault.HANG, is_killed=False),
}
NEED_KEEPER = ("keeper", "both", "stop-keeper")
NEED_DISK = ("full", "slow", "hang")


def parse_faults(text: str) -> list[str]:
    """Return the faults in a list such as ``kill,flip``. Raises: argparse.ArgumentTypeError."""
    names = text.split(",")
    if unknown := [name for name in names if name not in FAULTS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: no such fault; there are {', '.join(FAULTS)}")
    return names
