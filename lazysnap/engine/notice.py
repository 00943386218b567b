"""The procedure between a notice of the end (``engine.signals``) and the end of the process.

::

    notice      the keeper stores the newest capture at once, and tells the other ranks
    boundary    if it comes soon: the newer step is captured, and the training thread stops there
    sealed      nothing more is captured. To the keeper this rank is as one whose trainer is dead: the keepers store the
                newest step that all ranks hold
    told        that step is durable: one line names it and the step that was cut
    end         at a boundary by an exception in the training thread, else at once

A boundary comes soon if it comes within twice the time of the last step, counted from the last boundary, and within
half of ``preemption_timeout_s``. When that time is over, the line says what is not durable and where it is, and the
process ends. A program that handles the signal itself ends itself: then the newest capture is stored, and the rest is
up to the program.
"""

import contextlib
import enum
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from lazysnap.config import SnapshotConfig
from lazysnap.console import say
from lazysnap.core.messages import KeeperState
from lazysnap.engine.signals import Listener
from lazysnap.keeper.client import KeeperClient

logger = logging.getLogger("lazysnap.engine")

EXIT_CODE = 128 + 15
"""The exit code of a training that a notice ends."""
_SLACK_S = 0.5
"""A step may take so much longer than twice the one before."""
_LOOK_S = 0.1
_FLUSH_S = 1.0
_LISTEN_S = 600.0
"""The keeper's state is waited for in turns of so long."""
_PAUSE_S = 1.0


@dataclass(frozen=True)
class RankCaptures:
    """The captures of one rank at one moment."""

    steps: tuple[int, ...]
    """Whole in memory, the newest first; empty if nothing is newer than ``durable``."""
    durable: tuple[int, str] | None
    """The newest step of this training that a level is known to have, and the URL of that level."""
    seen: int
    """The step of the last boundary, or of the snapshot that was resumed."""
    is_resumed: bool = False
    """True if the only step is the resumed one, which an earlier start captured."""


class _Way(enum.Enum):
    """The way a training ends after a notice."""

    CUT = "at the next boundary, or at once"
    PROGRAM = "the program ends it"
    CLOSE = "it was over already, and is being closed"


