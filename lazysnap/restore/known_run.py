"""Finds the run that a start at a place would resume, without an engine. No shard is read or verified."""

import logging
import os
from functools import partial

from lazysnap.config import SnapshotConfig, config_at
from lazysnap.errors import LazySnapError
from lazysnap.keeper.asking import NeighbourMemory
from lazysnap.keeper.identity import JobIdentity
from lazysnap.restore.level import whole_snapshots

logger = logging.getLogger("lazysnap.engine")


def run_id(place: "str | os.PathLike[str] | SnapshotConfig") -> str | None:
    """Return the id of the newest run of the job at ``place``: the run that a start with ``"latest"`` resumes.

    It is the same after every restart of the run. A new training, a rollback and the restore of an older snapshot begin
    a new run with a new id. Before the first snapshot there is no id: for a logger that is made before the training use
    ``callback.run_id``, for a later one ``engine.run_id`` (docs/loggers.md)::

        print(lazysnap.run_id("runs/a"))  # 1a220fa0c0ffee11

    Blocks: asks the keeper of this node, if one runs, and lists the levels, each at most ``timeout_s`` without
    progress. A level that does not answer is skipped, with a warning. Not collective: with several nodes, call it on
    the first one.

    Args:
        place: the path or URL of the first level, or the ``SnapshotConfig`` of the training.

    Returns: 16 hexadecimal digits, or ``None`` if neither memory nor a level has a whole snapshot.
    Raises: ConfigError, if ``place`` names no job.
    """
    return newest_run(config_at(place))


def newest_run(config: SnapshotConfig, default_url: str | None = None) -> str | None:
    """See ``run_id``. ``default_url`` names the job where ``config`` does not."""
    identity = JobIdentity.from_config(config, default_url)
    runs = _in_memory(identity, config.io_timeout_s)
    for name in whole_snapshots(config.levels, partial(logger.warning, "run_id(): %s")):
        runs.add(name.run_id)
    return max(runs, default=None)


def _in_memory(identity: JobIdentity, timeout_s: float) -> set[str]:
    try:
        memory = NeighbourMemory(identity, 0, timeout_s)
    except LazySnapError as error:
        logger.debug("run_id() finds nothing in memory: %s", error)
        return set()
    try:
        return {capture.run_id for capture in memory.inventory.entries}
    finally:
        memory.close()
