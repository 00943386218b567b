"""Trainings of some ranks on each of some nodes, started by torchrun, and what they wrote down."""

import json
import pathlib
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from support.nodes import Cluster, Command, Node
from support.stored import snapshots_at
from support.waiting import until

SCRIPT = str(pathlib.Path(__file__).with_name("train.py"))
STEPS = 14
START_S = 150.0
"""Python, torch and a rendezvous, on a busy machine."""
_LAUNCHER = str(pathlib.Path(sys.executable).with_name("torchrun"))
_TORCH = {
    "GLOO_SOCKET_IFNAME": "eth0",
    # Without it the workers of a new start may meet at the addresses of dead ones.
    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
}


@dataclass
class Training:
    """One training, and its starts. All nodes see its directory."""

    cluster: Cluster
    kind: str
    steps: int = STEPS
    redundancy: str | None = None
    """As of ``SnapshotConfig``: without it what a lost node had is on storage alone."""
    local: int = 2
    """Ranks of a node."""
    has_level: bool = True
    """Whether it stores snapshots where all nodes see them; else memory is all there is."""
    starts: int = 0
    launchers: dict[Node, Command] = field(default_factory=dict)
    faults: dict[Node, str] = field(default_factory=dict)
    """What goes wrong in its ranks there (``lazysnap.faults``)."""
    join: Callable[[Node], None] = field(init=False)
    """Starts a launcher of the last start on another node, in place of one that is lost."""

    @property
    def root(self) -> pathlib.Path:
        """What all nodes see."""
        return self.cluster.shared

    @property
    def level(self) -> pathlib.Path:
        """Where it stores its snapshots."""
        return self.root / "level"

    def start(
        self, nodes: Sequence[Node], *, rendezvous: str = "static", restarts: int = 0, **settings: object
    ) -> None:
        """Start it on these nodes: with a static rendezvous ranks 0 and 1 on the first one. ``restarts``: how often
        torchrun starts the ranks again when one of them fails, or another node comes.
        """
        self.starts += 1
        first = nodes[0]
        levels = [{"url": str(self.level), "every_n_steps": 2, "keep_last": 3}] if self.has_level else []
        common = {"kind": self.kind, "steps": self.steps, "levels": levels, "trace": str(self._trace)}
        common["config"] = {"redundancy": self.redundancy}
        script = [SCRIPT, json.dumps({**common, **settings})]
        words = [f"--nnodes={len(nodes)}", f"--nproc-per-node={self.local}", f"--max-restarts={restarts}"]

        def launch(node: Node) -> None:
            if rendezvous == "static":
                meet = [f"--node-rank={nodes.index(node)}", f"--master-addr={first.name}", "--master-port=29500"]
            else:
                meet = ["--rdzv-backend=c10d", f"--rdzv-endpoint={first.address}:29400", f"--local-addr={node.address}"]
                meet += [f"--rdzv-conf=is_host={node is first},last_call_timeout=2", f"--rdzv-id={self.starts}"]
            python = self.cluster.python
            environment = {**_TORCH, "LAZYSNAP_JOB_ID": "training", "PYTHON_EXEC": python}
            if node in self.faults:
                environment["LAZYSNAP_FAULT"] = self.faults[node]
            self.launchers[node] = node.start([python, _LAUNCHER, *words, *meet, *script], environment)

        self.launchers = {}
        self.join = launch
        for node in nodes:
            launch(node)

    @property
    def _trace(self) -> pathlib.Path:
        return self.root / f"trace.{self.starts}"

    def wait(self, timeout_s: float = START_S) -> None:
        """Until it ended well."""
        codes = [launcher.wait(timeout_s) for launcher in self.launchers.values()]
        assert codes == [0] * len(codes), self.output()

    def output(self) -> str:
        """What its launchers and ranks said."""
        return "\n".join(f"--- {node.name}\n{told.output[-6000:]}" for node, told in self.launchers.items())

    def lines(self, *, word: str | None = None) -> list[tuple[str, ...]]:
        """Of the last start's trace, in the order of ranks and steps; with ``word`` those that say it."""
        text = self._trace.read_text() if self._trace.exists() else ""
        lines = [tuple(line.split()) for line in text.splitlines()]
        if word is not None:
            return sorted(line for line in lines if line[1] == word)
        return sorted((line for line in lines if line[1].isdecimal()), key=lambda line: (int(line[0]), int(line[1])))

    def wait_held(self) -> None:
        """Until all ranks are held, and were told that what they waited for is durable, or protected."""

        def is_held() -> bool:
            assert not any(launcher.code for launcher in self.launchers.values()), self.output()
            return len(self.lines(word="held")) == self.local * len(self.launchers)

        until(is_held, self.output, timeout_s=START_S)
        reached = self.lines(word="durable") + self.lines(word="protected")
        assert {line[2] for line in reached} == {"True"}, self.output()

    def let_go(self) -> None:
        """What is held trains on."""
        self._trace.with_name(f"{self._trace.name}.go").touch()

    def complete(self) -> list[int]:
        """Steps of the complete snapshots at its level, the newest first, as a restart finds them."""
        return [found.step for found in snapshots_at(self.level)]

    def end(self) -> None:
        """Kill its ranks and launchers on all nodes that are left, as a scheduler does. Keepers stay."""
        for node, launcher in self.launchers.items():
            if node.is_running and launcher.code is None:
                numbers = [number for number, line in node.processes().items() if _is_of_training(line)]
                # One that ends when another one dies may be gone already.
                node.run("sh", "-c", f"kill -9 {' '.join(map(str, numbers))} || true")
                launcher.wait()

    def lose(self, node: Node) -> None:
        """The node is killed, without a word to the others."""
        node.kill()
        del self.launchers[node]


def ranks(node: Node) -> list[int]:
    """The processes that train there."""
    return [number for number, line in node.processes().items() if line == pathlib.Path(SCRIPT).name]


def _is_of_training(line: str) -> bool:
    return SCRIPT in line or line in (pathlib.Path(SCRIPT).name, pathlib.Path(_LAUNCHER).name)


def state(node: Node, number: int) -> str:
    """Of a process there, as ``ps`` has it: ``T`` is stopped."""
    return node.run("cat", f"/proc/{number}/stat").rsplit(")", 1)[1].split()[0]


def keepers(node: Node) -> list[int]:
    """The processes that are keepers there."""
    return [number for number, line in node.processes().items() if " -m lazysnap.keeper " in line]


def connections(node: Node, state: str) -> list[tuple[str, str]]:
    """Local and remote address of the TCP connections of its keepers, of ``state`` "0A" (listening) or "01" (there)."""
    [keeper] = keepers(node)
    held = re.findall(r"socket:\[(\d+)]", node.run("sh", "-c", f"ls -l /proc/{keeper}/fd 2>&1 || true"))
    rows = [line.split() for line in node.run("cat", "/proc/net/tcp").splitlines()[1:]]
    return [(_host(row[1]), _host(row[2])) for row in rows if row[3] == state and row[9] in held]


def _host(text: str) -> str:
    return ".".join(str(byte) for byte in reversed(bytes.fromhex(text.split(":")[0])))
