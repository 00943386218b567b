"""Ranks as trainers see them, and the storage of their nodes' keepers behind them, in this process."""

import pathlib
import threading
from collections.abc import Callable
from typing import Any

from lazysnap.config import PersistentLevel
from lazysnap.events import Complete, Event, LevelFailed, NameFailed, Stored
from lazysnap.keeper.frozen import FrozenPool
from lazysnap.keeper.node_storage import NodeStorage, StorageContext
from lazysnap.keeper.parity import ParityStore
from lazysnap.keeper.peer_reads import PeerReads
from lazysnap.keeper.protocol import Peers, Run
from lazysnap.keeper.starts import Starts
from lazysnap.keeper.status import StatusBoard
from lazysnap.levels import open_store
from lazysnap.levels.source import map_anonymous
from lazysnap.links.listener import ReservedPort
from lazysnap.links.secret import Secret, draw_secret
from lazysnap.memory.arena import Slot, SlotPhase, Word
from lazysnap.resolver import Entry
from lazysnap.shard.checksum import Checksums
from lazysnap.shard.layout import Layout, TensorSpec
from lazysnap.shard.manifest import CaptureMeta, FrozenReference
from lazysnap.shard.names import SnapshotName
from lazysnap.topology import Team, places
from support.catalogue import inventory_of
from support.snapshots import read_image
from support.waiting import until

RUN = "ab" * 8
STARTS = tuple(f"{number:016x}" for number in range(1, 20))
"""Of trainings one after the other."""
SIZE = 300_000
NUM_SLOTS = 3
EVERY = 2
"""Levels of ``every_n_steps=1`` are granted steps 2, 4, 6, however many nodes there are."""


def image_of(step: int, rank: int = 0) -> bytes:
    """The shard of a rank."""
    layout = Layout.plan([TensorSpec("x", "U8", (SIZE,))])
    return layout.header + bytes([(step + 100 * rank) % 251]) * SIZE


def frozen_slot(size: int = 500_000) -> tuple[Slot, FrozenReference]:
    """Frozen tensors, and how a capture refers to them."""
    layout = Layout.plan([TensorSpec("base", "U8", (size,))])
    image = layout.header + b"\x07" * size
    slot = Slot.create(1 << 16, len(image))
    meta = CaptureMeta(RUN, STARTS[0], 0, 0, 1, 0).to_bytes()
    slot.begin(0, sequence=1, image_bytes=len(image), meta=meta, pin=False)
    slot.image[: len(image)] = image
    slot.commit()
    return slot, FrozenReference(Checksums.of(memoryview(image)).whole, len(image))


class Rank:
    """A trainer's end of three slots, and what its keeper knows of that trainer (``node_storage.RankMemory``)."""

    def __init__(self, rank: int, world_size: int, num_slots: int = NUM_SLOTS) -> None:
        self.rank, self.world_size, self.sequence = rank, world_size, 0
        self.is_gone = self.is_choosing = False
        self._slots = [Slot.create(1 << 16, len(image_of(0))) for _ in range(num_slots)]
        self.start, self.starts = "", Starts()
        for slot in self._slots:
            slot.populate()
            slot.set_word(Word.READY, 1)

    def slots(self) -> list[Slot]:
        """All of them."""
        return list(self._slots)

    def begin_run(self, start: str, node_ranks: int = 1) -> None:
        """Captures from now on are of this start, in which its node has so many ranks."""
        facts = {"step": 0, "every_n_steps": EVERY, "num_kept": 1, "stored": {}, "shared": [], "peers": None}
        run, team = Run(RUN, start, floor=self.sequence, is_new=True, **facts), Team(node_ranks=(0,) * node_ranks)
        self.starts.begin(run, team)
        self.start = start

    def begin(self, step: int, run_id: str, *, must: bool = False, frozen: FrozenReference | None = None) -> Slot:
        """Begin a capture as the trainer does: pinned, if its step is granted. Blocks: until a slot is free."""
        newest = max(
            (slot for slot in self._slots if slot.status().phase is SlotPhase.WHOLE), key=_sequence, default=None
        )

        def taken() -> Slot | None:
            free = [slot for slot in self._slots if slot is not newest and not slot.status().pinned]
            slot = min(free, key=_sequence, default=None)
            return slot if slot is not None and slot.take() else None

        slot = until(taken)
        self.sequence += 1
        meta = CaptureMeta(run_id, self.start, step, self.rank, self.world_size, 0, frozen=frozen)
        size, pin = len(image_of(step)), slot.is_granted(step)
        slot.begin(step, sequence=self.sequence, image_bytes=size, meta=meta.to_bytes(), pin=pin)
        if slot.status().pinned and not slot.is_granted(step):
            slot.unpin()
        if must:
            slot.pin(step, until_stored=True)
        return slot

    def finish(self, slot: Slot) -> None:
        """Copy everything, and commit."""
        status = slot.status()
        assert status.step is not None
        image = image_of(status.step, self.rank)
        slot.image[: len(image)] = image
        slot.commit()


