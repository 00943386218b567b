"""All exceptions that lazysnap raises on purpose, under one root.

::

    LazySnapError
    ├── ConfigError            (ValueError)         a setting, an argument or a call that cannot work
    ├── StateError             (ValueError)         state that cannot be captured, or does not fit a snapshot
    ├── FormatError            (ValueError)         bytes that violate the format
    ├── SnapshotNotFound       (FileNotFoundError)  nothing to restore, or not the wanted step
    ├── JobBusy                                     the same job runs already
    ├── LevelError                                  a storage level does not answer, refuses, or is full
    ├── KeeperError                                 the keeper process cannot be started or reached
    └── WaitTimeout            (TimeoutError)       a deadline passed; the event may still come
"""


class LazySnapError(Exception):
    """Root of all errors that lazysnap raises on purpose."""


class ConfigError(LazySnapError, ValueError):
    """A setting, an argument or a call that cannot work; also a combination of settings."""


class StateError(LazySnapError, ValueError):
    """The training state cannot be captured, or does not fit a snapshot. The message names the path."""


class FormatError(LazySnapError, ValueError):
    """Bytes that violate the format: damaged, truncated, or of another format version."""


class SnapshotNotFound(LazySnapError, FileNotFoundError):
    """Nothing to restore, or not the wanted step."""


class JobBusy(LazySnapError):
    """The same job runs already: another trainer is attached to its keeper."""


class LevelError(LazySnapError):
    """A storage level does not answer, refuses, or is full."""


class KeeperError(LazySnapError):
    """The keeper process cannot be started or reached, or has no memory to give."""


class WaitTimeout(LazySnapError, TimeoutError):
    """A deadline passed; the event may still come."""
