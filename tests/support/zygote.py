"""Starts programs by forking a process that has imported torch and the frameworks: a tenth of a second each, not five.

As a program it is that process; its arguments are the modules to import. It reads one JSON object per line (``id``,
``args``, ``env``, ``output``) and answers with one line when the child runs (``id``, ``pid``) and one when it has ended
(``id``, ``status``). The fault points of lazysnap are armed anew in each child, by the environment that it is given.

``{"id": ..., "listen": path}``: there it serves clients (``forked``), in whatever namespaces they are.
"""

import contextlib
import ctypes
import functools
import importlib
import itertools
import json
import os
import pathlib
import queue
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType

from support.newest import resume_newest

IMPORTED = (
    "accelerate",
    "torch._dynamo",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.device_mesh",
    "torch.distributed.fsdp",
    "torch.distributed.run",
    "torch.distributed.tensor.parallel",
    "torch.nn.parallel",
    "lightning.pytorch",
    "peft",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.trainer",
    "lazysnap.engine.engine",
    "lazysnap.integrations.accelerate",
    "lazysnap.integrations.lightning",
    "lazysnap.integrations.transformers",
)
TIMEOUT_S = 120.0
CLIENT = pathlib.Path(__file__).with_name("forked.py")
_NAMESPACES = {
    "user": 0x10000000, "mnt": 0x00020000, "uts": 0x04000000, "ipc": 0x08000000, "pid": 0x20000000, "net": 0x40000000,
}  # fmt: skip
_PR_SET_PDEATHSIG = 1


