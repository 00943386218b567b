"""Runs work that may hang, so that the caller waits for it no longer than a deadline."""

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from lazysnap.errors import LevelError
from lazysnap.memory.capture_reader import CaptureAborted

Result = TypeVar("Result")
Beat = Callable[[], None]
"""Reports progress of work that may hang. It may raise, which ends the work."""

_CHECK_S = 0.25


class LevelHangs(LevelError, TimeoutError):
    """An operation at the level moved no byte for ``PersistentLevel.timeout_s``."""


class Watchdog(Generic[Result]):
    """Runs ``work(beat)`` in a daemon thread of its own. ``beat()`` reports progress.

    A thread that hangs in a dead file system cannot be ended, so it is abandoned. If it resumes later, its next
    ``beat()`` raises CaptureAborted, so that it commits and deletes nothing. A ``levels.watched.WatchedStorage`` calls
    ``beat`` before each operation, so that only work which waits for something else calls ``beat`` itself.
    """

    def __init__(self, work: Callable[[Beat], Result], name: str, timeout_s: float) -> None:
        """Begin the work. ``timeout_s``: seconds for which it may show no progress."""
        self.name = name
        self.timeout_s = timeout_s
        self._moved = time.monotonic()
        self._given_up = False
        self._deciding = threading.Lock()
        self._done = threading.Event()
        self._result: list[Result] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(work,), name=name, daemon=True)
        self._thread.start()

    def _run(self, work: Callable[[Beat], Result]) -> None:
        try:
            self._result.append(work(self.beat))
        except BaseException as error:  # noqa: BLE001  raised by ``result``
            self._error = error
        finally:
            self._done.set()

    def beat(self) -> None:
        """Report progress. Raises: CaptureAborted, if the deadline has passed and the caller no longer waits."""
        with self._deciding:  # after a beat that did not raise, the caller waits
            self._moved = time.monotonic()
            if self._given_up:
                raise CaptureAborted(f"{self.name}: came back after its deadline")

    def wait(self, seconds: float) -> bool:
        """True if the work ends within ``timeout_s``, with or without progress. Blocks. Does not stop the work."""
        return self._done.wait(seconds)

    def result(self) -> Result:
        """Return the result of ``work``. Blocks: while there is progress, and up to ``timeout_s`` without.

        Raises: as ``work``; LevelHangs.
        """
        while not self._done.wait(min(_CHECK_S, self.timeout_s)):
            with self._deciding:
                is_hanging = time.monotonic() - self._moved > self.timeout_s
                if is_hanging:
                    self._given_up = True
            if is_hanging:
                raise LevelHangs(
                    f"{self.name} did not move for {self.timeout_s:g} s; check the mount or endpoint, or raise "
                    "PersistentLevel(timeout_s=...)"
                )
        if self._error is not None:
            raise self._error
        return self._result[0]
