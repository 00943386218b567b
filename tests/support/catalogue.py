"""What is at a level."""

from lazysnap.levels import SnapshotStore
from lazysnap.resolver import Inventory
from lazysnap.snapshots.catalogue import Catalogue


def inventory_of(store: SnapshotStore) -> Inventory:
    """All that can be restored from there, and what cannot and why."""
    return Catalogue(store).inventory()
