"""The snapshots that a restart may restore, from the contents of memory and levels. Pure."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

from lazysnap.shard.best import BEST, best_first, has_name
from lazysnap.shard.names import SnapshotName

MEMORY = "memory"
"""The level of captures in the memory of keepers, instead of a URL."""
PARITY = "parity"
"""The level of shards that are computed from parity, instead of a URL."""
_COMPARED = 2
"""Number of snapshots that the check of a restart needs."""


@dataclass(frozen=True)
class Entry:
    """One rank's committed shard of one snapshot at one level: part of a node's file, or a slot."""

    level: str
    """``MEMORY``, ``PARITY`` or the URL of a level."""
    run_id: str
    start: str
    """The start: only shards of the same start belong to one snapshot."""
    step: int
    rank: int
    world_size: int
    location: tuple[int, ...] = ()
    """In memory the local rank and the number of the capture; for parity the number of the lost part. Empty at a level,
    where the name of the ``snapshot`` is the directory.
    """
    node: str | None = None
    """The node that can read it; ``None``: all nodes."""
    names: tuple[str, ...] = ()
    """Names given by ``keep``."""
    file: str = ""
    """The name of the node's file that holds it, without suffix; empty in memory."""
    distance: int = 0
    """The position of the level in the read order of a restart: 0 for memory, the nearest."""
    is_repeatable: bool | None = None
    """True if a restart may repeat its step: see ``can_repeat``; ``None`` outside of slots of the rank itself."""

    @property
    def snapshot(self) -> SnapshotName:
        """Return the snapshot to which it belongs."""
        return SnapshotName(self.run_id, self.step, self.start)


@dataclass(frozen=True)
class Inventory:
    """The contents of one level, and its problems (incomplete, foreign, damaged)."""

    level: str
    entries: tuple[Entry, ...] = ()
    problems: tuple[str, ...] = ()


def entries_in(inventories: Iterable[Inventory]) -> Iterator[Entry]:
    """Yield the entries of all inventories."""
    for inventory in inventories:
        yield from inventory.entries


@dataclass(frozen=True)
class RestartPlan:
    """One snapshot, and for each rank the levels that offer its shard, the nearest first."""

    run_id: str
    start: str
    step: int
    world_size: int
    sources: tuple[tuple[Entry, ...], ...]

    @property
    def key(self) -> "SnapshotKey":
        """Its identity."""
        return SnapshotKey(self.run_id, self.step, self.start, self.world_size)

    @property
    def level(self) -> str:
        """The farthest of the first sources."""
        first_sources = [offers[0] for offers in self.sources]
        return max(first_sources, key=attrgetter("distance")).level


@dataclass(frozen=True, order=True)
class SnapshotKey:
    """The common facts of the shards of one snapshot. Newer snapshots have greater keys."""

    run_id: str
    step: int
    start: str
    world_size: int

    @classmethod
    def of(cls, entry: Entry) -> "SnapshotKey":
        """Return the snapshot that a shard is part of."""
        return cls(entry.run_id, entry.step, entry.start, entry.world_size)


def snapshots(entries: Iterable[Entry]) -> dict[SnapshotKey, list[Entry]]:
    """Return the shards of each snapshot, complete or not, at any level."""
    entries_by_key: dict[SnapshotKey, list[Entry]] = defaultdict(list)
    for entry in entries:
        entries_by_key[SnapshotKey.of(entry)].append(entry)
    return dict(entries_by_key)


def is_complete(entries: Sequence[Entry]) -> bool:
    """True if these shards are a complete snapshot: the shard of every rank is present.

    Restarts, retention and commands all use this rule.
    """
    ranks = {entry.rank for entry in entries}
    return bool(entries) and len(ranks) == entries[0].world_size and max(ranks) < entries[0].world_size


@dataclass(frozen=True)
class SnapshotFilter:
    """The snapshots to search; all of them by default."""

    step: int | None = None
    name: str | None = None
    """A name that ``keep`` gave, or ``"best"``."""
    run: str | None = None
    """The first digits of the id of their run."""

    @property
    def is_best(self) -> bool:
        """Return True for the best snapshots by a metric, which are ordered by the metric."""
        return self.name == BEST

    def includes(self, snapshot: SnapshotKey | SnapshotName, names: Collection[str]) -> bool:
        """Return True if a snapshot matches. ``names``: its names."""
        is_of_run = self.run is None or snapshot.run_id.startswith(self.run)
        is_named = self.name is None or has_name(names, self.name)
        return is_of_run and is_named and self.step in (None, snapshot.step)


ANY = SnapshotFilter()


def candidates(inventories: Iterable[Inventory], snapshot_filter: SnapshotFilter = ANY) -> list[RestartPlan]:
    """Return every complete snapshot that the filter includes, the best first.

    The best is of the newest run, of the greatest step and of the newest start. With the name ``"best"`` it is the best
    by the metric. The parts of a snapshot may be at different levels. The caller tries the plans in this order until
    one can be read.

    Raises: SnapshotNotFound, if ``"best"`` may mean several metrics.
    """
    plans = []
    names_of_plans = []
    for key, entries in sorted(snapshots(entries_in(inventories)).items(), reverse=True):
        names: set[str] = set()
        for entry in entries:
            names.update(entry.names)
        if snapshot_filter.includes(key, names) and is_complete(entries):
            plans.append(RestartPlan(key.run_id, key.start, key.step, key.world_size, _sources_of(entries)))
            names_of_plans.append(names)
    if snapshot_filter.is_best:
        return best_first(zip(plans, names_of_plans, strict=True))
    return plans


def _sources_of(entries: Iterable[Entry]) -> tuple[tuple[Entry, ...], ...]:
    """Return the entries of each rank, in the order of the ranks; the nearest level first."""
    offers: dict[int, list[Entry]] = defaultdict(list)
    for entry in sorted(entries, key=attrgetter("rank", "distance", "location")):
        offers[entry.rank].append(entry)
    return tuple(map(tuple, offers.values()))


def can_repeat(plans: Sequence[RestartPlan]) -> bool:
    """True if a restart can resume the second best of ``plans`` and repeat the step of the best one.

    The second best is of the previous step, of the same start and in memory. Each rank has the best one in its own
    slot.
    """
    if len(plans) < _COMPARED:
        return False
    newest, before = plans[:_COMPARED]
    is_next_step = before.key == replace(newest.key, step=newest.step - 1)
    is_before_in_memory = all(offers[0].distance == 0 for offers in before.sources)
    return is_next_step and is_before_in_memory and all(any(map(_is_repeatable, offers)) for offers in newest.sources)


def _is_repeatable(entry: Entry) -> bool:
    return entry.is_repeatable is True
