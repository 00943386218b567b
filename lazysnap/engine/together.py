"""One restart for all ranks: what every node's memory and every level hold is told to all, all try the same snapshots.

Every rank restores the same one or none. A snapshot that one rank cannot read whole is passed over by all of them; a
rank that is silent ends the restart at a deadline, and nothing was changed anywhere (docs/architecture.md).
"""

import contextlib
import dataclasses
import logging
import random
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import torch

from lazysnap import faults
from lazysnap.config import SnapshotConfig
from lazysnap.engine.assembly import Assembly, OpenShard
from lazysnap.engine.image import compare
from lazysnap.engine.names import check_name
from lazysnap.engine.reading import LevelReader
from lazysnap.engine.restore import LISTINGS, MEMORY, Snapshot, Vanished
from lazysnap.engine.shards import ShardOpener
from lazysnap.engine.world import World
from lazysnap.errors import JobBusy, LazySnapError, ShardCorrupt, SnapshotNotFound, StateMismatch
from lazysnap.keeper.client import KeeperClient
from lazysnap.keeper.events import MemoryHoldings
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.visit import Visit, keepers_here
from lazysnap.levels.redaction import shown
from lazysnap.resolver import Entry, FrozenEntry, Inventory, RestartPlan, candidates
from lazysnap.state.modules import held_names
from lazysnap.state.source import StateSource

logger = logging.getLogger("lazysnap.engine")

LATEST = "latest"


@dataclass(frozen=True)
class Together:
    """What a restart of several ranks needs."""

    config: SnapshotConfig
    source: StateSource
    client: KeeperClient | None
    identity: JobIdentity
    world: World


def fetch_together(which: int | str, told: Together) -> Snapshot | None:
    """See ``SnapshotEngine.fetch``. Collective. Blocks.

    Raises: StateMismatch on all ranks, if one of them cannot take the freshest snapshot; WaitTimeout.
    """
    started = time.perf_counter()
    step = which if isinstance(which, int) else None
    name = None if which == LATEST or step is not None else str(which)
    if name is not None:
        check_name(name)
    with contextlib.ExitStack() as stack:
        search = _Search(told, stack)
        snapshot = None
        for tries_left in reversed(range(LISTINGS)):
            search.problems = []
            inventories = search.inventories()
            plans = candidates(inventories, step=step, name=name)
            with contextlib.suppress(Vanished):  # on all ranks
                tried = (search.attempt(plan, is_last_try=not tries_left) for plan in plans)
                snapshot = next((found for found in tried if found is not None), None)
                break
        for problem in search.problems:
            logger.warning("%s", problem)
        if snapshot is not None:
            return dataclasses.replace(snapshot, seconds=time.perf_counter() - started, skipped=tuple(search.problems))
        if which != LATEST:
            held = sorted({plan.step for plan in candidates(inventories)})
            what = f"called {name!r}" if name is not None else f"of step {step}"
            raise SnapshotNotFound(f"no whole snapshot {what}; there are {held or 'none'}")
    return None


