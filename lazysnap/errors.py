"""All exceptions that lazysnap raises on purpose, under one root.

::

    LazySnapError
    ├── ConfigError            (ValueError)         a setting, an argument or a call that cannot work
    ├── StateError                                  the training state and a snapshot do not fit each other
    │   ├── UnsupportedState   (TypeError)          a value that the safe encoding does not know, by its path
    │   └── StateMismatch      (ValueError)         a snapshot of another model or optimizer
    ├── FormatError            (ValueError)         bytes that violate the format
    │   ├── FormatTooNew                            written by a newer lazysnap
    │   └── ShardCorrupt                            a checksum or a size does not agree
    ├── SnapshotNotFound       (FileNotFoundError)  nothing to restore, or not the wanted step
    ├── RollbackFailed                              the loss stays bad after every rollback
    ├── CaptureAborted                              a capture that will never be complete
    ├── KeeperError                                 the keeper process
    │   ├── KeeperUnavailable                       it cannot be started or reached
    │   ├── JobBusy                                 the same job runs already
    │   └── MemoryBoundExceeded (MemoryError)       the slots do not fit in ``MemoryLevel.max_bytes``
    ├── LevelError                                  one storage level
    │   ├── LevelUnavailable                        it does not answer, or refuses
    │   ├── LevelFull                               no space or quota left
    │   └── LevelHangs          (TimeoutError)      an operation moved no byte within the deadline
    ├── PeerError                                   reads from the memory of another node
    │   ├── PeerUnreachable                         it does not answer, or is no process of the job
    │   └── PeerRefused                             it cannot give what was asked for
    └── WaitTimeout            (TimeoutError)       a deadline passed; the event may still come
"""

import re

SECRET_NAME = re.compile(r"secret|token|pass|pwd|key|sas|credential|connection|auth|signature|\bsig\b", re.IGNORECASE)
"""Found in names of options, and of parameters of URLs, whose values are never shown."""
_PASSWORD = re.compile(r"(://[^/@:\s]*):[^/\s]*@")
_PARAMETER = re.compile(r"([?&]([^=&?#\s]*)=)[^&#\s'\")\]]*?(?=[&#\s'\")\]]|:\s|$)")


def without_passwords(text: str) -> str:
    """Return a text in which ``***`` stands for the password of each URL, and for values of its secret parameters."""
    if "://" not in text:
        return text
    text = _PASSWORD.sub(r"\1:***@", text)
    return _PARAMETER.sub(lambda found: f"{found[1]}***" if SECRET_NAME.search(found[2]) else found[0], text)


class LazySnapError(Exception):
    """Root of all errors that lazysnap raises on purpose. Passwords in URLs do not get into their messages."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*(without_passwords(one) if isinstance(one, str) else one for one in arguments))


class ConfigError(LazySnapError, ValueError):
    """A setting, an argument or a call that cannot work; also a combination of settings."""


class StateError(LazySnapError):
    """The training state and a snapshot do not fit each other."""


class UnsupportedState(StateError, TypeError):
    """The safe encoding does not know a value; the message names its path in the state."""


class StateMismatch(StateError, ValueError):
    """A snapshot of another model (names, shapes or dtypes differ) or of another optimizer. Nothing was loaded."""


class FormatError(LazySnapError, ValueError):
    """Bytes that violate the format."""


class FormatTooNew(FormatError):
    """Written by a newer lazysnap than this one."""


class ShardCorrupt(FormatError):
    """A checksum or a size does not agree with the manifest."""


class SnapshotNotFound(LazySnapError, FileNotFoundError):
    """Nothing to restore, or not the wanted step."""


class RollbackFailed(LazySnapError):
    """The loss was bad again after as many rollbacks as are allowed, without a new step in between."""


class CaptureAborted(LazySnapError):
    """A capture that will never be complete: it is torn, or its trainer died."""


class KeeperError(LazySnapError):
    """A problem of the keeper process."""


class KeeperUnavailable(KeeperError):
    """The keeper cannot be started or reached."""


class JobBusy(KeeperError):
    """The same job runs already: another trainer is attached to this keeper."""


class MemoryBoundExceeded(KeeperError, MemoryError):
    """The slots do not fit in ``MemoryLevel.max_bytes`` or in the memory of the machine."""


class LevelError(LazySnapError):
    """A problem of one storage level."""


class LevelUnavailable(LevelError):
    """The level does not answer, or refuses."""


class LevelFull(LevelError):
    """No space or quota left at the level."""


class LevelHangs(LevelError, TimeoutError):
    """An operation at the level moved no byte for ``PersistentLevel.timeout_s``."""


class PeerError(LazySnapError):
    """A problem of reads from the memory of another node."""


class PeerUnreachable(PeerError):
    """The peer cannot be reached, does not answer in time, or does not keep to the protocol."""


class PeerRefused(PeerError):
    """The peer answered that it cannot give what was asked for; the message is the peer's."""


class WaitTimeout(LazySnapError, TimeoutError):
    """A deadline passed; the event may still come."""
