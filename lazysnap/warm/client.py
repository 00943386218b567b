"""One start of a program: a thin process that represents the program, which the warm parent forks.

The first client that needs a parent starts it. So the parent inherits from a client everything that the program must
inherit: environment, directory, limits, masks, groups, namespaces. A client with another environment starts another
parent.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import resource
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from typing import Any, NoReturn

from lazysnap.warm.command import PythonCommand, python_command
from lazysnap.warm.directories import locked, owner_directory, owner_of, runtime_directory
from lazysnap.warm.steps import DIRECTORY

PARENT_VARIABLE = "LAZYSNAP_WARM_PARENT"
"""Environment variable that holds the descriptors and paths of a parent."""
PYTHON = "PYTHON_EXEC"
"""Environment variable that names the interpreter of torchrun's workers."""
_OF_ONE_START = (
    "RANK LOCAL_RANK GROUP_RANK ROLE_RANK NODE_RANK MASTER_ADDR MASTER_PORT SLURM_PROCID SLURM_LOCALID SLURM_TASK_PID "
    f"OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_LOCAL_RANK PMI_RANK PMIX_RANK PWD OLDPWD SHLVL _ {DIRECTORY} {PYTHON}"
)
"""Environment variables that may differ between the starts and ranks of one parent, besides ``TORCHELASTIC_*``."""
_INHERITED = tuple(["Umask", "Uid", "Gid", "Groups", "SigIgn", "Cap", "NoNewPrivs", "Cpus_allowed", "Mems_allowed"])
"""Lines of ``/proc/self/status`` that a program inherits."""
_TRIES = 3
_LOCK_S = 30.0
"""Maximum seconds to wait for another start, which starts a parent meanwhile, unless it was stopped."""
_MOST_HANDLES = 250
_TOGETHER_S = 0.2
"""Seconds within which a signal to a process group reaches the client and its supervisor."""
_KEPT = "KILL STOP CHLD IO TSTP TTIN TTOU CONT SEGV BUS FPE ILL TRAP ABRT PIPE SYS XCPU XFSZ URG STKFLT"
"""Signals that concern this process itself, or that a terminal sends to all."""
_FORWARDED = signal.valid_signals() - {getattr(signal, f"SIG{name}", 0) for name in _KEPT.split()}
SI_KERNEL = 0x80
"""``si_code`` of a signal from a terminal, which all processes of a group get."""


def main(words: Sequence[str]) -> NoReturn:
    """Run ``lazysnap worker``, also as ``PYTHON_EXEC``: start a program inside a launcher, and end as it does."""
    directory = os.environ.get(DIRECTORY, "")
    if owner_of(directory) is None:
        directory = owner_directory(os.getppid())
    run(words, directory)


