"""A storage that breaks at the n-th operation, in the way that was asked for; over any other storage.

Every call of the protocol is one operation with a name: ``begin write publish put get reader read_into size stamp list
lease is_leased delete delete_abandoned delete_directory abort_stale``. A dry run counts them, so that a test can go
through all::

    plan = FaultPlan()
    work(SnapshotStore(FaultyStorage(storage, plan)))
    for n in range(1, len(plan.operations) + 1):
        plan = FaultPlan(Fail(n))
        ...

``close`` is no operation: what it could not do, it does not say.
"""

import contextlib
import errno
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import NoReturn, TypeVar

from lazysnap.errors import NameTaken, ShardCorrupt
from lazysnap.levels.memory import map_anonymous
from lazysnap.levels.storage import Reader, Storage, Writer, level_error

Result = TypeVar("Result")

WRITES = frozenset({"write", "put"})
READS = frozenset({"get", "read_into"})
DATA_OPERATIONS = WRITES | READS
"""Those that move the bytes of objects: what ``Flip`` and ``Truncate`` act on (``Truncate`` also on ``list``)."""
CHANGES = frozenset(
    {"begin", "write", "publish", "put", "delete", "delete_abandoned", "delete_directory", "abort_stale"}
)
"""Those that change what is at the place."""


@dataclass(frozen=True)
class Fault:
    """What goes wrong, and when. One of the classes below."""

    at: int
    """The n-th operation, counted from 1."""
    operation: str | None = field(default=None, kw_only=True)
    """Count the operations of this name only."""
    lasting: bool = field(default=False, kw_only=True)
    """Also at every operation that follows (of that name), until ``FaultPlan.clear``."""


@dataclass(frozen=True)
class Fail(Fault):
    """Raises what a real place would: LevelFull or LevelUnavailable; FileNotFoundError for ``ENOENT``, NameTaken for
    ``EEXIST``.

    ``delete_directory`` never raises: there it does nothing.
    """

    error: int = field(default=errno.EIO, kw_only=True)
    """Number of the OSError."""
    after: bool = field(default=False, kw_only=True)
    """After the operation took effect, as when the answer is lost. (A ``begin`` that raises is undone.)"""


@dataclass(frozen=True)
class Delay(Fault):
    """Takes longer."""

    seconds: float = field(kw_only=True)


@dataclass(frozen=True)
class Truncate(Fault):
    """The second half of what is written or read is lost (zeros, where more of the object follows); of a listing, the
    last name.
    """

    claims_success: bool = field(default=False, kw_only=True)
    """Say nothing of it. Else a write raises LevelUnavailable, a read ShardCorrupt. (A listing says nothing ever.)"""


@dataclass(frozen=True)
class Flip(Fault):
    """One bit of what is written or read is another one; nothing is raised."""


@dataclass(frozen=True)
class Hang(Fault):
    """Blocks until ``FaultPlan.release``, then goes on as if nothing had been."""


@dataclass(frozen=True)
class Act(Fault):
    """Calls ``action`` just before the operation: fills a real disk, kills a real server."""

    action: Callable[[], object] = field(kw_only=True)


class FaultPlan:
    """The faults to come, and the operations that were. Thread-safe; may be shared by several storages."""

    def __init__(self, *faults: Fault) -> None:
        self._faults = faults
        self._lock = threading.Lock()
        self._released = threading.Event()
        self._counts: Counter[str | None] = Counter()
        self.operations: list[str] = []
        """Names of the operations so far, in order."""
        self.happened: list[Fault] = []
        """The faults that were reached, in order."""
        self.hanging = threading.Event()
        """Set as soon as an operation hangs."""

    def clear(self) -> None:
        """The place is well again: no fault from now on. What hangs goes on."""
        with self._lock:
            self._faults = ()
        self.release()

    def release(self) -> None:
        """Let go of what hangs, now and later. A test calls this in any case, or its threads stay behind."""
        self._released.set()

    def next(self, operation: str) -> list[Fault]:
        """Count one operation; what is to go wrong with it."""
        with self._lock:
            self.operations.append(operation)
            self._counts[operation] += 1
            self._counts[None] += 1
            due = [fault for fault in self._faults if self._is_due(fault, operation)]
            self.happened += due
            return due

    def _is_due(self, fault: Fault, operation: str) -> bool:
        if fault.operation not in (None, operation):
            return False
        count = self._counts[fault.operation]
        return count >= fault.at if fault.lasting else count == fault.at

    def wait_released(self) -> None:
        """Hang."""
        self.hanging.set()
        self._released.wait()