class Notice:
    """Waits for the notice of one training, and does what follows it.

    It is large because three threads take part in the one procedure that the module draws: the training thread, the
    listener's and the one that watches the time.
    """

    def __init__(
        self, config: SnapshotConfig, held: Callable[[], RankCaptures], seal: Callable[[], RankCaptures]
    ) -> None:
        """Both are called on other threads. ``held`` returns what is captured by now; ``seal``, too, when copies are
        done, and lets nothing be captured any more.
        """
        self._config, self._held, self._seal = config, held, seal
        self._timeout_s = config.preemption_timeout_s
        self._exception: type[BaseException] = SystemExit
        self.listener = Listener(self._received)
        self._client: KeeperClient | None = None
        self._keeper_listener: threading.Thread | None = None
        self._pace_s: float | None = None
        """The seconds between the last two boundaries."""
        self._last_s = 0.0
        """The time of the last boundary."""
        self._way: _Way | None = None
        """``None`` before the notice."""
        self._what = ""
        """The source of the notice."""
        self._stored = -1
        """The step that was stored after the notice."""
        self._is_closing = self._is_raised = self._is_telling = False
        self._arrived = threading.Event()
        """Set when the training thread is at a boundary."""
        self._telling = threading.Lock()
        self._is_told = threading.Event()
        self._is_left = threading.Event()

    # ---------------------------------------------------------------- the training thread

    def listen(self, client: KeeperClient, exception: type[BaseException]) -> None:
        """React to notices from now on. Idempotent. Does not block.

        ``exception`` is raised at the last boundary, with the exit code.
        """
        if self.listens:
            return
        self._client = client
        self._last_s = time.monotonic()
        self._exception = exception
        self.listener.start()
        self._keeper_listener = threading.Thread(
            target=self._listen_to_keeper, args=(client,), name="lazysnap-preempted", daemon=True
        )
        self._keeper_listener.start()
        if not self.listener.has_signals and os.getpid() == 1:
            logger.warning(
                "SIGTERM can neither end this training nor store its newest step: it is process number 1, and does not "
                "train on its main thread, where alone Python handles signals. Train on the main thread, or start the "
                "container with an init process (docker run --init)"
            )

    @property
    def listens(self) -> bool:
        """True after ``listen``."""
        return self._client is not None

    @property
    def cuts(self) -> bool:
        """True if the notice ends this training."""
        return self._way is _Way.CUT

    def passed(self) -> None:
        """A boundary is over; see ``end``, if the training ends here."""
        now = time.monotonic()
        self._pace_s, self._last_s = now - self._last_s, now
        self.end()

    def end(self) -> None:
        """If a notice cuts the training, block until its newest step is durable, and raise the exception of ``listen``.

        On another thread than the main one it ends the process: there an exception would end the thread alone.
        """
        if self.cuts and not self._is_raised:
            self._await_line()
            if threading.current_thread() is not threading.main_thread():
                self._exit()
            self._is_raised = True
            raise self._exception(EXIT_CODE)

    def _await_line(self) -> None:
        """The training thread has arrived: block until the last line is written, within the time."""
        self._arrived.set()
        self._is_told.wait(self._timeout_s)

    def closes(self) -> None:
        """The training is over, and is about to be closed: a notice waits for that."""
        self._is_closing = True

    def fails(self, error: BaseException | None, *, is_alone: bool) -> None:
        """``error`` ends the training. If a notice came, wait until the newest step is durable.

        With several ranks end the process then: those that are gone already make the others fail.
        """
        if self.cuts and not self._is_raised:
            self._await_line()
            if not is_alone:
                if error is not None:
                    _in_time(lambda: logger.warning("after the notice, %s:", type(error).__name__, exc_info=error))
                self._exit()

    def leave(self) -> None:
        """The training has ended: signals are handled as before. Idempotent. Blocks: an instant."""
        self._is_left.set()
        self.listener.close()
        if self._keeper_listener is not None:  # the client was left before, so it waits no longer
            self._keeper_listener.join(_PAUSE_S)

    def hand_on(self) -> None:
        """After ``leave``: a signal that came while the training was closed ends the process as it would without us."""
        if self._way is _Way.CLOSE:
            self.listener.raise_again(self._what)

    # ---------------------------------------------------------------- other threads

    def _listen_to_keeper(self, client: KeeperClient) -> None:
        """Wait until the keeper says that the processes of some rank are about to be killed, or the training ends."""

        def is_over(state: KeeperState) -> bool:
            return state.is_preempted or self._is_left.is_set()

        while not self._is_left.is_set():
            if client.wait(is_over, _LISTEN_S):
                break
            self._is_left.wait(_PAUSE_S)  # no keeper is sought, so the wait ended at once
        if not self._is_left.is_set():
            self.listener.notify()

    def _received(self, what: str) -> None:
        """Do all that follows a notice, on the listener's thread."""
        client = self._client
        assert client is not None
        ends_at = time.monotonic() + self._timeout_s
        self._what = what
        threading.Thread(target=self._guard, args=(ends_at,), name="lazysnap-notice-end", daemon=True).start()
        if self._is_closing:
            self._way = _Way.CLOSE
        elif self.listener.is_of_program(what):
            self._way = _Way.PROGRAM
        else:
            self._way = _Way.CUT
        client.preempt()
        if self._way is _Way.PROGRAM:
            self._watch_program(client, ends_at)
        if self._way is not _Way.CUT:
            return
        self._arrived.wait(self._patience_s())
        held = self._seal()
        client.seal()
        if self._store(client, held, ends_at):
            self._tell(is_stored=True)
            if not self._arrived.is_set():
                self._exit()

    def _patience_s(self) -> float:
        """Return the seconds within which the next boundary is expected."""
        if self._pace_s is None:
            return 0.0
        return max(0.0, min(self._last_s + 2 * self._pace_s + _SLACK_S - time.monotonic(), self._timeout_s / 2))

    def _store(self, client: KeeperClient, held: RankCaptures, ends_at: float) -> bool:
        """Block until the newest step that all ranks hold is durable at the first level; ``False`` after the deadline.

        Without levels, or without any capture, there is nothing to wait for.
        """
        if not self._config.levels or not held.steps:
            return True
        if not held.is_resumed:
            client.require(max(held.steps))
        while time.monotonic() < ends_at:
            stored = _newest_stored(client, held)
            if stored is not None:
                self._stored = stored
                return True
            time.sleep(_LOOK_S)
        return False

    def _watch_program(self, client: KeeperClient, ends_at: float) -> None:
        """The program ends itself: say when the newest step of now is durable."""
        newest = max(self._held().steps, default=None)
        while newest is not None and self._config.levels and client.newest_complete(0) < newest:
            if self._is_left.wait(_LOOK_S) or time.monotonic() > ends_at:
                return
        self._tell(is_stored=True)

    def _guard(self, ends_at: float) -> None:
        """End the process when the time is over, unless the training has ended, or the program ends it."""
        if self._is_left.wait(max(0.0, ends_at - time.monotonic())):
            return
        self._tell(is_stored=False)
        if self._way is not _Way.PROGRAM:
            self._exit()

    def _tell(self, *, is_stored: bool) -> None:
        """Write the last line, once. ``is_stored``: nothing that was waited for is missing."""
        with self._telling:
            is_first, self._is_telling = not self._is_telling, True
        if not is_first:
            self._is_told.wait(_FLUSH_S)
            return
        try:
            _in_time(lambda: self._write(is_stored=is_stored))
        finally:
            self._is_told.set()

    def _write(self, *, is_stored: bool) -> None:
        line = self._line(is_stored=is_stored)
        if is_stored and self._config.levels:
            say(line)
        else:
            logger.warning("%s", line)

    def _line(self, *, is_stored: bool) -> str:
        client = self._client
        held = self._held()
        levels = self._config.levels
        assert client is not None
        durable = self._stored
        url = ""
        if levels:
            durable = max(client.newest_complete(0), self._stored)
            url = levels[0].url
        if held.durable is not None and held.durable[0] > durable:
            durable, url = held.durable
        asks = "asks this training to end" if self._way is _Way.PROGRAM else "ended this training"
        head = f"{self._what or 'a notice to another rank'} {asks} in step {held.seen + 1}"
        stored = f"step {durable} is durable at {url}" if levels and durable >= 0 else ""
        newest = max(held.steps, default=-1)
        if newest < 0 and not stored:
            return f"{head}: no step of it was captured, a restart begins as this one did"
        if stored and (is_stored or newest <= durable):
            return f"{head}; {stored}"
        keeper = client.keeper_pid
        where = f"step {newest} is in the memory of " + (
            "this process alone" if keeper is None else f"the keeper (process {keeper})"
        )
        if os.getpid() == 1:
            where += ", which ends with this process, number 1 of its container"
        elif keeper is not None and levels:
            where += ", which goes on storing it"
        if not levels:
            return f"{head}; {where}: there is no storage level"
        return (
            f"{head}; NOT DURABLE after {self._timeout_s:g} s (preemption_timeout_s): {where}; "
            f"{stored or 'no step is durable'}"
        )

    def _exit(self) -> NoReturn:
        """End the process. Nothing else is reliable from here: the main thread may stand in a collective."""
        _in_time(_flush)
        os._exit(EXIT_CODE)


def _newest_stored(client: KeeperClient, held: RankCaptures) -> int | None:
    """Return the step that a restart finds at the first level; ``None`` while a newer one is still to be stored."""
    newest = max(held.steps)
    state = client.state
    if held.is_resumed:
        complete = state.levels[0].complete if state.levels else ()
        return newest if any(key.step == newest for key in complete) else None
    stored = client.newest_complete(0)
    if stored >= newest:
        return stored
    # If other ranks lack the newest step, the newest one that all of them hold is stored.
    is_newest_lost = any(key.step == newest for key in state.lost)
    return stored if is_newest_lost and stored >= min(held.steps) else None


def _in_time(work: Callable[[], None]) -> None:
    """Do ``work``, but wait for it only ``_FLUSH_S``: nobody may read a stream, or the main thread holds its lock."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(_FLUSH_S)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
