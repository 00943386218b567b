"""Signals that say that this process is about to be killed."""

import contextlib
import logging
import os
import signal
import threading
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

logger = logging.getLogger("lazysnap.engine")

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_CLOSE, _FROM_HANDLER, _KEEPER = 0, 128, 255
"""Bytes in the pipe that are no number of a signal; ``_FROM_HANDLER`` is added to one."""
_JOIN_S = 5.0
_forking = threading.local()
"""The signals that were blocked before the fork of a thread."""
_listeners: "weakref.WeakSet[Listener]" = weakref.WeakSet()


class ChainedHandler:
    """A handler that does not end the training: it is called, and the training ends all the same."""

    def __init__(self, handler: Any) -> None:
        self._handler = handler

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Call the handler, if there is one."""
        if callable(self._handler):
            self._handler(number, frame)


class Listener:
    """Calls ``received`` once, on a thread of its own, with the name of what was noticed first.

    A signal reaches that thread at once, whatever the main thread does: Python's C handler writes to a pipe. The
    program's own handler is called too, on the main thread, when that is between two instructions.
    """

    def __init__(self, received: Callable[[str], None]) -> None:
        self._received = received
        self._pipe: tuple[int, int] | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._wakeup_before = -1
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        self._has_received = False

    @property
    def has_signals(self) -> bool:
        """True if it handles signals. Elsewhere than on the main thread Python cannot."""
        return bool(self._before)

    def start(self) -> None:
        """Begin. Handles signals if called on the main thread."""
        if self._pipe is not None:
            return
        reader, writer = self._pipe = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(writer, False)
        _listeners.add(self)
        if threading.current_thread() is threading.main_thread():
            self._install(writer)
        self._thread = threading.Thread(target=self._listen, args=(reader,), name="lazysnap-notice", daemon=True)
        self._thread.start()

    def _install(self, writer: int) -> None:
        for number in SIGNALS:
            before = now = signal.getsignal(number)
            while isinstance(owner := getattr(before, "__self__", None), Listener):  # of an engine that was left open
                before = owner._before.get(number, signal.SIG_DFL)
            # A handler that is not Python's, such as that of faulthandler, could not be called, nor put back.
            if before is not signal.SIG_IGN and (callable(now) or not _is_caught(number)):
                self._before[number] = before
                signal.signal(number, self._on_signal)
        if self._before:
            replaced = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
            left_open = (one for one in _listeners if one is not self and one._pipe and one._pipe[1] == replaced)
            self._wakeup_before = next((one._wakeup_before for one in left_open), replaced)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._is_over.is_set():  # it was closed by another thread, which may not put handlers back
            self.close()
            if getattr(signal.getsignal(number), "__self__", None) is self:  # somebody put it back later
                signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
            return
        self._write(number | _FROM_HANDLER)  # again, since a program may have taken the wakeup descriptor
        before = self._before.get(signal.Signals(number))
        if callable(before):
            before(number, frame)

    def is_of_program(self, name: str) -> bool:
        """True if the program handles that signal itself; of anything else, if it handles SIGTERM."""
        number = next((number for number in self._before if number.name == name), signal.SIGTERM)
        now = signal.getsignal(number)
        is_ours = getattr(now, "__self__", None) is self
        handler = self._before.get(number) if is_ours else now
        return callable(handler) and not isinstance(handler, ChainedHandler)

    def notify(self) -> None:
        """Report a notice to another rank, which the keeper passed on."""
        self._write(_KEEPER)

    def _write(self, what: int) -> None:
        pipe = self._pipe
        if pipe is not None:
            with contextlib.suppress(OSError):  # full: there is something to read
                os.write(pipe[1], bytes([what]))

    def _listen(self, reader: int) -> None:
        names = {int(number): number.name for number in SIGNALS} | {_KEEPER: ""}
        while (read := os.read(reader, 1)) and (what := read[0]) != _CLOSE:
            if self._wakeup_before >= 0 and what < _FROM_HANDLER:
                with contextlib.suppress(OSError):
                    os.write(self._wakeup_before, read)
            if what != _KEEPER:
                what &= ~_FROM_HANDLER
            if what in names:
                self._has_received = True
                self._received(names[what])
                names = {}
        os.close(reader)

    def close(self) -> None:
        """Put the handlers back that were there before. Idempotent. Blocks: an instant, for the thread to end."""
        pipe = self._pipe
        if pipe is None:
            return
        self._is_over.set()
        if self._before and threading.current_thread() is not threading.main_thread():
            return  # only there may the handlers, which write to the pipe, be taken away
        self._uninstall(pipe[1])
        self._write(_CLOSE)
        self._pipe = None
        os.close(pipe[1])
        if self._thread is not None and not self._has_received:  # else it may wait for this very end
            self._thread.join(_JOIN_S)

    def _uninstall(self, writer: int) -> None:
        if not self._before:
            return
        if (now := signal.set_wakeup_fd(-1)) != writer:
            signal.set_wakeup_fd(now)  # of somebody who came later
        elif self._wakeup_before >= 0:
            with contextlib.suppress(OSError, ValueError):  # it was closed meanwhile
                signal.set_wakeup_fd(self._wakeup_before)
        for number, before in self._before.items():
            if getattr(signal.getsignal(number), "__self__", None) is self:
                signal.signal(number, before)
        self._before = {}

    def raise_again(self, name: str) -> None:
        """After ``close``: send this process the signal again, unless its handler was called. Main thread only."""
        number = next((number for number in SIGNALS if number.name == name), None)
        is_main = threading.current_thread() is threading.main_thread()
        if number is not None and is_main and signal.getsignal(number) is signal.SIG_DFL:
            signal.raise_signal(number)

    def forget_in_child(self) -> None:
        """Leave the signals of a forked child alone: its pipe is the parent's."""
        if self._pipe is not None:
            self._uninstall(self._pipe[1])
            for end in self._pipe:
                os.close(end)
            self._pipe = None


def _is_caught(number: signal.Signals) -> bool:
    """True if this process has a handler for that signal."""
    with contextlib.suppress(OSError), open("/proc/self/status") as lines:
        for line in lines:
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _before_fork() -> None:
    """Let a signal to the child wait until the child has its own handlers: these would report to the parent."""
    _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _after_fork_in_child() -> None:
    for listener in list(_listeners):
        listener.forget_in_child()
    _after_fork()


def _after_fork() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _forking.mask)


os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child, after_in_parent=_after_fork)