def run(words: Sequence[str], directory: str) -> NoReturn:
    """Start a program warm and end as it ends. If no warm parent can start it, become the program.

    ``directory``: see ``directories.owner_directory``. The calling process must have one thread, and no handlers of
    signals.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    command = python_command(words)
    # Before the program exists, so that an early signal reaches it instead of ending this process.
    waited = forwarded() | {signal.SIGIO}
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, waited)
    for _ in range(_TRIES):
        if not isinstance(command, PythonCommand):
            break
        try:
            program = _Program(*_start(command, directory, mask))
        except OSError:
            break
        status = program.wait(waited)
        if status is not None:
            end_as(status)
    while signal.sigtimedwait([signal.SIGIO], 0) is not None:
        pass  # of a connection that is closed
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    try:
        os.execvp(words[0], [*words])
    except OSError as error:
        sys.stderr.write(f"lazysnap: {words[0]}: {error.strerror}\n")
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def forwarded() -> set[signal.Signals]:
    """Return the signals that are forwarded to the program: those that this process does not ignore."""
    return {number for number in _FORWARDED if signal.getsignal(number) is not signal.SIG_IGN}


def end_as(status: int) -> NoReturn:
    """End this process with the wait status of another one: its exit code, or death by the same signal."""
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the program has dumped its core
        with contextlib.suppress(OSError, ValueError):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
        os.kill(os.getpid(), number)
        os._exit(128 + number)  # process 1 of a container does not die of it
    os._exit(os.waitstatus_to_exitcode(status))


# ------------------------------------------------------------------------------------------------ the parent


def _start(command: PythonCommand, directory: str, mask: Collection[int]) -> tuple[socket.socket, bool]:
    """Ask a parent to fork the program. Return the connection, and ``True`` if the program is to lead a session.

    ``mask``: the signals that the program is to block. Raises: OSError, if no parent can start it.
    """
    environ = {}
    environ_of_start = {}
    for name, value in os.environ.items():
        if _is_of_one_start(name):
            environ_of_start[name] = value
        else:
            environ[name] = value
    leads = os.getsid(0) == os.getpid()
    surroundings = hashlib.sha256(json.dumps(_surroundings(command, environ, leads, mask)).encode()).hexdigest()[:24]
    connection = _connect(command, environ, (directory, surroundings), mask)
    handles = []
    for name in os.listdir("/proc/self/fd"):
        if _is_inherited(int(name)):
            handles.append(int(name))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    # The parent receives them with consecutive numbers, above all numbers of the program.
    if len(handles) > _MOST_HANDLES or (soft >= 0 and max([2, *handles]) + len(handles) + 2 >= soft):
        raise OSError("too many open files")
    launcher = os.pidfd_open(os.getppid())
    message = {
        "environ": environ_of_start,
        "handles": handles,
        "group": None if leads else os.getpgrp(),
    }
    data = json.dumps(message).encode()
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it is seen when the answer is read
        socket.send_fds(connection, [struct.pack("I", len(data))], [launcher, *handles])
        connection.sendall(data)
    os.close(launcher)
    return connection, leads


def _is_of_one_start(name: str) -> bool:
    return name in _OF_ONE_START.split() or name.startswith("TORCHELASTIC_")


def _is_inherited(number: int) -> bool:
    try:
        return os.get_inheritable(number)
    except OSError:  # the descriptor that listed them is closed
        return False


def _surroundings(command: PythonCommand, environ: dict[str, str], leads: bool, mask: Collection[int]) -> list[Any]:
    """Return everything that a program inherits from its parent unchanged."""
    directory = os.stat(".")
    facts: list[Any] = [command.python, command.argv, sorted(environ.items()), directory.st_dev, directory.st_ino]
    facts += [sorted(mask), leads or os.getsid(0), os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)]
    facts += [os.readlink(f"/proc/self/ns/{name}") for name in sorted(os.listdir("/proc/self/ns"))]
    with open("/proc/self/status") as file:
        facts += [line for line in file if line.startswith(_INHERITED)]
    for name in ("limits", "cgroup", "oom_score_adj"):
        with contextlib.suppress(OSError), open(f"/proc/self/{name}") as file:
            facts.append(file.read())
    return facts


def _connect(
    command: PythonCommand, environ: dict[str, str], place: tuple[str, str], mask: Collection[int]
) -> socket.socket:
    """Connect to the parent for this environment; start it if there is none. ``place``: directory and name."""
    directory, name = place
    connection = socket.socket(socket.AF_UNIX)
    with locked(directory, _LOCK_S) as handle:
        address = f"/proc/self/fd/{handle}/{name}"  # for paths of any length
        try:
            connection.connect(address)
        except (FileNotFoundError, ConnectionRefusedError):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(address)
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(address)
                listener.listen(1024)
                _start_parent(command, environ, directory, (listener, name), mask)
            connection.connect(address)
    _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.getuid():
        raise PermissionError(f"{directory}/{name} belongs to user {uid}")
    return connection


def _start_parent(
    command: PythonCommand,
    environ: dict[str, str],
    directory: str,
    listening: tuple[socket.socket, str],
    mask: Collection[int],
) -> None:
    """Start a parent: the interpreter with the program's own arguments. Its ``sitecustomize`` is that of the parent."""
    owner = owner_of(directory)
    if owner is None:
        raise ProcessLookupError(f"the process that {directory} belongs to is gone")
    listener, name = listening
    program = hashlib.sha256(json.dumps([command.python, command.argv, os.getcwd()]).encode()).hexdigest()[:24]
    handle = os.pidfd_open(owner)
    facts = {
        "listener": listener.fileno(),
        "owner": handle,
        "socket": f"{directory}/{name}",
        "names": f"{runtime_directory()}/{program}",
        "path": environ.get("PYTHONPATH"),
        "name": command.name,
        "leads": os.getsid(0) == os.getpid(),
    }
    hook = os.path.join(os.path.dirname(__file__), "parent")
    path = os.pathsep.join(filter(None, [hook, environ.get("PYTHONPATH")]))
    try:
        subprocess.Popen(
            command.argv,
            executable=command.python,
            env={**environ, "PYTHONPATH": path, PARENT_VARIABLE: json.dumps(facts)},
            pass_fds=(listener.fileno(), handle),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_SETMASK, mask),  # this process has one thread
        )
    finally:
        os.close(handle)


