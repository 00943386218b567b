"""Small objects by which a place is tried out."""

import os
import re
from collections.abc import Callable

from lazysnap.errors import LevelUnavailable
from lazysnap.levels.storage import Storage

_PROBE = re.compile(r"\.lazysnap-probe-[0-9a-f]{16}")


def probe_name() -> str:
    """A new name."""
    return f".lazysnap-probe-{os.urandom(8).hex()}"


def is_probe(name: str) -> bool:
    """Whether this is such a name."""
    return _PROBE.fullmatch(name) is not None


def probe(storage: Storage, beat: Callable[[], None]) -> None:
    """Write a small object, read it back and delete it. Blocks. Raises: LevelUnavailable; what the storage raises."""
    path, text = probe_name(), os.urandom(8).hex()
    storage.put(path, text.encode())
    beat()
    try:
        found = storage.get(path)
    finally:
        storage.delete(path)
    if found != text.encode():
        raise LevelUnavailable(f"{path}: what was written was read back as {found!r:.40}")
