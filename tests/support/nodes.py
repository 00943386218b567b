"""Nodes on one machine that really go away: each has its own processes, memory, host name and cable. Needs root.

A node is a set of namespaces (network, mounts, processes, IPC, host name) with a private ``/tmp`` and ``/dev/shm``.
All are on one bridge, which is in a network namespace of its own: clusters do not meet each other, nor the machine.
No namespace has a name, so each is gone with the processes in it; these end with the test process, however it ends.
"""

import contextlib
import functools
import os
import pathlib
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence

from support import slow_link, zygote
from support.spaces import TIMEOUT_S, Space

MAX_NODES = 16
# Standard input ends when the test process does. A shell that waits for ``cat`` also reaps what lost its parent.
_HUB = """
set -e
ip link add br0 type bridge
ip link set br0 up
echo $$
cat
"""
_NODE = """
set -e
read -r pid rest < /proc/self/stat
mount -t proc proc /proc
mount -t sysfs sysfs /sys
cd "$SHARED"
mount -t tmpfs -o size=2g tmpfs /dev/shm
mount -t tmpfs -o size=2g tmpfs /tmp
mkdir -p "$SHARED"
mount -c --bind . "$SHARED"
printf %s "$HOSTS" > /dev/shm/hosts
mount --bind /dev/shm/hosts /etc/hosts
rm /dev/shm/hosts
mount --bind /dev/null /etc/resolv.conf
hostname "$NAME"
ip link set lo up
cd /
echo $pid
cat
"""


