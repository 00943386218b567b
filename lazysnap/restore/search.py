"""One search of all ranks: they list all sources, and try the same snapshots in the same order.

Every rank reads the same snapshot, or none does. If one rank cannot read its part, all ranks try the next snapshot.
If a rank is silent, the search ends at a deadline without any change (docs/architecture.md).
"""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from lazysnap import faults
from lazysnap.config import SnapshotConfig
from lazysnap.errors import JobBusy, SnapshotNotFound, StateError
from lazysnap.keeper.client import KeeperClient
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.questions import TrainerEnd
from lazysnap.ranks.discovery import NOBODY, Discovery, discover_keepers
from lazysnap.ranks.world import World
from lazysnap.resolver import (
    MEMORY,
    PARITY,
    Entry,
    Inventory,
    RestartPlan,
    SnapshotKey,
    candidates,
    entries_in,
    runs_in,
)
from lazysnap.restore.level import Level
from lazysnap.restore.lost_parts import lost_parts, protected_snapshots
from lazysnap.restore.node_memory import NodeMemory
from lazysnap.restore.offers import pack_memory, pack_parity, unpack_memory, unpack_parity
from lazysnap.restore.parity import Parity
from lazysnap.restore.part import PartReader
from lazysnap.restore.peer_memory import PeerMemory
from lazysnap.restore.snapshot import Snapshot
from lazysnap.restore.sources import Failure, Sources
from lazysnap.restore.survey import IsWanted, Survey
from lazysnap.shard.names import SnapshotName
from lazysnap.state.source import StateSource
from lazysnap.state.walk import collector_paused

logger = logging.getLogger("lazysnap.engine")

_FIRST_LEVEL = 2
"""Distance of the first level: after memory and parity."""
_PATIENCE_S = 3.0
"""Seconds to wait for levels if memory has a whole snapshot."""
_LISTINGS = 3
"""Maximum listings of levels, until nothing vanishes between listing and reading."""


@dataclass(frozen=True)
class Restart:
    """Inputs of a restart."""

    config: SnapshotConfig
    """The settings; their levels are searched."""
    source: StateSource
    client: KeeperClient | None
    """The connection to the keeper; ``None``: memory is not searched."""
    identity: JobIdentity
    world: World
    discovery: Discovery = NOBODY
    """The addresses of other nodes."""
    start: str = ""
    """The id of this start, greater than that of every earlier one."""
    casts: bool = False
    """True for an evaluation, which may use another precision than the training: see ``targets.check_fits``."""

    @property
    def proves(self) -> bool:
        """True if ``"latest"`` may mean the snapshot before the newest one, whose step is then repeated."""
        config = self.config
        return bool(config.verify_restart) and config.every_n_steps == 1 and not self.casts


def _no_flaw(snapshot: Snapshot) -> str:
    return ""


