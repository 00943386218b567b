"""Makes the settings of a job for its keepers, and computes the number of slots."""

from collections.abc import Collection

from lazysnap.config import STORE_EVERY_S, PersistentLevel, SnapshotConfig
from lazysnap.core.messages import JobSettings, LevelSettings, RedundancySettings
from lazysnap.memory.slot_choice import kept_whole, slots_needed
from lazysnap.ranks.world import World


def job_settings(
    config: SnapshotConfig,
    world: World,
    run_id: str,
    *,
    redundancy: RedundancySettings | None,
    shared: Collection[str],
) -> JobSettings:
    """Return what all ranks of a node agree on for one start.

    Args:
        config: the settings of the user.
        world: all ranks of the training.
        run_id: id of the run.
        redundancy: protection by other nodes; ``None`` without it.
        shared: URLs of the levels that are one place for all nodes.
    """
    nodes = list(dict.fromkeys(world.nodes))  # sorted by first rank, so rank 0 is on node 0
    levels = []
    for level in config.levels:
        is_shared = len(nodes) == 1 or level.url in shared
        levels.append(_level_settings(level, is_shared=is_shared))
    return JobSettings(
        run=run_id,
        levels=tuple(levels),
        redundancy=redundancy,
        capture_every_n_steps=config.every_n_steps,
        num_kept=num_kept(config, world),
        ranks=tuple(world.node_ranks),
        world_size=world.size,
        node=nodes.index(world.place.node),
        num_nodes=len(nodes),
    )


def _level_settings(level: PersistentLevel, *, is_shared: bool) -> LevelSettings:
    period_s = level.period_s
    if period_s is None:
        period_s = STORE_EVERY_S  # unused: the level stores by steps
    storage_options = None
    if level.storage_options is not None:
        storage_options = dict(level.storage_options)
    return LevelSettings(
        url=level.url,
        every_s=period_s,
        every_n_steps=level.every_n_steps,
        keep_last=level.keep_last,
        keep_every_n_steps=level.keep_every_n_steps,
        timeout_s=level.timeout_s,
        is_shared=is_shared,
        max_bytes_per_s=level.max_bytes_per_s,
        storage_options=storage_options,
    )


def num_kept(config: SnapshotConfig, world: World) -> int:
    """Return K, the number of newest whole captures that a rank never overwrites. See ``memory.slot_choice``."""
    return kept_whole(config.every_n_steps, world.size, runs_ahead=world.runs_ahead)


def num_slots(config: SnapshotConfig, world: World, *, is_redundant: bool) -> int:
    """Return the number of slots of one rank. ``is_redundant``: other nodes read captures to protect them."""
    return slots_needed(num_kept(config, world), is_read=bool(config.levels) or is_redundant)
