"""What goes from a level with one writer: old snapshots; and from any level what dead writers left.

Where several write, see ``levels.belongings``.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lazysnap import faults
from lazysnap.config import PersistentLevel
from lazysnap.errors import FormatError, ShardCorrupt
from lazysnap.levels.leftovers import is_empty_and_settled, leftovers, lone_names
from lazysnap.levels.storage import Storage
from lazysnap.policy import expired
from lazysnap.resolver import Entry, Inventory, SnapshotKey, is_complete, snapshots
from lazysnap.shard.names import ShardName, is_directory_of_ours

if TYPE_CHECKING:
    from lazysnap.levels.store import SnapshotStore

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Share:
    """The files that one writer looks after, of whatever world: what more ranks have left falls to those that there
    are now."""

    ranks: frozenset[int]
    world_size: int
    has_images: bool = True
    """Whether it looks after files of frozen tensors: one writer of each node does."""

    @classmethod
    def of_rank(cls, rank: int, world_size: int) -> "Share":
        """The share of one rank."""
        return cls(frozenset((rank,)), world_size)

    def has(self, stem: ShardName) -> bool:
        """Whether the files of this name fall to it."""
        return stem.rank % self.world_size in self.ranks


class _Found:
    """The snapshots of one run at a level."""

    def __init__(self, inventory: Inventory, run_id: str) -> None:
        self._entries = snapshots(entry for entry in inventory.entries if entry.run_id == run_id)
        images = {image.digest for image in inventory.frozen}
        self.complete = {one for one, entries in self._entries.items() if is_complete(entries, images)}
        self.halves = set(self._entries) - self.complete
        newest: dict[int, SnapshotKey] = {}
        for one in sorted(self.complete):
            newest[one.step] = one
        self.newest = newest
        """Of each step the complete snapshot that was taken last: a resumed run passes a step again."""

    def entries(self, one: SnapshotKey) -> list[Entry]:
        """All shards of it."""
        return self._entries[one]

    def named_steps(self) -> set[int]:
        """Steps that have a name."""
        return {one.step for one, entries in self._entries.items() if any(entry.names for entry in entries)}

    def forget(self, one: SnapshotKey) -> None:
        """It was deleted."""
        del self._entries[one]


def retain(
    store: "SnapshotStore", level: PersistentLevel, run_id: str, protect: frozenset[int], beat: Callable[[], None]
) -> list[int]:
    """See ``SnapshotStore.retain``."""
    inventory = store.inventory()
    found = _Found(inventory, run_id)
    sound, damaged = _sound_steps(store, level, found, beat)
    safe = found.named_steps() | protect
    old = set(expired(sorted(found.newest), level, sound=sound, protected=safe))
    going = {one for one in found.complete if one.step in old}
    passed = {one for one in found.complete if one != found.newest[one.step] and one.step in sound}
    going |= {one for one in passed | _worthless(found, sound) if one.step not in safe}
    gone = []
    for one in sorted(going):
        places = list(dict.fromkeys(store.place(entry) for entry in found.entries(one)))
        if any(place.why_it_stays() for place in places):
            continue  # the next time
        for place in places:
            beat()
            place.delete()
        if one in found.complete:
            gone.append(one.step)
        found.forget(one)
    if damaged and max(damaged) == max(found.newest):
        raise ShardCorrupt(f"{store.url}: the newest snapshot was read back damaged: {damaged[max(damaged)]}")
    return gone


def _worthless(found: _Found, sound: list[int]) -> set[SnapshotKey]:
    """Snapshots that are not complete here and are older than something safe. Those of several ranks, which a training
    goes on from that has one, may be complete together with other disks: they stay longer.
    """
    alone = {one for one in found.halves if one.world_size == 1 and sound and one.step < max(sound)}
    behind = {one for one in found.halves if one.world_size > 1 and sound and one.step < min(sound)}
    return alone | behind


def _sound_steps(
    store: "SnapshotStore", level: PersistentLevel, found: _Found, beat: Callable[[], None]
) -> tuple[list[int], dict[int, str]]:
    """The newest ``keep_last`` complete steps that were, or are now, read back whole; newer ones that are damaged."""
    read_back = not store.storage.checks_writes if level.verify is None else level.verify
    sound: list[int] = []
    damaged: dict[int, str] = {}
    for step, one in sorted(found.newest.items(), reverse=True):
        if len(sound) == level.keep_last:
            break
        for entry in found.entries(one) if read_back else ():
            try:
                store.check_frozen(entry, beat)
                if not store.is_sound(entry):
                    store.verify_entry(entry, beat)
            except (FormatError, FileNotFoundError) as error:
                logger.warning("%s: step %d does not count, and nothing is deleted for it: %s", store.url, step, error)
                damaged[step] = str(error)
        if step not in damaged:
            sound.append(step)
    return sound, damaged


def sweep(storage: Storage, share: Share | None) -> list[str]:
    """See ``SnapshotStore.sweep``; what may go is decided in ``levels.leftovers``."""
    gone: list[str] = []
    for directory in filter(is_directory_of_ours, storage.list()):
        before = len(gone)
        for leftover in leftovers(storage, directory, share):
            faults.point("level.store.sweep")
            if storage.delete_abandoned(leftover.path, unless=leftover.unless):
                gone.append(leftover.path)
        for path in lone_names(storage, directory):
            storage.delete(path)
            gone.append(path)
        if len(gone) > before or is_empty_and_settled(storage, directory):
            storage.delete_directory(directory)
    # Uploads that no listing shows: parts of dead writers, which cost money until they are given up.
    gone += storage.abort_stale()
    return gone
