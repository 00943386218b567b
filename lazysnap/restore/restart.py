"""One restart of all ranks: they list what all sources have, and try the same snapshots in the same order.

Every rank restores the same snapshot, or none does. If one rank cannot read its part, all go on to the next. If a rank
is silent, the restart ends at a deadline, and nothing was changed anywhere (docs/architecture.md).
"""

import contextlib
import dataclasses
import logging
import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lazysnap import faults
from lazysnap.config import PersistentLevel, SnapshotConfig
from lazysnap.errors import JobBusy, SnapshotNotFound, StateError
from lazysnap.keeper.client import KeeperClient
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.questions import TrainerEnd
from lazysnap.ranks.discovery import NOBODY, Discovery, discover_keepers
from lazysnap.ranks.world import World
from lazysnap.resolver import (
    Entry,
    Inventory,
    RestartPlan,
    SnapshotFilter,
    SnapshotKey,
    can_repeat,
    candidates,
    newest_start,
)
from lazysnap.restore.level import Level
from lazysnap.restore.lost_parts import PARITY, lost_parts, most_protected
from lazysnap.restore.node_memory import NodeMemory
from lazysnap.restore.offers import pack_memory, pack_parity, unpack_memory, unpack_parity
from lazysnap.restore.parity import Parity
from lazysnap.restore.part import PartReader
from lazysnap.restore.peer_memory import PeerConnections, PeerMemory
from lazysnap.restore.snapshot import MEMORY, Absence, NewRun, Snapshot
from lazysnap.restore.sources import Failure, Places, Sources
from lazysnap.restore.survey import IsWanted, Survey
from lazysnap.runs import Choice, runs_in, short_ids
from lazysnap.shard.names import SnapshotName, id_after, new_id
from lazysnap.state.source import StateSource
from lazysnap.state.walk import collector_paused

logger = logging.getLogger("lazysnap.engine")

_FIRST_LEVEL = 2
"""Speed of the first level: behind memory, and what is computed from parity."""
_PATIENCE_S = 3.0
"""Seconds to wait for levels if memory has a whole snapshot."""
_LISTINGS = 3
"""Listings of levels at most, until nothing vanishes between listing and reading."""


@dataclass(frozen=True)
class Restart:
    """Inputs of a restart."""

    config: SnapshotConfig
    source: StateSource
    client: KeeperClient | None
    identity: JobIdentity
    world: World
    discovery: Discovery = NOBODY
    """The addresses of other nodes."""
    has_storage: bool = True
    """True if levels are looked at; otherwise memory alone."""
    start: str = ""
    """The id of this start: no earlier one has a greater id."""
    casts: bool = False
    """True for an evaluation, which may use another precision than the training: see ``targets.check_fits``."""

    @property
    def proves(self) -> bool:
        """True if ``"latest"`` may mean the snapshot before the newest one, whose step is then trained again."""
        config = self.config
        return bool(config.verify_restart) and config.every_n_steps == 1 and not self.casts


def fetch(which: int | str, restart: Restart) -> Snapshot | Absence:
    """See ``SnapshotEngine.fetch``; in place of ``None``, why there is none. Collective. Blocks.

    Raises: StateError on all ranks, if one of them cannot take the freshest snapshot; WaitTimeout.
    """
    choice = Choice.of(which)
    with contextlib.ExitStack() as stack:
        search = _Search(restart, stack)

        def order(inventories: list[Inventory]) -> list[RestartPlan]:
            plans = choice.plans(inventories)
            if choice.is_latest and restart.proves and can_repeat(plans):
                newest, before, *rest = plans
                return [before, newest, *rest]
            return plans

        # Another choice than the newest may begin a new run, which has to be later than all others.
        search.reads_all = choice.is_best
        snapshot = search.first_whole(order, _may_mean(choice), is_patient=not choice.is_latest)
        inventories = search.inventories
        if snapshot is not None:
            key = SnapshotKey(snapshot.run_id, snapshot.step, snapshot.start, snapshot.world_size)
            newest = next(plan for plan in candidates(inventories) if plan.key not in search.unreadable)
            is_newest = choice.is_latest or newest.key == key
            repeats = newest.key if is_newest and newest.key != key else None
            search.note_newer(repeats or key)
            return dataclasses.replace(
                snapshot,
                skipped=tuple(search.problems),
                end=search.end() if choice.is_latest else None,
                protected=search.protected,
                stored={
                    level.url: _stored(inventories, level, repeats or key)
                    for level in restart.config.levels
                    if is_newest and any(inventory.level == level.url for inventory in inventories)
                },
                run=short_ids(search.runs())[snapshot.run_id],
                new_run=None if is_newest else _new_run(restart.world, search.runs(), newest),
                repeats=repeats,
                is_settled=is_newest and _is_settled(newest),
            )
        if not choice.is_latest:
            raise SnapshotNotFound(choice.missing(inventories))
        held = {plan.step for plan in candidates(inventories)}
        seen = {entry.step for inventory in inventories for entry in inventory.entries}
        return Absence(
            tuple(level.url for level in restart.config.levels),
            incomplete=tuple(sorted(seen - held)),
            unreadable=tuple(sorted(held)),
            uncommitted=search.survey.uncommitted,
            is_partial=bool(search.problems),
            newest_run=next(iter(search.runs()), None),
        )


