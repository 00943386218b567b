"""A file that an export makes: its size is known, and several threads write it in any order."""

import os

from lazysnap.levels.files import pwrite_all
from lazysnap.snapshots.reads import Write


class NewFile:
    """An open file. Raises: OSError, where it cannot be made or written."""

    def __init__(self, path: str, size_bytes: int | None = None) -> None:
        """``size_bytes``: the size of a new file; ``None``: open an existing one."""
        flags = os.O_RDWR | os.O_CLOEXEC | (0 if size_bytes is None else os.O_CREAT | os.O_EXCL)
        self.handle = os.open(path, flags, 0o666)
        if size_bytes is not None:
            os.ftruncate(self.handle, size_bytes)

    def close(self) -> None:
        """Close the file."""
        os.close(self.handle)

    def write(self, offset: int, data: "bytes | memoryview") -> None:
        """Write some bytes. Blocks."""
        pwrite_all(self.handle, offset, memoryview(data))

    def behind(self, start: int) -> Write:
        """Return a ``Write`` whose offsets count from ``start``."""
        return lambda offset, data: self.write(start + offset, data)
