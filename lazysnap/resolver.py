"""From what the levels hold to what a restart may restore. Pure: values in, a plan out."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass


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


@dataclass(frozen=True)
class Inventory:
    """What one level can offer, and what was found there that it cannot (half, foreign, damaged)."""

    level: str
    entries: tuple[Entry, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class RestartPlan:
    """One snapshot, and for each rank the levels that offer its shard, fastest first."""

    run_id: str
    run_started_ns: int
    step: int
    world_size: int
    sources: tuple[tuple[Entry, ...], ...]

    @property
    def level(self) -> str:
        """The slowest of the levels that would be read first."""
        return max((offers[0] for offers in self.sources), key=lambda entry: entry.speed).level


def candidates(inventories: Iterable[Inventory], *, step: int | None = None) -> list[RestartPlan]:
    """Every complete snapshot, the best one first: of the run started last, then of the greatest step.

    A snapshot is complete when each of the ranks that its entries name is there at some level. With ``step`` only
    snapshots of that step are listed. The caller tries them in this order until one verifies.
    """
    found: dict[tuple[int, str, int, int], dict[int, list[Entry]]] = defaultdict(lambda: defaultdict(list))
    for inventory in inventories:
        for entry in inventory.entries:
            key = (entry.run_started_ns, entry.run_id, entry.step, entry.world_size)
            found[key][entry.rank].append(entry)
    plans = []
    for (run_started_ns, run_id, at, world_size), ranks in sorted(
        found.items(), key=lambda item: (item[0][0], item[0][1], item[0][2], item[0][3]), reverse=True
    ):
        if set(ranks) == set(range(world_size)) and (step is None or step == at):
            sources = tuple(
                tuple(sorted(ranks[rank], key=lambda entry: (entry.speed, entry.location))) for rank in sorted(ranks)
            )
            plans.append(RestartPlan(run_id, run_started_ns, at, world_size, sources))
    return plans
