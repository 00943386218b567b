"""From what the levels hold to what a restart may restore. Pure: values in, a plan out."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Entry:
    """One rank's committed shard of one snapshot at one level."""

    level: str
    """Name of the level: ``memory`` or its URL."""
    speed: int
    """Rank among the levels, 0 the fastest to read."""
    run_id: str
    run_started_ns: int
    step: int
    rank: int
    world_size: int
    location: str
    """Where in the level: a directory name, or a slot's index."""
    frozen: str | None = None
    """Digest of the immutable tensors that belong with it, which may be found at another level."""
    node: str | None = None
    """Which node can read it, ``None``: every one."""
    generation: str | None = None
    """With several ranks, which start of theirs it is of: only shards of one generation are one snapshot."""
    names: tuple[str, ...] = ()
    """What the snapshot was called by ``keep``."""
    file: str | None = None
    """What the names of the file begin with that holds it with the other ranks of a node; ``None``: it has its own."""


@dataclass(frozen=True)
class FrozenEntry:
    """One image of immutable tensors at one level."""

    level: str
    speed: int
    run_id: str
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


def newest_generation(inventories: Iterable[Inventory]) -> str | None:
    """The start of several ranks that was last, of those that left something."""
    entries = (entry for inventory in inventories for entry in inventory.entries)
    return max((entry.generation for entry in entries if entry.generation is not None), default=None)


@dataclass(frozen=True)
class RestartPlan:
    """One snapshot, and for each rank the levels that offer its shard, fastest first."""

    run_id: str
    run_started_ns: int
    step: int
    world_size: int
    sources: tuple[tuple[Entry, ...], ...]
    frozen: Mapping[str, tuple[FrozenEntry, ...]] = field(default_factory=dict)
    """For each digest that an entry refers to, the levels that offer it, fastest first."""

    @property
    def level(self) -> str:
        """The slowest of the levels that would be read first."""
        return max((offers[0] for offers in self.sources), key=lambda entry: entry.speed).level


_Key = tuple[int, str, int, str, int]
"""Start of the run, run, step, generation, world size: what the shards of one snapshot have in common."""


def candidates(
    inventories: Iterable[Inventory], *, step: int | None = None, name: str | None = None
) -> list[RestartPlan]:
    """Every complete snapshot, the best one first: of the run started last, then of the greatest step, then
    of the start of its ranks that was last.

    A snapshot is complete when each of the ranks that its entries name is there at some level, and at some level the
    immutable tensors that it refers to. With ``step`` only snapshots of that step are listed, with ``name`` those that
    ``keep`` called so. The caller tries them in this order until one verifies.
    """
    inventories = list(inventories)
    frozen: dict[tuple[str, str], list[FrozenEntry]] = defaultdict(list)
    for image in (image for inventory in inventories for image in inventory.frozen):
        frozen[image.run_id, image.digest].append(image)
    found: dict[_Key, dict[int, list[Entry]]] = defaultdict(lambda: defaultdict(list))
    for inventory in inventories:
        for entry in inventory.entries:
            if entry.frozen is not None and (entry.run_id, entry.frozen) not in frozen:
                continue
            key = (entry.run_started_ns, entry.run_id, entry.step, entry.generation or "", entry.world_size)
            found[key][entry.rank].append(entry)
    plans = []
    for key, ranks in sorted(found.items(), reverse=True):
        run_started_ns, run_id, at, _, world_size = key
        names = {given for entries in ranks.values() for entry in entries for given in entry.names}
        asked_for = (step is None or step == at) and (name is None or name in names)
        if set(ranks) == set(range(world_size)) and asked_for:
            sources = tuple(
                tuple(sorted(ranks[rank], key=lambda entry: (entry.speed, entry.location))) for rank in sorted(ranks)
            )
            digests = {entry.frozen for entries in sources for entry in entries if entry.frozen is not None}
            images = {
                digest: tuple(sorted(frozen[run_id, digest], key=lambda image: (image.speed, image.location)))
                for digest in sorted(digests)
            }
            plans.append(RestartPlan(run_id, run_started_ns, at, world_size, sources, images))
    return plans
