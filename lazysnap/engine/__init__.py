"""What integrations and plain loops call: boundary, gate, restore."""

from lazysnap.engine.engine import SnapshotEngine
from lazysnap.engine.snapshot import Snapshot
from lazysnap.engine.statistics import Statistics

__all__ = ["Snapshot", "SnapshotEngine", "Statistics"]