def fetch_back(
    restart: Restart, is_wanted: Callable[[RestartPlan], bool], flaw: Callable[[Snapshot], str]
) -> Snapshot | None:
    """The newest snapshot of those ``is_wanted`` that reads whole and has no ``flaw`` on any rank. Collective. Blocks.

    Raises: as ``fetch``.
    """
    with contextlib.ExitStack() as stack:
        search = _Search(restart, stack)

        def order(inventories: list[Inventory]) -> list[RestartPlan]:
            return [plan for plan in candidates(inventories) if is_wanted(plan)]

        def may_be_wanted(name: SnapshotName, names: Collection[str]) -> bool:
            return is_wanted(RestartPlan(name.run_id, name.start, name.step, restart.world.size, ()))

        snapshot = search.first_whole(order, may_be_wanted, is_patient=True, flaw=flaw)
        return None if snapshot is None else dataclasses.replace(snapshot, skipped=tuple(search.problems))


def _may_mean(choice: Choice) -> IsWanted | None:
    """Return which snapshots are meant, as far as names of directories tell; ``None``: the newest."""
    if choice.is_latest:
        return None

    def may_mean(name: SnapshotName, names: Collection[str]) -> bool:
        return choice.may_mean(name.run_id, name.step, names)

    return may_mean


def _new_run(world: World, there: Sequence[str], newest: RestartPlan) -> NewRun:
    """Return a run for what is captured after an older snapshot was chosen.

    Collective: all ranks get that of rank 0. ``there``: the runs so far, the newest first.
    """
    # Later than every other run, whatever the clock says: "latest" is of the newest run.
    run_id = id_after(world.exchange("beginning a new run", new_id())[0], there[0])
    names = short_ids([run_id, *there])
    return NewRun(run_id, names[run_id], newest.key, names[newest.run_id])


def _is_settled(newest: RestartPlan) -> bool:
    """Return True if memory of some rank says that no restart is to train the step of its capture again."""
    return any(offers[0].speed == 0 and not offers[0].is_repeatable for offers in newest.sources)


def _stored(inventories: list[Inventory], level: PersistentLevel, newest: SnapshotKey) -> list[tuple[str, int]]:
    """Complete snapshots at a level that led to this one: retention counts them. The same on every rank."""
    own = (inventory for inventory in inventories if inventory.level == level.url)
    plans = candidates(own, SnapshotFilter(run_id=newest.run_id))
    starts: dict[int, str] = {}
    for plan in plans:
        if plan.step <= newest.step:
            starts.setdefault(plan.step, plan.start)
    return [(starts[step], step) for step in sorted(starts)[-level.keep_last :]]