class Search:
    """One restart on one rank: lists all sources, and reads the best snapshot that is whole everywhere."""

    def __init__(self, restart: Restart, stack: contextlib.ExitStack) -> None:
        self._started = time.perf_counter()
        self._restart = restart
        self._world = world = restart.world
        self._node = world.place.node
        self.problems: list[str] = []
        """One line for each snapshot or level that was not used, with the reason."""
        self.inventories: list[Inventory] = []
        """Contents of all sources. The same on every rank."""
        self.unreadable: set[SnapshotKey] = set()
        """Snapshots that some rank could not read."""
        self.decoder_errors: list[str] = []
        """Errors of the program's decoders for these snapshots. The same on every rank."""
        self.protected: frozenset[SnapshotKey] = frozenset()
        """See ``Snapshot``."""
        levels: dict[str, Level] = {}
        for index, config in enumerate(restart.config.levels):
            levels[config.url] = Level(config, index + _FIRST_LEVEL)
            levels[config.url].begin_open()
        self.survey = Survey(world, levels)
        self._peers = PeerMemory(restart.discovery)
        self._parity = Parity(self._peers)
        timeout_s = restart.config.io_timeout_s
        self._memory = NodeMemory(restart.client, restart.identity, world.place, timeout_s, self.problems.append)
        self._sources = Sources(self._memory, self._peers, self._parity, levels, stack)
        self._parts = PartReader(restart.source, world, self._sources, casts=restart.casts)
        stack.callback(self._close)

    def _close(self) -> None:
        for problem in self.problems:
            logger.warning("%s", problem)
        self._sources.forget()
        self._peers.close()
        self._memory.close()

    def first_whole(
        self,
        order: Callable[[list[Inventory]], list[RestartPlan]],
        may_be_wanted: IsWanted | None,
        *,
        is_patient: bool,
        reads_all: bool = False,
        flaw: Callable[[Snapshot], str] = _no_flaw,
    ) -> Snapshot | None:
        """Return the first snapshot that all ranks can read and in which none finds a ``flaw``.

        All sources are listed again if a file vanished between listing and reading. The same happens if the snapshot in
        memory cannot be read and a level had not answered in time.

        Args:
            order: returns the wanted complete snapshots, the best first.
            may_be_wanted: true for the snapshots that may be among them; ``None``: the newest is wanted.
            is_patient: see ``_list``.
            reads_all: read the manifests of all snapshots before one is tried.
            flaw: returns a defect of a snapshot that was read, or an empty text.

        Collective. Blocks. Raises: StateError; JobBusy; WaitTimeout; SnapshotNotFound, as ``order``.
        """
        for tries_left in reversed(range(_LISTINGS)):
            self.problems.clear()
            self.unreadable.clear()
            self.decoder_errors.clear()
            self._sources.forget()
            self._peers.close()
            self.inventories = self._list(may_be_wanted, is_patient=is_patient)
            is_patient = True
            for plan in self._plans(order, reads_all=reads_all):
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

    def _plans(
        self, order: Callable[[list[Inventory]], list[RestartPlan]], *, reads_all: bool
    ) -> Iterator[RestartPlan]:
        """Yield the plans in order, and then those of snapshots whose manifests were not read at first.

        The same on all ranks. Collective in the second part.
        """
        if self.survey.is_partial and (reads_all or not self._has_newest()):
            self._read_rest()
        try:
            yield from order(self.inventories)
        except SnapshotNotFound:
            if not self.survey.is_partial:
                raise
        if not self.survey.is_partial:
            return
        self._read_rest()
        for plan in order(self.inventories):
            if plan.key not in self.unreadable:
                yield plan

    def _has_newest(self) -> bool:
        """True if one of the newest snapshots, or a newer one in memory, is whole, so that "latest" is known."""
        if not self.survey.is_partial:
            return True
        plans = candidates(self.inventories)
        if not plans:
            return False
        best = plans[0]
        return SnapshotName(best.run_id, best.step, best.start) >= min(self.survey.newest)

    def _read_rest(self) -> None:
        """Read the manifests that were not read at first. Collective."""
        stored = self.survey.read_rest(self.problems)
        for inventory in stored:
            self.problems += inventory.problems
        self.inventories = [*self.inventories, *stored]

    def runs(self) -> list[str]:
        """Return the ids of all runs of which a part exists, the newest first."""
        ids = set(runs_in(self.inventories))
        for name in self.survey.names:
            ids.add(name.run_id)
        return sorted(ids, reverse=True)

    def _newest_start(self) -> str | None:
        starts = [name.start for name in self.survey.names]
        for entry in entries_in(self.inventories):
            starts.append(entry.start)
        return max(starts, default=None)

    def note_newer(self, key: SnapshotKey) -> None:
        """Report newer snapshots that were not read: those in a listing now, others when a late level answers."""
        restored = SnapshotName(key.run_id, key.step, key.start)
        if self._world.rank == 0:
            for name, text in self.survey.unread:
                if name > restored:
                    self.problems.append(text)
        self.survey.follow(restored, before=self._restart.start)

    def end(self) -> TrainerEnd | None:
        """Return the end of the last trainer, if this rank's keeper has it."""
        inventory = self._memory.of_this_rank
        if inventory is None:
            return None
        return inventory.end

    # ---------------------------------------------------------------- the listing

    def _list(self, may_be_wanted: IsWanted | None, *, is_patient: bool) -> list[Inventory]:
        """Return the contents of all sources, the same list on every rank. Collective.

        Of snapshots at levels only the newest of those that ``may_be_wanted``, and the newest of all.

        If ``is_patient``, or if memory has no whole snapshot, the deadline of a level is that of its settings.
        Otherwise it is a few seconds for all levels.
        """
        faults.point("restore.ask")

        def remember() -> list[Any]:
            refusal = ""
            captures: list[Any] = []
            try:
                captures = pack_memory(self._memory.inventories())
            except JobBusy as error:
                refusal = str(error)
            parity: list[Any] = []
            inventory = self._memory.of_this_rank
            if self._world.place.local_rank == 0 and inventory is not None:
                parity = pack_parity(inventory.parity)
            return [refusal, captures, parity]

        reports = self._world.exchange_after("what is in memory", remember)
        refusals = [text for text, *_ in reports]
        if any(refusals):
            raise JobBusy(self._refusal(refusals))
        # Not earlier: keepers of the last start may write and delete until those of this start are connected.
        memories = []
        parities = []
        for place, (_, captures, parity) in zip(self._world.places, reports, strict=True):
            memories.append(unpack_memory(captures, place.node))
            parities.append(parity)
        memories.append(self._computed(memories, parities))
        patience_s = None
        if not is_patient and candidates(memories):
            patience_s = _PATIENCE_S
        stored = self.survey.read_newest(self.problems, patience_s, may_be_wanted)
        inventories = [*memories, *stored]
        for inventory in inventories:
            self.problems += inventory.problems
        return inventories

    def _refusal(self, refusals: Sequence[str]) -> str:
        """Return the reason why this job cannot start: in full on the first rank of each node, in short on the others.

        ``refusals``: by rank; empty if its keeper did not refuse.
        """
        if self._world.place.local_rank != 0:
            job_id = self._restart.identity.job_id
            return f"job {job_id!r} runs already; the first rank of each node names its processes"
        return refusals[self._world.rank] or next(filter(None, refusals))

    def _computed(self, memories: Sequence[Inventory], reports: Sequence[list[Any]]) -> Inventory:
        """Return the shards of lost nodes that parity can replace. ``reports``: parity in memory, by rank.

        Collective with one node.
        """
        client = self._restart.client
        if any(reports) and client is not None and self._restart.discovery.peers is None:
            job_id = self._restart.identity.job_id
            self._peers.discovery = discover_keepers(self._world, client, self._restart.config, job_id, alone=True)
        parities = []
        for place, packed in zip(self._world.places, reports, strict=True):
            if self._peers.reaches(place.node):
                for parity in unpack_parity(packed):
                    parities.append((place.node, parity))
        captures = [entry for entry in entries_in(memories) if self._peers.reaches(entry.node)]
        self._parity.lost, entries, problems = lost_parts(captures, parities)
        self.protected = protected_snapshots(parities)
        if self._world.rank != 0:
            problems = []  # rank 0 reports them
        return Inventory(PARITY, tuple(entries), problems=tuple(problems))

    # ---------------------------------------------------------------- one snapshot

    def _attempt(self, plan: RestartPlan, flaw: Callable[[Snapshot], str]) -> tuple[Snapshot | None, bool]:
        """Read this rank's part of a snapshot; ``None`` on all ranks, if one of them could not, or found a flaw.

        The second result is True if a listed file vanished. Collective.
        Raises: StateError, on all ranks, if all parts were read, and the live objects of a rank do not fit.
        """
        snapshots: list[Snapshot] = []
        causes: list[BaseException | None] = []
        self._sources.has_vanished = False

        def read() -> list[Any]:
            mismatch = ""
            failure = ""
            is_of_decoder = False
            try:
                with collector_paused():
                    part = self._read(plan)
                if isinstance(part, Snapshot):
                    snapshots.append(part)
                    failure = flaw(part)
                else:
                    failure = part.text
                    is_of_decoder = part.is_of_decoder
            except StateError as error:  # the program's objects do not fit the snapshot, which was read
                causes.append(error.__cause__)  # the text of ``error`` itself is in the error below
                mismatch = str(error)
            except Exception as error:  # noqa: BLE001  decoders of users may raise anything
                failure = str(error) or repr(error)
            faults.point("restore.read")
            has_vanished = self._sources.has_vanished
            return [self._of_this_rank(mismatch), self._of_this_rank(failure), has_vanished, is_of_decoder]

        reports = self._world.exchange_after(f"reading step {plan.step}", read)
        failures = []
        mismatches = []
        has_vanished = False
        for mismatch, failure, has_vanished_there, is_of_decoder in reports:
            if failure:
                failures.append(f"step {plan.step} skipped: {failure}")
            if is_of_decoder:
                self.decoder_errors.append(f"step {plan.step}: {failure}")
            if mismatch:
                mismatches.append(mismatch)
            if has_vanished_there:
                has_vanished = True
        if failures:
            self.problems += failures
            return None, has_vanished
        if mismatches:
            # A list with the cause would keep its frames and slots alive.
            cause = causes.pop() if causes else None
            raise StateError(mismatches[0]) from cause
        return snapshots[0], False

    def _of_this_rank(self, problem: str) -> str:
        if not problem or self._world.is_alone:
            return problem
        return f"rank {self._world.rank}: {problem}"

    def _read(self, plan: RestartPlan) -> Snapshot | Failure:
        """Read from the best sources; after each failure from the next ones, if any."""
        own_rank = self._world.rank % plan.world_size
        failures = self._sources.failures
        entries = list(chain.from_iterable(plan.sources))
        is_of_decoder = False
        while True:
            chosen = nearest_sources(filter(self._is_usable, entries), self._node)
            bad = {entry: failures[entry] for entry in entries if entry in failures}
            if own_rank not in chosen:
                within = ""
                if not self._world.is_alone:
                    within = f" within reach of {self._node.split('/')[0]}"
                reasons = "; ".join(bad.values()) or "it is missing"
                text = f"the shard of rank {own_rank} is nowhere whole{within}: {reasons}"
                return Failure(text, is_of_decoder=is_of_decoder)
            part = self._parts.read(plan, chosen)
            if isinstance(part, Snapshot):
                for entry, reason in bad.items():
                    of_rank = ""
                    if plan.world_size > 1:
                        of_rank = f" of rank {entry.rank}"
                    self.problems.append(f"step {plan.step}{of_rank} at {entry.level} skipped: {reason}")
            if isinstance(part, Snapshot) or not part.may_try_others:
                return part
            is_of_decoder = is_of_decoder or part.is_of_decoder

    def _is_usable(self, entry: Entry) -> bool:
        is_here = entry.node in (None, self._node) or entry.node in self.survey.reach
        is_near = is_here or (entry.level == MEMORY and self._peers.reaches(entry.node))
        return is_near and entry not in self._sources.failures


def nearest_sources(usable: Iterable[Entry], node: str) -> dict[int, Entry]:
    """Return, by rank, the nearest usable source of its shard; in memory that of this node first. Pure."""
    chosen: dict[int, Entry] = {}
    for entry in sorted(usable, key=lambda entry: (entry.distance, entry.node not in (None, node))):
        chosen.setdefault(entry.rank, entry)
    return chosen
