"""Runs that are at the levels when a training starts fresh. They are looked for once, beside everything else."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lazysnap.config import PersistentLevel
from lazysnap.keeper.protocol import LeftRun, Message
from lazysnap.levels import SnapshotStore, open_store
from lazysnap.levels.listing import Listing
from lazysnap.levels.redaction import shown
from lazysnap.levels.watchdog import Watchdog
from lazysnap.resolver import SnapshotKey, candidates
from lazysnap.runs import short_ids
from lazysnap.shard.names import SnapshotName, parse_frozen_directory_name

logger = logging.getLogger(__name__)

_PATIENCE_S = 5.0
"""How long a level that is slow to answer is waited for, when another one has answered."""

Beat = Callable[[], None]


@dataclass(frozen=True)
class _Left:
    level: str
    newest: SnapshotKey
    run_ids: tuple[str, ...]
    """Of all runs there."""


def begin_search(levels: Sequence[PersistentLevel], run_id: str, emit: Callable[[Message], None]) -> None:
    """Look for complete snapshots of other runs than ``run_id``, and emit which is the newest. Does not block."""
    if levels:
        threading.Thread(target=_search, args=(levels, run_id, emit), name="lazysnap-left", daemon=True).start()


def _search(levels: Sequence[PersistentLevel], run_id: str, emit: Callable[[Message], None]) -> None:
    answers: queue.SimpleQueue[_Left | None] = queue.SimpleQueue()
    for level in levels:
        threading.Thread(target=_ask, args=(level, run_id, answers), name="lazysnap-left", daemon=True).start()
    found: list[_Left] = []
    deadline = time.monotonic() + _PATIENCE_S
    for _ in levels:
        try:
            answer = answers.get(timeout=max(0.0, deadline - time.monotonic()) if found else None)
        except queue.Empty:
            break  # the others are slow, or hang
        found += [] if answer is None else [answer]
    if found:
        left = max(found, key=lambda item: item.newest)
        names = short_ids([run_id, *(other for item in found for other in item.run_ids)])
        emit(LeftRun(left.level, left.newest.step, names[left.newest.run_id], names[run_id]))


def _ask(level: PersistentLevel, run_id: str, answers: "queue.SimpleQueue[_Left | None]") -> None:
    def look(beat: Beat) -> _Left | None:
        return _newest_left(open_store(level.url, options=level.storage_options), run_id, beat)

    try:
        answers.put(Watchdog(look, f"{shown(level.url)}: looking for other runs").result(level.timeout_s))
    except Exception as error:  # noqa: BLE001  the rim to storage packages, which raise what they like
        logger.info("%s: whether other runs are there is not known: %s", shown(level.url), error)
        answers.put(None)


def _newest_left(store: SnapshotStore, run_id: str, beat: Beat) -> _Left | None:
    """The newest complete snapshot of another run: the manifests of one after another, until one is complete."""
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
            return _Left(store.url, plans[0].key, tuple({name.run_id for name in named}))
    return None