class _Search:
    """One restart on one rank: lists what all sources have, and reads the best snapshot that is whole everywhere.

    It has many attributes because each step of the search needs what the ones before it found.
    """

    def __init__(self, restart: Restart, stack: contextlib.ExitStack) -> None:
        self._started = time.perf_counter()
        self._restart = restart
        self._world = world = restart.world
        self._node = world.place.node
        self.problems: list[str] = []
        """One line for each snapshot or level that was passed over, and why."""
        self.inventories: list[Inventory] = []
        """Contents of all sources. The same on every rank."""
        self.unreadable: set[SnapshotKey] = set()
        """Snapshots that some rank could not read."""
        self.protected: SnapshotKey | None = None
        """See ``Snapshot``."""
        self.reads_all = False
        """True if the manifests of all snapshots are read before one is tried."""
        places = enumerate(restart.config.levels if restart.has_storage else ())
        self._levels = levels = {level.url: Level(level, place + _FIRST_LEVEL) for place, level in places}
        for level in levels.values():
            level.begin_open()
        self.survey = Survey(world, levels)
        self._connections = PeerConnections(restart.discovery)
        self._parity = Parity(self._connections)
        timeout_s = restart.config.io_timeout_s
        self._memory = NodeMemory(restart.client, restart.identity, world.place, timeout_s, self.problems.append)
        self._sources = Sources(Places(self._memory, PeerMemory(self._connections), self._parity, levels), stack)
        self._parts = PartReader(restart.source, world, self._sources, casts=restart.casts)
        stack.callback(self._close)

    def _close(self) -> None:
        for problem in self.problems:
            logger.warning("%s", problem)
        self._sources.forget()
        self._connections.close()
        self._memory.close()

    def first_whole(
        self,
        order: Callable[[list[Inventory]], list[RestartPlan]],
        may_be_wanted: IsWanted | None,
        *,
        is_patient: bool,
        flaw: Callable[[Snapshot], str] = lambda snapshot: "",
    ) -> Snapshot | None:
        """Return the first snapshot that all ranks can read and in which none finds a ``flaw``.

        What vanished between listing and reading is listed again; so are levels that were not waited for, if what
        memory has cannot be read.

        Args:
            order: returns the complete snapshots that are wanted, the best first.
            may_be_wanted: true for the snapshots that may be among them; ``None``: the newest is wanted.
            is_patient: see ``_list``.
            flaw: says what is wrong with a snapshot that was read.

        Collective. Blocks. Raises: StateError; JobBusy; WaitTimeout; SnapshotNotFound, as ``order``.
        """
        for tries_left in reversed(range(_LISTINGS)):
            self.problems.clear()
            self.unreadable.clear()
            self._sources.forget()
            self._connections.close()
            self.inventories = self._list(may_be_wanted, is_patient=is_patient)
            is_patient = True
            for plan in self._plans(order):
                snapshot, has_vanished = self._attempt(plan, flaw)
                if snapshot is not None:
                    return dataclasses.replace(
                        snapshot,
                        seconds=time.perf_counter() - self._started,
                        newest_start=self._newest_start(),
                    )
                self.unreadable.add(plan.key)
                if self.survey.late or (has_vanished and tries_left):
                    break
            else:
                if not self.survey.late:
                    return None
        return None

    def _plans(self, order: Callable[[list[Inventory]], list[RestartPlan]]) -> Iterator[RestartPlan]:
        """Yield the plans in their order; behind the last, those of snapshots whose manifests were not read at first.

        The same on all ranks. Collective, if that is so.
        """
        if self.survey.is_partial and (self.reads_all or not self._has_newest()):
            self._look_at_rest()
        try:
            yield from order(self.inventories)
        except SnapshotNotFound:
            if not self.survey.is_partial:
                raise
        if not self.survey.is_partial:
            return
        self._look_at_rest()
        for plan in order(self.inventories):
            if plan.key not in self.unreadable:
                yield plan

    def _has_newest(self) -> bool:
        """True if one of the newest snapshots, or a newer one in memory, is whole: what "latest" means is known."""
        if not self.survey.is_partial:
            return True
        plans = candidates(self.inventories)
        return bool(plans) and _name_of(plans[0]) >= min(self.survey.newest)

    def _look_at_rest(self) -> None:
        """Read the manifests that were not read at first. Collective."""
        stored = self.survey.look_at_rest(self.problems)
        for inventory in stored:
            self.problems += inventory.problems
        self.inventories = [*self.inventories, *stored]

    def runs(self) -> list[str]:
        """Return the ids of all runs of which there is anything, the newest first."""
        ids = {*runs_in(self.inventories), *(name.run_id for name in self.survey.names)}
        return sorted(ids, reverse=True)

    def _newest_start(self) -> str | None:
        starts = [name.start for name in self.survey.names]
        in_memory = newest_start(self.inventories)
        if in_memory is not None:
            starts.append(in_memory)
        return max(starts, default=None)

    def note_newer(self, key: SnapshotKey) -> None:
        """Name newer snapshots that a listing shows, now and when a late level answers, and that were not read."""
        restored = SnapshotName(key.run_id, key.step, key.start)
        if self._world.rank == 0:
            self.problems += [text for name, text in self.survey.unread if name > restored]
        self.survey.follow(restored, before=self._restart.start)

    def end(self) -> TrainerEnd | None:
        """Return the end of the last trainer, as far as this rank's keeper knows it."""
        return None if self._memory.own is None else self._memory.own.end

    # ---------------------------------------------------------------- what there is

    def _list(self, may_be_wanted: IsWanted | None, *, is_patient: bool) -> list[Inventory]:
        """Return what all ranks found, the same list on every rank. Collective.

        Of snapshots at levels, the newest of those that ``may_be_wanted``, and the newest of all.

        Levels are waited for as long as their settings say if ``is_patient``, or if memory has no whole snapshot; else
        for a few seconds in all.
        """
        faults.point("restore.ask")

        def remember() -> list[Any]:
            refusal = ""
            captures: list[Any] = []
            try:
                captures = pack_memory(self._memory.inventories())
            except JobBusy as error:
                refusal = str(error)
            own = self._memory.own if self._world.place.local_rank == 0 else None
            parity = [] if own is None else pack_parity(own.parity)
            return [refusal, captures, parity]

        told = self._world.exchange_after("what is in memory", remember)
        refusals = [text for text, *_ in told]
        if any(refusals):
            raise JobBusy(self._refusal(refusals))
        # Not before: keepers of the last start may have been writing, and deleting, until those of this one came.
        memories = []
        for place, (_, captures, _) in zip(self._world.places, told, strict=True):
            memories.append(unpack_memory(captures, place.node))
        memories.append(self._computed(memories, [parity for *_, parity in told]))
        patience_s = None if is_patient or not candidates(memories) else _PATIENCE_S
        stored = self.survey.look(self.problems, patience_s, may_be_wanted)
        found = [*memories, *stored]
        self.problems += [problem for inventory in found for problem in inventory.problems]
        return found

    def _refusal(self, refusals: Sequence[str]) -> str:
        """Return why this job cannot start: in full on the first rank of each node, in short on the others.

        ``refusals``: by rank; empty where its keeper did not refuse.
        """
        if self._world.place.local_rank != 0:
            job_id = self._restart.identity.job_id
            return f"job {job_id!r} runs already; the first rank of each node names its processes"
        return refusals[self._world.rank] or next(text for text in refusals if text)

    def _computed(self, memories: Sequence[Inventory], reports: Sequence[list[Any]]) -> Inventory:
        """Return what parity has of lost nodes. ``reports``: parity in memory, by rank.

        Collective, if one node is left.
        """
        client = self._restart.client
        if any(reports) and client is not None and self._restart.discovery.peers is None:
            config, job_id = self._restart.config, self._restart.identity.job_id
            self._connections.discovery = discover_keepers(self._world, client, config, job_id, alone=True)
        held = [
            (place.node, parity)
            for place, packed in zip(self._world.places, reports, strict=True)
            for parity in unpack_parity(packed)
            if self._connections.reaches(place.node)
        ]
        memory = (entry for inventory in memories for entry in inventory.entries)
        self._parity.lost, entries, problems = lost_parts(memory, held)
        self.protected = most_protected(held)
        return Inventory(PARITY, tuple(entries), problems=tuple(problems) if self._world.rank == 0 else ())

    # ---------------------------------------------------------------- one snapshot

    def _attempt(self, plan: RestartPlan, flaw: Callable[[Snapshot], str]) -> tuple[Snapshot | None, bool]:
        """Read this rank's part of a snapshot; ``None`` on all ranks, if one of them could not, or found a flaw.

        The second is true if something vanished that was listed. Collective.
        Raises: StateError, on all ranks, if all could read theirs, and the live objects of one of them do not fit it.
        """
        found: list[Snapshot] = []
        causes: list[StateError] = []
        self._sources.has_vanished = False

        def read() -> list[Any]:
            mismatch = failure = ""
            try:
                with collector_paused():
                    part = self._read(plan)
                if isinstance(part, Snapshot):
                    found.append(part)
                    failure = flaw(part)
                else:
                    failure = part.text
            except StateError as error:  # the program's objects and the snapshot, which was read, do not fit each other
                causes.append(error)
                mismatch = str(error)
            except Exception as error:  # noqa: BLE001  decoders of users may raise anything
                failure = str(error) or repr(error)
            faults.point("restore.read")
            by_rank = "" if self._world.is_alone else f"rank {self._world.rank}: "
            return [text and f"{by_rank}{text}" for text in (mismatch, failure)] + [self._sources.has_vanished]

        told = self._world.exchange_after(f"reading step {plan.step}", read)
        failures = [f"step {plan.step} passed over: {text}" for _, text, _ in told if text]
        if failures:
            self.problems += failures
            return None, any(gone for *_, gone in told)
        mismatches = [text for text, *_ in told if text]
        if mismatches:
            cause = (
                causes.pop() if causes else None
            )  # a list that still held it would keep its frames, and slots, alive
            raise StateError(mismatches[0]) from cause
        return found[0], False

    def _read(self, plan: RestartPlan) -> Snapshot | Failure:
        """Read from the best sources; after each failure from the next ones, as long as there are any."""
        own, failures = self._world.rank % plan.world_size, self._sources.failures
        entries = [entry for offers in plan.sources for entry in offers]
        while True:
            chosen = nearest_sources(filter(self._is_usable, entries), self._node)
            bad = {entry: failures[entry] for entry in entries if entry in failures}
            if own not in chosen:
                within = "" if self._world.is_alone else f" within reach of {self._node.split('/')[0]}"
                reasons = "; ".join(bad.values()) or "it is not there"
                return Failure(f"the shard of rank {own} is nowhere whole{within}: {reasons}")
            part = self._parts.read(plan, chosen)
            if isinstance(part, Snapshot):
                for entry, reason in bad.items():
                    of_rank = f" of rank {entry.rank}" if plan.world_size > 1 else ""
                    self.problems.append(f"step {plan.step}{of_rank} at {entry.level} passed over: {reason}")
            if isinstance(part, Snapshot) or part.entry is None:
                return part

    def _is_usable(self, entry: Entry) -> bool:
        is_here = entry.node in (None, self._node) or entry.node in self.survey.reach
        is_near = is_here or (entry.level == MEMORY and self._connections.reaches(entry.node))
        return is_near and entry not in self._sources.failures


