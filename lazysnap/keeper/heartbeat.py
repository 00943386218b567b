"""Whether a keeper that is attached answers: a stopped process ends no connection."""

import contextlib
import select
import time

from lazysnap.keeper.messages import Connection
from lazysnap.keeper.protocol import Ping

_MOST_S = 1.0
_LEAST_S = 0.05
_UNANSWERED = 2
"""A trainer that was itself stopped asks this often before it believes what its clock says."""
_MOST_PINGS = 8
"""Unanswered ones: more would fill the socket."""


class Heartbeat:
    """Of one connection, on the thread that receives its messages; ``fall_silent`` and ``is_silent`` on any.

    Answering -> silent, when nothing was heard for ``timeout_s``, pings or not; back with the next message.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = max(timeout_s, 2 * _LEAST_S)
        self._pause_ms = 1000 * max(_LEAST_S, min(_MOST_S, timeout_s / 4))
        self._heard = time.monotonic()
        self._pings = 0
        self.is_silent = False

    def wait(self, connection: Connection) -> bool:
        """Whether there is something to receive; asks for a sign of life where there was none for a while. Blocks."""
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
        """Whether the keeper should have answered by now."""
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
