"""Snapshots for ``torch.distributed.checkpoint``: from any world, mesh and strategy into any other.

::

    dcp.load(state_dict, storage_reader=SnapshotReader("runs/lazysnap"))
"""

from lazysnap.dcp.planner import SnapshotLoadPlanner
from lazysnap.dcp.reader import SnapshotReader

__all__ = ["SnapshotLoadPlanner", "SnapshotReader"]