class _Search:
    """One restart on one rank."""

    def __init__(self, told: Together, stack: contextlib.ExitStack) -> None:
        self._told = told
        self._world = told.world
        self._stack = stack
        self._node = told.world.place.node
        levels = {level.url: LevelReader(level, place + 1) for place, level in enumerate(told.config.levels)}
        self._levels = levels
        self._opener = ShardOpener(levels, self._visit, stack)
        self._visits: dict[int, MemoryHoldings] = {}
        self._gone = False
        self._parameters: dict[str, list[str]] | None = None
        self.problems: list[str] = []

    # ---------------------------------------------------------------- what there is

    def inventories(self) -> list[Inventory]:
        """What all ranks found, the same list on every rank. Collective."""
        faults.point("engine.restart.ask")

        def remember() -> list[Any]:
            refusal, mine = "", []
            try:
                mine = self._memories()
            except JobBusy as error:
                refusal = str(error)
            return [refusal, [_as_json(inventory) for inventory in mine]]

        def look() -> list[Any]:
            mine = [_as_json(inventory) for inventory in self._stored()]
            faults.point("engine.restart.told")
            return mine

        told = self._world.exchange_after("what is in memory", remember)
        busy = [text for text, _ in told if text]
        if busy:
            raise JobBusy(busy[0])
        # Not before: keepers of the last start may have been writing, and deleting, until those of this one came.
        stored = self._world.exchange_after("what is on storage", look)
        found = [_from_json(item) for _, listed in told for item in listed]
        found += [_from_json(item) for listed in stored for item in listed]
        self.problems += [problem for inventory in found for problem in inventory.problems]
        return found

    def _memories(self) -> list[Inventory]:
        """What this rank's keeper holds, and on the first rank of a node what is left of ranks that are no more."""
        client, place = self._told.client, self._world.place
        if client is None:
            return []
        found = []
        try:
            client.connect(self._told.config.keeper_timeout_s)
            self._visits[place.local_rank] = client.inventory(self._told.config.keeper_timeout_s)
            found.append(place.local_rank)
        except JobBusy:
            raise
        except LazySnapError as error:
            self.problems.append(f"no snapshot in this rank's memory can be used: {error}")
        if place.local_rank == 0:
            found += [number for number in keepers_here(self._told.identity) if number >= place.local_world_size]
        return [self._memory(number) for number in found]

    def _memory(self, number: int) -> Inventory:
        holdings = self._visit(number)
        entries = tuple(
            Entry(
                MEMORY,
                0,
                item.run_id,
                item.run_started_ns,
                item.step,
                item.rank,
                item.world_size,
                f"{number}/{item.sequence}",
                item.frozen,
                node=self._node,
                generation=item.generation,
            )
            for item in holdings.entries
        )
        runs = {entry.run_id for entry in entries}
        digests = list(holdings.frozen)
        images = tuple(FrozenEntry(MEMORY, 0, run, digest, f"{number}/{digest}") for run in runs for digest in digests)
        return Inventory(f"{MEMORY} of local rank {number} of {self._node}", entries, images)

    def _visit(self, number: int) -> MemoryHoldings:
        """What the keeper of a local rank of this node holds; asked once."""
        if number not in self._visits:
            identity = dataclasses.replace(self._told.identity, local_rank=number)
            try:
                visit = Visit(identity, self._told.config.keeper_timeout_s)
            except LazySnapError as error:
                self.problems.append(str(error))
                self._visits[number] = MemoryHoldings()
            else:
                self._stack.callback(visit.close)
                self._visits[number] = visit.holdings
        return self._visits[number]

    def _stored(self) -> list[Inventory]:
        """Levels that are the same place for all are listed by one rank, local paths by one of each node."""
        place = self._world.place
        mine = []
        for url, level in self._levels.items():
            is_local = urlsplit(url).scheme in ("", "file", "local")
            if place.local_rank == 0 if is_local else place.rank == 0:
                level.begin_inventory()
                mine.append((url, level, self._node if is_local else None))
        found = []
        for url, level, node in mine:
            try:
                listed = level.inventory()
            except Exception as error:  # noqa: BLE001  the rim to storage packages, which raise what they like
                self.problems.append(f"{shown(url)} passed over: {error}")
                continue
            entries = tuple(dataclasses.replace(entry, node=node) for entry in listed.entries)
            found.append(dataclasses.replace(listed, entries=entries))
        return found

    # ---------------------------------------------------------------- one snapshot

    def attempt(self, plan: RestartPlan, *, is_last_try: bool) -> Snapshot | None:
        """Read this rank's part of a snapshot; ``None`` on all ranks, if one of them could not. Collective.

        Raises: StateMismatch; Vanished, if it is not the last try. Each on all ranks.
        """
        state: dict[str, Any] = {}
        used: list[str] = []
        self._gone = False

        def read() -> list[Any]:
            mismatch = failure = ""
            try:
                found, levels = self._read(plan, self._world.rank % plan.world_size)
                state.update(found)
                used.extend(levels)
            except StateMismatch as error:
                mismatch = str(error)
            except Exception as error:  # noqa: BLE001  the rim to storage packages, which raise what they like
                failure = f"step {plan.step} passed over: rank {self._world.rank}: {error}"
            faults.point("engine.restart.read")
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
        level = max(used, key=lambda url: -1 if url == MEMORY else list(self._levels).index(url))
        return Snapshot(
            state,
            plan.step,
            plan.run_id,
            plan.run_started_ns,
            level,
            seconds=0.0,
            world_size=plan.world_size,
            generation=plan.sources[0][0].generation,
            parameters=self._parameters,
        )

    def _read(self, plan: RestartPlan, own: int) -> tuple[dict[str, Any], list[str]]:
        bad: set[Entry] = set()
        while True:
            chosen = self._choose(plan, own, bad)
            try:
                shards = self._open(plan, chosen, bad)
                assembly = Assembly(shards, own)
                where = f"step {plan.step}"
                expected = self._told.source.expected()
                held = assembly.facts()
                compare(held, expected, where)
                meta = next(shard.meta for shard in shards if shard.rank == own and shard.meta.step == plan.step)
                self._parameters = meta.parameters
                return assembly.state(meta, self._target(expected, held)), sorted(
                    {entry.level for entry in chosen.values()}
                )
            except _BadShard as error:
                bad.add(error.entry)
                self._gone = self._gone or isinstance(error.__cause__, FileNotFoundError)
                where = f"step {plan.step} of rank {error.entry.rank} at {shown(error.entry.level)}"
                self.problems.append(f"{where}: {error}")

    def _choose(self, plan: RestartPlan, own: int, bad: set[Entry]) -> dict[int, Entry]:
        """Per rank of the snapshot the fastest source that this one can reach."""
        chosen = {}
        for rank, offers in enumerate(plan.sources):
            entry = next((e for e in offers if e not in bad and e.node in (None, self._node)), None)
            if entry is not None:
                chosen[rank] = entry
        if own not in chosen:
            raise ShardCorrupt(f"the shard of rank {own} is nowhere whole within reach of {self._node.split('/')[0]}")
        return chosen

    def _open(self, plan: RestartPlan, chosen: dict[int, Entry], bad: set[Entry]) -> list[OpenShard]:
        shards = []
        for entry in chosen.values():
            try:
                opened = self._opener.open(entry, lambda error, entry=entry: _BadShard(entry, error))  # type: ignore[misc]
                shards.append(opened)
                if opened.meta.frozen is not None:
                    shards.append(self._opener.open_frozen(opened.meta.frozen, plan, entry.rank))
            except _BadShard:
                raise
            except Exception as error:
                raise _BadShard(entry, error) from error
        return shards

    def _target(self, expected: Mapping[str, torch.Tensor], held: Iterable[str]) -> Any:
        """The live tensor that a name of the state is to fill: a parameter, or for optimizer state its parameter."""
        live = {there: expected[name] for name, there in held_names(expected, held).items()}
        prefixes = [
            (f"{path}.state.", parameters) for path, parameters in self._told.source.optimizer_parameters().items()
        ]

        def target(name: str) -> torch.Tensor | None:
            if name in live:
                return live[name]
            for prefix, parameters in prefixes:
                number = name.removeprefix(prefix).split(".", 1)[0]
                if name.startswith(prefix) and number.isdecimal() and int(number) < len(parameters):
                    return parameters[int(number)]
            return None

        return target


