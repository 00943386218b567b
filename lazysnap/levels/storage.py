"""The little that a place for snapshots must be able to do. Levels move bytes; they never re-serialize them."""

import errno
from typing import Protocol

from lazysnap.errors import LevelFull, LevelUnavailable


class Writer(Protocol):
    """One object that is being written; nothing of it is visible before ``publish``."""

    def write(self, offset: int, data: memoryview) -> None:
        """Write ``data`` at ``offset``. Blocks. May be called from several threads at once."""
        ...

    def publish(self) -> None:
        """Make the object durable and visible under its name, in this order. Blocks."""
        ...

    def abort(self) -> None:
        """Leave nothing behind; harmless after ``publish``."""
        ...


class Storage(Protocol):
    """A directory of objects. Paths are relative, with ``/``.

    Every method blocks and raises LevelUnavailable or LevelFull; a name that is not there raises FileNotFoundError.
    """

    url: str
    parallel_writes: int
    """Threads that a writer can use with profit."""

    def begin(self, path: str, size_bytes: int) -> Writer:
        """Start to write an object of a size known beforehand; its directory is made."""
        ...

    def put(self, path: str, data: bytes) -> None:
        """Write a small object as one act: durable and visible on return, or not there at all."""
        ...

    def get(self, path: str) -> bytes:
        """Read a small object whole."""
        ...

    def read_into(self, path: str, offset: int, out: memoryview) -> None:
        """Fill ``out`` from ``offset``. Raises: ShardCorrupt, if the object ends before."""
        ...

    def size(self, path: str) -> int:
        """Bytes of an object."""
        ...

    def list(self, path: str = "") -> list[str]:
        """Names in a directory, files and directories; empty if there is no such directory."""
        ...

    def delete(self, path: str) -> None:
        """Remove an object; harmless if it is not there."""
        ...

    def delete_directory(self, path: str) -> None:
        """Remove an empty directory; harmless if it is not there, not empty, or no such thing exists here."""
        ...


def level_error(url: str, what: str, error: OSError) -> LevelUnavailable | LevelFull:
    """``error`` as one of ours, with the place and what was tried."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return LevelFull(f"{url}: {what}: {error.strerror}; free space there or lower keep_last")
    return LevelUnavailable(f"{url}: {what}: {error.strerror or error}")
