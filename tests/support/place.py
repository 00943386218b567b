"""What the suites have in common: the place under test, and how to write to it and look at it by the protocol alone."""

import contextlib
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

import pytest

from lazysnap.levels.source import map_anonymous
from lazysnap.levels.storage import Storage, Writer
from lazysnap.shard.checksum import block_ranges

PAGE = 4096
BLOCK = 16 << 20
"""Shards are written in blocks of this size, the last one padded to a page."""
WAIT_S = 60.0
"""How long anything may take before it counts as hanging."""


class MakeStorage(Protocol):
    """What a suite is given: new clients of the place."""

    def __call__(self, name: str = "run") -> Storage:
        """A client of its own on the directory ``name``, which is the same place for all clients, empty at first."""
        ...


class Place:
    """What the place under test is; to be overridden by the class that runs a suite."""

    keeps_open_files = True
    """A file that is open can be read when another client deletes it."""
    notices_death = True
    """Whether what a dead process left is known to be abandoned at once (else after a time that no test waits for)."""

    @pytest.fixture
    def make_storage(self) -> MakeStorage:
        """To be overridden: makes clients of a place that is empty before each test, and removed after it."""
        raise NotImplementedError("override the fixture make_storage")

    @pytest.fixture
    def storage(self, make_storage: MakeStorage) -> Storage:
        """One client."""
        return make_storage()

    @pytest.fixture
    def elsewhere(self, storage: Storage) -> str | None:
        """May be overridden: a Python expression that makes another client of ``storage``'s place in a new process.

        ``open_storage`` is imported there. ``None``: no other process can reach this place.
        """
        return None

    @pytest.fixture
    def read_only(self, storage: Storage) -> Storage | None:
        """May be overridden: a client of ``storage``'s place that may read but not write; ``None``: there is none."""
        return None


def pattern(size_bytes: int, seed: int = 0) -> bytes:
    """Bytes that are wrong anywhere else, and with any other seed."""
    return random.Random(seed).randbytes(size_bytes)


def blocks(data: bytes) -> list[tuple[int, memoryview]]:
    """Offset and memory of each block as the store writes it: page-aligned, the last one with garbage to the page."""
    room = map_anonymous(-(-len(data) // PAGE) * PAGE)
    room[: len(data)] = data
    room[len(data) :] = b"\xee" * (len(room) - len(data))
    return [(offset, room[offset : offset + -(-length // PAGE) * PAGE]) for offset, length in block_ranges(len(data))]


def write_blocks(storage: Storage, writer: Writer, data: bytes) -> None:
    """Write all of ``data`` as the store does."""
    with ThreadPoolExecutor(storage.parallel_writes) as pool:
        for future in [pool.submit(writer.write, *block) for block in blocks(data)]:
            future.result()


def write_object(storage: Storage, path: str, data: bytes) -> None:
    """Begin, write, publish, close."""
    with contextlib.closing(storage.create(path, len(data))) as writer:
        write_blocks(storage, writer, data)
        writer.publish()


def read_object(storage: Storage, path: str) -> bytes:
    """All of an object, block by block."""
    out = map_anonymous(storage.size(path))
    with contextlib.closing(storage.reader(path)) as reader:
        for offset, length in block_ranges(len(out)):
            reader.read_into(offset, out[offset : offset + length])
    return bytes(out)


def read_range(storage: Storage, path: str, offset: int, out: memoryview) -> None:
    """A part of an object, from ``offset``."""
    with contextlib.closing(storage.reader(path)) as reader:
        reader.read_into(offset, out)


def everything(storage: Storage) -> list[str]:
    """All there is, two levels deep, as deep as snapshots go; an empty directory as ``name/``."""
    found = []
    for name in storage.list():
        names = storage.list(name)
        found += [f"{name}/{child}" for child in names] or [f"{name}/"]
    return sorted(found)


def at_once(*works: Callable[[], object]) -> list[BaseException | None]:
    """Run them at the same time, a thread each; what each of them raised."""

    def one(work: Callable[[], object]) -> BaseException | None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  given back
            return error
        return None

    with ThreadPoolExecutor(len(works)) as pool:
        return [future.result(WAIT_S) for future in [pool.submit(one, work) for work in works]]


_CHILD = """
import sys
import time
from lazysnap.errors import LazySnapError
from lazysnap.levels.store import open_storage
from support.place import pattern, write_blocks, write_object
storage = {storage}
def say(text):
    print(text, flush=True)
def wait():
    sys.stdin.readline()
{code}
"""


class Child:
    """Another process with a client ``storage`` of the place; it calls ``say()``, and ``wait()`` waits for us."""

    def __init__(self, elsewhere: str, code: str) -> None:
        text = _CHILD.format(storage=elsewhere, code=code)
        self._process = subprocess.Popen(
            [sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def next_line(self) -> str:
        """The next line that the process prints. Raises: AssertionError, if it ended; its error is on stderr."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the other process ended with {self._process.wait(WAIT_S)}"
        return line.strip()

    def go_on(self) -> None:
        """End its ``wait()``."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def kill(self) -> None:
        """SIGKILL; harmless twice."""
        self._process.kill()
        self._process.wait(WAIT_S)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


@contextlib.contextmanager
def in_another_process(elsewhere: str | None, code: str) -> Iterator[Child]:
    """Run ``code`` there; skips the test where no other process can reach the place. Killed at the end."""
    if elsewhere is None:
        pytest.skip("no other process can reach this place")
    child = Child(elsewhere, code)
    try:
        yield child
    finally:
        child.kill()
