"""Preemption: from a signal that says that the processes are about to be killed, to the end of the training.

::

    signal      the keeper is told at once: it stores the newest capture, and tells the other ranks
    boundary    if it comes in time, it captures the newer step, and the training thread stops there
    sealed      nothing more is captured: the keepers store the newest step that all ranks hold
    durable     one line names that step and the step that was cut
    end         at a boundary by an exception in the training thread, else at once, with exit code 143

The next boundary is waited for until twice the time of the last step is over, and at most for half of
``preemption_timeout_s``. When that whole time is over, the line says what is not durable and where it is, and the
process ends. A program that handles the signal itself ends itself: the newest capture is stored, and the line says so.
"""

import contextlib
import enum
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from lazysnap.config import SnapshotConfig
from lazysnap.console import say
from lazysnap.core.messages import KeeperState
from lazysnap.engine.preemption_signals import PreemptionSignals
from lazysnap.keeper.client import KeeperClient

logger = logging.getLogger("lazysnap.engine")

EXIT_CODE = 128 + signal.SIGTERM
"""The exit code of a training that is preempted."""
_SLACK_S = 0.5
"""A step may take so much longer than twice the one before."""
_WRITE_S = 1.0
"""Seconds for a line: nobody may read the stream, or a thread that hangs may have its lock."""


@dataclass(frozen=True)
class RankCaptures:
    """The captures of one rank at one moment."""

    steps: tuple[int, ...]
    """Steps that are whole in memory, the newest first."""
    durable: tuple[int, str] | None
    """The newest step of this training that a level is known to have, and the URL of that level."""
    seen_step: int
    """The step of the last boundary, or of the snapshot that was resumed."""
    is_resumed: bool = False
    """True if the only step is the resumed one, which an earlier start captured."""


class _Ending(enum.Enum):
    """What ends the process after a preemption signal."""

    PREEMPTION = "the next boundary, or this module"
    PROGRAM = "a handler of the program"
    CLOSE = "the training is over, and is being closed"


