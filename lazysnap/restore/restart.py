"""One restart of all ranks: each reports what its memory and its levels hold, and all try the same snapshots.

Every rank restores the same one or none. A snapshot that one rank cannot read whole is passed over by all of them; a
rank that is silent ends the restart at a deadline, and nothing was changed anywhere (docs/architecture.md).
"""

import contextlib
import dataclasses
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from lazysnap import faults
from lazysnap.config import PersistentLevel, SnapshotConfig
from lazysnap.errors import JobBusy, ShardCorrupt, SnapshotNotFound, StateMismatch
from lazysnap.keeper.client import KeeperClient
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.protocol import HeldParity, TrainerEnd
from lazysnap.levels.redaction import shown
from lazysnap.ranks.meeting import NOBODY, Meeting, meet_keepers
from lazysnap.ranks.world import World
from lazysnap.resolver import Entry, Inventory, RestartPlan, SnapshotKey, candidates, newest_start
from lazysnap.restore.late_levels import follow
from lazysnap.restore.level_reader import LevelReader
from lazysnap.restore.lost_parts import PARITY, lost_parts, most_protected
from lazysnap.restore.node_memory import NodeMemory
from lazysnap.restore.part import Part, PartReader
from lazysnap.restore.peer_shards import PeerShards
from lazysnap.restore.shards import BadFrozen, BadShard, ShardOpener
from lazysnap.restore.snapshot import MEMORY, Absence, NewRun, Snapshot
from lazysnap.restore.survey import Survey, check_levels, fields_of, inventory_of
from lazysnap.runs import Choice, runs_in, short_ids
from lazysnap.shard.names import SnapshotName, id_after, new_id
from lazysnap.state.gc_pause import collector_paused
from lazysnap.state.source import StateSource

logger = logging.getLogger("lazysnap.engine")

_FIRST_LEVEL = 2
"""Speed of the first level: behind memory, and what is computed from parity."""
_PATIENCE_S = 3.0
"""Seconds to wait for levels if memory has a whole snapshot."""
_LISTINGS = 3
"""Listings of levels at most, until nothing vanishes between listing and reading."""


class Vanished(Exception):
    """A snapshot that was listed is not there any more."""


@dataclass(frozen=True)
class Restart:
    """Inputs of a restart."""

    config: SnapshotConfig
    source: StateSource
    client: KeeperClient | None
    identity: JobIdentity
    world: World
    meeting: Meeting = NOBODY
    """The addresses of other nodes."""
    has_storage: bool = True
    """True if levels are looked at; otherwise memory alone."""
    start: str = ""
    """The id of this start: no earlier one has a greater id."""
    casts: bool = False
    """True for an evaluation, which may use another precision than the training: see ``part.check_fits``."""


def fetch(which: int | str, restart: Restart) -> Snapshot | Absence:
    """See ``SnapshotEngine.fetch``; in place of ``None``, why there is none. Collective. Blocks.

    Raises: StateMismatch on all ranks, if one of them cannot take the freshest snapshot; WaitTimeout.
    """
    started = time.perf_counter()
    choice = Choice.of(which)
    with contextlib.ExitStack() as stack:
        search = _Search(restart, stack)
        snapshot = None
        unreadable: set[SnapshotKey] = set()
        is_patient = False
        for tries_left in reversed(range(_LISTINGS)):
            search.forget()
            unreadable.clear()
            # Another choice than the newest may begin a new run, which has to be later than all others.
            inventories = search.inventories(is_patient=is_patient or not choice.is_latest)
            is_patient = True
            plans = choice.plans(inventories)
            with contextlib.suppress(Vanished):  # on all ranks
                for plan in plans:
                    snapshot = search.attempt(plan, is_last_try=not tries_left)
                    if snapshot is not None:
                        break
                    unreadable.add(plan.key)
                    if search.survey.late:
                        break
                if snapshot is not None or not search.survey.late:
                    break
        if snapshot is not None:
            search.note_newer(snapshot)
            newest = next(other for other in candidates(inventories) if other.key not in unreadable)
            is_newest = newest.key == plan.key
            return dataclasses.replace(
                snapshot,
                seconds=time.perf_counter() - started,
                skipped=tuple(search.problems),
                end=search.end() if choice.is_latest else None,
                protected=search.protected,
                newest_start=newest_start(inventories),
                stored={
                    level.url: _stored(inventories, level, snapshot)
                    for level in restart.config.levels
                    if is_newest and any(inventory.level == level.url for inventory in inventories)
                },
                run=short_ids(runs_in(inventories))[snapshot.run_id],
                new_run=None if is_newest else _new_run(restart.world, inventories, newest),
            )
        if not choice.is_latest:
            raise SnapshotNotFound(choice.missing(inventories))
        held = {plan.step for plan in candidates(inventories)}
        seen = {entry.step for inventory in inventories for entry in inventory.entries}
        urls = tuple(level.url for level in restart.config.levels)
        return Absence(
            urls,
            incomplete=tuple(sorted(seen - held)),
            unreadable=tuple(sorted(held)),
            uncommitted=search.survey.uncommitted,
            is_partial=bool(search.problems),
        )


