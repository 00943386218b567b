"""What is at a level."""

from lazysnap.levels.storage import Storage
from lazysnap.resolver import Inventory
from lazysnap.snapshots.catalogue import Catalogue


def inventory_of(storage: Storage) -> Inventory:
    """All that can be restored from there, and what cannot and why."""
    return Catalogue(storage).inventory()