def _name_of(plan: RestartPlan) -> SnapshotName:
    return SnapshotName(plan.run_id, plan.step, plan.start)


def nearest_sources(usable: Iterable[Entry], node: str) -> dict[int, Entry]:
    """Return by rank the fastest of the usable sources of its shard; of two in memory that of this node. Pure."""
    chosen: dict[int, Entry] = {}
    for entry in sorted(usable, key=lambda entry: (entry.speed, entry.node not in (None, node))):
        chosen.setdefault(entry.rank, entry)
    return chosen


def reseed(snapshot: Snapshot, world: World) -> None:
    """After a restart with another number of ranks: every rank draws random numbers of its own from here on.

    Rank 0 warns. What each rank had drawn cannot be continued by another number of them; equal numbers on two ranks
    would be worse.
    """
    if world.rank == 0:
        then, now = snapshot.world_size, world.size
        logger.warning(
            "step %d was captured by %s and is resumed by %d: weights and optimizer are exact; random numbers begin "
            "anew; the data goes on in the same epoch behind as many samples as were trained. These are the same "
            "samples where their order comes from a seed (docs/several-ranks.md)",
            snapshot.step,
            f"{then} rank{'s' * (then > 1)}",
            now,
        )
    seed = (int(snapshot.run_id, 16) ^ (snapshot.step << 20) ^ (world.size << 10) ^ world.rank) & ((1 << 63) - 1)
    torch.manual_seed(seed)
    random.seed(seed)
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.seed(seed & 0xFFFFFFFF)