def fetch_back(
    restart: Restart, is_wanted: Callable[[RestartPlan], bool], flaw: Callable[[Snapshot], str]
) -> Snapshot | None:
    """The newest snapshot of those ``is_wanted`` that reads whole and has no ``flaw`` on any rank. Collective. Blocks.

    Raises: as ``fetch``.
    """
    started = time.perf_counter()
    with contextlib.ExitStack() as stack:
        search = _Search(restart, stack)
        inventories = search.inventories(is_patient=True)
        for plan in filter(is_wanted, candidates(inventories)):
            snapshot = search.attempt(plan, is_last_try=True)
            if snapshot is None:
                continue
            flaws = [text for text in restart.world.exchange(f"looking at step {plan.step}", flaw(snapshot)) if text]
            if not flaws:
                return dataclasses.replace(
                    snapshot,
                    seconds=time.perf_counter() - started,
                    skipped=tuple(search.problems),
                    newest_start=newest_start(inventories),
                )
            search.problems.append(f"step {plan.step} passed over: {flaws[0]}")
    return None


def _new_run(world: World, inventories: list[Inventory], newest: RestartPlan) -> NewRun:
    """A run for what is captured after an older snapshot was chosen. Collective: all ranks get that of rank 0."""
    there = runs_in(inventories)
    # Later than every other run, whatever the clock says: "latest" is of the newest run.
    run_id = id_after(world.exchange("beginning a new run", new_id())[0], there[0])
    names = short_ids([run_id, *there])
    return NewRun(run_id, names[run_id], newest.key, names[newest.run_id])


def _stored(inventories: list[Inventory], level: PersistentLevel, snapshot: Snapshot) -> list[tuple[str, int]]:
    """Complete snapshots at a level that led to this one: retention counts them. The same on every rank."""
    plans = candidates((inventory for inventory in inventories if inventory.level == level.url), run_id=snapshot.run_id)
    newest: dict[int, str] = {}
    for plan in plans:
        if plan.step <= snapshot.step:
            newest.setdefault(plan.step, plan.start)
    return [(newest[step], step) for step in sorted(newest)[-level.keep_last :]]


