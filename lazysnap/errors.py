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


class StateError(LazySnapError, ValueError):
    """The training state cannot be captured, or it and a snapshot do not fit each other. The message names the path."""


class FormatError(LazySnapError, ValueError):
    """Bytes that violate the format: damaged, truncated, or written by a newer lazysnap."""


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
