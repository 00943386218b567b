"""The engine that integrations and plain loops call: boundary, gate, restore."""

from lazysnap.engine.engine import SnapshotEngine
from lazysnap.engine.statistics import Statistics
from lazysnap.restore.snapshot import Snapshot

__all__ = ["Snapshot", "SnapshotEngine", "Statistics"]