class _Search:
    """One restart on one rank."""

    def __init__(self, restart: Restart, stack: contextlib.ExitStack) -> None:
        self._restart = restart
        self._world = world = restart.world
        self._node = world.place.node
        self.problems: list[str] = []
        """One line for each snapshot or level that was passed over, and why."""
        places = enumerate(restart.config.levels if restart.has_storage else ())
        self._levels = levels = {level.url: LevelReader(level, place + _FIRST_LEVEL) for place, level in places}
        for level in levels.values():
            level.begin_open()
        self.survey = Survey(world, levels)
        self._peers = PeerShards(restart.meeting)
        timeout_s = restart.config.io_timeout_s
        self._memory = NodeMemory(restart.client, restart.identity, world.place, timeout_s, self.problems.append)
        self._opener = ShardOpener(levels, self._memory, self._peers, stack, self.problems.append)
        self._parts = PartReader(restart.source, world, self._opener, casts=restart.casts)
        self._gone = False
        self.protected: SnapshotKey | None = None
        """See ``Snapshot``."""
        stack.callback(self._close)

    def _close(self) -> None:
        for problem in self.problems:
            logger.warning("%s", problem)
        self.forget()
        self._memory.close()

    def forget(self) -> None:
        """Everything is listed and opened anew."""
        self.problems.clear()
        self._opener.forget()
        self._peers.close()

    def note_newer(self, snapshot: Snapshot) -> None:
        """Name newer snapshots that a listing shows, now and when a late level answers, and that were not read."""
        restored = SnapshotName(snapshot.run_id, snapshot.step, snapshot.start)
        if self._world.rank == 0:
            self.problems += [text for name, text in self.survey.unread if name > restored]
        for url, listing in self.survey.unanswered.items():
            follow(url, listing, restored, before=self._restart.start)

    def end(self) -> TrainerEnd | None:
        """Return the end of the last trainer, as far as this rank's keeper knows it."""
        return None if self._memory.own is None else self._memory.own.end

    # ---------------------------------------------------------------- what there is

    def inventories(self, *, is_patient: bool) -> list[Inventory]:
        """Return what all ranks found, the same list on every rank. Collective.

        Levels are waited for as long as their settings say if ``is_patient``, or if memory has no whole snapshot; else
        for a few seconds in all.
        """
        faults.point("restore.ask")

        def remember() -> list[Any]:
            refusal, mine = "", []
            try:
                mine = self._memory.inventories()
            except JobBusy as error:
                refusal = str(error)
            own = self._memory.own if self._world.place.local_rank == 0 else None
            parity = [] if own is None else [msgspec.to_builtins(held) for held in own.parity]
            return [refusal, [fields_of(inventory) for inventory in mine], list(self._levels), parity]

        told = self._world.exchange_after("what is in memory", remember)
        busy = [text for text, *_ in told if text]
        if busy:
            raise JobBusy(busy[0])
        check_levels([urls for _, _, urls, _ in told], self._world.places)
        # Not before: keepers of the last start may have been writing, and deleting, until those of this one came.
        memories = [inventory_of(item) for _, listed, _, _ in told for item in listed]
        memories.append(self._computed(memories, [parity for *_, parity in told]))
        stored = self.survey.look(self.problems, None if is_patient or not candidates(memories) else _PATIENCE_S)
        found = [*memories, *stored]
        self.problems += [problem for inventory in found for problem in inventory.problems]
        return found

    def _computed(self, memories: Sequence[Inventory], told: Sequence[list[Any]]) -> Inventory:
        """Return what parity has of nodes that are gone. ``told``: the reports by rank. Collective, if one node is left
        of several."""
        client = self._restart.client
        if any(told) and client is not None and self._restart.meeting.peers is None:
            config, job_id = self._restart.config, self._restart.identity.job_id
            self._peers.meet(meet_keepers(self._world, client, config, job_id, alone=True))
        held = [
            (place.node, msgspec.convert(item, HeldParity))
            for place, items in zip(self._world.places, told, strict=True)
            for item in items
            if self._peers.reaches(place.node)
        ]
        lost, entries, problems = lost_parts((entry for memory in memories for entry in memory.entries), held)
        self._peers.know(lost)
        self.protected = most_protected(held)
        return Inventory(PARITY, tuple(entries), problems=tuple(problems) if self._world.rank == 0 else ())

    # ---------------------------------------------------------------- one snapshot

    def attempt(self, plan: RestartPlan, *, is_last_try: bool) -> Snapshot | None:
        """Read this rank's part of a snapshot; ``None`` on all ranks, if one of them could not. Collective.

        Raises: StateMismatch; Vanished, if it is not the last try. Each on all ranks.
        """
        parts: list[Part] = []
        self._gone = False

        def read() -> list[Any]:
            mismatch = failure = ""
            by_rank = "" if self._world.is_alone else f"rank {self._world.rank}: "
            try:
                with collector_paused():
                    parts.append(self._read(plan, self._world.rank % plan.world_size))
            except StateMismatch as error:
                mismatch = f"{by_rank}{error}"
            except Exception as error:  # noqa: BLE001  storage packages may raise anything
                failure = f"step {plan.step} passed over: {by_rank}{error}"
            faults.point("restore.read")
            return [mismatch, failure, self._gone]

        told = self._world.exchange_after(f"reading step {plan.step}", read)
        failures = [text for _, text, _ in told if text]
        if failures:
            self.problems += failures
            if any(gone for _, _, gone in told) and not is_last_try:
                raise Vanished(f"step {plan.step}")
            return None
        mismatches = [text for text, _, _ in told if text]
        if mismatches:
            raise StateMismatch(mismatches[0])
        [part] = parts
        level = max(part.levels, key=[MEMORY, PARITY, *self._levels].index)
        return Snapshot(
            part.state,
            plan.step,
            plan.run_id,
            plan.start,
            level,
            seconds=0.0,
            world_size=plan.world_size,
            parameters=part.parameters,
            captured_ns=part.captured_ns,
        )

    def _read(self, plan: RestartPlan, own: int) -> Part:
        bad: dict[Entry, BadShard] = {}
        while True:
            chosen = self._choose(plan, own, bad)
            try:
                part = self._parts.read(plan, chosen)
            except BadFrozen as error:  # another source of it is tried, as long as there are any
                self._gone = self._gone or isinstance(error.__cause__, FileNotFoundError)
            except BadShard as error:
                bad[error.entry] = error
                self._gone = self._gone or isinstance(error.__cause__, FileNotFoundError)
            else:
                for entry, reason in bad.items():
                    of_rank = f" of rank {entry.rank}" if plan.world_size > 1 else ""
                    self.problems.append(f"step {plan.step}{of_rank} at {shown(entry.level)} passed over: {reason}")
                return part

    def _is_near(self, entry: Entry) -> bool:
        is_here = entry.node in (None, self._node) or entry.node in self.survey.reach
        return is_here or (entry.level == MEMORY and self._peers.reaches(entry.node))

    def _choose(self, plan: RestartPlan, own: int, bad: Mapping[Entry, BadShard]) -> dict[int, Entry]:
        """Per rank of the snapshot the fastest source that this one can reach."""
        chosen = {}
        for rank, offers in enumerate(plan.sources):
            near = [entry for entry in offers if entry not in bad and self._is_near(entry)]
            if near:  # of two in memory the one of this node
                chosen[rank] = min(near, key=lambda entry: (entry.speed, entry.node not in (None, self._node)))
        if own not in chosen:
            within = "" if self._world.is_alone else f" within reach of {self._node.split('/')[0]}"
            reasons = "; ".join(map(str, bad.values())) or "it is not there"
            raise ShardCorrupt(f"the shard of rank {own} is nowhere whole{within}: {reasons}")
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
