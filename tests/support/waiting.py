"""Waiting for what other threads and processes do."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
TIMEOUT_S = 60.0
"""Long enough for a busy machine: nothing waits for it that works."""


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


def stop(process: subprocess.Popen) -> None:
    """Stop ``process``, and return when it is: until then it may still do what a test means to prevent."""
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