# ------------------------------------------------------------------------------------------------ the program


class _Program:
    """A program that a parent was asked to fork."""

    def __init__(self, connection: socket.socket, leads: bool) -> None:
        self._connection = connection
        self._pid = 0
        """Its process; 0 before the parent has forked it."""
        self._leads = leads
        """True if it has a session of its own; else it is in the process group of this client."""
        self._received: dict[int, float] = {}
        """Times of the signals of processes other than the launcher of this client."""

    def wait(self, waited: set[signal.Signals]) -> int | None:
        """Forward signals until the program ends. Blocks. ``waited``: blocked signals, SIGIO among them.

        Returns: the wait status of the program, SIGKILL if its parent died; ``None``, if the parent ended or refused
        before there was a program.
        """
        fcntl.fcntl(self._connection, fcntl.F_SETOWN, os.getpid())
        flags = fcntl.fcntl(self._connection, fcntl.F_GETFL)
        fcntl.fcntl(self._connection, fcntl.F_SETFL, flags | os.O_ASYNC | os.O_NONBLOCK)
        early: int | None = None
        """A signal that came before there was a program."""
        while True:
            try:
                data = self._connection.recv(4)
            except BlockingIOError:
                if early is not None:  # there is no program
                    end_as(early)
                info = self._next_signal(waited)
                if info is not None and self._pid:
                    self._forward(info)
                elif info is not None and info.si_signo != signal.SIGWINCH:  # by default, that one is ignored
                    early = info.si_signo
                continue
            except ConnectionResetError:
                data = b""
            if len(data) < 4:
                self._connection.close()
                if self._pid:
                    return int(signal.SIGKILL)
                return None
            number: int = struct.unpack("i", data)[0]
            if self._pid:
                return number
            self._pid = number
            if early is not None:
                # Also one to the process group or from a terminal: the program may have joined the group after it.
                # If it joined before, it gets the signal twice, which is better than never.
                self._send(early)
                early = None

    def _next_signal(self, waited: set[signal.Signals]) -> signal.struct_siginfo | None:
        """Return the next signal to forward; ``None`` if there is data to read first."""
        info = None
        while info is None and self._received:
            left_s = min(self._received.values()) + _TOGETHER_S - time.monotonic()
            info = signal.sigtimedwait(waited, max(0.0, left_s))
            if info is None:
                self._send_waiting()
        if info is None:
            info = signal.sigwaitinfo(waited)
        if info.si_signo == signal.SIGIO:
            return None
        return info

    def _send_waiting(self) -> None:
        """Forward the signals that only this client received: its launcher has not sent them in time."""
        now = time.monotonic()
        for number, received_s in list(self._received.items()):
            if now - received_s >= _TOGETHER_S:
                del self._received[number]
                self._send(number)

    def _forward(self, info: signal.struct_siginfo) -> None:
        """Forward a signal, but only once: the program already has a signal to a process group that it is in."""
        number = info.si_signo
        now = time.monotonic()
        if self._leads:
            self._send(number)
        elif info.si_code == SI_KERNEL:
            return
        elif info.si_pid != os.getppid():
            self._received[number] = now
        elif now - self._received.pop(number, -_TOGETHER_S) >= _TOGETHER_S:
            self._send(number)

    def _send(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._leads:
                # Launchers signal the whole group of a worker.
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._pid, number)
                    return
            os.kill(self._pid, number)
