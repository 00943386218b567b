"""``lazysnap run``: start a command, and start it again after a crash."""

import contextlib
import ctypes
import os
import shlex
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Sequence

from lazysnap.errors import ConfigError
from lazysnap.warm import client, steps
from lazysnap.warm.command import PythonCommand, python_command
from lazysnap.warm.directories import owner_directory

_PR_SET_PDEATHSIG = 1
_ENDS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT}
"""Signals after which nothing is started again."""
_ENDED_ON_REQUEST = (-signal.SIGTERM, 128 + signal.SIGTERM)
"""Exit codes after a request to end: a preempted training exits with 143."""
_SAME_EXIT_S = 30.0
"""Seconds within which two equal ends without a new step stop the restarts."""
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_WORKER = """import sys, types
package = sys.modules["lazysnap"] = types.ModuleType("lazysnap")
package.__path__ = [{package!r}]
from lazysnap.warm.client import main
main(sys.argv[1:])"""
"""A replacement for the interpreter of workers, without ``site`` and the rest of lazysnap: it starts in 0.05 s, not
0.3.
"""


def supervise(words: Sequence[str], max_restarts: int) -> int:
    """Start a command until it ends well or must not be started again. Return its last wait status.

    Blocks. Changes the environment and the mask of signals of this process, which must have one thread.
    Raises: ConfigError, for a number below 0.
    """
    if max_restarts < 0:
        raise ConfigError(f"--max-restarts must be 0 or more, got {max_restarts}")
    directory = owner_directory(os.getpid())
    try:
        os.environ[steps.DIRECTORY] = directory
        return _Supervisor(words, directory).run(max_restarts)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _name_workers(command: PythonCommand, directory: str) -> None:
    """Let torchrun start its workers through a client, unless their interpreter is already set.

    Before each start, because a cleaner of /tmp may have deleted old files.
    """
    os.makedirs(directory, 0o700, exist_ok=True)
    path = os.path.join(directory, "python")
    program = _WORKER.format(package=_PACKAGE)
    words = shlex.join([sys.executable, "-I", "-S", "-c", program, command.python])
    with open(path, "w") as file:
        file.write(f'#!/bin/sh\nexec {words} "$@"\n')
    os.chmod(path, 0o700)
    if os.access(path, os.X_OK):  # not on a file system that is mounted with noexec
        os.environ.setdefault(client.PYTHON, path)


class _Supervisor:
    """Starts a command again and again."""

    def __init__(self, words: Sequence[str], directory: str) -> None:
        self._words = words
        self._command = python_command(words)
        if not isinstance(self._command, PythonCommand):
            _say(f"{self._command}: each start is a cold one")
        self._directory = directory
        self._is_ended = False
        """True after a signal that ends all."""
        self._waited = client.forwarded() | {signal.SIGCHLD}
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._waited)
        # If SIGCHLD is ignored, the kernel does not report the end of a child. The program inherits the old handler.
        self._on_child = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._libc = ctypes.CDLL(None)

    def run(self, max_restarts: int) -> int:
        newest = -1
        last_status = None
        last_end_s = 0.0
        for number in range(max_restarts + 1):
            if isinstance(self._command, PythonCommand):
                _name_workers(self._command, self._directory)
            status = self._wait(self._start())
            step = steps.read(self._directory)
            now = time.monotonic()
            if status == 0 or self._is_ended or os.waitstatus_to_exitcode(status) in _ENDED_ON_REQUEST:
                break
            end = _described(status)
            if step > newest:
                newest = step
                last_status = None
            if last_status == status and now - last_end_s < _SAME_EXIT_S:
                _say(f"the command {end} twice within {_SAME_EXIT_S:g} s without a new step: no restart")
                break
            last_status = status
            last_end_s = now
            if number == max_restarts:
                _say(f"the command {end}; it was restarted {number} times, as often as --max-restarts allows")
                break
            if newest >= 0:
                end += f" after step {newest}"
            _say(f"the command {end}: restart {number + 1} of at most {max_restarts}")
        return status

    def _start(self) -> int:
        supervisor = os.getpid()
        pid = os.fork()
        if pid:
            return pid
        try:
            self._libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            signal.signal(signal.SIGCHLD, self._on_child or signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
            if os.getppid() == supervisor:
                client.run(self._words, self._directory)
        except BaseException:  # noqa: BLE001  this process must not continue as a second supervisor
            traceback.print_exc()
        finally:
            os._exit(1)

    def _wait(self, pid: int) -> int:
        """Forward signals until that process ends. Return its wait status."""
        while True:
            info = signal.sigwaitinfo(self._waited)
            if info.si_signo != signal.SIGCHLD:
                if info.si_signo in _ENDS:
                    self._is_ended = True
                if info.si_code != client.SI_KERNEL:  # a terminal signals the whole group
                    os.kill(pid, info.si_signo)
                continue
            with contextlib.suppress(ChildProcessError):
                # Process 1 of a container also gets children that it did not start.
                ended_pid = -1
                while ended_pid != 0:
                    ended_pid, status = os.waitpid(-1, os.WNOHANG)
                    if ended_pid == pid:
                        return status


def _described(status: int) -> str:
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return f"ended with exit code {code}"
    return f"was ended by signal {-code} ({signal.strsignal(-code)})"


def _say(text: str) -> None:
    with contextlib.suppress(OSError):
        os.write(2, f"lazysnap: {text}\n".encode())
