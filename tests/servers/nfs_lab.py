"""A real NFS server and a real NFS client kernel, both in a private network; needs root and Debian packages.

The server is nfs-ganesha, in user space. The client is a Linux kernel in user mode, whose root file system is the
host's, so that the same Python runs in it; ``nfs_guest.py`` is its only program and does what it is called for.
Network and processes end with the process that made them, however that ends.
"""

import contextlib
import functools
import itertools
import json
import os
import pathlib
import queue
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

HERE = pathlib.Path(__file__).parent
PACKAGES = {
    "linux.uml": "user-mode-linux",
    "ganesha.nfsd": "nfs-ganesha nfs-ganesha-vfs",
    "mount.nfs4": "nfs-common",
    "insmod": "kmod",
    "ip": "iproute2",
}
DEADLINE_S = 60
_NETWORK = """
set -e
ip link set lo up
ip tuntap add dev utap0 mode tap
ip addr add 10.77.0.1/24 dev utap0
ip link set utap0 up
echo up
exec cat
"""


def missing() -> str | None:
    """Why the lab cannot be built here; ``None`` if it can."""
    return missing_packages(*PACKAGES) or (None if os.path.exists("/dev/net/tun") else "no /dev/net/tun")


def missing_packages(*commands: str) -> str | None:
    """Why these commands of ``PACKAGES`` cannot be used."""
    if os.geteuid():
        return "needs root"
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    lacking = [PACKAGES[command] for command in commands if not shutil.which(command, path=path)]
    if lacking:
        return f"not installed: apt-get install {' '.join(lacking)}"
    return _guest_cannot_run() if "linux.uml" in commands else None


@functools.cache
def _guest_cannot_run() -> str | None:
    """Why no process runs in a guest, found out by booting one that runs ``true``."""
    command = ["linux.uml", "mem=64M", "root=/dev/root", "rootfstype=hostfs", "rootflags=/", "ro", "init=/bin/true"]
    command += ["con=null", "con0=null,fd:1", "con1=null", "quiet"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace", timeout=60, check=False
        )
    except subprocess.TimeoutExpired:
        return None  # the lab itself says more
    if "set fp regs failed" in done.stdout + done.stderr:
        return "the processor has registers (AMX) that the guest's kernel does not know: no process runs in it"
    return None


