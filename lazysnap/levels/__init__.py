"""Persistent levels: storage backends, and the snapshots kept on them."""

from lazysnap.levels.store import SnapshotStore, open_store

__all__ = ["SnapshotStore", "open_store"]
