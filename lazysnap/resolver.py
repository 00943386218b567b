"""From what the levels hold to what a restart may restore. Pure: values in, a plan out."""

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Entry:
    """One rank's committed shard of one snapshot at one level."""

    level: str
    """Name of the level: ``memory`` or its URL."""
    speed: int
    """Rank among the levels, 0 the fastest to read."""
    run_id: str
    start: str
    """Which start of the run it is of: only shards of one start are one snapshot."""
    step: int
    rank: int
    world_size: int
    location: str
    """Where in the level: a directory name, or a slot's index."""
    frozen: str | None = None
    """Digest of the frozen tensors that belong with it, which may be found at another level."""
    node: str | None = None
    """Which node can read it, ``None``: every one."""
    names: tuple[str, ...] = ()
    """What the snapshot was called by ``keep``."""


@dataclass(frozen=True)
class FrozenEntry:
    """One file of frozen tensors at one level."""

    level: str
    speed: int
    digest: str
    location: str
    """Where in the level: a directory name, or a slot's index."""


@dataclass(frozen=True)
class Inventory:
    """What one level can offer, and what was found there that it cannot (half, foreign, damaged)."""

    level: str
    entries: tuple[Entry, ...] = ()
    frozen: tuple[FrozenEntry, ...] = ()
    problems: tuple[str, ...] = ()


def joined(parts: Sequence[Inventory]) -> Inventory:
    """One of a level that was looked at in parts."""
    return Inventory(
        parts[0].level,
        tuple(entry for part in parts for entry in part.entries),
        tuple(image for part in parts for image in part.frozen),
        tuple(problem for part in parts for problem in part.problems),
    )


def newest_start(inventories: Iterable[Inventory]) -> str | None:
    """The newest start, of those that left something."""
    entries = (entry for inventory in inventories for entry in inventory.entries)
    return max((entry.start for entry in entries), default=None)


@dataclass(frozen=True)
class RestartPlan:
    """One snapshot, and for each rank the levels that offer its shard, fastest first."""

    run_id: str
    start: str
    step: int
    world_size: int
    sources: tuple[tuple[Entry, ...], ...]
    frozen: Mapping[str, tuple[FrozenEntry, ...]] = field(default_factory=dict)
    """For each digest that an entry refers to, the levels that offer it, fastest first."""

    @property
    def key(self) -> "SnapshotKey":
        """Tells it apart from all other snapshots."""
        return SnapshotKey(self.run_id, self.step, self.start, self.world_size)

    @property
    def level(self) -> str:
        """The slowest of the levels that would be read first."""
        return max((offers[0] for offers in self.sources), key=lambda entry: entry.speed).level


@dataclass(frozen=True, order=True)
class SnapshotKey:
    """What the shards of one snapshot have in common. Newer snapshots have greater keys."""

    run_id: str
    step: int
    start: str
    world_size: int

    @classmethod
    def of(cls, entry: Entry) -> "SnapshotKey":
        """The snapshot that a shard is part of."""
        return cls(entry.run_id, entry.step, entry.start, entry.world_size)


def snapshots(entries: Iterable[Entry]) -> dict[SnapshotKey, list[Entry]]:
    """The shards of each snapshot, complete or not, wherever they are."""
    found: dict[SnapshotKey, list[Entry]] = defaultdict(list)
    for entry in entries:
        found[SnapshotKey.of(entry)].append(entry)
    return dict(found)


def is_complete(entries: Iterable[Entry], images: Container[str]) -> bool:
    """Whether the shards of one snapshot are all of it. The only rule: restarts, retention and commands share it.

    A snapshot is complete when the shard of every rank is present, with the frozen tensors that it refers to.
    ``images``: digests of the frozen tensors that are present.
    """
    usable = [entry for entry in entries if _is_usable(entry, images)]
    ranks = {entry.rank for entry in usable}
    return bool(usable) and len(ranks) == usable[0].world_size and max(ranks) < usable[0].world_size


def _is_usable(entry: Entry, images: Container[str]) -> bool:
    return entry.frozen is None or entry.frozen in images


def candidates(
    inventories: Iterable[Inventory], *, step: int | None = None, name: str | None = None, run_id: str | None = None
) -> list[RestartPlan]:
    """Every complete snapshot, the best one first: of the newest run, then of the greatest step, then of the newest
    start.

    See ``is_complete``; its parts may be at different levels. With ``step`` only snapshots of that step are listed,
    with ``name`` those that ``keep`` called so, with ``run_id`` those of that run. The caller tries them in this order
    until one verifies.
    """
    inventories = list(inventories)
    frozen: dict[str, list[FrozenEntry]] = defaultdict(list)
    for image in (image for inventory in inventories for image in inventory.frozen):
        frozen[image.digest].append(image)
    found = snapshots(entry for inventory in inventories for entry in inventory.entries)
    plans = []
    for key, entries in sorted(found.items(), reverse=True):
        usable = [entry for entry in entries if _is_usable(entry, frozen)]
        names = {given for entry in usable for given in entry.names}
        is_wanted = step in (None, key.step) and run_id in (None, key.run_id) and (name is None or name in names)
        if not is_wanted or not is_complete(usable, frozen):
            continue
        ranks: dict[int, list[Entry]] = defaultdict(list)
        for entry in usable:
            ranks[entry.rank].append(entry)
        sources = tuple(
            tuple(sorted(ranks[rank], key=lambda entry: (entry.speed, entry.location))) for rank in sorted(ranks)
        )
        digests = {entry.frozen for entries in sources for entry in entries if entry.frozen is not None}
        images = {
            digest: tuple(sorted(frozen[digest], key=lambda image: (image.speed, image.location)))
            for digest in sorted(digests)
        }
        plans.append(RestartPlan(key.run_id, key.start, key.step, key.world_size, sources, images))
    return plans
