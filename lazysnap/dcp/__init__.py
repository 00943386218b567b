"""Snapshots for ``torch.distributed.checkpoint``: from any world, mesh and strategy into any other.

::

    dcp.load(state_dict, storage_reader=SnapshotReader("runs/lazysnap"))

Names are imported when they are first used: ``load_weights`` needs no DCP, which takes a second to import.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lazysnap.dcp.planner import SnapshotLoadPlanner
    from lazysnap.dcp.reader import SnapshotReader

__all__ = ["SnapshotLoadPlanner", "SnapshotReader"]

_LAZY = {"SnapshotLoadPlanner": "lazysnap.dcp.planner", "SnapshotReader": "lazysnap.dcp.reader"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'lazysnap.dcp' has no attribute {name!r}")
