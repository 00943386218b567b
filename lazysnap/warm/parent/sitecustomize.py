"""The warm parent: a Python interpreter that stops right before its program, and forks each start of it.

Python imports this module as ``sitecustomize``, at the end of its own start. The first process waits for clients. As
soon as the program's imports are known, it forks a second process, which imports them and serves the clients from then
on. A process that either of them forks for a client leaves this module: its interpreter continues with the program of
its command line.
"""

import atexit
import contextlib
import ctypes
import fcntl
import gc
import io
import json
import os
import select
import signal
import socket
import struct
import sys
import time
import warnings
from types import ModuleType
from typing import Any, NoReturn

_HERE = os.path.dirname(os.path.abspath(__file__))
_PACKAGE = os.path.dirname(os.path.dirname(_HERE))
_STANDARD = os.path.dirname(os.__file__)
_PACKAGES = ("/site-packages/", "/dist-packages/")
_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/", "/dev/accel")
_UNFIT = 81
"""Exit code of the second process: after the import of a module it cannot fork."""
_STALE = 82
"""Exit code of the second process: installed packages have changed."""
_MOST_FAILURES = 8
_IMPORT_S = 300
"""Seconds that the import of one module may take: clients wait meanwhile."""
_POLL_S = 0.5
_STORE_S = 0.5
"""Maximum seconds that a rank waits for the store of rank 0. PyTorch itself retries only after 0.25 to 0.75 s."""
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


