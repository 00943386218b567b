"""Checks across all ranks: equal settings, and an error on one rank is raised on all."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from lazysnap.config import SnapshotConfig
from lazysnap.errors import ConfigError, JobBusy, KeeperError, LazySnapError, LevelError, StateError
from lazysnap.keeper.identity import given_job_id
from lazysnap.memory.budget import MemoryBoundExceeded
from lazysnap.ranks.world import World

Settings = dict[str, Any]


MAY_DIFFER = {
    "redundancy.max_bytes_per_s": "networks of nodes may differ; a slow node makes protection slower",
    "memory.max_bytes": "nodes may have memory of different sizes; a rank whose slots do not fit says so",
    "memory.spill_dir": "disks of nodes may differ",
    "levels[].url": "each node may have a disk of its own; ranks of one node must name the same: see check_places",
    "levels[].storage_options": "credentials and endpoints may be a node's own; and secrets are sent nowhere",
    "levels[].max_bytes_per_s": "disks and networks of nodes may differ; a slow rank stores fewer of the same steps",
    "levels[].timeout_s": "as with max_bytes_per_s; it bounds what one rank waits for at its own place",
}
"""Settings that are not compared, and why. All others must be the same on all ranks."""

_SHARED = (
    ConfigError,
    JobBusy,
    KeeperError,
    LevelError,
    MemoryBoundExceeded,
    StateError,
)
_KINDS: dict[str, type[LazySnapError]] = {kind.__name__: kind for kind in _SHARED}


def common_settings(config: SnapshotConfig) -> Settings:
    """Return the settings that must be equal on all ranks, by name; plain JSON."""
    found: Settings = {}
    for name, value in vars(config).items():
        if name == "job_id":
            found[name] = given_job_id(config)  # one that is a level's URL may differ as that does
        elif name == "levels":
            found["number of levels"] = len(value)
            for number, level in enumerate(value):
                found |= _compared(f"levels[{number}]", "levels[]", level)
        elif dataclasses.is_dataclass(value):
            found[name] = type(value).__name__
            found |= _compared(name, name, value)
        elif name not in MAY_DIFFER:
            found[name] = value
    return found


def _compared(owner: str, kind: str, settings: object) -> Settings:
    return {f"{owner}.{name}": value for name, value in vars(settings).items() if f"{kind}.{name}" not in MAY_DIFFER}


def check_alike(settings: Sequence[Settings]) -> None:
    """Check that the settings of all ranks are equal. Raises: ConfigError, naming what differs, and on which ranks."""
    first = settings[0]
    for rank, mine in enumerate(settings):
        # The number of levels first: then it says enough.
        for name in ("number of levels", *first):
            if mine.get(name) != first[name]:
                raise ConfigError(
                    f"ranks 0 and {rank} have other settings: {name} is {first[name]!r} and {mine.get(name)!r}; give "
                    "all ranks the same value (SnapshotConfig; the job's name may come from LAZYSNAP_JOB_ID), or no "
                    "snapshot would be complete"
                )


def check_places(world: World, config: SnapshotConfig, job_id: str) -> None:
    """Compare the places of snapshots, and the name of the job, among the ranks of each node. Collective.

    Ranks of one node share a keeper, which is found by the name of the job. Levels that differ differ by node.
    Raises: ConfigError, on all ranks, with both places.
    """
    places = [[f"level {number}", level.url] for number, level in enumerate(config.levels)]
    places.append(["the job", job_id])
    first_of_node: dict[str, tuple[int, list[list[str]]]] = {}
    for rank, places_of_rank in enumerate(world.exchange("comparing places", places)):
        first_rank, expected = first_of_node.setdefault(world.places[rank].node, (rank, places_of_rank))
        for (what, place), (_, expected_place) in zip(places_of_rank, expected, strict=False):
            if place != expected_place:
                raise ConfigError(
                    f"ranks {first_rank} and {rank} of one node have different places for snapshots: {what} is "
                    f"{expected_place!r} on rank {first_rank} and {place!r} on rank {rank}. Name the same directory on "
                    "all ranks of a node; where the name holds a time or a random part, make it on rank 0 and "
                    "broadcast it"
                )


def together(world: World, what: str, work: Callable[[], object]) -> None:
    """Do ``work`` on every rank; if it raises on one of them, all raise, naming that rank and its reason. Collective.

    Blocks: until all have done theirs. Raises: as ``work`` does, of the kinds in ``_SHARED``; for
    any other error StateError, with that error as the cause on the rank that met it; WaitTimeout.
    """
    if world.is_alone:
        work()
        return
    causes: list[Exception] = []

    def outcome() -> list[str] | None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  objects of users load themselves: they raise what they like
            causes.append(error)
            return [type(error).__name__, str(error)]
        return None

    told = world.exchange_after(what, outcome)
    refusals = [(rank, answer) for rank, answer in enumerate(told) if answer is not None]
    if not refusals:
        return
    rank, (kind, text) = refusals[0]
    others = f" (and {len(refusals) - 1} more ranks)" if len(refusals) > 1 else ""
    reason = text if kind in _KINDS else f"{kind}: {text}"
    raise _KINDS.get(kind, StateError)(f"rank {rank}{others}: {reason}") from next(iter(causes), None)
