"""Where the bytes of a shard come from while it is written: a slot that still fills, or a file that is whole."""

from collections.abc import Callable
from types import TracebackType
from typing import Protocol

from lazysnap.levels.memory import map_anonymous
from lazysnap.levels.pace import Pace
from lazysnap.levels.storage import Storage


class BlockSource(Protocol):
    """The image of one shard, readable block by block as it lands."""

    size_bytes: int

    def wait(self, upto: int) -> None:
        """Block until bytes below ``upto`` have landed; with a deadline of its own.

        Raises: CaptureAborted, if they never will.
        """
        ...

    def view(self, offset: int, length: int) -> memoryview:
        """Bytes ``[offset, offset + length)``, which may reach up to the next page boundary behind the end."""
        ...

    def finish(self) -> None:
        """Called after the last byte was read, before anything is published.

        Raises: CaptureAborted, if what was read does not count (the capture was torn).
        """
        ...


class FileSource:
    """A shard already committed at another level, read in blocks.

    Opened once: a slow level still copies it to the end when the level it comes from has deleted it meanwhile.
    """

    def __init__(self, storage: Storage, path: str, size_bytes: int) -> None:
        """Raises: FileNotFoundError, LevelUnavailable."""
        self.size_bytes = size_bytes
        self._reader = storage.reader(path)

    def wait(self, upto: int) -> None:
        """Nothing to wait for: the file is whole."""

    def view(self, offset: int, length: int) -> memoryview:
        """Read into fresh page-aligned memory, zeros behind the end."""
        block = map_anonymous(length)
        self._reader.read_into(offset, block[: min(length, self.size_bytes - offset)])
        return block

    def finish(self) -> None:
        """The reader compares checksums: nothing more to say."""

    def close(self) -> None:
        """Let go of the file; harmless twice."""
        self._reader.close()

    def __enter__(self) -> "FileSource":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class MemorySource:
    """An image that is whole in memory."""

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
        """The writer compares the digest: nothing more to say."""


class PacedSource:
    """A source that is read no faster than a level may be written, and tells its reader's supervisor that it moves."""

    def __init__(self, source: BlockSource, pace: Pace, beat: Callable[[], None]) -> None:
        self.size_bytes = source.size_bytes
        self.moved_bytes = 0
        """How much was read so far."""
        self._source = source
        self._pace = pace
        self._beat = beat

    def wait(self, upto: int) -> None:
        """See ``BlockSource.wait``; a capture has a deadline of its own."""
        self._beat()
        self._source.wait(upto)
        self._beat()

    def view(self, offset: int, length: int) -> memoryview:
        """See ``BlockSource.view``. Blocks: until the level may take so much more."""
        self._pace.take(length, self._beat)
        self._beat()
        self.moved_bytes += length
        return self._source.view(offset, length)

    def finish(self) -> None:
        """See ``BlockSource.finish``."""
        self._beat()
        self._source.finish()
        self._beat()
