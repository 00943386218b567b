"""A storage that breaks at the n-th operation, in the way that was asked for; over any other storage.

Every call of the protocol is one operation with a name: ``create write publish put link get reader read_into size stamp
list is_link is_stale delete delete_abandoned delete_directory abort_stale``. A dry run counts them, so that a test
can go through all::

    plan = FaultPlan()
    work(FaultyStorage(storage, plan))
    for n in range(1, len(plan.operations) + 1):
        plan = FaultPlan(Fail(n))
        ...

``close`` is no operation: what it could not do, it does not say.
"""

import errno
import os
from collections.abc import Callable
from typing import NoReturn

from lazysnap.errors import FormatError
from lazysnap.levels.source import map_anonymous
from lazysnap.levels.storage import Reader, Storage, Writer, level_error
from support.fault_plan import Act, Fail, Fault, FaultPlan, Flip, Hang, Truncate


class _Operation:
    """One operation and what is to go wrong with it."""

    def __init__(self, storage: "FaultyStorage", name: str, path: str) -> None:
        self._url = storage.url
        self._what = f"{name} {path}"
        self.faults = storage.plan.next(name)
        for fault in self.faults:
            if isinstance(fault, Act):
                fault.action()
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
            raise FormatError(f"{self._url}: {self._what}: ends before")
        self.fail(after=True)


class FaultyWriter:
    """See ``levels.storage.Writer``."""

    def __init__(self, storage: "FaultyStorage", path: str, size_bytes: int, writer: Writer) -> None:
        self._storage = storage
        self._path = path
        self._size = size_bytes
        self._writer = writer

    def write(self, offset: int, data: memoryview) -> None:
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
        operation = _Operation(self._storage, "publish", self._path)
        operation.fail(after=False)
        self._writer.publish()
        operation.fail(after=True)

    def close(self) -> None:
        self._writer.close()


class FaultyReader:
    """See ``levels.storage.Reader``."""

    def __init__(self, storage: "FaultyStorage", path: str, reader: Reader) -> None:
        self._storage = storage
        self._path = path
        self._reader = reader

    def read_into(self, offset: int, out: memoryview) -> None:
        self._storage.read_faulty(self._path, offset, out, self._reader.read_into)

    def close(self) -> None:
        self._reader.close()


class FaultyStorage:
    """Another storage, with what the plan says going wrong; see ``levels.storage.Storage``."""

    def __init__(self, storage: Storage, plan: FaultPlan) -> None:
        self.storage = storage
        self.plan = plan
        self.url = storage.url
        self.parallel_writes = storage.parallel_writes
        self.parallel_reads = storage.parallel_reads

    def checks_writes(self) -> bool:
        """As the storage says, which may have to try it out first; never, if bytes are to be lost in silence."""
        return self.storage.checks_writes() and not self.plan.is_silent

    def __getattr__(self, name: str) -> Callable[..., object]:
        """An operation that moves no data: it can only fail or hang."""

        def call(*paths: str, **options: object) -> object:
            operation = _Operation(self, name, "".join(paths))
            operation.fail(after=False)
            result = getattr(self.storage, name)(*paths, **options)
            operation.fail(after=True)
            return result

        return call

    def create(self, path: str, size_bytes: int) -> FaultyWriter:
        operation = _Operation(self, "create", path)
        operation.fail(after=False)
        writer = self.storage.create(path, size_bytes)
        try:
            operation.fail(after=True)
        except BaseException:
            writer.close()  # nobody else could
            raise
        return FaultyWriter(self, path, size_bytes, writer)

    def put(self, path: str, data: bytes) -> None:
        operation = _Operation(self, "put", path)
        operation.fail(after=False)
        self.storage.put(path, bytes(operation.damaged(memoryview(data), len(data))))
        operation.end_write()

    def link(self, path: str, new_path: str, beat: Callable[[], object] = lambda: None) -> bool:
        operation = _Operation(self, "link", new_path)
        operation.fail(after=False)
        is_linked = self.storage.link(path, new_path, beat)
        operation.fail(after=True)
        return is_linked

    def get(self, path: str) -> bytes:
        operation = _Operation(self, "get", path)
        operation.fail(after=False)
        whole = self.storage.get(path)
        data = bytes(operation.damaged(memoryview(whole), len(whole)))
        operation.end_read()
        return data

    def reader(self, path: str) -> FaultyReader:
        operation = _Operation(self, "reader", path)
        operation.fail(after=False)
        reader = self.storage.reader(path)
        try:
            operation.fail(after=True)
        except BaseException:
            reader.close()
            raise
        return FaultyReader(self, path, reader)

    def read_faulty(self, path: str, offset: int, out: memoryview, read: Callable[[int, memoryview], None]) -> None:
        """One read of a range through ``read``."""
        operation = _Operation(self, "read_into", f"{path} at {offset}")
        operation.fail(after=False)
        kept = out if operation.truncation is None else out[: len(out) // 2]
        read(offset, kept)
        if operation.is_to(Flip) and len(kept):
            kept[len(kept) // 2] ^= 0x10
        operation.end_read()

    def list(self, path: str = "") -> list[str]:
        operation = _Operation(self, "list", path)
        operation.fail(after=False)
        names = self.storage.list(path)
        operation.fail(after=True)
        return names if operation.truncation is None else names[:-1]

    def delete_directory(self, path: str) -> None:
        operation = _Operation(self, "delete_directory", path)
        if not any(isinstance(fault, Fail) and not fault.after for fault in operation.faults):
            self.storage.delete_directory(path)
