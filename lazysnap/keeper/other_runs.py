"""Runs that are at the levels when a training starts fresh. They are looked for once, beside everything else."""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from lazysnap.config import PersistentLevel
from lazysnap.keeper.protocol import Message, OtherRun
from lazysnap.levels import open_store
from lazysnap.levels.listing import Listing
from lazysnap.levels.redaction import shown
from lazysnap.levels.watchdog import Beat, Watchdog
from lazysnap.resolver import SnapshotKey, candidates
from lazysnap.runs import short_ids
from lazysnap.shard.names import SnapshotName, parse_frozen_directory_name

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Found:
    level: str
    newest: SnapshotKey
    run_ids: tuple[str, ...]
    """Of all runs there."""


def begin_search(levels: Sequence[PersistentLevel], run_id: str, emit: Callable[[Message], None]) -> None:
    """Look for complete snapshots of other runs than ``run_id``, and emit which is the newest. Does not block."""
    if levels:
        threading.Thread(target=_search, args=(levels, run_id, emit), name="lazysnap-other-runs", daemon=True).start()


def _search(levels: Sequence[PersistentLevel], run_id: str, emit: Callable[[Message], None]) -> None:
    found: list[_Found] = []
    for level in levels:
        try:
            search = Watchdog(partial(_newest_other, level, run_id), f"{shown(level.url)}: looking for other runs")
            found += [one for one in [search.result(level.timeout_s)] if one is not None]
        except Exception as error:  # noqa: BLE001  storage packages may raise anything
            logger.info("%s: whether other runs are there is not known: %s", shown(level.url), error)
    if found:
        other = max(found, key=lambda item: item.newest)
        names = short_ids([run_id, *(other for item in found for other in item.run_ids)])
        newest = other.newest
        emit(OtherRun(other.level, newest.step, names[newest.run_id], names[run_id]))


def _newest_other(level: PersistentLevel, run_id: str, beat: Beat) -> _Found | None:
    """The newest complete snapshot of another run: the manifests of one after another, until one is complete."""
    store = open_store(level.url, options=level.storage_options)
    directories = store.listing().directories
    beat()
    named = {name: one for one in directories if (name := SnapshotName.parse(one.name)) is not None}
    images = [one for one in directories if parse_frozen_directory_name(one.name) is not None]
    for name in sorted(named, reverse=True):
        if name.run_id == run_id:
            continue
        inventory = store.inventory(Listing((named[name], *images)), (0, 1))
        beat()
        plans = candidates([inventory])
        if plans:
            return _Found(store.url, plans[0].key, tuple({name.run_id for name in named}))
    return None
