"""Daemon threads that can be waited for."""

import threading
import time
from collections.abc import Callable


class Threads:
    """The threads of one object. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()

    def start(self, run: Callable[[], None], name: str) -> threading.Thread:
        """Run this in a thread of its own. Raises: RuntimeError, if there can be no more threads."""
        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        self.add(thread)
        return thread

    def add(self, thread: threading.Thread) -> None:
        """Have ``join`` wait for this thread, too."""
        with self._lock:
            self._threads = {one for one in self._threads if one.is_alive()} | {thread}

    def remove(self, thread: threading.Thread) -> None:
        """Do not wait for this thread any more."""
        with self._lock:
            self._threads.discard(thread)

    def join(self, timeout_s: float) -> None:
        """Block until all of them have ended, but for the caller, at most ``timeout_s``."""
        deadline = time.monotonic() + timeout_s
        while (thread := self._other()) is not None and (left_s := deadline - time.monotonic()) > 0:
            thread.join(left_s)

    def _other(self) -> threading.Thread | None:
        current = threading.current_thread()
        with self._lock:
            return next((one for one in self._threads if one.is_alive() and one is not current), None)
