"""A storage for one task of a level: each operation reports to the watchdog, and writes are rate-limited."""

import threading
import time
from collections.abc import Callable, Sequence

from lazysnap.levels.storage import Reader, Storage, Writer, no_beat
from lazysnap.levels.watchdog import Beat

_SLICE_S = 0.2
"""The longest pause of a write that waits for the rate limit, between two calls of ``beat``."""


class RateLimiter:
    """Lets at most ``max_bytes_per_s`` pass, averaged over the time since it was last idle; ``None``: no limit."""

    def __init__(self, max_bytes_per_s: int | None) -> None:
        self._rate = max_bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def wait_for(self, num_bytes: int, while_waiting: Callable[[], None]) -> None:
        """Block until ``num_bytes`` may pass. Calls ``while_waiting`` repeatedly, which may raise."""
        if self._rate is None:
            return
        with self._lock:
            now = time.monotonic()
            start = max(now, self._free_at)
            self._free_at = start + num_bytes / self._rate
        # Earlier bytes pass first.
        remaining_s = start - time.monotonic()
        while remaining_s > 0:
            while_waiting()
            time.sleep(min(remaining_s, _SLICE_S))
            remaining_s = start - time.monotonic()


class WatchedStorage(Storage):
    """Another storage. Each operation first calls ``beat``, of the watchdog of one task.

    ``beat`` reports progress, and raises CaptureAborted when the caller of the task has given up. So an abandoned
    thread that returns commits and deletes nothing. A storage outlives a task, so each task wraps it again: an
    abandoned thread keeps the ``beat`` that raises.
    """

    def __init__(self, storage: Storage, beat: Beat, pace: RateLimiter | None = None) -> None:
        """``pace``: limits the bytes per second of ``Writer.write``. Waiting for it counts as progress."""
        self.url = storage.url
        self.parallel_writes = storage.parallel_writes
        self.parallel_reads = storage.parallel_reads
        self._storage = storage
        self._beat = beat
        self._pace = pace or RateLimiter(None)

    def checks_writes(self) -> bool:
        """See ``Storage.checks_writes``."""
        self._beat()
        return self._storage.checks_writes()

    def create(self, path: str, size_bytes: int) -> Writer:
        """See ``Storage.create``."""
        self._beat()
        return _WatchedWriter(self._storage.create(path, size_bytes), self._beat, self._pace)

    def put(self, path: str, data: bytes) -> None:
        """See ``Storage.put``. Nothing raises after it: a manifest is committed by then."""
        self._beat()
        self._storage.put(path, data)

    def link(self, path: str, new_path: str, beat: Callable[[], object] = no_beat) -> bool:
        """See ``Storage.link``. The copy of each part is progress of the task. ``beat`` is not used."""
        self._beat()
        return self._storage.link(path, new_path, self._beat)

    def reader(self, path: str) -> Reader:
        """See ``Storage.reader``."""
        self._beat()
        return _WatchedReader(self._storage.reader(path), self._beat)

    def get(self, path: str) -> bytes:
        """See ``Storage.get``."""
        self._beat()
        return self._storage.get(path)

    def size(self, path: str) -> int:
        """See ``Storage.size``."""
        self._beat()
        return self._storage.size(path)

    def delete(self, path: str) -> None:
        """See ``Storage.delete``."""
        self._beat()
        self._storage.delete(path)

    def stamp(self, path: str) -> object:
        """See ``Storage.stamp``."""
        self._beat()
        return self._storage.stamp(path)

    def is_stale(self, path: str) -> bool:
        """See ``Storage.is_stale``."""
        self._beat()
        return self._storage.is_stale(path)

    def delete_abandoned(self, path: str, *, unless: str | None = None) -> bool:
        """See ``Storage.delete_abandoned``."""
        self._beat()
        return self._storage.delete_abandoned(path, unless=unless)

    def abort_stale(self) -> Sequence[str]:
        """See ``Storage.abort_stale``."""
        self._beat()
        return self._storage.abort_stale()

    def is_link(self, path: str) -> bool:
        """See ``Storage.is_link``."""
        self._beat()
        return self._storage.is_link(path)

    def delete_directory(self, path: str) -> None:
        """See ``Storage.delete_directory``."""
        self._beat()
        self._storage.delete_directory(path)

    # Defined last, because it hides the type ``list`` from later annotations.
    def list(self, path: str = "") -> list[str]:
        """See ``Storage.list``."""
        self._beat()
        return self._storage.list(path)


class _WatchedWriter:
    """See ``levels.storage.Writer``."""

    def __init__(self, writer: Writer, beat: Beat, pace: RateLimiter) -> None:
        self._writer = writer
        self._beat = beat
        self._pace = pace

    def write(self, offset: int, data: memoryview) -> None:
        """See ``Writer.write``. Blocks: also until the rate limit allows it."""
        self._pace.wait_for(len(data), self._beat)
        self._beat()
        self._writer.write(offset, data)
        self._beat()

    def publish(self) -> None:
        """See ``Writer.publish``. Nothing raises after it, so the caller knows that the object is visible."""
        self._beat()
        self._writer.publish()

    def close(self) -> None:
        """See ``Writer.close``. An abandoned thread closes, too: the object belongs to it."""
        self._writer.close()


class _WatchedReader:
    """See ``levels.storage.Reader``."""

    def __init__(self, reader: Reader, beat: Beat) -> None:
        self._reader = reader
        self._beat = beat

    def read_into(self, offset: int, out: memoryview) -> None:
        """See ``Reader.read_into``."""
        self._beat()
        self._reader.read_into(offset, out)
        self._beat()

    def close(self) -> None:
        """See ``Reader.close``."""
        self._reader.close()
