"""Interface of a storage for snapshots. Levels move bytes; they never re-serialize them."""

import contextlib
import errno
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from lazysnap.errors import LazySnapError, LevelError
from lazysnap.shard.limits import MAX_MANIFEST_BYTES

MAX_SMALL_BYTES = MAX_MANIFEST_BYTES
"""The largest object that is read whole. Manifests are smaller; a larger one is damaged or not ours."""

ABANDONED_AFTER_S = 3600.0
"""Age after which an unfinished object counts as abandoned, at places that cannot tell whether its writer is alive."""

STALE_FACTOR = 24
"""Times ``ABANDONED_AFTER_S``: a day. No program is still writing an older object."""

_PROBE = re.compile(r"\.lazysnap-probe-[0-9a-f]{16}")


def no_beat() -> None:
    """Do nothing: a ``beat`` for a copy that no watchdog follows."""


class Writer(Protocol):
    """One object that is being written."""

    def write(self, offset: int, data: memoryview) -> None:
        """Write ``data`` at ``offset``. Blocks. Called from ``Storage.parallel_writes`` threads; with one, in order."""
        ...

    def publish(self) -> None:
        """Make the object durable and visible under its name, in this order. Blocks.

        An existing object of that name is replaced atomically: the name determines the bytes.
        """
        ...

    def close(self) -> None:
        """Remove an object that was not published whole; harmless twice. Until then no sweep takes the object."""
        ...


