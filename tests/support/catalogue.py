"""What is at a level."""

import os

from lazysnap.levels.storage import Storage
from lazysnap.levels.store import open_storage
from lazysnap.resolver import Inventory
from lazysnap.snapshots.catalogue import Catalogue


def inventory_of(storage: Storage) -> Inventory:
    """All that can be restored from there, and what cannot and why."""
    return Catalogue(storage).inventory()


def newest_directory(place: str | os.PathLike[str]) -> str | None:
    """The directory of the newest complete snapshot of a level; ``None`` if there is none."""
    storage = open_storage(os.fspath(place))
    plan = next(Catalogue(storage).plans(), None)
    if plan is None:
        return None
    return f"{storage.url}/{plan.sources[0][0].snapshot.directory}"
