"""Checkpointing that is free and loss-proof: lazy captures, memory that outlives the process, exact resume.

Importing this package imports neither torch nor a framework; names are loaded when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from lazysnap.config import MemoryLevel, PersistentLevel, SnapshotConfig
from lazysnap.errors import LazySnapError

if TYPE_CHECKING:
    from lazysnap.engine import SnapshotEngine
    from lazysnap.engine.latest import latest_path
    from lazysnap.integrations.lightning import LazySnapshotCallback
    from lazysnap.state.codec import register_type

__version__ = "0.1.0"

__all__ = [
    "LazySnapError",
    "LazySnapshotCallback",
    "MemoryLevel",
    "PersistentLevel",
    "SnapshotConfig",
    "SnapshotEngine",
    "latest_path",
    "register_type",
]

_LAZY = {
    "LazySnapshotCallback": "lazysnap.integrations.lightning",
    "SnapshotEngine": "lazysnap.engine",
    "latest_path": "lazysnap.engine.latest",
    "register_type": "lazysnap.state.codec",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'lazysnap' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
