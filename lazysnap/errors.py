"""Every exception that lazysnap raises on purpose, under one root.

::

    LazySnapError
    ├── ConfigError            (ValueError)         a setting, or a combination of settings, that cannot work
    ├── StateError                                  the training state and a snapshot do not fit each other
    │   ├── UnsupportedState   (TypeError)          a value that the safe encoding does not know, by its path
    │   └── StateMismatch      (ValueError)         a snapshot of another model: names, shapes or dtypes differ
    ├── FormatError            (ValueError)         bytes that are not what the format says
    │   ├── FormatTooNew                            written by a newer lazysnap
    │   └── ShardCorrupt                            a checksum or a size does not agree
    ├── SnapshotNotFound       (FileNotFoundError)  nothing to restore, or not the step that was asked for
    ├── CaptureAborted                              a capture that will never be complete
    ├── KeeperError                                 the keeper process
    │   ├── KeeperUnavailable                       it cannot be started or reached
    │   ├── JobBusy                                 the same job runs already
    │   └── MemoryBoundExceeded (MemoryError)       the slots do not fit in ``MemoryLevel.max_bytes``
    ├── LevelError                                  one storage level
    │   ├── LevelUnavailable                        it does not answer, or refuses
    │   ├── LevelFull                               no space or quota left
    │   ├── LevelHangs          (TimeoutError)      an operation there did not move within the level's deadline
    │   └── NameTaken                               another writer has the name already
    └── WaitTimeout            (TimeoutError)       a deadline passed; what was waited for may still happen
"""


class LazySnapError(Exception):
    """Root of all errors that lazysnap raises on purpose."""


class ConfigError(LazySnapError, ValueError):
    """A setting, or a combination of settings, that cannot work."""


class StateError(LazySnapError):
    """The training state and a snapshot do not fit each other."""


class UnsupportedState(StateError, TypeError):
    """The safe encoding does not know a value; the message names its path in the state."""


class StateMismatch(StateError, ValueError):
    """A snapshot of another model: names, shapes or dtypes differ. Nothing was loaded."""


class FormatError(LazySnapError, ValueError):
    """Bytes that are not what the format says."""


class FormatTooNew(FormatError):
    """Written by a newer lazysnap than this one."""


class ShardCorrupt(FormatError):
    """A checksum or a size does not agree with the manifest."""


class SnapshotNotFound(LazySnapError, FileNotFoundError):
    """Nothing to restore, or not the step that was asked for."""


class CaptureAborted(LazySnapError):
    """A capture that will never be complete: torn, or its trainer died in the middle."""


class KeeperError(LazySnapError):
    """Something about the keeper process."""


class KeeperUnavailable(KeeperError):
    """The keeper cannot be started or reached."""


class JobBusy(KeeperError):
    """The same job runs already: another trainer is attached to this keeper."""


class MemoryBoundExceeded(KeeperError, MemoryError):
    """The slots do not fit in ``MemoryLevel.max_bytes`` or in the memory of the machine."""


class LevelError(LazySnapError):
    """Something about one storage level."""


class LevelUnavailable(LevelError):
    """The level does not answer, or refuses."""


class LevelFull(LevelError):
    """No space or quota left at the level."""


class LevelHangs(LevelError, TimeoutError):
    """An operation at the level did not move for ``PersistentLevel.timeout_s``."""


class NameTaken(LevelError):
    """Another writer has, or is writing, an object of this name; nothing of it was touched."""


class WaitTimeout(LazySnapError, TimeoutError):
    """A deadline passed; what was waited for may still happen."""