class _BadShard(ShardCorrupt):
    """A source of one shard that turned out to be no good."""

    def __init__(self, entry: Entry, error: Exception) -> None:
        super().__init__(str(error))
        self.entry = entry


def part_ways(snapshot: Snapshot, world: World) -> None:
    """After a restart with another number of ranks: every rank draws random numbers of its own from here on.

    What each rank had drawn cannot be continued by another number of them; equal numbers on two ranks would be worse.
    """
    logger.warning(
        "step %d was taken with %d ranks, there are %d now: weights and optimizer are exact; random numbers and the "
        "position in the data are not continued exactly",
        snapshot.step,
        snapshot.world_size,
        world.size,
    )
    seed = (int(snapshot.run_id, 16) ^ (snapshot.step << 20) ^ (world.size << 10) ^ world.rank) & ((1 << 63) - 1)
    torch.manual_seed(seed)
    random.seed(seed)
    with contextlib.suppress(ImportError):
        import numpy

        numpy.random.seed(seed & 0xFFFFFFFF)


def _as_json(inventory: Inventory) -> dict[str, Any]:
    return dataclasses.asdict(inventory)


def _from_json(fields: dict[str, Any]) -> Inventory:
    return Inventory(
        fields["level"],
        tuple(Entry(**{**item, "names": tuple(item["names"])}) for item in fields["entries"]),
        tuple(FrozenEntry(**item) for item in fields["frozen"]),
        tuple(fields["problems"]),
    )
