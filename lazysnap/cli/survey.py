"""What is at a level, put together for people: snapshots with their ranks, images of immutable tensors."""

from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from lazysnap.levels.store import SnapshotStore
from lazysnap.resolver import Entry, FrozenEntry, Inventory
from lazysnap.shard.manifest import Manifest, parse_directory_name

_READERS = 8
"""Manifests read at once: each is a request to an object store."""


@dataclass(frozen=True)
class Found:
    """One snapshot at a level: the ranks that are in one directory."""

    location: str
    step: int
    run_id: str
    world_size: int
    shards: tuple[tuple[Entry, Manifest], ...]

    @property
    def names(self) -> list[str]:
        """What it was called by ``keep``."""
        return sorted({name for entry, _ in self.shards for name in entry.names})

    @property
    def files(self) -> list[tuple[Entry, Manifest]]:
        """One of the ranks of each file."""
        return list({manifest.file: (entry, manifest) for entry, manifest in reversed(self.shards)}.values())[::-1]

    @property
    def size_bytes(self) -> int:
        """Bytes of its files."""
        return sum(manifest.size_bytes for _, manifest in self.files)

    @property
    def frozen(self) -> list[str]:
        """Digests of the immutable tensors that it refers to."""
        return sorted({entry.frozen for entry, _ in self.shards if entry.frozen is not None})

    @property
    def is_whole(self) -> bool:
        """Whether every rank is there."""
        return len({entry.rank for entry, _ in self.shards}) == self.world_size


@dataclass(frozen=True)
class Survey:
    """Everything at a level."""

    url: str
    snapshots: tuple[Found, ...]
    """Oldest step first."""
    frozen: tuple[tuple[FrozenEntry, Manifest], ...]
    uncommitted: tuple[tuple[str, int], ...]
    """Directories in which no manifest can be read, with the step that their name tells."""
    inventory: Inventory

    def missing(self, found: Found) -> list[str]:
        """Digests of immutable tensors that a snapshot refers to and that are not at this level."""
        there = {image.digest for image, _ in self.frozen if image.run_id == found.run_id}
        return [digest for digest in found.frozen if digest not in there]

    def references(self, image: FrozenEntry) -> int:
        """How many snapshots at this level refer to an image of immutable tensors."""
        return sum(found.run_id == image.run_id and image.digest in found.frozen for found in self.snapshots)


def survey(store: SnapshotStore) -> Survey:
    """Look at everything. Blocks: reads every manifest, no shard. Raises: LevelUnavailable."""
    inventory = store.inventory()
    with ThreadPoolExecutor(_READERS, "lazysnap-look") as pool:
        manifests = list(pool.map(lambda entry: _if_there(store, entry), inventory.entries))
        images = list(pool.map(lambda image: _frozen_if_there(store, image), inventory.frozen))
    groups: dict[tuple[str, str, int], list[tuple[Entry, Manifest]]] = defaultdict(list)
    for entry, manifest in zip(inventory.entries, manifests, strict=True):
        if manifest is not None:
            groups[entry.location, entry.run_id, entry.world_size].append((entry, manifest))
    snapshots = [
        Found(location, shards[0][0].step, run_id, world_size, tuple(sorted(shards, key=lambda pair: pair[0].rank)))
        for (location, run_id, world_size), shards in groups.items()
    ]
    known = {entry.location for entry in inventory.entries}
    steps = {name: parse_directory_name(name) for name in store.storage.list() if name not in known}
    return Survey(
        store.url,
        tuple(sorted(snapshots, key=lambda found: (found.step, found.location))),
        tuple((image, found) for image, found in zip(inventory.frozen, images, strict=True) if found is not None),
        tuple(sorted((name, step) for name, step in steps.items() if step is not None)),
        inventory,
    )


def beats(manifest: Manifest, advance: Callable[[int], None]) -> Callable[[], None]:
    """What the store calls for every block of a shard, as a function that is told bytes (of a bar)."""
    left = manifest.size_bytes

    def beat() -> None:
        nonlocal left
        done = min(manifest.checksums.block_bytes, left)
        left -= done
        advance(done)

    return beat


def _if_there(store: SnapshotStore, entry: Entry) -> Manifest | None:
    """The manifest, or ``None`` if a running job's retention deleted it since the inventory was made."""
    try:
        return store.read_manifest(entry)
    except FileNotFoundError:
        return None


def _frozen_if_there(store: SnapshotStore, image: FrozenEntry) -> Manifest | None:
    try:
        return store.read_manifest(image)
    except FileNotFoundError:
        return None
