"""Waiting for what other threads and processes do."""

import os
import pathlib
import signal
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
TIMEOUT_S = float(os.environ.get("LAZYSNAP_TEST_TIMEOUT_S", "120"))
"""Long enough for a busy machine: nothing waits for it that works. What is broken on purpose waits less."""


def until(
    condition: Callable[[], T],
    tell: Callable[[], str] = lambda: "it did not happen in time",
    *,
    timeout_s: float = TIMEOUT_S,
) -> T:
    """What ``condition`` returns as soon as that is true. Raises: AssertionError, with what ``tell`` returns."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, tell()
        time.sleep(0.005)
    return value


def capture_for_all(engine: Any, step: int) -> None:
    """Repeat the boundary of ``step`` until this rank has captured it.

    A capture that finds no slot while two steps are held for other nodes is left out. A step that one rank left out is
    neither protected nor durable, so no other rank could wait for it.
    """

    def is_captured() -> bool:
        engine.boundary(step)  # does nothing for a step that is captured
        return engine.wait(step, until="captured", timeout_s=TIMEOUT_S)

    until(is_captured)


def stop(pid: int) -> None:
    """Stop a process, and return when it is: until then it may still do what a test means to prevent."""
    os.kill(pid, signal.SIGSTOP)
    until(lambda: _are_threads_stopped(pid))


def _are_threads_stopped(pid: int) -> bool:
    """True if the signal, which reaches one thread after the other, has reached all."""
    texts = [path.read_text() for path in pathlib.Path(f"/proc/{pid}/task").glob("*/stat")]
    return all(text.rpartition(")")[2].split()[0] == "T" for text in texts)
