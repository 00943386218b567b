"""Failures of slots and their memory. The package tells them apart; users see their base classes."""

from lazysnap.errors import KeeperError, LazySnapError


class CaptureAborted(LazySnapError):
    """A capture that will never be complete: it is torn, or its trainer died."""


class MemoryBoundExceeded(KeeperError, MemoryError):
    """The slots do not fit in ``MemoryLevel.max_bytes`` or in the memory of the machine."""
