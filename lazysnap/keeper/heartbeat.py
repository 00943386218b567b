"""Signs of life of a keeper: a stopped process ends no connection, and a slow one is waited for."""

import contextlib
import select
import time

from lazysnap.keeper.messages import Connection
from lazysnap.keeper.protocol import Ping

_MOST_S = 1.0
_LEAST_S = 0.05
_UNANSWERED = 2
"""A trainer that was itself stopped asks this often before it believes what its clock says."""
_MOST_TIMEOUTS = 5
"""A process that runs and does not answer is waited for so many timeouts."""
LOOK_S = 0.25
"""A keeper that does nothing looks around ten times a second."""
_MOST_PINGS = 8
"""Unanswered ones: more would fill the socket."""


class Patience:
    """Moves a deadline on as long as the process that is waited for runs, be it slowly."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._last = time.monotonic() + _MOST_TIMEOUTS * timeout_s
        self._until = float("-inf")
        self._seen: tuple[int, str] | None = None

    def look(self, pid: int) -> None:
        """Look whether that process ran since the last look; call this every ``LOOK_S``."""
        ran = _times_run(pid)
        if ran is not None:
            if self._seen is not None and self._seen != (pid, ran):
                self._until = min(time.monotonic() + self._timeout_s, self._last)
            self._seen = pid, ran

    def extend(self, deadline: float) -> float:
        """Return the deadline, or the later one that the signs of life allow; both by the monotonic clock."""
        return max(deadline, self._until)


def _times_run(pid: int) -> str | None:
    """Return a count of how often the main thread ran; ``None``, if the process cannot be seen from here."""
    try:
        with open(f"/proc/{pid}/status") as file:
            return "".join(line for line in file if "ctxt_switches" in line)
    except OSError:
        return None


class Heartbeat:
    """The heartbeat of one connection, on the thread that receives its messages; ``fall_silent`` and ``is_silent`` on
    any.

    Answering -> silent, when nothing arrived for ``timeout_s``, pings or not; back with the next message.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = max(timeout_s, 2 * _LEAST_S)
        self._pause_ms = 1000 * max(_LEAST_S, min(_MOST_S, timeout_s / 4))
        self._heard = time.monotonic()
        self._pings = 0
        self.is_silent = False

    def wait(self, connection: Connection) -> bool:
        """True if there is something to receive; asks for a sign of life where there was none for a while. Blocks."""
        poll = select.poll()
        poll.register(connection.sock, select.POLLIN)
        if poll.poll(self._pause_ms):
            return True
        if self._pings < _MOST_PINGS:
            self._pings += 1
            with contextlib.suppress(OSError):
                connection.send(Ping(), timeout_s=_LEAST_S)
        return False

    @property
    def is_over(self) -> bool:
        """True if the keeper should have answered by now."""
        return self._pings > _UNANSWERED and time.monotonic() - self._heard >= self._timeout_s

    def fall_silent(self) -> bool:
        """The keeper does not answer; whether that is new."""
        is_new, self.is_silent = not self.is_silent, True
        return is_new

    def heard(self) -> bool:
        """A message came; whether the keeper had been silent."""
        was_silent, self.is_silent = self.is_silent, False
        self._heard, self._pings = time.monotonic(), 0
        return was_silent
