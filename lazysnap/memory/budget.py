"""The memory that slots of one node may take: one account, however many ranks ask at once."""

import contextlib
import threading
from collections.abc import Callable, Iterator

from rich.filesize import decimal

from lazysnap.errors import KeeperError
from lazysnap.memory.limits import available_bytes

_RESERVE_BYTES = 256 << 20
"""Free memory that is left to the rest of the machine."""


class MemoryBoundExceeded(KeeperError, MemoryError):
    """The slots do not fit in ``MemoryLevel.max_bytes`` or in the memory of the machine."""


class Budget:
    """Share of the machine's free memory that slots may take. Thread-safe.

    Memory counts as free until its pages are populated, which takes seconds, and training takes more of it until its
    first step is over. Both are subtracted here, so that ranks that ask at the same time cannot all be promised the
    same memory.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._reserved = 0
        self._expected: dict[object, int] = {}

    def expect(self, trainer: object, growth_bytes: int) -> None:
        """Leave room for what a ``trainer`` (any key) is still going to take. Replaces what it expected before."""
        with self._lock:
            self._expected[trainer] = growth_bytes

    def forget(self, trainer: object) -> None:
        """Expect nothing more of a trainer that ended."""
        with self._lock:
            self._expected.pop(trainer, None)

    def free_bytes(self) -> int:
        """Return the bytes that slots may still take."""
        with self._lock:
            return self._free_bytes()

    def _free_bytes(self) -> int:
        return max(0, available_bytes() - _RESERVE_BYTES - self._reserved - sum(self._expected.values()))

    def check(self, size_bytes: int, what: str) -> None:
        """Raise MemoryBoundExceeded if ``what`` takes more than is free."""
        if size_bytes > (free := self.free_bytes()):
            raise MemoryBoundExceeded(_shortage(size_bytes, free, what))

    @contextlib.contextmanager
    def reserved(self, size_bytes: int, what: str) -> Iterator[Callable[[int], None]]:
        """Reserve memory for ``what`` while it is populated.

        Yields a function to be called before each further piece is populated, with the bytes populated since the call
        before: those are not reserved any more, since the machine no longer counts them as free. It raises
        MemoryBoundExceeded if other processes took the memory meanwhile.
        Raises: MemoryBoundExceeded, if there is not enough.
        """
        with self._lock:
            free = self._free_bytes()
            if size_bytes > free:
                raise MemoryBoundExceeded(_shortage(size_bytes, free, what))
            self._reserved += size_bytes
        left = size_bytes

        def populated(count: int) -> None:
            nonlocal left
            with self._lock:
                self._reserved -= min(count, left)
            left -= min(count, left)
            if left and (available := available_bytes()) < _RESERVE_BYTES // 2:
                raise MemoryBoundExceeded(_shortage(left, max(0, available - _RESERVE_BYTES), f"the rest of {what}"))

        try:
            yield populated
        finally:
            with self._lock:
                self._reserved -= left


def _shortage(needed: int, free: int, what: str) -> str:
    return (
        f"{what} need {needed} bytes ({decimal(needed)}), this machine (or its container) has {free} "
        f"({decimal(free)}) to spare; free memory, use a larger machine, or capture a smaller state"
    )


NODE = Budget()
"""The budget of this process. A node has one keeper for each job, which makes the slots of all its ranks."""
