"""Two hosts on one machine: network namespaces with a cable between them. Needs root and iproute2.

Abstract sockets belong to a namespace, so a keeper in one is out of reach of the other, as on two machines.
"""

import contextlib
import os
import pathlib
import shutil
import signal
import subprocess
import uuid


def why_not() -> str | None:
    """Why there can be none here."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "needs iproute2"
    probe = f"lazysnap-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if made.returncode:
        return f"no network namespaces here: {made.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return None


class Nodes:
    """A context; on leaving it all that runs on the nodes is killed."""

    ADDRESSES = ("10.77.0.1", "10.77.0.2")

    def __init__(self) -> None:
        self.names = [f"lazysnap-{uuid.uuid4().hex[:8]}" for _ in self.ADDRESSES]

    def __enter__(self) -> "Nodes":
        with contextlib.ExitStack() as undo:
            undo.callback(self._end)
            for name in self.names:
                self._ip("netns", "add", name)
                # ``ip netns exec`` shows it in place of /etc: a look-up of a name would wait for a server otherwise.
                files = self._etc(name)
                files.mkdir(parents=True)
                hosts = [f"{address} {other}" for address, other in zip(self.ADDRESSES, self.names, strict=True)]
                (files / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts, ""]))
                (files / "resolv.conf").write_text("")
            first, second = self.names
            cable = ("link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", second)
            self._ip("-netns", first, *cable)
            for name, address in zip(self.names, self.ADDRESSES, strict=True):
                self._ip("-netns", name, "address", "add", f"{address}/24", "dev", "eth0")
                for device in ("lo", "eth0"):
                    self._ip("-netns", name, "link", "set", device, "up")
            undo.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._end()

    def start(self, number: int, command: list[str], **options: object) -> subprocess.Popen[str]:
        """Run a command on a node."""
        return subprocess.Popen(["ip", "netns", "exec", self.names[number], *command], text=True, **options)

    def processes(self, number: int) -> list[int]:
        """What runs on a node, keepers among them."""
        told = subprocess.run(["ip", "netns", "pids", self.names[number]], capture_output=True, text=True)
        return [int(pid) for pid in told.stdout.split()]

    def _end(self) -> None:
        for number, name in enumerate(self.names):
            for pid in self.processes(number):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(self._etc(name), ignore_errors=True)

    @staticmethod
    def _etc(name: str) -> pathlib.Path:
        return pathlib.Path("/etc/netns") / name

    @staticmethod
    def _ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)