class Preemption:
    """Waits for the preemption of one training, and does what follows it, on a thread of its own.

    Example::

        preemption = Preemption(config, captures, seal)
        preemption.listen(client)
        preemption.boundary_passed()  # behind each boundary; raises SystemExit(143) once the training is preempted
        preemption.leave()
    """

    def __init__(
        self, config: SnapshotConfig, captures: Callable[[], RankCaptures], seal: Callable[[float], None]
    ) -> None:
        """Nothing happens before ``listen``.

        Args:
            config: settings of the training.
            captures: returns what is captured by now. It is called on another thread.
            seal: lets nothing be captured any more, and waits for copies, at most the given seconds. As ``captures``.
        """
        self._config = config
        self._captures = captures
        self._seal = seal
        self._signals = PreemptionSignals(self._become_preempted)
        self._client: KeeperClient | None = None
        self._exception: type[BaseException] = SystemExit
        self._overrules_handler = False
        self._step_s: float | None = None
        """Seconds between the last two boundaries."""
        self._last_boundary_s = 0.0
        self._ending: _Ending | None = None
        """None before the signal."""
        self._signal: signal.Signals | None = None
        """None if another rank got the signal."""
        self._deadline_s = 0.0
        self._is_closing = False
        self._is_raised = False
        self._arrived = threading.Event()
        """Set when the training thread is at a boundary, or at its end."""
        self._reported = threading.Event()
        """Set when the last line is written."""
        self._left = threading.Event()

    # The training thread

    def listen(
        self, client: KeeperClient, exception: type[BaseException] = SystemExit, *, overrules_handler: bool = False
    ) -> None:
        """React to preemption from now on. Idempotent. Does not block.

        Args:
            client: the connection to the keeper.
            exception: type that is raised at the last boundary, with the exit code.
            overrules_handler: SIGTERM ends the training also where it has a handler, which is called.
        """
        if self.listens:
            return
        self._client = client
        self._exception = exception
        self._overrules_handler = overrules_handler
        self._last_boundary_s = time.monotonic()
        self._signals.start()
        client.when_preempted(self._signals.report_other_rank)
        if os.getpid() == 1 and not self._signals.are_handled:
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
    def is_ending(self) -> bool:
        """True if preemption ends this training: the next boundary is the last one."""
        return self._ending is _Ending.PREEMPTION

    def boundary_passed(self) -> None:
        """Note the time of a boundary. If the training is preempted, end it as ``end_training``."""
        now_s = time.monotonic()
        self._step_s = now_s - self._last_boundary_s
        self._last_boundary_s = now_s
        self.end_training()

    def end_training(self) -> None:
        """If the training is preempted, block until its newest step is durable, and raise the exception of ``listen``.

        On another thread than the main one, end the process: there an exception would end the thread alone.
        """
        if not self.is_ending or self._is_raised:
            return
        self._await_report()
        if threading.current_thread() is not threading.main_thread():
            _exit()
        self._is_raised = True
        raise self._exception(EXIT_CODE)

    def training_failed(self, error: BaseException | None, *, is_alone: bool) -> None:
        """If the training is preempted, block until its newest step is durable.

        With several ranks end the process then: ranks that are gone already make the others fail.
        """
        if not self.is_ending or self._is_raised:
            return
        self._await_report()
        if is_alone:
            return
        if error is not None:
            _write_in_time(lambda: logger.warning("after preemption, %s:", type(error).__name__, exc_info=error))
        _exit()

    def _await_report(self) -> None:
        self._arrived.set()
        self._reported.wait(self._config.preemption_timeout_s + _WRITE_S)

    def begin_close(self) -> None:
        """The training is over: a signal from now on ends the process when it is closed."""
        self._is_closing = True

    def leave(self) -> None:
        """The training has ended: put the handlers of signals back. Idempotent. Blocks: an instant."""
        self._left.set()
        self._signals.stop()

    def finish_close(self) -> None:
        """After ``leave``: let a signal that came during the close end the process, as it would without lazysnap."""
        if self._ending is not _Ending.CLOSE or self._signal is None:
            return
        if signal.getsignal(self._signal) is signal.SIG_DFL:  # else its handler was called already
            signal.raise_signal(self._signal)

    # The thread of the signals

    def _become_preempted(self, number: signal.Signals | None) -> None:
        """Tell the keeper, wait until the newest step is durable, write the line, and end the process if need be."""
        client = self._client
        if client is None or self._left.is_set():
            return
        self._signal = number
        self._deadline_s = time.monotonic() + self._config.preemption_timeout_s
        client.preempt()
        self._ending = self._choose_ending()
        is_stored = False
        try:
            is_stored = self._store_newest(client)
        except Exception:  # the process must end in time, whatever fails
            logger.warning("preemption: the newest step is not stored", exc_info=True)
        if not self._left.is_set():
            line = self._line(client, is_stored=is_stored)
            if is_stored and self._config.levels:
                _write_in_time(lambda: say(line))
            else:
                _write_in_time(lambda: logger.warning("%s", line))
        self._reported.set()
        is_left_to_others = self._ending is _Ending.PROGRAM or self._arrived.is_set() or self._left.is_set()
        if not is_left_to_others:
            _exit()

    def _choose_ending(self) -> _Ending:
        if self._is_closing:
            return _Ending.CLOSE
        number = self._signal or signal.SIGTERM
        is_overruled = self._overrules_handler and number == signal.SIGTERM
        if self._signals.has_handler(number) and not is_overruled:
            return _Ending.PROGRAM
        return _Ending.PREEMPTION

    def _store_newest(self, client: KeeperClient) -> bool:
        """Block until the newest step that all ranks hold is durable; False if it is not in time.

        While the training is being closed, block until that is over.
        """
        if self._ending is _Ending.CLOSE:
            return self._left.wait(self._remaining_s())
        if self._ending is _Ending.PREEMPTION:
            self._arrived.wait(self._patience_s())
            self._seal(self._remaining_s())
            client.seal()
        captures = self._captures()
        if not self._config.levels or not captures.steps:
            return True
        newest_step = captures.steps[0]
        if self._ending is _Ending.PREEMPTION and not captures.is_resumed:
            client.require(newest_step)

        def is_settled(state: KeeperState) -> bool:
            durable_step = self._durable_step()
            if durable_step >= newest_step:
                return True
            # If other ranks lack the newest step, the newest one that all of them hold is stored.
            is_newest_lost = any(key.step == newest_step for key in state.lost)
            return is_newest_lost and durable_step >= captures.steps[-1]

        return client.wait(is_settled, self._remaining_s())

    def _durable_step(self) -> int:
        durable = self._captures().durable
        return -1 if durable is None else durable[0]

    def _patience_s(self) -> float:
        """Return the seconds within which the next boundary is expected."""
        if self._step_s is None:
            return 0.0
        expected_s = self._last_boundary_s + 2 * self._step_s + _SLACK_S - time.monotonic()
        return max(0.0, min(expected_s, self._config.preemption_timeout_s / 2))

    def _remaining_s(self) -> float:
        return max(0.0, self._deadline_s - time.monotonic())

    def _line(self, client: KeeperClient, *, is_stored: bool) -> str:
        """Return the last line: the step that was cut, the durable one, and what is not durable."""
        captures = self._captures()
        cause = "preemption of another rank" if self._signal is None else self._signal.name
        verb = "asks this training to end" if self._ending is _Ending.PROGRAM else "ended this training"
        head = f"{cause} {verb} in step {captures.seen_step + 1}"
        durable = "no step is durable"
        if captures.durable is not None:
            step, url = captures.durable
            durable = f"step {step} is durable at {url}"
            if is_stored or not captures.steps or captures.steps[0] <= step:
                return f"{head}; {durable}"
        elif not captures.steps:
            return f"{head}: no step of it was captured, a restart begins as this one did"
        place = f"step {captures.steps[0]} is in the memory of {self._place(client)}"
        if not self._config.levels:
            return f"{head}; {place}: there is no storage level"
        late = ""
        if not self._remaining_s():
            late = f" after {self._config.preemption_timeout_s:g} s (preemption_timeout_s)"
        return f"{head}; NOT DURABLE{late}: {place}; {durable}"

    def _place(self, client: KeeperClient) -> str:
        """Return where captures are, and what becomes of them."""
        keeper = client.keeper_pid
        place = "this process alone"
        if keeper is not None:
            place = f"the keeper (process {keeper})"
        if os.getpid() == 1:
            return f"{place}, which ends with this process, number 1 of its container"
        if keeper is not None and self._config.levels:
            return f"{place}, which goes on storing it"
        return place


def _exit() -> NoReturn:
    """End the process. Nothing else is reliable from here: the main thread may be in a collective."""
    _write_in_time(_flush)
    os._exit(EXIT_CODE)


def _write_in_time(write: Callable[[], None]) -> None:
    """Call ``write``, but wait for it at most ``_WRITE_S``."""
    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    thread.join(_WRITE_S)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
