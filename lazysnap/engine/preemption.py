"""Preemption: from the signal that announces that processes will be killed, to the end of the training.

::

    signal      the keeper receives it at once: it stores the newest capture, and informs the other ranks
    boundary    if one comes in time, the newer step is captured, and the training thread stops there
    sealed      captures stop: the keepers store the newest step that all ranks hold
    durable     one line names that step, and the step in progress, which is lost
    end         at a boundary by an exception in the training thread, else at once, with exit code 143

The next boundary is expected within twice the time of the last step plus ``_SLACK_S``, counted from the last boundary.
The wait is at most half of ``preemption_timeout_s``. After ``preemption_timeout_s`` the line says what is not durable
and where it is, and the process ends in any case. A program that handles the signal ends itself: then the newest
capture is stored, and the line says that the signal asks the training to end.
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
from typing import Any, NoReturn

from lazysnap.config import SnapshotConfig
from lazysnap.console import say
from lazysnap.core.messages import KeeperState
from lazysnap.engine.preemption_signals import PreemptionSignals
from lazysnap.keeper.client import KeeperClient

logger = logging.getLogger("lazysnap.engine")

EXIT_CODE = 128 + signal.SIGTERM
"""The exit code of a training that is preempted."""
_SLACK_S = 0.5
"""Seconds that a step may take longer than twice the last one."""
_WRITE_S = 1.0
"""Seconds to wait for the output of a line: the stream may block, or a thread that hangs may hold its lock."""


@dataclass(frozen=True)
class RankCaptures:
    """The captures of one rank at one time."""

    steps: tuple[int, ...]
    """Steps that are whole in memory, the newest first."""
    durable: tuple[int, str] | None
    """The newest step of this training that a level has, and the URL of that level."""
    seen_step: int
    """The step of the last boundary, or of the resumed snapshot."""
    is_resumed: bool = False
    """True if the only step is the resumed one, from an earlier start."""


class _EndedBy(enum.Enum):
    """The party that ends the process after a preemption signal."""

    PREEMPTION = enum.auto()
    """An exception at the next boundary, or else this module."""
    PROGRAM = enum.auto()
    """The program, with its own handler."""
    CLOSE = enum.auto()
    """The signal itself, after the training has started to end."""


class Preemption:
    """Waits for the preemption of one training and handles it on its own thread.

    Example::

        preemption = Preemption(config, client, captures, seal)
        preemption.listen()
        preemption.boundary_passed()  # after each boundary; raises SystemExit(143) once the training is preempted
        preemption.leave()
    """

    def __init__(
        self,
        config: SnapshotConfig,
        client: KeeperClient,
        captures: Callable[[], RankCaptures],
        seal: Callable[[float], None],
    ) -> None:
        """Do nothing before ``listen``.

        Args:
            config: settings of the training.
            client: the connection to the keeper.
            captures: returns the captures so far. Called on another thread.
            seal: stops captures and waits for copies, at most the given seconds. Called on another thread.
        """
        self._config = config
        self._client = client
        self._captures = captures
        self._seal = seal
        self._signals = PreemptionSignals(self._become_preempted)
        self.listens = False
        """True after ``listen``."""
        self._exception: Callable[[int], BaseException] = SystemExit
        self._overrules_handler = False
        self._step_s: float | None = None
        """Seconds between the last two boundaries."""
        self._last_boundary_s = 0.0
        self._choosing = threading.Lock()
        """Protects the fields below: either the signal or the end of the training comes first."""
        self._ending: _EndedBy | None = None
        """None before the signal."""
        self._is_closing = False
        """True once the training thread ends the training."""
        self._signal: signal.Signals | None = None
        """None if another rank got the signal."""
        self._deadline_s = 0.0
        self._is_raised = False
        """True once the exception was raised in the training thread."""
        self._stopped = threading.Event()
        """Set when the training thread waits for the last line, and then ends the training."""
        self._reported = threading.Event()
        """Set after the last line is written."""
        self._left = threading.Event()
        """Set when the training has ended. From then on preemption may not end the process."""

    # The training thread

    def listen(
        self, exception: Callable[[int], BaseException] = SystemExit, *, overrules_handler: bool = False
    ) -> None:
        """Handle preemption from now on. Idempotent: the first call counts. Does not block.

        Args:
            exception: called with the exit code; returns the exception that is raised at the last boundary.
            overrules_handler: call the existing handler of SIGTERM, but end the training anyway.
        """
        if self.listens:
            return
        self.listens = True
        self._exception = exception
        self._overrules_handler = overrules_handler
        self._last_boundary_s = time.monotonic()
        self._signals.start()
        self._client.when_preempted(self._signals.report_other_rank)
        if os.getpid() == 1 and not self._signals.is_installed:
            logger.warning(
                "SIGTERM can neither end this training nor store its newest step: it is process number 1, and does not "
                "train on its main thread, where alone Python handles signals. Train on the main thread, or start the "
                "container with an init process (docker run --init)"
            )

    @property
    def ends_training(self) -> bool:
        """True if preemption ends this training at the next boundary."""
        return self._ending is _EndedBy.PREEMPTION

    def boundary_passed(self) -> None:
        """Record the time of a boundary. If the training is preempted, end it as ``end_training``."""
        now_s = time.monotonic()
        self._step_s = now_s - self._last_boundary_s
        self._last_boundary_s = now_s
        self.end_training()

    def end_training(self) -> None:
        """If the training is preempted, block until its newest step is durable, and raise the exception of ``listen``.

        On another thread than the main one, end the process: an exception would end only the thread.
        """
        if not self.ends_training or self._is_raised:
            return
        self._await_report()
        if threading.current_thread() is not threading.main_thread():
            _exit()
        self._is_raised = True
        raise self._exception(EXIT_CODE)

    def training_failed(self, error: BaseException | None, *, is_alone: bool) -> None:
        """Handle the end of the training by an error. If it is preempted, block until its newest step is durable.

        With several ranks then end the process: the error is usually caused by ranks that have ended. A later signal is
        handled as after ``begin_close``.
        """
        if self.begin_close() or self._is_raised:
            return
        self._await_report()
        if is_alone:
            return
        if error is not None:
            _write_in_time(logger.warning, "after preemption, %s:", type(error).__name__, exc_info=error)
        _exit()

    def _await_report(self) -> None:
        self._stopped.set()
        self._reported.wait(self._config.preemption_timeout_s + _WRITE_S)

    def begin_close(self) -> bool:
        """Begin the end of the training: a later signal ends the process in ``leave``.

        Returns: False if preemption ends the training already.
        """
        with self._choosing:
            self._is_closing = True
            return self._ending is not _EndedBy.PREEMPTION

    def leave(self) -> None:
        """Finish the end of the training: restore the handlers of signals. Idempotent. Blocks: shortly.

        A signal since ``begin_close`` ends the process now, as it would without lazysnap.
        """
        if self._left.is_set():
            return
        self._left.set()
        self._signals.stop()
        number = self._signal
        if self._ending is not _EndedBy.CLOSE or number is None:
            return
        if signal.getsignal(number) is signal.SIG_DFL:  # otherwise its handler was already called
            signal.raise_signal(number)

    # The thread of the signals

    def _become_preempted(self, number: signal.Signals | None) -> None:
        """Inform the keeper, wait until the newest step is durable, write the line, and end the process if necessary.

        Called for each signal. After one that the program handles, another one may end the training.
        """
        if not self._choose_ending(number):
            return
        self._deadline_s = time.monotonic() + self._config.preemption_timeout_s
        if self._ending is not _EndedBy.PROGRAM:
            with contextlib.suppress(RuntimeError):  # no new thread can be started
                threading.Thread(target=self._guard, name="lazysnap-preemption-end", daemon=True).start()
        self._client.preempt()
        is_stored = False
        try:
            is_stored = self._store_newest()
        except Exception:  # the process must end in time, whatever fails
            logger.warning("preemption: the newest step is not stored", exc_info=True)
        if not self._left.is_set():
            line = self._line(is_stored=is_stored)
            if is_stored and self._config.levels:
                _write_in_time(say, line)
            else:
                _write_in_time(logger.warning, "%s", line)
        self._reported.set()
        do_others_end_it = self._ending is _EndedBy.PROGRAM or self._stopped.is_set() or self._left.is_set()
        if not do_others_end_it:
            _exit()

    def _choose_ending(self, number: signal.Signals | None) -> bool:
        """Choose what ends the process. Returns: False if nothing else remains to be done."""
        with self._choosing:
            if self._ending in (_EndedBy.PREEMPTION, _EndedBy.CLOSE):
                return False
            if self._ending is _EndedBy.PROGRAM and number is None:
                return False  # the keeper reports what this rank reported
            ending = _EndedBy.PREEMPTION
            if self._is_closing:
                ending = _EndedBy.CLOSE
            elif self._signals.has_handler(number, except_older_one=self._overrules_handler):
                ending = _EndedBy.PROGRAM
            is_new = ending is not self._ending
            self._reported.clear()
            self._ending = ending
            self._signal = number
        return is_new and not self._left.is_set()

    def _guard(self) -> None:
        """End the process after the timeout, unless the training has ended."""
        if not self._left.wait(self._remaining_s() + 2 * _WRITE_S):
            _exit()

    def _store_newest(self) -> bool:
        """Block until the newest step that all ranks hold is durable; False after the timeout.

        If the training is being closed, block until that is over.
        """
        if self._ending is _EndedBy.CLOSE:
            return self._left.wait(self._remaining_s())
        if self._ending is _EndedBy.PREEMPTION:
            self._stopped.wait(self._patience_s())
            self._seal(self._remaining_s())
            self._client.seal()
        captures = self._captures()
        if not self._config.levels or not captures.steps:
            return True
        newest_step = captures.steps[0]
        if self._ending is _EndedBy.PREEMPTION and not captures.is_resumed:
            self._client.require(newest_step)

        def is_decided(state: KeeperState) -> bool:
            durable = self._captures().durable
            if durable is None:
                return False
            step, url = durable
            is_first_failing = bool(state.levels) and state.levels[0].is_failing
            if url != self._config.levels[0].url and not (is_first_failing or captures.is_resumed):
                return False
            # If other ranks lack the newest step, the newest step of all ranks is an older one.
            is_newest_lost = any(key.step == newest_step for key in state.lost)
            return step >= newest_step or (is_newest_lost and step >= captures.steps[-1])

        return self._client.wait(is_decided, self._remaining_s())

    def _patience_s(self) -> float:
        """Return the seconds within which the next boundary is expected."""
        if self._step_s is None:
            return 0.0
        expected_s = self._last_boundary_s + 2 * self._step_s + _SLACK_S - time.monotonic()
        return max(0.0, min(expected_s, self._config.preemption_timeout_s / 2))

    def _remaining_s(self) -> float:
        return max(0.0, self._deadline_s - time.monotonic())

    def _line(self, *, is_stored: bool) -> str:
        """Return the last line: the step in progress, the durable step, and what is not durable."""
        captures = self._captures()
        cause = "preemption of another rank"
        if self._signal is not None:
            cause = self._signal.name
        verb = "ended this training"
        if self._ending is _EndedBy.PROGRAM:
            verb = "asks this training to end"
        head = f"{cause} {verb} in step {captures.seen_step + 1}"
        durable = "no step is durable"
        if captures.durable is not None:
            step, url = captures.durable
            durable = f"step {step} is durable at {url}"
            if is_stored or not captures.steps or captures.steps[0] <= step:
                return f"{head}; {durable}"
        elif not captures.steps:
            return f"{head}: no step of it was captured, a restart begins as this one did"
        place = f"step {captures.steps[0]} is in the memory of {self._place()}"
        if not self._config.levels:
            return f"{head}; {place}: there is no storage level"
        late = ""
        if not self._remaining_s():
            late = f" after {self._config.preemption_timeout_s:g} s (preemption_timeout_s)"
        return f"{head}; NOT DURABLE{late}: {place}; {durable}"

    def _place(self) -> str:
        """Return where captures are, and whether they outlive this process."""
        keeper = self._client.keeper_pid
        place = "this process alone"
        if keeper is not None:
            place = f"the keeper (process {keeper})"
        if os.getpid() == 1:
            return f"{place}, which ends with this process, number 1 of its container"
        if keeper is not None and self._config.levels:
            return f"{place}, which keeps storing it"
        return place


def _exit() -> NoReturn:
    """End the process. Anything else may fail, since the main thread may be in a collective."""
    try:
        _write_in_time(_flush)
    finally:
        os._exit(EXIT_CODE)


def _write_in_time(write: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    """Call ``write`` with the arguments on a thread, and wait at most ``_WRITE_S``."""
    thread = threading.Thread(target=write, args=args, kwargs=kwargs, daemon=True)
    thread.start()
    thread.join(_WRITE_S)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
