"""Run tests on the package with one change of its source, each in a process of its own.

Used by scripts that have imported all but the package: the processes are forked from there, and begin at once.
"""

import contextlib
import importlib.machinery
import os
import pathlib
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import CodeType

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "lazysnap"
AT_ONCE = 2
DEADLINE_S = 120.0
HANGS = 124


def replace_module(file: str, code: CodeType) -> None:
    """Let the import of a file of the package run other code, in this process."""
    path = str(PACKAGE / file)
    original = importlib.machinery.SourceFileLoader.get_code

    def get_code(loader, name):
        if loader.path == path:
            return code
        return original(loader, name)

    importlib.machinery.SourceFileLoader.get_code = get_code


def run_all(changes: Sequence[Callable[[], list[str]]], directory: pathlib.Path) -> Iterator[tuple[int, int, str]]:
    """Make each change in a process of its own, and run the tests that it names.

    Args:
        changes: each changes the package and returns the arguments of pytest.
        directory: for what the processes print.

    Yields: number of the change, exit status of pytest (``HANGS`` after ``DEADLINE_S``), and what it printed.
    """
    waiting = list(range(len(changes)))
    running: dict[int, tuple[int, float]] = {}
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            number = waiting.pop(0)
            pid = os.fork()
            if not pid:
                _run(changes[number], directory / str(number))
            running[pid] = (number, time.monotonic() + DEADLINE_S)
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            number, _ = running.pop(pid)
            _kill_group(pid)
            exit_code = os.waitstatus_to_exitcode(status)
            if exit_code == -signal.SIGKILL:
                exit_code = HANGS
            yield number, exit_code, (directory / str(number)).read_text(errors="replace")
            continue
        for pid, (_, deadline) in running.items():
            if time.monotonic() > deadline:
                _kill_group(pid)
        time.sleep(0.01)


def _run(change: Callable[[], list[str]], output: pathlib.Path) -> None:
    status = 70
    try:
        os.setsid()
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), 1)
        os.dup2(1, 2)
        status = pytest.main(change())
    except BaseException:  # noqa: BLE001  it is printed, and the status says that it was no test
        traceback.print_exc()
    finally:
        os._exit(int(status))


def _kill_group(pid: int) -> None:
    """End what a test may have left running."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
