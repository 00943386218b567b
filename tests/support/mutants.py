"""Run tests on the package with one change of its source, each in a process of its own: they must fail.

A script that has imported all but the package calls ``main``: the processes are forked from there, and begin at once.
A test runs that script with ``check``.
"""

import contextlib
import importlib.machinery
import os
import pathlib
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import CodeType

import pytest

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "lazysnap"
AT_ONCE = 2
DEADLINE_S = 120.0
HANGS = 124
ALL_NOTICED = "each change is noticed\n"
RunTests = Callable[[list[str]], int]
"""Runs the tests that arguments of pytest choose; the exit status. It is called in a process of its own."""


@dataclass(frozen=True)
class Change:
    """A change of the package's source, and the tests that notice it."""

    name: str
    make: Callable[[], None]
    """Changes the package, in the process of the tests."""
    arguments: tuple[str, ...]
    """Those of pytest, which choose the tests."""


def check(script: str, directory: pathlib.Path, deadline_s: float, **environment: str) -> None:
    """Run a script that calls ``main``. Raises: AssertionError, naming each change that is not noticed."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    env |= {"PYTHONPATH": f"{ROOT}:{ROOT}/tests", **environment}
    words = [sys.executable, "-W", "ignore", script, str(directory)]
    run = subprocess.run(words, env=env, cwd=ROOT, capture_output=True, text=True, timeout=deadline_s, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    assert ALL_NOTICED in run.stdout, run.stdout + run.stderr


def main(changes: Sequence[Change], run_tests: RunTests = pytest.main) -> None:
    """Make each change and run its tests; they must have passed without it. ``SCRIPT DIRECTORY``"""
    directory = pathlib.Path(sys.argv[1])
    arguments_of_tests = dict.fromkeys(change.arguments for change in changes)
    unchanged = [Change("no change", _change_nothing, arguments) for arguments in arguments_of_tests]
    is_sound = _all_end_with(pytest.ExitCode.OK, _run_all(unchanged, directory, run_tests))
    if is_sound and _all_end_with(pytest.ExitCode.TESTS_FAILED, _run_all(changes, directory, run_tests)):
        print(ALL_NOTICED, end="")


def _all_end_with(expected: int, results: Iterable[tuple[Change, int, str]]) -> bool:
    """Return True if all tests end with this exit status; write down those that do not."""
    is_expected = True
    for change, status, output in results:
        if status != expected:
            is_expected = False
            print(f"{change.name}: {change.arguments[-1]} ends with {status}\n{output[-3000:]}\n")
    return is_expected


def replace_module(file: str, code: CodeType) -> None:
    """Let the import of a file of the package run other code, in this process."""
    path = str(PACKAGE / file)
    original = importlib.machinery.SourceFileLoader.get_code

    def get_code(loader, name):
        if loader.path == path:
            return code
        return original(loader, name)

    importlib.machinery.SourceFileLoader.get_code = get_code


def _change_nothing() -> None:
    """Leave the package as it is."""


def _run_all(
    changes: Sequence[Change], directory: pathlib.Path, run_tests: RunTests
) -> Iterator[tuple[Change, int, str]]:
    """Make each change in a process of its own, and run its tests there.

    Yields: the change, the exit status of pytest (``HANGS`` after ``DEADLINE_S``), and what it printed.
    """
    waiting = list(enumerate(changes))
    running: dict[int, tuple[int, float]] = {}
    while waiting or running:
        while waiting and len(running) < AT_ONCE:
            number, change = waiting.pop(0)
            pid = os.fork()
            if not pid:
                _run(change, directory / str(number), run_tests)
            running[pid] = (number, time.monotonic() + DEADLINE_S)
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            number, _ = running.pop(pid)
            _kill_group(pid)
            exit_code = os.waitstatus_to_exitcode(status)
            if exit_code == -signal.SIGKILL:
                exit_code = HANGS
            yield changes[number], exit_code, (directory / str(number)).read_text(errors="replace")
            continue
        for pid, (_, deadline) in running.items():
            if time.monotonic() > deadline:
                _kill_group(pid)
        time.sleep(0.01)


def _run(change: Change, output: pathlib.Path, run_tests: RunTests) -> None:
    status = 70
    try:
        os.setsid()
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), 1)
        os.dup2(1, 2)
        change.make()
        status = run_tests([*change.arguments])
    except BaseException:  # noqa: BLE001  it is printed, and the status says that it was no test
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(int(status))


def _kill_group(pid: int) -> None:
    """End what a test may have left running."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
