"""The little that a place for snapshots must be able to do. Levels move bytes; they never re-serialize them."""

import errno
from contextlib import AbstractContextManager
from typing import Protocol

from lazysnap.errors import LevelFull, LevelUnavailable
from lazysnap.shard.limits import MAX_MANIFEST_BYTES

MAX_SMALL_BYTES = MAX_MANIFEST_BYTES
"""Objects that are read whole (manifests) are never larger; a larger one is damaged or not ours."""

ABANDONED_AFTER_S = 3600.0
"""Where a place cannot tell whether a writer lives: what was not touched for so long has none."""

SETTLED = 24
"""Times ``ABANDONED_AFTER_S``: a day. What was not touched for so long is nobody's work in progress, whoever put it."""


class Writer(Protocol):
    """One object that is being written."""

    def write(self, offset: int, data: memoryview) -> None:
        """Write ``data`` at ``offset``. Blocks. Called from ``Storage.parallel_writes`` threads; with one, in order."""
        ...

    def publish(self) -> None:
        """Make the object durable and visible under its name, in this order. Blocks.

        An object of that name is replaced by one act: the name says what the bytes are.
        """
        ...

    def close(self) -> None:
        """What was not published, or only half, is removed; harmless twice. Until then no sweep takes the object."""
        ...


class Reader(Protocol):
    """One object that is being read; what was opened stays readable where the place allows, even if it is deleted."""

    def read_into(self, offset: int, out: memoryview) -> None:
        """Fill ``out`` from ``offset``. Blocks; thread-safe. Raises: ShardCorrupt, if the object ends before."""
        ...

    def close(self) -> None:
        """Harmless twice."""
        ...


class Storage(Protocol):
    """A directory of objects. Paths are relative, with ``/``.

    Every method blocks and raises LevelUnavailable or LevelFull; a name that is not there raises FileNotFoundError,
    one that is no object of ours (a pipe, too large) ShardCorrupt.
    """

    url: str
    parallel_writes: int
    """Threads that a writer can use with profit; 1 means that blocks must come in order."""
    parallel_reads: int
    """Threads that read blocks with profit."""
    checks_writes: bool
    """Whether the place itself compares a checksum of every part on arrival: reading back would prove no more."""

    def begin(self, path: str, size_bytes: int) -> Writer:
        """Start to write an object of a size known beforehand; its directory is made."""
        ...

    def put(self, path: str, data: bytes) -> None:
        """Write a small object as one act: durable and visible on return, or not there at all."""
        ...

    def get(self, path: str) -> bytes:
        """Read a small object whole."""
        ...

    def reader(self, path: str) -> Reader:
        """Open an object for reads of ranges."""
        ...

    def read_into(self, path: str, offset: int, out: memoryview) -> None:
        """Fill ``out`` from ``offset``, for a single read. Raises: ShardCorrupt, if the object ends before."""
        ...

    def size(self, path: str) -> int:
        """Bytes of an object."""
        ...

    def stamp(self, path: str) -> object:
        """Something that changes when the object does and is cheap to ask for; ``None`` if there is no such thing."""
        ...

    def abort_stale(self, path: str = "") -> list[str]:
        """Give up uploads below ``path`` that no living writer stands behind, and that no listing shows.

        Returns what went; nothing where an unfinished object is a file like any other (``delete_abandoned``).
        """
        ...

    def list(self, path: str = "", prefix: str = "") -> list[str]:
        """Names in a directory that begin with ``prefix``, files and directories; empty if there is no such directory.

        Where the place can, what begins otherwise is not even looked at.
        """
        ...

    def lease(self, path: str) -> AbstractContextManager[None]:
        """While held, retention anywhere leaves the snapshot alone whose shard or manifest ``path`` is.

        Never fails for want of rights: a reader that may not write gets no protection, and reads all the same. Where a
        place knows no locks nothing is protected.
        """
        ...

    def is_leased(self, path: str) -> bool:
        """Whether a living reader holds a lease on ``path``. A lease of a reader that died ends by itself."""
        ...

    def is_link(self, path: str) -> bool:
        """Whether ``path``, or a directory that it is in, is a symbolic link: what is behind it is not ours to delete.

        False where a place has no such thing, and if nothing is there.
        """
        ...

    def is_settled(self, path: str) -> bool:
        """Whether nothing about an object changed for a day, by the place's own clock. In doubt it did.

        Raises: FileNotFoundError, also for a directory where a place has no such thing.
        """
        ...

    def delete(self, path: str) -> None:
        """Remove an object, durably; harmless if it is not there. Never through a symbolic link."""
        ...

    def delete_abandoned(self, path: str, *, unless: str | None = None) -> bool:
        """Remove an uncommitted object if no living writer stands behind it, and ``unless`` is not there.

        Returns whether it went. In doubt it stays.
        """
        ...

    def delete_directory(self, path: str) -> None:
        """Remove an empty directory; harmless if it is not there, not empty, or no such thing exists here."""
        ...


def level_error(url: str, what: str, error: OSError) -> LevelUnavailable | LevelFull:
    """``error`` as one of ours, with the place and what was tried."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return LevelFull(f"{url}: {what}: {error.strerror}; free space there or lower keep_last")
    return LevelUnavailable(f"{url}: {what}: {error}")
