"""The signals that say that this process is about to be killed, seen whatever the main thread does."""

import contextlib
import os
import signal
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_STOP = 0
_OTHER_RANK = 255
"""Bytes in the pipe that are no number of a signal."""
_JOIN_S = 5.0
_installed: "PreemptionSignals | None" = None
"""The one that handles the signals of this process: the newest."""
_mask_before_fork = threading.local()


class PreemptionSignals:
    """Reports each preemption signal on a thread of its own, some of them twice.

    Python's C handler writes the number of a signal into a pipe, the wake-up descriptor, also while the main thread is
    in a collective. The handler that was there is called on the main thread, between two instructions. A wake-up
    descriptor of the program stays: then the signal is reported only when that handler is called.
    """

    def __init__(self, report: Callable[[signal.Signals | None], None]) -> None:
        """Nothing happens before ``start``. ``report`` gets the signal; None if another rank got it."""
        self._report = report
        self._handlers_before: dict[int, Any] = {}
        self._writer = -1
        """The end of the pipe that wakes the thread. Signals and other threads may write to it at any moment, so it is
        closed with this object only."""
        self._thread: threading.Thread | None = None
        self._is_stopped = False

    @property
    def is_installed(self) -> bool:
        """True if signals are handled. Python can do that on the main thread only."""
        return bool(self._handlers_before)

    def start(self) -> None:
        """Begin. Signals are handled if this is called on the main thread."""
        reader, self._writer = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._writer, False)
        for descriptor in (reader, self._writer):
            weakref.finalize(self, os.close, descriptor).atexit = False
        if threading.current_thread() is threading.main_thread():
            self._install()
        self._thread = threading.Thread(target=self._read, args=(reader,), name="lazysnap-preemption", daemon=True)
        self._thread.start()

    def _install(self) -> None:
        global _installed
        if _installed is not None:  # of an engine that was left open
            _installed.uninstall()
        for number in SIGNALS:
            handler = signal.getsignal(number)
            # A handler that is not Python's, such as that of faulthandler, could not be called, nor restored.
            is_foreign = not callable(handler) and _is_caught(number)
            if handler is not signal.SIG_IGN and not is_foreign:
                self._handlers_before[number] = handler
                signal.signal(number, self._handle)
        if self._handlers_before:
            _set_wakeup_fd_back(signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False))
            _installed = self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_stopped:  # on another thread, where Python forbids to change handlers
            self.uninstall()
            if signal.getsignal(number) == self._handle:  # the program saved this one, and set it again after that
                signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            return
        self._write(number)
        handler = self._handlers_before.get(number)
        if callable(handler):
            handler(number, frame)

    def has_handler(self, number: signal.Signals | None, *, except_older_one: bool) -> bool:
        """Return True if the program handles a signal itself.

        Args:
            number: the signal that came; None if another rank got it: then it is about SIGTERM, which has not come.
            except_older_one: a handler of SIGTERM that was there before this one does not count.
        """
        expected = number or signal.SIGTERM
        handler = signal.getsignal(expected)
        if handler == self._handle:
            is_counted = not (except_older_one and expected == signal.SIGTERM)
            return is_counted and callable(self._handlers_before.get(expected))
        # What came had a handler. One for a single time has put the default back by now.
        return number is not None or callable(handler)

    def report_other_rank(self) -> None:
        """Report that another rank is preempted. Thread-safe. Does not block."""
        self._write(_OTHER_RANK)

    def _write(self, byte: int) -> None:
        with contextlib.suppress(OSError):  # it is full: there is something to read
            os.write(self._writer, bytes([byte]))

    def _read(self, reader: int) -> None:
        """Report ``SIGNALS``. Other signals that the program handles come through the pipe, too."""
        byte = _OTHER_RANK
        while byte != _STOP:
            byte = os.read(reader, 1)[0]
            if byte == _OTHER_RANK:
                self._report(None)
            elif byte in SIGNALS:
                self._report(signal.Signals(byte))

    def stop(self) -> None:
        """Put the handlers back, and end the thread. Idempotent. Blocks: an instant."""
        self._is_stopped = True
        is_main = threading.current_thread() is threading.main_thread()
        if self._thread is None or (self.is_installed and not is_main):
            return
        self.uninstall()
        self._write(_STOP)
        self._thread.join(_JOIN_S)

    def uninstall(self) -> None:
        """Put the handlers back that were there before. On the main thread."""
        global _installed
        for number, handler in self._handlers_before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, handler)
        if self._handlers_before:
            descriptor = signal.set_wakeup_fd(-1)
            if descriptor != self._writer:
                _set_wakeup_fd_back(descriptor)
        self._handlers_before = {}
        if _installed is self:
            _installed = None


def _set_wakeup_fd_back(descriptor: int) -> None:
    """Set the wake-up descriptor of the program again, if it has one, and has not closed it meanwhile."""
    if descriptor >= 0:
        with contextlib.suppress(OSError, ValueError):
            signal.set_wakeup_fd(descriptor)


def _is_caught(number: signal.Signals) -> bool:
    """True if this process has a handler for that signal, of Python or not."""
    with contextlib.suppress(OSError), open("/proc/self/status") as lines:
        for line in lines:
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _before_fork() -> None:
    """Let a signal to the child wait until the child has its own handlers: those of the parent write to its pipe."""
    _mask_before_fork.value = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _mask_before_fork.value)


def _after_fork_in_child() -> None:
    try:
        if _installed is not None:
            _installed.uninstall()
    finally:
        _after_fork()


os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child, after_in_parent=_after_fork)
