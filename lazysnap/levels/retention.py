"""What goes from a level: old snapshots, unreferenced images of immutable tensors, and what dead writers left."""

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from lazysnap import faults
from lazysnap.config import PersistentLevel
from lazysnap.errors import FormatError, ShardCorrupt
from lazysnap.levels.files import TEMP_MARK
from lazysnap.levels.shards import ShardPlace
from lazysnap.levels.storage import Storage
from lazysnap.policy import expired
from lazysnap.resolver import Entry, Inventory
from lazysnap.shard.manifest import (
    manifest_name,
    parse_directory_name,
    parse_frozen_directory_name,
    parse_keep_file_name,
    parse_rank_name,
    shard_name,
)

if TYPE_CHECKING:
    from lazysnap.levels.store import SnapshotStore

logger = logging.getLogger(__name__)


def is_complete(entries: Iterable[Entry]) -> bool:
    """Whether all ranks of the world that one of them names are there."""
    ranks: dict[int, set[int]] = defaultdict(set)
    for entry in entries:
        ranks[entry.world_size].add(entry.rank)
    return any(len(found) == world_size for world_size, found in ranks.items())


def retain(
    store: "SnapshotStore",
    level: PersistentLevel,
    run_id: str,
    protect: frozenset[int],
    beat: Callable[[], None],
) -> list[int]:
    """See ``SnapshotStore.retain``."""
    inventory = store.inventory()
    found: dict[int, list[Entry]] = defaultdict(list)
    for entry in inventory.entries:
        if entry.run_id == run_id:
            found[entry.step].append(entry)
    images = {image.digest for image in inventory.frozen if image.run_id == run_id}
    complete = [
        step
        for step, entries in sorted(found.items())
        if is_complete(entry for entry in entries if entry.frozen is None or entry.frozen in images)
    ]
    sound, damaged = _sound_steps(store, level, {step: found[step] for step in complete}, beat)
    gone = []
    named = {step for step, entries in found.items() if any(entry.names for entry in entries)}
    going = expired(complete, level, sound=sound, protected=named | protect)
    # What never became complete is garbage once something newer is safe.
    halves = [step for step in found if step not in complete and sound and step < max(sound)]
    for step in sorted({*going, *halves} - named):
        places = [ShardPlace(store.storage, entry.location, entry.rank, entry.world_size) for entry in found[step]]
        if any(store.storage.is_leased(place.shard_path) for place in places):
            continue  # a restore reads it; the next time
        for place in places:
            beat()
            place.delete()
        if step in going:
            gone.append(step)
        del found[step]
    _delete_unreferenced(store.storage, inventory, run_id, {e.frozen for entries in found.values() for e in entries})
    if damaged and max(damaged) == max(complete):
        raise ShardCorrupt(f"{store.url}: the newest snapshot was read back damaged: {damaged[max(damaged)]}")
    return gone


def _sound_steps(
    store: "SnapshotStore", level: PersistentLevel, complete: dict[int, list[Entry]], beat: Callable[[], None]
) -> tuple[list[int], dict[int, str]]:
    """The newest ``keep_last`` complete steps that were, or are now, read back whole; newer ones that are damaged."""
    read_back = not store.storage.checks_writes if level.verify is None else level.verify
    sound: list[int] = []
    damaged: dict[int, str] = {}
    for step in sorted(complete, reverse=True):
        if len(sound) == level.keep_last:
            break
        try:
            if read_back:
                for entry in complete[step]:
                    store.check_frozen(entry, beat)
            for entry in complete[step]:
                if read_back and not store.is_sound(entry):
                    store.verify_entry(entry, beat)
        except (FormatError, FileNotFoundError) as error:
            logger.warning("%s: step %d does not count, and nothing is deleted for it: %s", store.url, step, error)
            damaged[step] = str(error)
            continue
        sound.append(step)
    return sound, damaged


def _delete_unreferenced(storage: Storage, inventory: Inventory, run_id: str, wanted: set[str | None]) -> None:
    """Images of immutable tensors that no snapshot of the run refers to any more, and no writer is about to."""
    if inventory.problems:
        return  # a manifest that cannot be read just now may refer to one
    for image in inventory.frozen:
        place = ShardPlace(storage, image.location, 0, 1)
        if image.run_id != run_id or image.digest in wanted:
            continue
        if storage.is_leased(place.manifest_path) or storage.is_leased(place.shard_path):
            continue
        place.delete()


def left_names(names: Sequence[str]) -> list[str]:
    """Names in a directory whose snapshot is gone: they keep nothing, and nothing else is there."""
    return [] if any(parse_keep_file_name(name) is None for name in names) else list(names)


def sweep(storage: Storage, rank: int | None, world_size: int | None) -> list[str]:
    """See ``SnapshotStore.sweep``."""
    gone = []
    for directory in storage.list():
        is_frozen = parse_frozen_directory_name(directory) is not None
        if not is_frozen and parse_directory_name(directory) is None:
            continue
        names = storage.list(directory)
        for name in names:
            parsed = parse_rank_name(name.removeprefix(".").split(TEMP_MARK)[0])
            if parsed is None:
                continue
            of_rank, of_world, suffix = parsed
            if rank is not None and not is_frozen and (of_rank, of_world) != (rank, world_size):
                continue
            shard, manifest = shard_name(of_rank, of_world), manifest_name(of_rank, of_world)
            is_temporary = name.startswith(f".{shard if suffix != 'json' else manifest}{TEMP_MARK}")
            is_uncommitted = name == shard and manifest not in names
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
