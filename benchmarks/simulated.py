"""What one rank of N does, through the package's own code: plan, restart, retention; for scale.py.

The engine and ``fetch`` are the real ones. Not there: the other ranks (fellows.py), storage and its manifests
(imagined.py), the keeper, and what is in the tensors.
"""

import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import imagined
from fellows import Fellows
from imagined import URL, ImaginedStorage, Small, Whole

from lazysnap.config import PersistentLevel, SnapshotConfig
from lazysnap.engine import engine, restart
from lazysnap.engine.assembly import Assembly
from lazysnap.engine.part import Part, complete, nearest_first
from lazysnap.engine.reading import LevelReader
from lazysnap.engine.restart import Restart
from lazysnap.keeper.events import MemoryEntry, MemoryHoldings
from lazysnap.keeper.identity import JobIdentity
from lazysnap.levels.belongings import Belongings, Told
from lazysnap.levels.blocks import MemoryBlocks
from lazysnap.levels.retention import Share
from lazysnap.levels.shards import entry_of
from lazysnap.levels.store import SnapshotStore
from lazysnap.resolver import Entry, RestartPlan
from lazysnap.shard.layout import Layout
from lazysnap.snapshots.reader import OpenShard
from lazysnap.state.codec import tensor_names
from lazysnap.state.objects import ObjectState
from lazysnap.state.walk import walk

KEPT = 3
"""Snapshots on storage; and whole captures in each keeper's memory."""


class Clock:
    """Processor time of this process, without what was spent on making things up."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def run(self, work: Callable[[], Any], *makers: Any) -> Any:
        """Do it and count it; ``makers`` know what they spent on making things up."""
        started = time.process_time()
        before = sum(maker.made_up_s for maker in makers)
        result = work()
        made_up = sum(maker.made_up_s for maker in makers) - before
        self.seconds += time.process_time() - started - made_up
        return result


def make_config() -> SnapshotConfig:
    """One level at a URL."""
    return SnapshotConfig(levels=(PersistentLevel(URL, every_n_steps=1, keep_last=KEPT),), job_id="imagined")


def plan(kind: str, ranks: int) -> dict[str, Any]:
    """One rank's planning: the engine is made, who sits where, its share, the layout, what is written beside it."""
    rank = 0
    imagined.tensors()
    clock, fellows = Clock(), Fellows(ranks, rank)

    def make() -> engine.SnapshotEngine:
        with mock.patch.object(engine, "World", return_value=fellows):
            return engine.SnapshotEngine(make_config(), {"loop": {}})

    def settle() -> tuple[int, int]:
        fellows.settle(walk({}), ())
        layout, meta = imagined.capture(kind, rank, ranks, 1)
        return layout.size_bytes, len(imagined.manifest_of(meta, len(layout.header), layout.size_bytes).encode())

    made = clock.run(make, fellows)
    making_s = clock.seconds
    _, manifest_bytes = clock.run(settle, fellows)
    made.abandon()
    held = sum(4 * imagined.volume(part) for _, _, part in imagined.pieces(kind, rank, ranks).values())
    return {
        "cpu_s": clock.seconds,
        "making_s": making_s,
        "told_bytes": fellows.told_bytes,
        "shard_bytes": held,
        "manifest_bytes": manifest_bytes,
        "said": fellows.said,
    }


class ImaginedKeeper:
    """Holds whole captures of one rank that are newer than those on storage."""

    def __init__(self, rank: int, ranks: int) -> None:
        facts: dict[str, Any] = {"run_id": imagined.RUN, "frozen": None}
        place: dict[str, Any] = {"rank": rank, "world_size": ranks, "start": imagined.START}
        slot: Any = None
        self._held = MemoryHoldings(
            tuple(MemoryEntry(slot, 10 + n, sequence=n, checksums=None, **facts, **place) for n in range(KEPT))
        )

    def connect(self, timeout_s: float) -> None:
        """See ``KeeperClient``."""

    def inventory(self, timeout_s: float) -> MemoryHoldings:
        """See ``KeeperClient``."""
        return self._held


class ImaginedReader:
    """In the place of ``PartReader``: opens shards until nothing is missing, and reads no tensor."""

    def __init__(self, kind: str, store: SnapshotStore, storage: ImaginedStorage, fellows: Fellows) -> None:
        self._kind, self._store, self._storage, self._fellows = kind, store, storage, fellows
        self.opened = 0
        self.asked_before: dict[str, int] = {}
        """Of storage, until the first shard was opened."""

    def read(self, plan: RestartPlan, chosen: dict[int, Entry]) -> Part:
        """See ``PartReader``."""
        self.asked_before = self.asked_before or dict(self._storage.asked)
        self.opened = open_part(self._kind, self._store, chosen, plan, self._fellows)
        return Part({}, [chosen[self._fellows.rank % plan.world_size].level], None, captured_ns=0)