class Rig:
    """A training of some nodes with some ranks each, and what their keepers do about levels."""

    def __init__(
        self, *levels: PersistentLevel, nodes: int = 1, ranks: int = 1, frozen: dict[str, Slot] | None = None
    ) -> None:
        """``ranks``: of each node."""
        self.levels, self.run_id, self.step, self.frozen = levels, RUN, 0, {} if frozen is None else frozen
        count = nodes * ranks
        self._places = places([f"node {rank // ranks}" for rank in range(count)])
        self.nodes = [[Rank(node * ranks + rank, count) for rank in range(ranks)] for node in range(nodes)]
        self.storages: list[NodeStorage] = []
        self._writers: list[threading.Thread] = []
        self.levels_of: Callable[[int], tuple[PersistentLevel, ...]] = lambda node: levels
        """As that node sees them: a path may be another disk there."""
        self.ears: Callable[[], list[Event]] = list
        self.told_to: list[list[Event]] = []
        """What the trainers of each node hear."""
        self._peers: Peers | None = None
        self._ports: list[ReservedPort] = []
        self.reads = [self._served(node) for node in range(nodes)]
        if nodes > 1:
            secret = draw_secret()
            self._peers = Peers("job", "127.0.0.1", self._listen(secret), secret)
        self.start = ""

    @property
    def ranks(self) -> list[Rank]:
        """Of all nodes."""
        return [rank for node in self.nodes for rank in node]

    def begin(self, start: str = STARTS[0], *, run_id: str = RUN, follows: bool = False, **told: Any) -> "Rig":
        """A start of the training; ``follows``: at the same keepers. ``told``: further fields of ``Run``."""
        self.start, self.run_id, self.step = start, run_id, 0
        before = self.storages if follows else [None] * len(self.nodes)
        if not follows:
            self._end()
        self.told_to = [self.ears() for _ in self.nodes]
        for node in self.nodes:
            for rank in node:
                rank.begin_run(start, len(node))
        self.storages = [
            self._storage(node, is_new=True, before=before[node], **told) for node in range(len(self.nodes))
        ]
        return self

    def stop(self, node: int) -> None:
        """Its keeper is gone, and no other one comes."""
        self.storages[node].close()

    def replace(self, node: int = 0) -> None:
        """Its keeper dies, and another one takes over what trainers hold."""
        self.storages[node].close()
        self.told_to[node] = self.ears()
        self.storages[node] = self._storage(node, is_new=False)

    def _storage(
        self,
        node: int,
        *,
        is_new: bool,
        before: NodeStorage | None = None,
        stored: dict[str, list[tuple[str, int]]] | None = None,
    ) -> NodeStorage:
        run = Run(
            self.run_id,
            self.start,
            step=self.step,
            floor=0,
            every_n_steps=EVERY,
            num_kept=1,
            stored={level.url: [] for level in self.levels_of(node)} if stored is None else stored,
            peers=self._peers,
            shared=[level.url for level in self.levels_of(node) if level.shared],
            is_new=is_new,
        )
        ranks = self.nodes[node]
        for slot in (slot for rank in ranks for slot in rank.slots()):
            slot.set_word(Word.GRANT, 0)  # what the keeper before granted is not asked for any more
        team = Team.of(self._places, ranks[0].rank)
        context = StorageContext(
            lambda: list(ranks),
            self.frozen.get,
            StatusBoard(self.told_to[node].append),
            lambda links: self.reads[node].admit(links),
            self._parity_of(node),
        )
        known = set(threading.enumerate())
        storage = NodeStorage(self.levels_of(node), self._protected(run, node), team, context, before)
        self._writers += [one for one in set(threading.enumerate()) - known if one.name == "lazysnap-level"]
        return storage

    def _served(self, node: int) -> PeerReads:
        """The port of a node's keeper."""
        return PeerReads(lambda: list(self.nodes[node]), self._parity_of(node), FrozenPool(lambda digest: None))  # type: ignore[arg-type]

    def _listen(self, secret: Secret) -> int:
        port = self._reserve()
        self.reads[0].serve(("127.0.0.1", port), secret)
        return port

    def _reserve(self) -> int:
        self._ports.append(ReservedPort("127.0.0.1"))
        return self._ports[-1].number

    def _parity_of(self, node: int) -> ParityStore:
        """What the keeper of that node holds for others."""
        return ParityStore()

    def _protected(self, run: Run, node: int) -> Run:
        """With what the keeper of a node is told of others that protect it."""
        return run

    def _end(self) -> None:
        for storage in self.storages:
            storage.close()

    def close(self) -> None:
        """End, and wait until what was under way has ended: fault points of the next test are its own."""
        self._end()
        for reads in self.reads:
            reads.close()
        for port in self._ports:
            port.release()
        until(lambda: not any(thread.is_alive() for thread in self._writers))

    # ---------------------------------------------------------------- training

    @property
    def granted(self) -> int | None:
        """The step ahead that all trainers are to pin when they begin it."""
        words = {slot.word(Word.GRANT) - 1 for rank in self.ranks for slot in rank.slots()}
        [step] = words if len(words) == 1 else [-1]
        return step if step > self.step else None

    def capture(self, step: int, *, must: bool = False, frozen: FrozenReference | None = None) -> None:
        """All ranks capture a step."""
        self.step = step
        begun = [(rank, rank.begin(step, self.run_id, must=must, frozen=frozen)) for rank in self.ranks]
        self.look()
        for rank, slot in begun:
            rank.finish(slot)
        self.look()

    def look(self) -> None:
        """Something changed in the slots."""
        for storage in self.storages:
            storage.slots_changed()

    def train(self, *, frozen: FrozenReference | None = None) -> int:
        """Capture the next step that storage wants, and return it. Blocks: until it wants one."""
        until(lambda: self.granted is not None)
        step = self.granted
        assert step is not None
        self.capture(step, frozen=frozen)
        return step

    def train_until(self, condition: Any, *, frozen: FrozenReference | None = None) -> None:
        """Capture what storage wants, again and again."""

        def goes_on() -> bool:
            if self.granted is not None:
                self.train(frozen=frozen)
            return bool(condition())

        until(goes_on)

    def store(self, *levels: PersistentLevel, frozen: FrozenReference | None = None) -> int:
        """Capture the next step that storage wants, and wait until it is complete at these levels; at all without."""
        step = self.train(frozen=frozen)
        for level in levels or self.levels:
            self.wait(level, step)
        return step

    # ---------------------------------------------------------------- what is told

    def complete(self, level: PersistentLevel, node: int = 0) -> list[int]:
        """Steps that trainers of a node were told to be complete, in that order."""
        url = self.levels_of(node)[self.levels.index(level)].url
        events = [event for event in list(self.told_to[node]) if isinstance(event, Complete)]
        return [step for event in events if event.level == url for step in event.steps]

    def wait(self, level: PersistentLevel, step: int) -> None:
        """Until all nodes know the step to be complete there."""
        nodes = range(len(self.nodes))
        until(lambda: all(step in self.complete(level, node) for node in nodes), lambda: f"step {step}: {self.told_to}")

    def told(
        self, kind: type[Stored | LevelFailed | NameFailed], level: PersistentLevel | None = None, node: int = 0
    ) -> list[Any]:
        """Events of a kind, of one level or of all."""
        url = None if level is None else self.levels_of(node)[self.levels.index(level)].url
        events = list(self.told_to[node])
        return [event for event in events if isinstance(event, kind) and url in (None, event.level)]

    def failed(self, level: PersistentLevel | None = None, node: int = 0) -> list[int]:
        """Steps that a level could not take."""
        return [event.step for event in self.told(LevelFailed, level, node)]

    def is_pinned(self) -> bool:
        """Whether any slot is held for storage."""
        return any(slot.status().pinned for rank in self.ranks for slot in rank.slots())

    # ---------------------------------------------------------------- what is there

    def directory(self, level: PersistentLevel, step: int, start: str | None = None) -> pathlib.Path:
        """Of a snapshot at a local level."""
        return pathlib.Path(level.url) / SnapshotName(self.run_id, step, start or self.start).directory