class _Operation:
    """One operation and what is to go wrong with it."""

    def __init__(self, storage: "FaultyStorage", name: str, path: str) -> None:
        self._url = storage.url
        self._what = f"{name} {path}"
        self.faults = storage.plan.next(name)
        for fault in self.faults:
            if isinstance(fault, Act):
                fault.action()
            elif isinstance(fault, Delay):
                time.sleep(fault.seconds)
            elif isinstance(fault, Hang):
                storage.plan.wait_released()

    def fail(self, *, after: bool) -> None:
        """Raise, if it is to fail at this point."""
        for fault in self.faults:
            if isinstance(fault, Fail) and fault.after == after:
                self.raise_error(fault.error)

    def raise_error(self, number: int) -> NoReturn:
        """What a place makes of an OSError."""
        error = OSError(number, os.strerror(number), self._what)
        if isinstance(error, FileNotFoundError):
            raise error
        if isinstance(error, FileExistsError):
            raise NameTaken(f"{self._url}: fault at {self._what}: {error.strerror}")
        raise level_error(self._url, f"fault at {self._what}", error)

    def is_to(self, kind: type[Fault]) -> bool:
        """Whether a fault of that kind is due."""
        return any(isinstance(fault, kind) for fault in self.faults)

    @property
    def truncation(self) -> Truncate | None:
        """The truncation that is due."""
        return next((fault for fault in self.faults if isinstance(fault, Truncate)), None)

    @property
    def claims_success(self) -> bool:
        """Whether nothing is to be said of a truncation."""
        return self.truncation is not None and self.truncation.claims_success

    def damaged(self, data: memoryview, counting: int) -> memoryview:
        """``data`` as it arrives: itself, or a copy cut or with a bit flipped within the bytes that count."""
        if self.truncation is not None:
            data = data[: counting // 2]
        if self.is_to(Flip) and len(data):
            copy = map_anonymous(len(data))
            copy[:] = data
            copy[min(counting, len(data)) // 2] ^= 0x10
            data = copy
        return data

    def end_write(self) -> None:
        """Raise what follows a write."""
        if self.truncation is not None and not self.claims_success:
            self.raise_error(errno.EIO)
        self.fail(after=True)

    def end_read(self) -> None:
        """Raise what follows a read."""
        if self.truncation is not None and not self.claims_success:
            raise ShardCorrupt(f"{self._url}: {self._what}: ends before")
        self.fail(after=True)


class FaultyWriter:
    """See ``levels.storage.Writer``."""

    def __init__(self, storage: "FaultyStorage", path: str, size_bytes: int, writer: Writer) -> None:
        self._storage = storage
        self._path = path
        self._size = size_bytes
        self._writer = writer

    def write(self, offset: int, data: memoryview) -> None:
        """Write, perhaps."""
        operation = _Operation(self._storage, "write", f"{self._path} at {offset}")
        operation.fail(after=False)
        counting = min(len(data), self._size - offset)
        arrives = operation.damaged(data, counting)
        if len(arrives) < len(data) and operation.claims_success:
            whole = map_anonymous(len(data))  # a hole: later blocks are where they belong
            whole[: len(arrives)] = arrives
            arrives = whole
        self._writer.write(offset, arrives)
        operation.end_write()

    def publish(self) -> None:
        """Publish, perhaps."""
        operation = _Operation(self._storage, "publish", self._path)
        operation.fail(after=False)
        self._writer.publish()
        operation.fail(after=True)

    def close(self) -> None:
        """Always closes."""
        self._writer.close()


class FaultyReader:
    """See ``levels.storage.Reader``."""

    def __init__(self, storage: "FaultyStorage", path: str, reader: Reader) -> None:
        self._storage = storage
        self._path = path
        self._reader = reader

    def read_into(self, offset: int, out: memoryview) -> None:
        """Read, perhaps."""
        self._storage.read_faulty(self._path, offset, out, self._reader.read_into)

    def close(self) -> None:
        """Always closes."""
        self._reader.close()


class FaultyStorage:
    """Another storage, with what the plan says going wrong; see ``levels.storage.Storage``."""

    def __init__(self, storage: Storage, plan: FaultPlan) -> None:
        self.storage = storage
        self.plan = plan
        self.url = storage.url
        self.parallel_writes = storage.parallel_writes

    @property
    def checks_writes(self) -> bool:
        """As the storage says, which may have to try it out first."""
        return self.storage.checks_writes

    @checks_writes.setter
    def checks_writes(self, checks: bool) -> None:
        self.storage.checks_writes = checks

    def _do(self, name: str, path: str, work: Callable[[], Result]) -> Result:
        operation = _Operation(self, name, path)
        operation.fail(after=False)
        result = work()
        operation.fail(after=True)
        return result

    def begin(self, path: str, size_bytes: int) -> FaultyWriter:
        """Begin, perhaps."""
        operation = _Operation(self, "begin", path)
        operation.fail(after=False)
        writer = self.storage.begin(path, size_bytes)
        try:
            operation.fail(after=True)
        except BaseException:
            writer.close()  # nobody else could
            raise
        return FaultyWriter(self, path, size_bytes, writer)

    def put(self, path: str, data: bytes, *, exclusive: bool = False) -> None:
        """Put, perhaps."""
        operation = _Operation(self, "put", path)
        operation.fail(after=False)
        self.storage.put(path, bytes(operation.damaged(memoryview(data), len(data))), exclusive=exclusive)
        operation.end_write()

    def get(self, path: str) -> bytes:
        """Get, perhaps."""
        operation = _Operation(self, "get", path)
        operation.fail(after=False)
        whole = self.storage.get(path)
        data = bytes(operation.damaged(memoryview(whole), len(whole)))
        operation.end_read()
        return data

    def reader(self, path: str) -> FaultyReader:
        """Open, perhaps."""
        operation = _Operation(self, "reader", path)
        operation.fail(after=False)
        reader = self.storage.reader(path)
        try:
            operation.fail(after=True)
        except BaseException:
            reader.close()
            raise
        return FaultyReader(self, path, reader)

    def read_into(self, path: str, offset: int, out: memoryview) -> None:
        """Read, perhaps."""

        def read(offset: int, out: memoryview) -> None:
            self.storage.read_into(path, offset, out)

        self.read_faulty(path, offset, out, read)

    def read_faulty(self, path: str, offset: int, out: memoryview, read: Callable[[int, memoryview], None]) -> None:
        """One read of a range through ``read``."""
        operation = _Operation(self, "read_into", f"{path} at {offset}")
        operation.fail(after=False)
        kept = out if operation.truncation is None else out[: len(out) // 2]
        read(offset, kept)
        if operation.is_to(Flip) and len(kept):
            kept[len(kept) // 2] ^= 0x10
        operation.end_read()

    def size(self, path: str) -> int:
        """Ask, perhaps."""
        return self._do("size", path, lambda: self.storage.size(path))

    def stamp(self, path: str) -> object:
        """Ask, perhaps."""
        return self._do("stamp", path, lambda: self.storage.stamp(path))

    def abort_stale(self, path: str = "") -> list[str]:
        """Give up, perhaps."""
        return self._do("abort_stale", path, lambda: self.storage.abort_stale(path))

    def list(self, path: str = "") -> list[str]:
        """List, perhaps."""
        operation = _Operation(self, "list", path)
        operation.fail(after=False)
        names = self.storage.list(path)
        operation.fail(after=True)
        return names if operation.truncation is None else names[:-1]

    def lease(self, path: str) -> AbstractContextManager[None]:
        """Take a lease, perhaps."""
        return self._lease(path)

    @contextlib.contextmanager
    def _lease(self, path: str) -> Iterator[None]:
        operation = _Operation(self, "lease", path)
        operation.fail(after=False)
        with self.storage.lease(path):
            operation.fail(after=True)
            yield

    def is_leased(self, path: str) -> bool:
        """Ask, perhaps."""
        return self._do("is_leased", path, lambda: self.storage.is_leased(path))

    def delete(self, path: str) -> None:
        """Delete, perhaps."""
        self._do("delete", path, lambda: self.storage.delete(path))

    def delete_abandoned(self, path: str, *, unless: str | None = None) -> bool:
        """Delete, perhaps."""
        return self._do("delete_abandoned", path, lambda: self.storage.delete_abandoned(path, unless=unless))

    def delete_directory(self, path: str) -> None:
        """Remove, perhaps; never raises."""
        operation = _Operation(self, "delete_directory", path)
        if not any(isinstance(fault, Fail) and not fault.after for fault in operation.faults):
            self.storage.delete_directory(path)
