"""The parity that a keeper holds for the other nodes of its group: of the newest protected step, and of the next."""

import ctypes
import threading
from collections.abc import Callable
from dataclasses import dataclass

from lazysnap.errors import CaptureAborted
from lazysnap.keeper.protocol import HeldParity
from lazysnap.levels.source import MemorySource, map_anonymous
from lazysnap.memory.budget import NODE


@dataclass(frozen=True, eq=False)
class ParitySet:
    """The parity of one step."""

    held: HeldParity
    files: dict[int, memoryview]
    """Stripes by number; see ``parity.pieces``."""


class ParityStore:
    """Thread-safe. It outlasts starts: what an earlier one protected stays until this one has protected a step."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sets: list[ParitySet] = []
        self._spare: list[memoryview] = []

    def buffers(self, count: int, size_bytes: int) -> list[memoryview]:
        """Zeroed memory for the files of that many stripes. Blocks. Raises: MemoryBoundExceeded."""
        with self._lock:
            spare, self._spare = self._spare, []
        found = [buffer for buffer in spare if len(buffer) == size_bytes][:count]
        for buffer in found:
            ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(buffer)), 0, size_bytes)
        del spare
        missing = count - len(found)
        if missing:
            NODE.check(missing * size_bytes, "parity for other nodes")
        return found + [map_anonymous(size_bytes) for _ in range(missing)]

    def add(self, done: ParitySet) -> None:
        """Parity of a step is whole."""
        with self._lock:
            self._sets.append(done)

    def keep(self, stays: Callable[[HeldParity], bool]) -> list[HeldParity]:
        """Release all parity but that for which ``stays`` is true; the parity that is left."""
        with self._lock:
            kept = [one for one in self._sets if stays(one.held)]
            gone = [one for one in self._sets if one not in kept]
            self._sets = kept
            if gone:
                self._spare = [buffer for one in gone for buffer in one.files.values()]
            return [one.held for one in kept]

    def clear(self) -> None:
        """Release all parity: no restart needs it."""
        with self._lock:
            self._sets, self._spare = [], []

    def inventory(self) -> list[HeldParity]:
        """The parity of each step that is held."""
        with self._lock:
            return [one.held for one in self._sets]

    def source(self, start: str, step: int, stripe: int) -> MemorySource:
        """The file of a stripe. Raises: CaptureAborted, if it is not there."""
        with self._lock:
            found = next((one for one in self._sets if (one.held.start, one.held.step) == (start, step)), None)
        if found is None or stripe not in found.files:
            raise CaptureAborted(f"no parity of stripe {stripe} of step {step} of start {start} is held here")
        return MemorySource(found.files[stripe], len(found.files[stripe]))