def _sequence(slot: Slot) -> int:
    return slot.word(Word.SEQUENCE)


def entries_at(level: PersistentLevel) -> list[Entry]:
    """What a level offers."""
    return list(inventory_of(open_store(level.url)).entries)


def steps_at(level: PersistentLevel) -> list[int]:
    """Steps of which a level has anything."""
    return sorted({entry.step for entry in entries_at(level)})


def names_at(level: PersistentLevel) -> dict[int, tuple[str, ...]]:
    """Names of what a level has."""
    return {entry.step: entry.names for entry in entries_at(level)}


def check(level: PersistentLevel, step: int) -> None:
    """Every byte of all shards of a step."""
    store = open_store(level.url)
    found = [entry for entry in inventory_of(store).entries if entry.step == step]
    assert found, step
    for entry in found:
        check_entry(level, entry)


def check_entry(level: PersistentLevel, entry: Entry) -> None:
    """Every byte of a rank's shard. Raises: FileNotFoundError, if it goes meanwhile."""
    store = open_store(level.url)
    manifest = store.read_manifest(entry)
    out = map_anonymous(manifest.size_bytes)
    read_image(store, entry, out)
    shard = manifest.of(entry.rank)
    assert bytes(out[shard.offset :][: shard.size_bytes]) == image_of(entry.step, entry.rank)
