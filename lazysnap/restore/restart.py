"""A restart: which snapshot is wanted, and what else the search for it found. Every rank gets the same snapshot."""

import contextlib
import dataclasses
import logging
import random
from collections.abc import Callable, Collection, Sequence

import torch

from lazysnap.config import PersistentLevel
from lazysnap.errors import SnapshotNotFound, StateError
from lazysnap.ranks.world import World
from lazysnap.resolver import (
    Choice,
    Inventory,
    RestartPlan,
    SnapshotKey,
    can_repeat,
    candidates,
    short_ids,
)
from lazysnap.restore.search import Restart, Search
from lazysnap.restore.snapshot import Absence, NewRun, Snapshot
from lazysnap.shard.names import SnapshotName, id_after, new_id

logger = logging.getLogger("lazysnap.engine")


def fetch(which: int | str, restart: Restart) -> Snapshot | Absence:
    """See ``SnapshotEngine._fetch``, but returns the reason instead of ``None``. Collective. Blocks.

    Raises: StateError on all ranks, if the newest snapshot does not fit one of them, or if none can be restored and a
    decoder of the program refused one; WaitTimeout.
    """
    choice = Choice.of(which)
    with contextlib.ExitStack() as stack:
        search = Search(restart, stack)

        def order(inventories: list[Inventory]) -> list[RestartPlan]:
            plans = choice.plans(inventories)
            if choice.is_latest and restart.proves and can_repeat(plans):
                newest, before, *rest = plans
                return [before, newest, *rest]
            return plans

        may_be_wanted = None
        if not choice.is_latest:
            may_be_wanted = choice.includes
        snapshot = search.first_whole(order, may_be_wanted, is_patient=not choice.is_latest, reads_all=choice.is_best)
        if snapshot is not None:
            return _with_findings(snapshot, search, restart, choice)
        if search.decoder_errors:
            raise StateError(
                f"no snapshot can be restored: {search.decoder_errors[0]}. Nothing was loaded. Correct the decoder "
                "given to lazysnap.register_type(), or give another training a directory of its own"
            )
        if not choice.is_latest:
            raise SnapshotNotFound(choice.missing(search.inventories))
        return _absence(search, restart)


def _with_findings(snapshot: Snapshot, search: Search, restart: Restart, choice: Choice) -> Snapshot:
    """Return a snapshot that was read, with the other results of the search.

    Collective, if a new run begins: the choice of an older snapshot begins one, later than all others.
    """
    inventories = search.inventories
    key = SnapshotKey(snapshot.run_id, snapshot.step, snapshot.start, snapshot.world_size)
    newest = next(plan for plan in candidates(inventories) if plan.key not in search.unreadable)
    is_newest = choice.is_latest or newest.key == key
    repeats = None
    if is_newest and newest.key != key:
        repeats = newest.key
    last_key = repeats or key
    search.note_newer(last_key)
    new_run = None
    if not is_newest:
        new_run = _new_run(restart.world, search.runs(), newest)
    return dataclasses.replace(
        snapshot,
        skipped=tuple(search.problems),
        end=search.end() if choice.is_latest else None,
        protected=search.protected,
        durable_at=_durable_at(inventories, restart.config.levels, last_key),
        run=short_ids(search.runs())[snapshot.run_id],
        new_run=new_run,
        repeats=repeats,
        forbids_repeats=is_newest and _forbids_repeats(newest),
    )


def _absence(search: Search, restart: Restart) -> Absence:
    complete_steps = {plan.step for plan in candidates(search.inventories)}
    steps = set()
    for inventory in search.inventories:
        for entry in inventory.entries:
            steps.add(entry.step)
    return Absence(
        tuple(level.url for level in restart.config.levels),
        incomplete=tuple(sorted(steps - complete_steps)),
        unreadable=tuple(sorted(complete_steps)),
        uncommitted=search.survey.uncommitted,
        is_partial=bool(search.problems),
        newest_run=next(iter(search.runs()), None),
    )


def fetch_back(
    restart: Restart, is_wanted: Callable[[str, int], bool], flaw: Callable[[Snapshot], str]
) -> Snapshot | None:
    """Return the newest whole snapshot that ``is_wanted`` and has no ``flaw`` on any rank. Collective. Blocks.

    ``is_wanted``: called with the id of its run and its step. Raises: as ``fetch``.
    """
    with contextlib.ExitStack() as stack:
        search = Search(restart, stack)

        def order(inventories: list[Inventory]) -> list[RestartPlan]:
            return [plan for plan in candidates(inventories) if is_wanted(plan.run_id, plan.step)]

        def may_be_wanted(name: SnapshotName, names: Collection[str]) -> bool:
            return is_wanted(name.run_id, name.step)

        snapshot = search.first_whole(order, may_be_wanted, is_patient=True, flaw=flaw)
        if snapshot is None:
            return None
        return dataclasses.replace(snapshot, skipped=tuple(search.problems))


def _new_run(world: World, runs: Sequence[str], newest: RestartPlan) -> NewRun:
    """Return the new run after the choice of an older snapshot.

    Collective: all ranks get that of rank 0. ``runs``: the runs so far, the newest first.
    """
    # Later than every other run, independent of the clock, because "latest" means the newest run.
    run_id = id_after(world.exchange("beginning a new run", new_id())[0], runs[0])
    names = short_ids([run_id, *runs])
    return NewRun(run_id, names[run_id], newest.key, names[newest.run_id])


def _forbids_repeats(newest: RestartPlan) -> bool:
    """True if a slot of some rank forbids that a restart repeats its step."""
    return any(offers[0].is_repeatable is False for offers in newest.sources)


def _durable_at(inventories: list[Inventory], levels: Sequence[PersistentLevel], key: SnapshotKey) -> str | None:
    """Return the URL of the first level with a complete snapshot. The same on every rank."""
    for level in levels:
        at_level = [inventory for inventory in inventories if inventory.level == level.url]
        if any(plan.key == key for plan in candidates(at_level)):
            return level.url
    return None


def reseed(snapshot: Snapshot, world: World) -> None:
    """Give every rank its own random numbers after a restart with another number of ranks. Rank 0 warns.

    Another number of ranks cannot continue the random numbers of each rank. Equal numbers on two ranks would be worse.
    """
    if world.rank == 0:
        captured_by = f"{snapshot.world_size} rank"
        if snapshot.world_size > 1:
            captured_by += "s"
        logger.warning(
            "step %d was captured by %s and is resumed by %d: weights and optimizer are exact; random numbers are "
            "new; the data continues in the same epoch after as many samples as were trained. These are the same "
            "samples if their order comes from a seed (docs/several-ranks.md)",
            snapshot.step,
            captured_by,
            world.size,
        )
    seed = (int(snapshot.run_id, 16) ^ (snapshot.step << 20) ^ (world.size << 10) ^ world.rank) & ((1 << 63) - 1)
    torch.manual_seed(seed)
    random.seed(seed)
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.seed(seed & 0xFFFFFFFF)
