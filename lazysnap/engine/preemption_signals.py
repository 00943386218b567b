"""Handles preemption signals, also while the main thread is busy."""

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
"""Bytes in the pipe that are not signal numbers."""
_JOIN_S = 5.0
_installed: "PreemptionSignals | None" = None
"""The newest instance, which handles the signals of this process."""
_mask_before_fork = threading.local()


class PreemptionSignals:
    """Reports each preemption signal on its own thread, sometimes twice.

    Python's C handler writes the number of a signal into a pipe, the wake-up descriptor, also while the main thread is
    in a collective. The previous handler runs on the main thread. A wake-up descriptor of the program is not replaced:
    then the signal is reported only when the handler runs.
    """

    def __init__(self, report: Callable[[signal.Signals | None], None]) -> None:
        """Do nothing before ``start``. ``report`` gets the signal; None if another rank got it."""
        self._report = report
        self._handlers_before: dict[int, Any] = {}
        self._writer = -1
        """The end of the pipe that wakes the thread. Signals and other threads may write to it at any time, so it stays
        open as long as this object.
        """
        self._thread: threading.Thread | None = None
        self._is_stopped = False

    @property
    def is_installed(self) -> bool:
        """True if signals are handled, which Python can do only on the main thread."""
        return bool(self._handlers_before)

    def start(self) -> None:
        """Start the thread. Handle signals if this is the main thread."""
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
        if _installed is not None:  # of an engine that was not closed
            _installed.uninstall()
        for number in SIGNALS:
            handler = signal.getsignal(number)
            # A handler that is not Python's, such as that of faulthandler, could be neither called nor restored.
            is_foreign = not callable(handler) and _is_caught(number)
            if handler is not signal.SIG_IGN and not is_foreign:
                self._handlers_before[number] = handler
                signal.signal(number, self._handle)
        if self._handlers_before:
            _set_wakeup_fd_back(signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False))
            _installed = self

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._is_stopped:  # other threads cannot change handlers in Python
            self.uninstall()
            if signal.getsignal(number) == self._handle:  # the program saved this handler and set it again later
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
            number: the received signal; None if another rank got it, which counts as SIGTERM.
            except_older_one: ignore a handler of SIGTERM that is older than this one.
        """
        expected = number or signal.SIGTERM
        handler = signal.getsignal(expected)
        if handler == self._handle:
            is_counted = not (except_older_one and expected == signal.SIGTERM)
            return is_counted and callable(self._handlers_before.get(expected))
        # The received signal had a handler. A one-time handler has restored the default by now.
        return number is not None or callable(handler)

    def report_other_rank(self) -> None:
        """Report that another rank is preempted. Thread-safe. Does not block."""
        self._write(_OTHER_RANK)

    def _write(self, byte: int) -> None:
        with contextlib.suppress(OSError):  # it is full, so the thread will wake anyway
            os.write(self._writer, bytes([byte]))

    def _read(self, reader: int) -> None:
        """Report ``SIGNALS``. The pipe gets other signals of the program, too."""
        byte = _OTHER_RANK
        while byte != _STOP:
            byte = os.read(reader, 1)[0]
            if byte == _OTHER_RANK:
                self._report(None)
            elif byte in SIGNALS:
                self._report(signal.Signals(byte))

    def stop(self) -> None:
        """Restore the handlers, and end the thread. Idempotent. Blocks: shortly."""
        self._is_stopped = True
        is_main = threading.current_thread() is threading.main_thread()
        if self._thread is None or (self.is_installed and not is_main):
            return
        self.uninstall()
        self._write(_STOP)
        self._thread.join(_JOIN_S)

    def uninstall(self) -> None:
        """Restore the previous handlers. On the main thread."""
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
    """Restore the wake-up descriptor of the program, if it has one and did not close it."""
    if descriptor >= 0:
        with contextlib.suppress(OSError, ValueError):
            signal.set_wakeup_fd(descriptor)


def _is_caught(number: signal.Signals) -> bool:
    """True if this process has a handler for that signal, in Python or not."""
    with contextlib.suppress(OSError), open("/proc/self/status") as lines:
        for line in lines:
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _before_fork() -> None:
    """Block signals to the child until it has its own handlers: those of the parent write to its pipe."""
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
