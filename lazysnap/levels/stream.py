"""One object that is streamed through an fsspec driver: in order, one block in memory at a time."""

import contextlib
from typing import TYPE_CHECKING, Any

from fsspec.spec import AbstractBufferedFile

from lazysnap.errors import LevelError, LevelUnavailable, ShardCorrupt
from lazysnap.levels.files import temp_name

if TYPE_CHECKING:
    from lazysnap.levels.remote import FsspecStorage


def discard(file: Any) -> None:
    """Close without publishing, where the driver can."""
    with contextlib.suppress(Exception):
        if isinstance(file, AbstractBufferedFile):
            file.discard()
            file.closed = True  # else its destructor would publish the half
        else:
            file.close()


class StreamWriter:
    """Streams one object; see ``levels.storage.Writer``. Blocks must come in order."""

    def __init__(self, storage: "FsspecStorage", path: str, size_bytes: int) -> None:
        self._storage = storage
        self._path = path
        self._size = size_bytes
        self._done = 0
        self._left: set[str] = set()
        """The temporary name, if there is one that is to be removed."""
        self._file: Any = None
        try:
            self._open_name = path
            if storage.abilities().shows_open_files:
                directory, _, name = path.rpartition("/")
                self._open_name = f"{directory}/{temp_name(name)}"
                self._left.add(self._open_name)
            self._file = storage.open_to_write(self._open_name)
        except BaseException:
            self.close()
            raise

    def write(self, offset: int, data: memoryview) -> None:
        """Send the next block."""
        if offset != self._done:
            raise ValueError(f"{self._storage.url}/{self._path}: block at {offset}, expected at {self._done}")
        block = data[: max(0, self._size - offset)]
        self._storage.reach("write", self._path)
        # A copy, because not every driver takes a memoryview, or sends it before it returns.
        self._storage.call(f"writing {self._path} at {offset}", self._file.write, bytes(block))
        self._done += len(block)

    def publish(self) -> None:
        """Close the file, rename it if it has not its name yet, and ask whether all of it arrived."""
        storage, path = self._storage, self._path
        if self._done != self._size:
            raise ShardCorrupt(f"{storage.url}/{path}: {self._done} bytes were written of {self._size}")
        storage.reach("upload", path)
        storage.call(f"ending {path}", self._file.close)
        if self._open_name != path:
            storage.rename(self._open_name, path)
            self._left.discard(self._open_name)
        storage.reach("uploaded", path)
        size = storage.size(path)
        if size != self._size:
            storage.delete(path)
            raise LevelUnavailable(f"{storage.url}/{path}: {size} bytes arrived, {self._size} were sent")
        self._left.clear()
        self._file = None

    def close(self) -> None:
        """Discard what is not published; harmless twice. What may stand under the final name stays: it is whole."""
        file, self._file = self._file, None
        if file is not None:
            discard(file)
        left, self._left = self._left, set()
        with contextlib.suppress(LevelError):  # the level is away: the next sweep gets it
            for name in left:
                self._storage.delete(name)
