"""Persistent levels: storage backends, and the snapshots kept on them."""

from lazysnap.levels.store import open_storage

__all__ = ["open_storage"]