class _Start:
    """A program that was forked for a client."""

    def __init__(self, pid: int, connection: socket.socket, launcher: int, leads: bool) -> None:
        self.pid = pid
        self.connection = connection
        self.launcher = launcher
        self.leads = leads
        self.handle = os.pidfd_open(pid)
        self.is_killed = False

    def kill(self) -> None:
        """Send SIGKILL to the program, and to its process group if it leads one."""
        self.is_killed = True
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(self.pid, signal.SIGKILL)
            if self.leads:
                os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close its descriptors in this process."""
        self.connection.close()
        os.close(self.launcher)
        os.close(self.handle)


class _Parent:
    """The work of both processes: wait for clients, fork programs, report their ends."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.listener = socket.socket(fileno=facts["listener"])
        self.owner: int = facts["owner"]
        self.socket: str = facts["socket"]
        self.names: str = facts["names"]
        self.name: str = facts["name"]
        self.starts: list[_Start] = []
        self.second: int | None = None
        """Descriptor of the second process, in the first one."""
        self.is_second = False
        self.is_stale = False
        self.failures = 0
        self.importing = os.memfd_create("importing")
        """The name of the module that the second process is importing, for the first process."""
        self.imported_at = 0
        """The time at which the last imported list of names was written."""
        self.packages = _packages()

    def serve(self) -> None:
        """Serve clients. Returns in a program that was forked."""
        while True:
            if self._lacks_second() and self._written_at():
                self._fork_second()
            ready = self._wait()
            if self.owner in ready:
                self._end()
            if self.second in ready:
                self._second_ended()
            for start in list(self.starts):
                if start.handle in ready:
                    _, status = os.waitpid(start.pid, 0)
                    with contextlib.suppress(OSError):
                        start.connection.send(struct.pack("i", status))
                    start.close()
                    self.starts.remove(start)
                elif start.connection.fileno() in ready or start.launcher in ready:
                    start.kill()  # its client died, or the process that started the client
            if self.is_stale and not self.starts and self.second is None:
                os._exit(_STALE)
            if self.listener.fileno() in ready and self._accept():
                return

    def _lacks_second(self) -> bool:
        """True in a first process that forks a second one as soon as the program's imports are known."""
        return not self.is_second and self.second is None and self.failures < _MOST_FAILURES

    def _wait(self) -> set[int]:
        """Wait for an event. Return the descriptors that have one."""
        watched = [self.owner]
        for start in self.starts:
            watched.append(start.handle)
            if not start.is_killed:
                watched += [start.connection.fileno(), start.launcher]
        if self.second is not None:
            watched.append(self.second)
        elif not self.is_stale:
            watched.append(self.listener.fileno())
        poll = select.poll()
        for number in watched:
            poll.register(number, select.POLLIN)
        timeout_ms = None
        if self._lacks_second():
            timeout_ms = 1000 * _POLL_S
        return {number for number, _ in poll.poll(timeout_ms)}

    def _end(self) -> NoReturn:
        """End this parent with its programs and files: the process that it belongs to has ended."""
        for start in self.starts:
            start.kill()
        with contextlib.suppress(OSError):
            for name in os.listdir(os.path.dirname(self.socket)):
                os.unlink(os.path.join(os.path.dirname(self.socket), name))
            os.rmdir(os.path.dirname(self.socket))
        os._exit(0)

    # ---------------------------------------------------------------- the second process

    def _written_at(self) -> int:
        try:
            return os.stat(f"{self.names}.imports").st_mtime_ns
        except OSError:
            return 0

    def _fork_second(self) -> None:
        parent = os.getpid()
        pid = _fork()
        if pid:
            self.second = os.pidfd_open(pid)
            self._second_pid = pid
            return
        _die_with(parent)
        for start in self.starts:
            start.close()
        self.starts.clear()
        self.is_second = True
        self._import()

    def _second_ended(self) -> None:
        _, status = os.waitpid(self._second_pid, 0)
        assert self.second is not None
        os.close(self.second)
        self.second = None
        self.is_stale = os.WIFEXITED(status) and os.WEXITSTATUS(status) == _STALE
        if not self.is_stale:
            self.failures += 1
        name = os.pread(self.importing, 4096, 0)
        if name:
            os.ftruncate(self.importing, 0)
            with open(f"{self.names}.left-out", "ab") as file:
                file.write(name + b"\n")

    def _import(self) -> None:
        """Import the modules that the last start had imported, except those that failed before.

        Ends the process if a module starts a thread, opens a device or does not return.
        """
        self.imported_at = self._written_at()
        on_alarm = signal.signal(signal.SIGALRM, signal.SIG_DFL)
        skipped = set(_lines(f"{self.names}.left-out"))
        for name in _lines(f"{self.names}.imports"):
            if name in sys.modules or name in skipped:
                continue
            os.pwrite(self.importing, name.encode(), 0)
            signal.alarm(_IMPORT_S)
            with contextlib.suppress(BaseException):  # the program gets the same error, if it imports the module
                __import__(name)
            signal.alarm(0)
            if not _can_fork():
                os._exit(_UNFIT)
            os.ftruncate(self.importing, 0)
        signal.signal(signal.SIGALRM, on_alarm)
        # A collection in a program ignores the imported objects: it would copy the pages that both share.
        gc.collect()
        gc.freeze()

    # ---------------------------------------------------------------- a start

    def _accept(self) -> bool:
        """Serve one client. Return ``True`` in the program that was forked for it."""
        try:
            connection, _ = self.listener.accept()
        except OSError:
            return False
        _, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        connection.settimeout(5.0)
        handles: list[int] = []
        try:
            head, handles, _, _ = socket.recv_fds(connection, 4, 253, socket.MSG_CMSG_CLOEXEC)
            if uid != os.getuid() or len(head) < 4 or not handles:
                raise ValueError("no client")
            request = json.loads(_received(connection, struct.unpack("I", head)[0]))
            if not {"environ", "group"} <= request.keys() or len(handles) != 1 + len(request["handles"]):
                raise ValueError("no whole request")
        except (OSError, ValueError, AttributeError, LookupError, TypeError):
            for number in handles:
                os.close(number)
            connection.close()
            return False
        connection.settimeout(None)
        if self.packages != _packages():
            # The next client finds no socket and makes a new parent.
            self.is_stale = True
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.socket)
        elif self.is_second and not self.starts and self.imported_at != self._written_at():
            self._import()
        if self.is_stale or not _can_fork():
            for number in handles:
                os.close(number)
            connection.close()
            if not self.starts and not self.is_stale:
                os._exit(_UNFIT)
            return False
        return self._fork_program(connection, request, handles)

    def _fork_program(self, connection: socket.socket, request: dict[str, Any], handles: list[int]) -> bool:
        """Fork the program that a client requested. Return ``True`` in the program."""
        gate, gate_end = os.pipe()
        parent = os.getpid()
        pid = _fork()
        if pid:
            for number in handles[1:]:
                os.close(number)
            self.starts.append(_Start(pid, connection, handles[0], request["group"] is None))
            with contextlib.suppress(OSError):
                connection.send(struct.pack("i", pid))
            os.close(gate_end)
            os.close(gate)
            return False
        _die_with(parent)
        # No line of the program runs before its client can reach it: the parent then closes its end of the gate.
        os.close(gate_end)
        os.read(gate, 1)
        os.close(gate)
        connection.close()
        os.close(handles.pop(0))
        try:
            self._become(request, handles)
        except BaseException:
            with contextlib.suppress(OSError, ValueError):  # its error belongs on the program's console
                os.dup2(handles[request["handles"].index(2)], 2)
            raise
        return True

    def _become(self, request: dict[str, Any], handles: list[int]) -> None:
        """Apply everything from the request that a fork does not inherit from the client."""
        for start in self.starts:
            start.close()
        self.listener.close()
        os.close(self.owner)
        os.close(self.importing)
        _set_process_name(self.name)
        if request["group"] is None:
            os.setsid()
        else:
            os.setpgid(0, request["group"])
        _take_handles(request["handles"], handles)
        signal.signal(signal.SIGCHLD, _on_child)
        os.environ.update(request["environ"])
        for name, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
            stream = _stream(number, mode, getattr(sys, name))
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        # These modules draw random numbers at their import. ``random`` itself handles a fork.
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed()
        if "multiprocessing.process" in sys.modules:
            process = sys.modules["multiprocessing.process"].current_process()
            process.authkey = os.urandom(32)
        program = os.getpid()

        def record_in_program() -> None:
            if os.getpid() == program:
                record()

        atexit.register(record_in_program)
        if self.is_second:  # otherwise rank 0 is busy with its imports, and so is this rank
            _wait_for_store(request["environ"])


