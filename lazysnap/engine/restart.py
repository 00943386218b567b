"""Finding what a restart goes on from: the keeper asked, every level listed, the freshest that verifies read."""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping

import torch
from torch.distributed.tensor import DTensor

from lazysnap.config import SnapshotConfig
from lazysnap.engine.events import EventLog
from lazysnap.engine.names import check_name
from lazysnap.engine.reading import LevelReader
from lazysnap.engine.restore import LISTINGS, Snapshot, SnapshotReader, Vanished
from lazysnap.errors import KeeperUnavailable, SnapshotNotFound
from lazysnap.keeper.client import KeeperClient
from lazysnap.keeper.events import MemoryHoldings

logger = logging.getLogger("lazysnap.engine")

LATEST = "latest"


def fetch(  # noqa: PLR0913  one call, from one place
    which: int | str,
    config: SnapshotConfig,
    expected: Mapping[str, torch.Tensor],
    client: KeeperClient | None,
    log: EventLog,
    of_many: Callable[[], Snapshot | None],
) -> Snapshot | None:
    """See ``SnapshotEngine.fetch``; without a client, from storage alone. Blocks.

    ``of_many`` reads what several ranks captured, if the best snapshot is such a one, and into live DTensors.
    """
    started = time.perf_counter()
    step = which if isinstance(which, int) else None
    name = None if which == LATEST or step is not None else str(which)
    if name is not None:
        check_name(name)
    levels = {level.url: LevelReader(level, place + 1) for place, level in enumerate(config.levels)}
    for level in levels.values():
        level.begin_open()
    memory = MemoryHoldings()
    if client is not None:
        try:
            client.connect(config.keeper_timeout_s)
            memory = client.inventory(config.keeper_timeout_s)
        except KeeperUnavailable as error:
            log.note_once("keeper", "no snapshot in memory can be used: %s", error)
    # Not before: the keeper of the last run may have been writing, and deleting, until this one took its place.
    reader = SnapshotReader(levels, memory)
    for tries_left in reversed(range(LISTINGS)):
        reader.list_again()
        plans = reader.plans(step=step, name=name)
        if plans and (plans[0].world_size > 1 or any(isinstance(tensor, DTensor) for tensor in expected.values())):
            return of_many()
        with contextlib.suppress(Vanished):  # retention, or prune, went on meanwhile
            snapshot = reader.read(plans, expected, is_last_try=not tries_left)
            break
    for problem in reader.problems:
        logger.warning("%s", problem)
    if snapshot is None and which != LATEST:
        held = sorted({plan.step for plan in reader.plans()})
        what = f"called {name!r}" if name is not None else f"of step {step}"
        raise SnapshotNotFound(f"no whole snapshot {what}; there are {held or 'none'}")
    return snapshot and dataclasses.replace(snapshot, seconds=time.perf_counter() - started)
