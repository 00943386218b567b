"""Checkpoints for PyTorch: lazy captures into memory that outlives the process, and exact resume.

Importing this package imports neither torch nor a framework; names are loaded when they are first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import lazysnap.console  # noqa: F401  warnings say whose they are
from lazysnap.config import KeepBest, MemoryLevel, PersistentLevel, Redundancy, SnapshotConfig
from lazysnap.errors import (
    ConfigError,
    FormatError,
    JobBusy,
    KeeperError,
    LazySnapError,
    LevelError,
    SnapshotNotFound,
    StateError,
    WaitTimeout,
)

if TYPE_CHECKING:
    from lazysnap.data import ResumableLoader
    from lazysnap.engine import SnapshotEngine
    from lazysnap.exports.exporting import export
    from lazysnap.exports.load_weights import load_weights
    from lazysnap.integrations.accelerate import LazyAccelerator
    from lazysnap.integrations.frameworks import attach
    from lazysnap.integrations.lightning import LazySnapshotCallback
    from lazysnap.integrations.transformers import LazyTrainerCallback
    from lazysnap.restore.known_run import run_id
    from lazysnap.state.codec import register_type

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "FormatError",
    "JobBusy",
    "KeepBest",
    "KeeperError",
    "LazyAccelerator",
    "LazySnapError",
    "LazySnapshotCallback",
    "LazyTrainerCallback",
    "LevelError",
    "MemoryLevel",
    "PersistentLevel",
    "Redundancy",
    "ResumableLoader",
    "SnapshotConfig",
    "SnapshotEngine",
    "SnapshotNotFound",
    "StateError",
    "WaitTimeout",
    "attach",
    "export",
    "load_weights",
    "register_type",
    "run_id",
]

_LAZY = {
    "LazyAccelerator": "lazysnap.integrations.accelerate",
    "LazySnapshotCallback": "lazysnap.integrations.lightning",
    "LazyTrainerCallback": "lazysnap.integrations.transformers",
    "ResumableLoader": "lazysnap.data",
    "SnapshotEngine": "lazysnap.engine",
    "attach": "lazysnap.integrations.frameworks",
    "export": "lazysnap.exports.exporting",
    "load_weights": "lazysnap.exports.load_weights",
    "register_type": "lazysnap.state.codec",
    "run_id": "lazysnap.restore.known_run",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(import_module(_LAZY[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'lazysnap' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