def _wait_for_store(environ: dict[str, str]) -> None:
    """Wait until rank 0, on this node, listens for the other ranks: they start within milliseconds of each other."""
    port = environ.get("MASTER_PORT", "")
    is_here = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "False" and environ.get("GROUP_RANK") == "0"
    if not is_here or environ.get("RANK") == "0" or not port.isdecimal():
        return
    deadline = time.monotonic() + _STORE_S
    while not _is_listened_to(int(port)) and time.monotonic() < deadline:
        time.sleep(0.005)


def _is_listened_to(port: int) -> bool:
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in _lines(path)[1:]:
            _, local, _, state, *_ = line.split()
            if state == "0A" and int(local.rpartition(":")[2], 16) == port:
                return True
    return False


def _received(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        received = connection.recv(size - len(data))
        if not received:
            raise ValueError("half a request")
        data += received
    return data


def record() -> None:
    """Record the installed modules that are imported now, once: the next start finds them imported."""
    if _recorded:
        return
    _recorded.append(True)
    names = [name for name, module in list(sys.modules.items()) if _is_installed(name, module)]
    path = f"{_parent.names}.imports"
    with contextlib.suppress(OSError):
        if names != _lines(path):
            with open(f"{path}.{os.getpid()}", "w") as file:
                file.write("\n".join(names))
            os.replace(f"{path}.{os.getpid()}", path)


def _is_installed(name: str, module: ModuleType) -> bool:
    """True for the standard library and packages, but not for the user's own files, which may change."""
    try:
        spec = module.__spec__
        if spec is None or spec.name != name:
            return False
        origin = spec.origin
    except Exception:  # noqa: BLE001  modules may be any object
        return False
    if not isinstance(origin, str) or name == "__main__":
        return False
    return origin.startswith((f"{_STANDARD}/", f"{_PACKAGE}/")) or any(part in origin for part in _PACKAGES)


def _lines(path: str) -> list[str]:
    try:
        with open(path) as file:
            return file.read().splitlines()
    except OSError:
        return []


def _packages() -> list[tuple[str, int]]:
    """Return the directories of installed packages and the files of lazysnap, each with the time of its last change."""
    paths = [path for path in sys.path if any(part in f"{path}/" for part in _PACKAGES)]
    # No directories of lazysnap: the first import makes ``__pycache__`` in them.
    for folder, _, names in os.walk(_PACKAGE):
        for name in names:
            if name.endswith(".py"):
                paths.append(f"{folder}/{name}")
    changes = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            changes.append((path, os.stat(path).st_mtime_ns))
    return changes


def _can_fork() -> bool:
    """True if this process has no other thread of Python, and no context on a device."""
    if len(sys._current_frames()) > 1:
        return False
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith(_DEVICES):
                return False
    return True


def _fork() -> int:
    """Fork without the warning of other threads: those outside of Python, such as OpenBLAS's, do no harm."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return os.fork()


def _die_with(parent: int) -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _take_handles(targets: list[int], handles: list[int]) -> None:
    """Give descriptors the numbers that they had in the client. Standard ones that it had closed are closed."""
    least = max([2, *targets]) + 1
    moved = [fcntl.fcntl(number, fcntl.F_DUPFD_CLOEXEC, least) for number in handles]
    for number in {0, 1, 2, *handles}:
        os.close(number)
    for target, number in zip(targets, moved, strict=True):
        os.dup2(number, target)
        os.close(number)


def _stream(number: int, mode: str, old: io.TextIOWrapper) -> io.TextIOWrapper | None:
    """Make a standard stream as Python makes it."""
    is_unbuffered = old.write_through
    buffer_size = -1
    if is_unbuffered and mode == "w":
        buffer_size = 0
    try:
        buffer: Any = open(number, f"{mode}b", buffer_size, closefd=False)  # noqa: SIM115
    except OSError:
        return None
    raw = getattr(buffer, "raw", buffer)
    raw.name = old.name
    is_line = not is_unbuffered and (raw.isatty() or number == 2)
    stream = io.TextIOWrapper(buffer, old.encoding, old.errors, "\n", is_line, is_unbuffered)
    stream.mode = mode  # type: ignore[misc]
    return stream


def _set_process_name(name: str) -> None:
    """Give this process a name, in listings of processes."""
    with open("/proc/self/comm", "w") as file:
        file.write(name)


def _begin() -> _Parent:
    _set_process_name("lazysnap-warm")
    sys.path[:] = [path for path in sys.path if path != _HERE]
    sys.path_importer_cache.pop(_HERE, None)
    facts = json.loads(os.environ.pop("LAZYSNAP_WARM_PARENT"))
    if facts["path"] is None:
        del os.environ["PYTHONPATH"]
    else:
        os.environ["PYTHONPATH"] = facts["path"]
    for name in ("listener", "owner"):
        os.set_inheritable(facts[name], False)
    if facts["leads"]:
        os.setsid()
    else:
        os.setpgid(0, 0)
    return _Parent(facts)


sys.modules["_lazysnap_warm"] = sys.modules[__name__]
_recorded: list[bool] = []
# If SIGCHLD is ignored, the kernel does not report the ends of children.
_on_child = signal.signal(signal.SIGCHLD, signal.SIG_DFL) or signal.SIG_DFL
try:
    _parent = _begin()
    _parent.serve()
except BaseException:  # noqa: BLE001  after any error the program must not run in its parent
    sys.excepthook(*sys.exc_info())
    os._exit(1)
sys.modules.pop("sitecustomize")
import sitecustomize  # type: ignore[import-not-found]  # noqa: E402, F401  the user's module, if any