def resolve(kind: str, taken: int, ranks: int, rank: int) -> dict[str, Any]:
    """One rank's restart from storage after the memory was lost (told of all the same), up to reading its tensors."""
    storage = ImaginedStorage(taken, range(1, KEPT + 1), Whole(kind))
    store = SnapshotStore(storage, speed=1)
    others = SnapshotStore(ImaginedStorage(taken, range(1, KEPT + 1), Whole(kind)))
    fellows = Fellows(ranks, rank, lambda: [[URL, others.listing().to_fields()]])
    reader = ImaginedReader(kind, store, storage, fellows)
    config = make_config()
    client: Any = ImaginedKeeper(rank, ranks)
    told = Restart(config, ObjectState({}), client, JobIdentity.from_config(config), fellows)
    clock = Clock()
    clock.run(lambda: fellows.place, fellows)  # when the engine was made
    clock.seconds, fellows.told_bytes, fellows.said[:] = 0.0, 0, []
    with (
        mock.patch.object(LevelReader, "_open", return_value=store),
        mock.patch.object(restart, "PartReader", return_value=reader),
    ):
        snapshot = clock.run(lambda: restart.fetch("latest", told), storage, fellows)
    assert (snapshot.step, snapshot.level) == (KEPT, URL), snapshot
    assert [step for _, step in snapshot.stored[URL]] == list(range(1, KEPT + 1)), snapshot.stored
    return {
        "cpu_s": clock.seconds,
        "lists": reader.asked_before.get("list", 0),
        "survey_reads": reader.asked_before["get"],
        "shards_opened": reader.opened,
        "told_bytes": fellows.told_bytes,
        "said": fellows.said,
    }


def open_part(kind: str, store: SnapshotStore, chosen: dict[int, Entry], plan: RestartPlan, fellows: Fellows) -> int:
    """Open shards until nothing is missing, as ``engine.part`` does; how many."""
    rank, ranks, taken = fellows.rank, fellows.size, plan.world_size
    same = taken == ranks
    neighbours = range(rank // 8 * 8, rank // 8 * 8 + 8) if same else ()
    left = nearest_first(chosen, rank if same else rank * taken // ranks, neighbours)
    own = rank % taken
    assembly = Assembly(own, lambda name, shape: imagined.box(kind, shape, rank, ranks))
    opened = []

    def add(number: int) -> Any:
        manifest = store.read_manifest(chosen[number])
        layout, _ = imagined.capture(kind, number, taken, plan.step)
        parsed_layout = Layout.parse(layout.header, layout.size_bytes)
        blocks = MemoryBlocks(memoryview(b""), None, f"rank {number}")
        assembly.add(OpenShard(number, manifest.meta, parsed_layout, blocks))
        opened.append(number)
        left.remove(number)
        return manifest.meta

    names = tensor_names(add(own).state)
    shapes = imagined.tensors()
    assembly.want(name for name in names if imagined.volume(imagined.box(kind, shapes[name], rank, ranks)[1]))
    for other in range(rank, taken, ranks):
        if other != own:
            add(other)
    complete(assembly, left, add, "imagined")
    return len(opened)


def retention(ranks: int) -> dict[str, Any]:
    """What one rank asks of a level after each snapshot, once it runs evenly; manifests are tiny here."""
    rank = ranks // 2
    storage = ImaginedStorage(ranks, range(1, KEPT + 2), Small())
    store = SnapshotStore(storage)
    level = PersistentLevel(URL, keep_last=KEPT)
    own = Belongings(store, level, Share.of_rank(rank, ranks))
    kept = tuple(range(2, KEPT + 2))
    gone = own.tidy(Told(imagined.RUN, imagined.START, kept), frozenset(), lambda: None)  # looks round, once
    assert gone == [1], gone
    last = KEPT + 2
    storage.steps = [*kept, last]  # the others deleted theirs, too
    manifest = storage.manifest(rank, last)
    meta = manifest.meta
    entry = entry_of(meta, store.url, store.speed, meta.name.directory)
    told = Told(imagined.RUN, imagined.START, (*kept[1:], last))
    storage.asked.clear()
    clock = Clock()

    def work() -> list[int]:
        own.confirm(entry, manifest, lambda: None)
        own.surplus(told, frozenset(), 5, lambda: None)
        return own.tidy(told, frozenset(), lambda: None)

    gone = clock.run(work, storage)
    assert gone == [2], gone
    names = ("list", "get", "stamp", "size", "is_leased", "delete", "delete_directory")
    each = {name: storage.asked[name] for name in names}
    return {"cpu_s": clock.seconds, "operations": sum(storage.asked.values()), **each}