class Reader(Protocol):
    """One object that is being read. It stays readable, where the place allows, even if it is deleted."""

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill ``out`` from ``offset``. Blocks; thread-safe. Raises: FormatError, if the object ends before."""
        ...

    def close(self) -> None:
        """Close. May be called twice."""
        ...


class Storage(ABC):
    """A directory of objects. Paths are relative, with ``/``.

    Every place implements the abstract methods. The others have defaults for a place without locks, links and
    directories, where only an object's age shows whether its writer is dead.

    Every method blocks and raises LevelError. A name that does not exist raises FileNotFoundError; one that is no
    object of ours (a pipe, too large) raises FormatError.

    A level does these things. The calls of each come in this order:

    * Store a step: ``get`` of the manifest, which may exist already; ``create``; ``Writer.write`` for each block, from
    ``parallel_writes`` threads; ``Writer.publish``; ``put`` of the manifest, which commits; ``Writer.close``. On an
      error: ``Writer.close``; ``delete`` of a published file; ``delete_directory``. A fine-tuning stores its base
      first: ``get`` of the manifest of another step, and ``link`` of its base; or ``create`` to ``publish``.
    * Read it back: ``get`` of the manifest; ``size``; ``reader``; ``Reader.read_into`` for each block, from
    ``parallel_reads`` threads; ``Reader.close``. A training skips this if ``checks_writes``. A restart reads the same
    way, after ``list`` of every directory.
    * Delete a step: ``list`` of all directories, then of this one; ``is_link``; ``delete`` of the manifest, then of the
    file; ``delete_directory``.
    * Give a name: ``list``; ``put``. Take it away: ``list`` of every directory; ``size``; ``get``; ``is_link``;
    ``delete``.
    * Sweep, once in a start and before all else: ``list`` of every directory; ``is_link``; ``is_stale``;
    ``delete_abandoned``; ``delete_directory``; ``abort_stale``.
    * Try a level that failed: ``put``, ``get`` and ``delete`` of a small object.

    The keeper makes them through a ``levels.watched.WatchedStorage``, and abandons the thread if a call hangs. A call
    that returns late may still take effect. No other call follows it, except ``close``.
    """

    url: str
    parallel_writes = 1
    """The number of threads with which a writer is fastest; 1 means that blocks must come in order."""
    parallel_reads = 2
    """The number of threads with which reading is fastest."""
    abandoned_after_s = ABANDONED_AFTER_S

    def checks_writes(self) -> bool:
        """True if the place compares a checksum of every part on arrival. Reading back is then unnecessary.

        The first call may test that.
        """
        return False

    # ---------------------------------------------------------------- objects

    @abstractmethod
    def create(self, path: str, size_bytes: int) -> Writer:
        """Start to write an object of a known size; its directory is made."""

    @abstractmethod
    def put(self, path: str, data: bytes) -> None:
        """Write a small object atomically: on return it is durable and visible; on an error it does not exist."""

    @abstractmethod
    def get(self, path: str) -> bytes:
        """Read a small object whole."""

    @abstractmethod
    def reader(self, path: str) -> Reader:
        """Open an object for reads of ranges."""

    @abstractmethod
    def size(self, path: str) -> int:
        """Return the bytes of an object."""

    @abstractmethod
    def delete(self, path: str) -> None:
        """Remove an object, durably. A missing object is no error. Symbolic links are not followed."""

    @abstractmethod
    def list(self, path: str = "") -> list[str]:
        """Return the names in a directory, sorted. A missing directory is empty."""

    def exists(self, path: str) -> bool:
        """True if the object exists."""
        try:
            self.size(path)
        except FileNotFoundError:
            return False
        return True

    def link(self, path: str, new_path: str, beat: Callable[[], object] = no_beat) -> bool:
        """Copy an object to another name, without sending its bytes. The two objects are independent.

        ``beat``: called after each part, from any thread, where the place copies the bytes.

        Returns: ``False``, if the place cannot do that, now or ever. Then nothing is changed.
        Raises: CaptureAborted, if ``beat`` does. Then nothing is changed.
        """
        return False

    def stamp(self, path: str) -> object:
        """Return a value that changes when the object does and is cheap to get; ``None`` if the place has none."""
        return None

    # ---------------------------------------------------------------- writers that live or are dead

    def is_stale(self, path: str) -> bool:
        """True if an object certainly did not change for a day. Raises: FileNotFoundError."""
        return self._is_older(path, STALE_FACTOR * self.abandoned_after_s)

    def delete_abandoned(self, path: str, *, unless: str | None = None) -> bool:
        """Remove an uncommitted object if its writer is certainly dead and ``unless`` does not exist.

        True if it was removed.
        """
        try:
            if not self._is_older(path, self.abandoned_after_s):
                return False
        except FileNotFoundError:
            return False
        if unless is not None and self.exists(unless):
            return False
        self.delete(path)
        return True

    def _is_older(self, path: str, seconds: float) -> bool:
        age = self._age_s(path)
        return age is not None and age >= seconds

    def _age_s(self, path: str) -> float | None:
        """Return the seconds since an object changed, by the place's own clock; ``None`` if the place has no times."""
        return None

    def abort_stale(self) -> Sequence[str]:
        """Abort uploads whose writers are dead and that no listing shows. Return their names."""
        return []

    # ---------------------------------------------------------------- directories and links

    def is_link(self, path: str) -> bool:
        """True if ``path``, or a directory above it, is a symbolic link, whose target must not be deleted.

        False if the path does not exist.
        """
        return False

    def delete_directory(self, path: str) -> None:
        """Remove an empty directory. A missing one, or one that is not empty, is no error."""
        return


def probe_name() -> str:
    """Return a new name of a small object for a test of the place."""
    return f".lazysnap-probe-{os.urandom(8).hex()}"


def is_probe(name: str) -> bool:
    """True for a name that ``probe_name`` made."""
    return _PROBE.fullmatch(name) is not None


def probe(storage: Storage) -> None:
    """Write a small object, read it back and delete it. Blocks. Raises: LevelError; as the storage."""
    path = probe_name()
    written = os.urandom(8).hex().encode()
    storage.put(path, written)
    try:
        read_back = storage.get(path)
    finally:
        storage.delete(path)
    if read_back != written:
        raise LevelError(f"{path}: what was written was read back as {read_back!r:.40}")


@contextlib.contextmanager
def os_errors_named(url: str, action: str) -> Iterator[None]:
    """Turn OSError into LevelError within the context. Errors of this package stay."""
    try:
        yield
    except LazySnapError:
        raise
    except OSError as error:
        raise level_error(url, action, error) from error


def level_error(url: str, action: str, error: OSError) -> LevelError:
    """Return ``error`` as a LevelError that names the place and the operation."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return LevelError(f"{url}: {action}: {error.strerror}; free space there or lower keep_last")
    return LevelError(f"{url}: {action}: {error}")