@functools.cache
def why_not() -> str | None:
    """Why there can be none here."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "nodes are namespaces of Linux, which need root"
    tools = ("ip", "tc", "unshare", "nsenter", "mount", "hostname")
    if any(pathlib.Path("/tmp") in pathlib.Path(path).resolve().parents for path in (__file__, sys.prefix)):
        return "nodes have a /tmp of their own: this checkout and its Python must be elsewhere"
    if missing := [tool for tool in tools if shutil.which(tool) is None]:
        return f"nodes need {', '.join(missing)} (iproute2, util-linux)"
    probe = ["unshare", "-nmpiuf", "ip", "link", "add", "br0", "type", "bridge"]
    made = subprocess.run(probe, capture_output=True, text=True)
    return f"no namespaces or no bridge here: {made.stderr.strip()}" if made.returncode else None


class Command:
    """What runs on a node. Its output is in a file."""

    def __init__(self, process: "subprocess.Popen[bytes]", path: pathlib.Path) -> None:
        self._process, self._path = process, path

    @property
    def output(self) -> str:
        """What it said so far, errors among it."""
        return self._path.read_text(errors="replace")

    @property
    def code(self) -> int | None:
        """Negative if a signal ended it; ``None`` while it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float = TIMEOUT_S) -> int:
        """Its exit code. Raises: AssertionError, with what it said last, if it still runs after that time."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_s)
        raise AssertionError(f"still running after {timeout_s:g} s: {self._process.args}\n{self.output[-4000:]}")


class Node:
    """One of a cluster; it runs until it is killed."""

    def __init__(self, cluster: "Cluster", number: int) -> None:
        self.name, self.address = f"node{number}", address_of(number)
        self._hub, self._shared, self._number = cluster.hub, cluster.shared, number
        self._commands: list[Command] = []
        self._line: subprocess.Popen[bytes] | None = None
        self.is_running = True
        # As Debian has it: to a node its own name means itself, and no address at which others reach it.
        hosts = ["127.0.0.1 localhost", f"127.0.1.1 {self.name}"]
        hosts += [f"{address_of(other)} node{other}" for other in range(MAX_NODES) if other != number]
        facts = {"NAME": self.name, "SHARED": str(self._shared), "HOSTS": "\n".join([*hosts, ""])}
        self.space = Space("nmpiu", _NODE, facts)
        self._hub.do(f"ip link add port{number} type veth peer name eth0 netns {self.space.pid}")
        self._hub.do(f"ip link set port{number} master br0 up")
        self.space.do(f"ip address add {self.address}/24 dev eth0")
        self.space.do("ip link set eth0 up")

    def start(self, command: Sequence[str], env: Mapping[str, str] | None = None) -> Command:
        """Run a command, in the environment of this process and ``env``, until its end or that of the node."""
        path = self._shared / f"output.{self.name}.{len(self._commands)}"
        with path.open("wb") as output:
            told = dict.fromkeys(("stdout", "stderr"), output)
            process = self.space.popen(command, env={**os.environ, **(env or {})}, stdin=subprocess.DEVNULL, **told)
        self._commands.append(Command(process, path))
        return self._commands[-1]

    def run(self, *command: str, timeout_s: float = TIMEOUT_S) -> str:
        """The same, and wait for its end; its output. Raises: AssertionError, if it fails or takes longer."""
        running = self.start(command)
        assert running.wait(timeout_s) == 0, f"{command}: {running.output}"
        return running.output

    def processes(self) -> dict[int, str]:
        """What runs there: number, as the node knows it, and command line; of what a zygote forked the script."""
        found = {}
        for path in pathlib.Path(f"/proc/{self.space.pid}/root/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                line = " ".join(path.read_text(errors="replace").split("\0")[:-1])
                # What was forked has the line of its zygote, and a name of its own.
                is_forked = zygote.__file__ in line
                found[int(path.parent.name)] = path.with_name("comm").read_text().strip() if is_forked else line
        return {number: line for number, line in found.items() if number != 1 and line not in ("", "cat")}

    def kill(self) -> None:
        """Pull the plug: its processes and its memory are gone when this returns, and its peers hear nothing.

        Harmless twice.
        """
        if self.is_running:
            self.is_running = False
            self.unplug()
            self.space.end()
            for command in self._commands:
                command.wait()
            self._end_line()

    def unplug(self) -> None:
        """Pull its cable out."""
        self._hub.do(f"ip link set port{self._number} down")

    def plug(self) -> None:
        """Put it back."""
        self._hub.do(f"ip link set port{self._number} up")

    def shape(self, *, rate: str | None = None, delay_s: float = 0.0, loss: float = 0.0) -> None:
        """Make its cable slow from now on, in each direction; without arguments it is as it was.

        ``rate``: as ``tc`` has it, ``100mbit``. ``delay_s`` and ``loss``, a share of 1, of every frame.
        """
        port, near, far, side = (f"{word}{self._number}" for word in ("port", "near", "far", "side"))
        queue = f"tbf rate {rate} burst 64kb latency 200ms" if rate else "noqueue"
        self.space.do(f"tc qdisc replace dev eth0 root {queue}")
        self._hub.do(f"tc qdisc replace dev {port} root {queue}")
        if self._line is not None:
            self._end_line()
            self._hub.do(f"ip link set {port} master br0")
        if delay_s or loss:  # the cable ends at a bridge of its own, which the line joins to that of all
            relay = [sys.executable, slow_link.__file__, near, far, str(delay_s), str(loss)]
            self._line = self._hub.popen(relay, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert self._line.stdout is not None
            assert self._line.stdout.readline() == b"up\n"
            self._hub.do(f"ip link add {side} type bridge")
            self._hub.do(f"ip link set {side} up")
            for device, bridge in ((port, side), (near, side), (far, "br0")):
                self._hub.do(f"ip link set {device} master {bridge} up")

    def _end_line(self) -> None:
        if self._line is not None:
            self._line.kill()
            self._line.communicate()
            self._line = None
            self._hub.do(f"ip link delete side{self._number}")

    def cut(self, other: "Node") -> None:
        """Neither hears the other one from now on; all others hear both."""
        for node, lost in ((self, other), (other, self)):
            # To an address that nobody has.
            node.space.do(f"ip neighbour replace {lost.address} lladdr 02:00:00:00:00:01 dev eth0 nud permanent")

    def mend(self, other: "Node") -> None:
        """They hear each other again."""
        for node, found in ((self, other), (other, self)):
            node.space.do(f"ip neighbour delete {found.address} dev eth0")


class Cluster:
    """A context: some nodes, to which more can be added. At its end all are killed."""

    python = sys.executable
    """What its nodes call to run a script; may be set to a quicker one."""

    def __init__(self, shared: pathlib.Path, num_nodes: int = 2) -> None:
        """``shared``: what all nodes see of ``/tmp``."""
        self.shared, self.nodes = shared, list[Node]()
        shared.mkdir(parents=True, exist_ok=True)
        self.hub = Space("n", _HUB, {})
        with contextlib.ExitStack() as undo:
            undo.callback(self.close)
            for _ in range(num_nodes):
                self.add()
            undo.pop_all()

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill all nodes."""
        with contextlib.ExitStack() as ends:
            ends.callback(self.hub.end)
            for node in self.nodes:
                ends.callback(node.kill)

    def add(self) -> Node:
        """Another node, with a name and an address that no other one ever had."""
        self.nodes.append(Node(self, len(self.nodes)))
        return self.nodes[-1]


def address_of(number: int) -> str:
    """Of a node, as of any other cluster: they do not meet."""
    return f"10.77.0.{number + 1}"