class Child:
    """A program that was started."""

    def __init__(self) -> None:
        self._pids: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._statuses: queue.SimpleQueue[int] = queue.SimpleQueue()

    def hear(self, answer: dict) -> None:
        (self._pids if "pid" in answer else self._statuses).put(answer.get("pid", answer.get("status")))

    def get(self, timeout: float = TIMEOUT_S) -> int:
        """Its exit status, once; negative if a signal ended it. Raises: queue.Empty."""
        return self._statuses.get(timeout=timeout)

    def is_over(self) -> bool:
        """Whether it has ended, and nobody has asked for its status yet."""
        return not self._statuses.empty()

    @functools.cached_property
    def pid(self) -> int:
        """Its process, as soon as that runs. Raises: queue.Empty."""
        return self._pids.get(timeout=TIMEOUT_S)

    def kill(self) -> None:
        """SIGKILL, as soon as it runs."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)


def ended(
    children: Sequence[Child], timeout_s: float = TIMEOUT_S, is_good: Callable[[int], bool] = lambda status: status == 0
) -> list[int]:
    """Return the exit statuses of all. As a launcher does, the first that fails takes the others along; so does the
    deadline.
    """
    statuses: dict[Child, int] = {}
    deadline, is_over = time.monotonic() + timeout_s, False
    while len(statuses) < len(children):
        for child in children:
            if child not in statuses:
                with contextlib.suppress(queue.Empty):
                    statuses[child] = child.get(0.01)
        if not is_over and (time.monotonic() > deadline or not all(map(is_good, statuses.values()))):
            is_over = True
            for child in children:
                if child not in statuses:
                    child.kill()
    return [statuses[child] for child in children]


class Zygote:
    """The process that is forked, seen by the tests. Thread-safe."""

    def __init__(self, imported: Sequence[str] = IMPORTED, env: Mapping[str, str] = MappingProxyType({})) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__, *imported],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **env},
        )
        self._children: dict[int, Child] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        threading.Thread(target=self._read, daemon=True).start()
        # No deadline of a test is to pass while torch is imported on a busy machine.
        self.run([os.devnull], {}, pathlib.Path(os.devnull), timeout_s=240)

    def _read(self) -> None:
        for line in self._process.stdout:
            answer = json.loads(line)
            self._children[answer["id"]].hear(answer)

    def start(self, args: Sequence[str], env: Mapping[str, str], output: pathlib.Path | str) -> Child:
        """Run the script ``args[0]`` with its arguments; what it says goes to the file ``output``."""
        test = {name: os.environ[name] for name in ("PYTEST_CURRENT_TEST",) if name in os.environ}
        return self._ask({"args": list(args), "env": {**test, **env}, "output": str(output)})

    def _ask(self, request: dict) -> Child:
        with self._lock:
            number = next(self._numbers)
            child = self._children[number] = Child()
            self._process.stdin.write(json.dumps({"id": number, **request}).encode() + b"\n")
            self._process.stdin.flush()
        return child

    def python(self, directory: pathlib.Path) -> pathlib.Path:
        """A program to be called in place of Python wherever that directory is seen; it is made there."""
        program, path = directory / "python", directory / "zygote"
        self._ask({"listen": str(path)}).get()
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -IS {CLIENT} {path} "$@"\n')
        program.chmod(0o755)
        return program

    def run(
        self,
        args: Sequence[str],
        env: Mapping[str, str],
        output: pathlib.Path | str,
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> int:
        """The same, and wait for its end; the exit status."""
        child = self.start(args, env, output)
        try:
            return child.get(timeout_s)
        except queue.Empty:
            child.kill()
            raise

    def close(self) -> None:
        self._process.stdin.close()
        # The end of its input may not reach it: what was forked meanwhile holds the pipe, too.
        self._process.kill()
        self._process.wait(60)
        self._process.stdout.close()


def _warm_up() -> None:
    """The first step of an optimizer imports half of torch: here, once."""
    import torch

    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    loss = model(torch.ones(1, 2)).sum()
    if torch.accelerator.is_available():  # the threads of its backward would be there in no child
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    else:
        loss.backward()
    optimizer.step()
    optimizer.state_dict()


def _run(request: dict, handles: Sequence[int] = ()) -> None:
    """The child; ``handles``: its standard input, output and errors and its directory, unless the request names a file
    for the output.
    """
    os.setsid()
    if not handles:
        output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        handles = (os.open(os.devnull, os.O_RDONLY), output, output)
    for target, source in enumerate(handles[:3]):
        os.dup2(source, target)
    for directory in handles[3:]:
        os.fchdir(directory)
        os.close(directory)
    os.environ.update(request["env"])
    importlib.reload(sys.modules["lazysnap.faults"])
    resume_newest()
    sys.argv = request["args"]
    if sys.argv[0] == "-c":
        program = sys.argv.pop(1)
        sys.path[0] = ""
        exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
    elif sys.argv[0] == "-m":
        module = sys.argv.pop(1)
        sys.path[0] = os.getcwd()
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = os.path.dirname(sys.argv[0])
        runpy.run_path(sys.argv[0], run_name="__main__")


def _run_there(connection: socket.socket) -> None:
    """The child, for a client: its own child runs in the namespaces of the client, and ends with it."""
    data, handles, _, _ = socket.recv_fds(connection, 1 << 20, 4)
    client, _, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    libc = ctypes.CDLL(None, use_errno=True)
    theirs, ours = pathlib.Path(f"/proc/{client}/ns"), pathlib.Path("/proc/self/ns")
    other = [flag for name, flag in _NAMESPACES.items() if not (theirs / name).samefile(ours / name)]
    if other and libc.setns(os.pidfd_open(client), sum(other)):
        raise OSError(ctypes.get_errno(), "setns")

    def run() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        request = json.loads(data)
        pathlib.Path("/proc/self/comm").write_text(os.path.basename(request["args"][0]))
        with connection:
            connection.send(str(os.getpid()).encode())
        _run(request, handles)

    pid = _fork(run)
    for handle in handles:  # who reads them sees the end of the child
        os.close(handle)
    end = os.pidfd_open(pid)
    if end not in select.select([connection, end], [], [])[0]:
        os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(BrokenPipeError):  # it was killed as well
        connection.send(str(os.waitstatus_to_exitcode(status)).encode())


def _fork(work: Callable[[], None]) -> int:
    """Do that in a child, which ends as the work does."""
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        work()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  the rim of the child
        sys.excepthook(*sys.exc_info())
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def _serve() -> None:
    def answer(**facts: int) -> None:
        os.write(1, json.dumps(facts).encode() + b"\n")

    running: dict[int, int | None] = {}
    listeners: list[socket.socket] = []
    buffer = b""
    while True:
        readable, _, _ = select.select([0, *listeners], [], [], 0.02 if running else None)
        for listener in filter(readable.count, listeners):
            with listener.accept()[0] as connection:
                running[_fork(partial(_run_there, connection))] = None
        if 0 in readable:
            data = os.read(0, 1 << 16)
            if not data:
                return
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                request = json.loads(line)
                if "listen" in request:
                    listeners.append(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
                    listeners[-1].bind(request["listen"])
                    listeners[-1].listen(64)
                    answer(id=request["id"], status=0)
                    continue
                pid = _fork(partial(_run, request))
                running[pid] = request["id"]
                answer(id=request["id"], pid=pid)
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if (number := running.pop(pid)) is not None:
                answer(id=number, status=os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in sys.argv[1:]:
            importlib.import_module(module)
        _warm_up()
    _serve()
