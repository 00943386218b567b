"""What goes from a level with one writer: old snapshots, unreferenced images of immutable tensors; and from any level
what dead writers left. Where several write, see ``levels.belongings``.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lazysnap import faults
from lazysnap.config import PersistentLevel
from lazysnap.errors import FormatError, ShardCorrupt
from lazysnap.levels.files import TEMP_MARK
from lazysnap.levels.shards import place_of, stem_of
from lazysnap.levels.storage import Storage
from lazysnap.policy import expired
from lazysnap.resolver import Entry, Inventory
from lazysnap.shard.manifest import parse_directory_name, parse_frozen_directory_name, parse_keep_file_name
from lazysnap.shard.stem import Stem, parse_file_name

if TYPE_CHECKING:
    from lazysnap.levels.store import SnapshotStore

logger = logging.getLogger(__name__)


def is_complete(entries: Iterable[Entry]) -> bool:
    """Whether all ranks of one snapshot are there: those of one world, and of one start of it."""
    ranks: dict[tuple[str, int], set[int]] = defaultdict(set)
    for entry in entries:
        ranks[entry.generation or "", entry.world_size].add(entry.rank)
    return any(len(found) == world_size for (_, world_size), found in ranks.items())


@dataclass(frozen=True)
class Share:
    """The files that one writer looks after, of whatever world: what more ranks, or nodes, have left falls to those
    that there are now."""

    ranks: frozenset[int]
    world_size: int
    node: int | None = None
    """Whose files are looked after; ``None``: no node's, the first rank there does it."""
    nodes: int = 1

    @classmethod
    def of_rank(cls, rank: int, world_size: int) -> "Share":
        """Where nothing is known of nodes: theirs fall to the ranks as well."""
        return cls(frozenset((rank,)), world_size, rank, world_size)

    def has(self, stem: Stem) -> bool:
        """Whether the files of this name fall to it."""
        if stem.is_node:
            return stem.index % self.nodes == self.node
        return stem.index % self.world_size in self.ranks


@dataclass(frozen=True, order=True)
class _Snapshot:
    """What the shards of one snapshot have in common, besides the run. Newer ones are greater."""

    step: int
    generation: str
    world_size: int


class _Found:
    """The snapshots of one run at a level."""

    def __init__(self, inventory: Inventory, run_id: str) -> None:
        self._entries: dict[_Snapshot, list[Entry]] = defaultdict(list)
        for entry in inventory.entries:
            if entry.run_id == run_id:
                self._entries[_Snapshot(entry.step, entry.generation or "", entry.world_size)].append(entry)
        images = {image.digest for image in inventory.frozen if image.run_id == run_id}
        self.complete = {
            one
            for one, entries in self._entries.items()
            if is_complete(entry for entry in entries if entry.frozen is None or entry.frozen in images)
        }
        self.halves = set(self._entries) - self.complete
        newest: dict[int, _Snapshot] = {}
        for one in sorted(self.complete):
            newest[one.step] = one
        self.newest = newest
        """Of each step the complete snapshot that was taken last: a resumed run passes a step again."""

    def entries(self, one: _Snapshot) -> list[Entry]:
        """All shards of it."""
        return self._entries[one]

    def named_steps(self) -> set[int]:
        """Steps that have a name."""
        return {one.step for one, entries in self._entries.items() if any(entry.names for entry in entries)}

    def forget(self, one: _Snapshot) -> None:
        """It was deleted."""
        del self._entries[one]

    def references(self) -> set[str | None]:
        """The immutable tensors that are still referred to."""
        return {entry.frozen for entries in self._entries.values() for entry in entries}


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
        if any(store.storage.is_leased(place.shard_path) for place in places):
            continue  # a restore reads it; the next time
        for place in places:
            beat()
            place.delete()
        if one in found.complete:
            gone.append(one.step)
        found.forget(one)
    delete_unreferenced(store.storage, inventory, run_id, found.references())
    if damaged and max(damaged) == max(found.newest):
        raise ShardCorrupt(f"{store.url}: the newest snapshot was read back damaged: {damaged[max(damaged)]}")
    return gone


def _worthless(found: _Found, sound: list[int]) -> set[_Snapshot]:
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
        read: set[tuple[str, Stem]] = set()
        for entry in found.entries(one) if read_back else ():
            file = (entry.location, stem_of(entry))
            try:
                store.check_frozen(entry, beat)
                if file not in read and not store.is_sound(entry):
                    store.verify_entry(entry, beat)
                read.add(file)
            except (FormatError, FileNotFoundError) as error:
                logger.warning("%s: step %d does not count, and nothing is deleted for it: %s", store.url, step, error)
                damaged[step] = str(error)
        if step not in damaged:
            sound.append(step)
    return sound, damaged


def delete_unreferenced(
    storage: Storage,
    inventory: Inventory,
    run_id: str,
    wanted: Collection[str | None],
    only: Collection[str] | None = None,
) -> frozenset[str]:
    """Images of immutable tensors that no snapshot of the run refers to any more, and no writer is about to.

    ``only``: where those lie that may go. Returns where those lie that would have gone but for that.
    """
    if inventory.problems:
        return frozenset()  # a manifest that cannot be read just now may refer to one
    left = set()
    for image in inventory.frozen:
        place = place_of(storage, image)
        if image.run_id != run_id or image.digest in wanted:
            continue
        if storage.is_leased(place.manifest_path) or storage.is_leased(place.shard_path):
            continue
        if only is None or image.location in only:
            place.delete()
        else:
            left.add(image.location)
    return frozenset(left)


def left_names(names: Sequence[str]) -> list[str]:
    """Names in a directory whose snapshot is gone: they keep nothing, and nothing else is there."""
    return [] if any(parse_keep_file_name(name) is None for name in names) else list(names)


def sweep(storage: Storage, share: Share | None) -> list[str]:
    """See ``SnapshotStore.sweep``."""
    gone = []
    for directory in storage.list():
        is_frozen = parse_frozen_directory_name(directory) is not None
        if not is_frozen and parse_directory_name(directory) is None:
            continue
        names = storage.list(directory)
        for name in names:
            parsed = parse_file_name(name.removeprefix(".").split(TEMP_MARK)[0])
            if parsed is None:
                continue
            stem, suffix = parsed
            if share is not None and not is_frozen and not share.has(stem):
                continue
            manifest = stem.manifest
            is_temporary = name.startswith(f".{stem.text}.{suffix}{TEMP_MARK}")
            is_uncommitted = name == stem.shard and manifest not in names
            if not is_temporary and not is_uncommitted:
                continue
            faults.point("level.store.sweep")
            unless = f"{directory}/{manifest}" if is_uncommitted else None
            if storage.delete_abandoned(f"{directory}/{name}", unless=unless):
                gone.append(f"{directory}/{name}")
        for name in left_names(storage.list(directory)):
            storage.delete(f"{directory}/{name}")
            gone.append(f"{directory}/{name}")
        storage.delete_directory(directory)
    # Uploads that no listing shows: parts of dead writers, which cost money until they are given up.
    gone += storage.abort_stale()
    return gone
