"""The memory budget of the slots of one node, for any number of concurrent requests."""

import contextlib
import threading
from collections.abc import Callable, Iterator

from rich.filesize import decimal

from lazysnap.errors import KeeperError
from lazysnap.memory.available import available_bytes

_RESERVE_BYTES = 256 << 20
"""Free memory that slots leave to the rest of the machine."""


class MemoryBoundExceeded(KeeperError, MemoryError):
    """The slots do not fit in ``MemoryLevel.max_bytes`` or in the memory of the machine."""


class Budget:
    """Share of the machine's free memory that slots may take. Thread-safe.

    Memory counts as free until its pages are populated, which takes seconds. Training takes more memory until its first
    step is over. Both are subtracted here, so that concurrent requests never get the same memory.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reserved = 0
        self._growth_bytes: Callable[[], int] = int

    def expect(self, growth_bytes: Callable[[], int]) -> None:
        """Leave room for growth.

        Args:
            growth_bytes: returns the memory that all trainers together will still take. Called on any thread.
        """
        self._growth_bytes = growth_bytes

    def free_bytes(self) -> int:
        """Return the bytes that slots may still take."""
        with self._lock:
            return self._free_bytes()

    def _free_bytes(self) -> int:
        return max(0, available_bytes() - _RESERVE_BYTES - self._reserved - self._growth_bytes())

    @contextlib.contextmanager
    def reserved(self, size_bytes: int, purpose: str) -> Iterator[Callable[[int], None]]:
        """Reserve memory while it is populated. ``purpose``: its use, for messages.

        Yields a function to be called before each further piece is populated, with the bytes populated since the call
        before. These are no longer reserved, because the machine no longer counts them as free. The function raises
        MemoryBoundExceeded if other processes took the memory meanwhile.
        Raises: MemoryBoundExceeded, if there is not enough.
        """
        with self._lock:
            free = self._free_bytes()
            if size_bytes > free:
                raise MemoryBoundExceeded(_shortage(size_bytes, free, purpose))
            self._reserved += size_bytes
        remaining_bytes = size_bytes

        def populated(count: int) -> None:
            nonlocal remaining_bytes
            released_bytes = min(count, remaining_bytes)
            with self._lock:
                self._reserved -= released_bytes
            remaining_bytes -= released_bytes
            if not remaining_bytes:
                return
            available = available_bytes()
            if available < _RESERVE_BYTES // 2:
                free = max(0, available - _RESERVE_BYTES)
                raise MemoryBoundExceeded(_shortage(remaining_bytes, free, f"the rest of {purpose}"))

        try:
            yield populated
        finally:
            with self._lock:
                self._reserved -= remaining_bytes


def _shortage(needed: int, free: int, purpose: str) -> str:
    return (
        f"{purpose} need {needed} bytes ({decimal(needed)}), this machine (or its container) has {free} "
        f"({decimal(free)}) to spare; free memory, use a larger machine, or capture a smaller state"
    )


NODE = Budget()
"""The budget of this process. A node has one keeper for each job, which makes the slots of all its ranks."""
