"""Sources of a shard's bytes while it is written: a slot that is still being filled, or a complete file."""

from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from lazysnap.levels.memory import map_anonymous
from lazysnap.levels.rate_limiter import RateLimiter
from lazysnap.levels.storage import Storage


class BlockSource(Protocol):
    """The bytes of one shard, readable block by block as they arrive."""

    size_bytes: int

    def wait(self, upto: int) -> None:
        """Block until the bytes below ``upto`` are there; with a deadline of its own.

        Raises: CaptureAborted, if they will never be.
        """
        ...

    def view(self, offset: int, length: int) -> memoryview:
        """Bytes ``[offset, offset + length)``; they may reach up to the next page boundary behind the end."""
        ...

    def finish(self) -> None:
        """Called after the last byte was read, before anything is published.

        Raises: CaptureAborted, if the capture was torn: what was read is discarded.
        """
        ...


class FileSource:
    """A shard that is committed at another level.

    The file is opened once: a slow level copies it to the end even if the other level deletes it meanwhile.
    """

    def __init__(self, storage: Storage, path: str, size_bytes: int) -> None:
        """Raises: FileNotFoundError, LevelUnavailable."""
        self.size_bytes = size_bytes
        self._reader = storage.reader(path)

    def wait(self, upto: int) -> None:
        """Nothing to wait for: the file is complete."""

    def view(self, offset: int, length: int) -> memoryview:
        """Read into fresh page-aligned memory, zeros behind the end."""
        block = map_anonymous(length)
        self._reader.read_into(offset, block[: min(length, self.size_bytes - offset)])
        return block

    def finish(self) -> None:
        """Nothing more to check: the writer compares the digest."""

    def close(self) -> None:
        """Close the file; harmless twice."""
        self._reader.close()

    def __enter__(self) -> "FileSource":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class MemorySource:
    """A shard that is complete in memory."""

    def __init__(self, image: memoryview, size_bytes: int) -> None:
        """``image`` reaches up to the next page boundary behind ``size_bytes``."""
        self.size_bytes = size_bytes
        self._image = image

    def wait(self, upto: int) -> None:
        """Nothing to wait for."""

    def view(self, offset: int, length: int) -> memoryview:
        """See ``BlockSource.view``."""
        return self._image[offset : offset + length]

    def finish(self) -> None:
        """Nothing more to check: the writer compares the digest."""


class RateLimitedSource:
    """A source that is read no faster than a level may be written, and that reports progress to a watchdog."""

    def __init__(self, source: BlockSource, limiter: RateLimiter, beat: Callable[[], None]) -> None:
        self.size_bytes = source.size_bytes
        self.moved_bytes = 0
        """Bytes read so far."""
        self._source = source
        self._limiter = limiter
        self._beat = beat

    def wait(self, upto: int) -> None:
        """See ``BlockSource.wait``; a capture has a deadline of its own."""
        self._beat()
        self._source.wait(upto)
        self._beat()

    def view(self, offset: int, length: int) -> memoryview:
        """See ``BlockSource.view``. Blocks: until the rate limit allows it."""
        self._limiter.take(length, self._beat)
        self._beat()
        self.moved_bytes += length
        return self._source.view(offset, length)

    def finish(self) -> None:
        """See ``BlockSource.finish``."""
        self._beat()
        self._source.finish()
        self._beat()
