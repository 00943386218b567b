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
    "levels[].max_bytes_per_s": "disks and networks of nodes may differ; the slowest node decides how much is stored",
    "levels[].timeout_s": "as with max_bytes_per_s; it bounds what the keeper of a node waits for",
}
"""Settings that are not compared, with the reason. All others must be the same on all ranks.

Ranks of one node share a keeper. If they differ in a setting of a level or of redundancy, the keeper uses that of one
rank, and reports what differs.
"""

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
    settings: Settings = {}
    for name, value in vars(config).items():
        if name == "job_id":
            settings[name] = given_job_id(config)  # a name that is the URL of a level may differ as that URL does
        elif name == "levels":
            settings["number of levels"] = len(value)
            for number, level in enumerate(value):
                _add_group(settings, f"levels[{number}]", "levels[]", level)
        elif dataclasses.is_dataclass(value):
            settings[name] = type(value).__name__
            _add_group(settings, name, name, value)
        elif name not in MAY_DIFFER:
            settings[name] = value
    return settings


def _add_group(settings: Settings, owner: str, kind: str, group: object) -> None:
    """Add the fields of a nested object that must be equal. ``kind``: its name in ``MAY_DIFFER``."""
    for name, value in vars(group).items():
        if f"{kind}.{name}" not in MAY_DIFFER:
            settings[f"{owner}.{name}"] = value


def check_alike(settings: Sequence[Settings]) -> None:
    """Check that the settings of all ranks are equal. Raises: ConfigError, naming what differs, and on which ranks."""
    expected = settings[0]
    for rank, settings_of_rank in enumerate(settings):
        # The number of levels first: if it differs, nothing else matters.
        for name in ("number of levels", *expected):
            value = settings_of_rank.get(name)
            if value != expected[name]:
                raise ConfigError(
                    f"ranks 0 and {rank} have different settings: {name} is {expected[name]!r} and {value!r}; give "
                    "all ranks the same value (SnapshotConfig; the job's name may come from LAZYSNAP_JOB_ID), or no "
                    "snapshot would be complete"
                )


def check_places(world: World, config: SnapshotConfig, job_id: str) -> None:
    """Compare the places of snapshots, and the name of the job, among the ranks of each node. Collective.

    Ranks of one node share a keeper, which is found by the name of the job. Levels may differ between nodes.
    Raises: ConfigError, on all ranks, with both places.
    """
    named_places = []
    for number, level in enumerate(config.levels):
        named_places.append([f"level {number}", level.url])
    named_places.append(["the job", job_id])
    answers = world.exchange("comparing places", named_places)
    first_ranks: dict[str, int] = {}
    for rank, answer in enumerate(answers):
        first_rank = first_ranks.setdefault(world.places[rank].node, rank)
        for (owner, place), (_, expected_place) in zip(answer, answers[first_rank], strict=False):
            if place != expected_place:
                raise ConfigError(
                    f"ranks {first_rank} and {rank} of one node have different places for snapshots: {owner} is "
                    f"{expected_place!r} on rank {first_rank} and {place!r} on rank {rank}. Name the same directory on "
                    "all ranks of a node; where the name holds a time or a random part, make it on rank 0 and "
                    "broadcast it"
                )


def together(world: World, activity: str, work: Callable[[], object]) -> None:
    """Call ``work`` on every rank; if it raises on a rank, all raise, naming that rank and its reason. Collective.

    Blocks: until all ranks have done their work.
    Raises: as ``work`` does, of the kinds in ``_SHARED``; for any other error StateError, with that error as the cause
    on its rank; WaitTimeout.
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

    answers = world.exchange_after(activity, outcome)
    refusals = [(rank, answer) for rank, answer in enumerate(answers) if answer is not None]
    if not refusals:
        return
    rank, (kind, reason) = refusals[0]
    ranks = f"rank {rank}"
    if len(refusals) > 1:
        ranks += f" (and {len(refusals) - 1} more ranks)"
    if kind not in _KINDS:
        reason = f"{kind}: {reason}"
    raise _KINDS.get(kind, StateError)(f"{ranks}: {reason}") from next(iter(causes), None)