class GuestError(Exception):
    """What a call in the guest raised: the name of its type, its text."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


class NoLab(RuntimeError):
    """The machine does not allow it."""


class Host:
    """This machine; for guests without a network."""

    def popen(self, *command: str, **options) -> subprocess.Popen:
        """Start a process that dies with this one."""
        return subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *command], **options)


class Network(Host):
    """A network of its own, which lives as long as this process keeps a pipe open."""

    def __init__(self) -> None:
        self._holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", _NETWORK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if self._holder.stdout.readline() != "up\n":
            self.close()
            raise NoLab("no network of its own with a tap device is allowed here")

    def popen(self, *command: str, **options) -> subprocess.Popen:
        """Start a process there that dies with this one."""
        return super().popen("nsenter", "-t", str(self._holder.pid), "-n", *command, **options)

    def close(self) -> None:
        self._holder.kill()  # the end of its input may not reach it: what was forked meanwhile holds the pipe, too
        self._holder.communicate(timeout=DEADLINE_S)


class Server:
    """nfs-ganesha with the exports ``/open``, ``/squashed`` (root is nobody), ``/replaced`` (for tests to replace)."""

    def __init__(self, network: Network, root: pathlib.Path) -> None:
        self.root = root / "export"
        self.exports = {name: self.root / name for name in ("open", "squashed", "replaced")}
        for path in self.exports.values():
            path.mkdir(parents=True)
        self._state = root / "ganesha"
        self._state.mkdir()
        self.memory = self._state / "clients"
        """What the server remembers of its clients over a restart."""
        self._network = network
        text = (HERE / "nfs_ganesha.conf").read_text()
        (self._state / "conf").write_text(text.replace("@ROOT@", str(self.root)).replace("@STATE@", str(self.memory)))
        self._process: subprocess.Popen | None = None

    def start(self) -> None:
        """Returns when it serves."""
        self._process = self._network.popen(
            *["ganesha.nfsd", "-F", "-L", "STDOUT", "-N", "NIV_EVENT"],
            *["-f", str(self._state / "conf"), "-p", str(self._state / "pid")],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        lines = []
        for line in self._process.stdout:
            lines.append(line)
            if "NFS SERVER INITIALIZED" in line:
                break
        else:
            raise RuntimeError("the NFS server did not start:\n" + "".join(lines[-20:]))
        self._log = threading.Thread(target=self._process.stdout.read, daemon=True)
        self._log.start()

    def kill(self) -> None:
        """SIGKILL; harmless if it is dead."""
        if self._process is None:
            return
        self._process.kill()
        self._process.wait(DEADLINE_S)
        self._log.join(DEADLINE_S)
        self._process.stdout.close()
        self._process = None

    def ensure(self) -> None:
        """Start it if a test left it dead, or it crashed by itself."""
        if self._process is not None and self._process.poll() is not None:
            self.kill()  # what is left of it
        if self._process is None:
            self.start()


class Call:
    """One call in the guest."""

    def __init__(self, guest: "Guest", number: int) -> None:
        self._guest = guest
        self._number = number
        self.answers: queue.SimpleQueue[dict] = queue.SimpleQueue()

    def _next(self, deadline_s: float = DEADLINE_S) -> dict:
        try:
            return self.answers.get(timeout=deadline_s)
        except queue.Empty:
            raise TimeoutError(f"no answer from the guest:\n{self._guest.tail()}") from None

    def stopped(self, where: str) -> None:
        """Wait until it stands at ``where``, from which only ``go`` leads on."""
        answer = self._next()
        if "error" in answer:
            raise GuestError(*answer["error"])
        assert answer == {"stopped": where}, answer

    def go(self) -> None:
        self._guest.send({"id": self._number, "go": True})

    def result_of_any_length(self, meanwhile, deadline_s: float):
        """As ``result``; ``meanwhile`` is called every few seconds."""
        deadline = time.monotonic() + deadline_s
        while self.answers.empty() and time.monotonic() < deadline:
            meanwhile()
            with contextlib.suppress(queue.Empty):
                self.answers.put(self.answers.get(timeout=2))
        return self.result(0.1)

    def result(self, deadline_s: float = DEADLINE_S):
        answer = self._next(deadline_s)
        if "error" in answer:
            raise GuestError(*answer["error"])
        return answer["result"]


class Guest:
    """A Linux kernel in user mode, which runs ``nfs_guest.py``."""

    def __init__(self, host: Host, place: pathlib.Path, *arguments: str) -> None:
        """``place`` is a directory of its own, ``arguments`` are for the kernel."""
        self._console: list[str] = []
        self._calls: dict[int, Call] = {}
        self._numbers = itertools.count()
        self._process = host.popen(
            # In a process namespace of its own, so that the many processes of which it is made end with the first.
            *["unshare", "--pid", "--fork", "--kill-child"],
            *["linux.uml", "mem=1G", f"uml_dir={place}/", "umid=guest", "quiet", "panic=-1"],
            *["root=/dev/root", "rootfstype=hostfs", "rootflags=/", "rw"],
            *["con=null", "con0=fd:0,fd:1", "con1=null"],
            f"init={HERE / 'nfs_init.sh'}",
            f"PYTHON={sys.executable}",
            f"GUEST={HERE / 'nfs_guest.py'}",
            *arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._started = self._calls[-1] = Call(self, -1)
        self._reader.start()

    def wait_until_up(self) -> None:
        self._started.result()

    def tail(self) -> str:
        return "\n".join(self._console[-60:])

    def _read(self) -> None:
        for raw in self._process.stdout:
            line = raw.decode(errors="replace").strip()
            _, mark, text = line.partition("@@")
            if not mark:
                self._console.append(line)
                continue
            answer = json.loads(text)
            self._calls[answer.pop("id")].answers.put(answer)
        for call in list(self._calls.values()):
            call.answers.put({"error": ["GuestEnded", self.tail()]})

    def send(self, message: dict) -> None:
        self._process.stdin.write(json.dumps(message).encode() + b"\n")
        self._process.stdin.flush()

    def start(self, function: str, *arguments: object) -> Call:
        """Start a function of ``nfs_guest.py`` in a thread of the guest."""
        number = next(self._numbers)
        call = self._calls[number] = Call(self, number)
        self.send({"id": number, "call": function, "arguments": arguments})
        return call

    def run(self, function: str, *arguments: object):
        return self.start(function, *arguments).result()

    def close(self) -> None:
        """Pull the plug: what it has not written is lost."""
        pid = self._process.pid
        for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            os.kill(int(child), 9)
        self._process.wait(DEADLINE_S)
        self._reader.join(DEADLINE_S)
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._process.stdout.close()


@contextlib.contextmanager
def lab(root: pathlib.Path, memory_mb: int = 1024) -> Iterator[tuple[Server, Guest]]:
    """Server and client, connected, nothing mounted yet; ``memory_mb``: of the client."""
    with contextlib.ExitStack() as stack:
        network = Network()
        stack.callback(network.close)
        server = Server(network, root)
        guest = Guest(network, root, "vec0:transport=tap,ifname=utap0,depth=128,gro=1", f"mem={memory_mb}M")
        stack.callback(guest.close)
        stack.callback(server.kill)
        server.start()
        guest.wait_until_up()
        yield server, guest
