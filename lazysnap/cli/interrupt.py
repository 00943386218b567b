"""Ctrl-C between two blocks, where everything can be cleaned up."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any


class Interrupt:
    """Whether Ctrl-C was pressed."""

    def __init__(self) -> None:
        self._pressed = threading.Event()

    def check(self) -> None:
        """Raises: KeyboardInterrupt, in the thread that asks, if Ctrl-C was pressed."""
        if self._pressed.is_set():
            raise KeyboardInterrupt

    def press(self, *_: Any) -> None:
        """The first time it is only noted; the second time it strikes where the program is."""
        if self._pressed.is_set():
            raise KeyboardInterrupt
        self._pressed.set()


@contextlib.contextmanager
def noting_interrupts() -> Iterator[Interrupt]:
    """Meanwhile, Ctrl-C is only noted. In another thread than the main one, signals stay as they are."""
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    before = signal.signal(signal.SIGINT, interrupt.press)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
