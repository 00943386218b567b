"""Reading a snapshot back: verified as a whole before anything is handed out, decoded without running anything."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch

from lazysnap.engine.image import Image, check_apart, check_fits, decode_state
from lazysnap.engine.reading import LevelReader
from lazysnap.errors import ShardCorrupt, StateMismatch
from lazysnap.keeper.events import MemoryHoldings
from lazysnap.levels.attempt import Attempt
from lazysnap.levels.redaction import shown
from lazysnap.resolver import Entry, FrozenEntry, Inventory, RestartPlan, candidates
from lazysnap.shard.checksum import Checksums
from lazysnap.shard.manifest import CaptureMeta, FrozenReference

logger = logging.getLogger(__name__)

MEMORY = "memory"
_CHECK_S = 60.0
"""For one block in memory."""


@dataclass(frozen=True)
class Snapshot:
    """A snapshot read back. Its tensors are its own: nothing else writes to their memory."""

    state: dict[str, Any] = field(repr=False)
    """What ``StateSource.collect`` returned at that boundary."""
    step: int
    run_id: str
    run_started_ns: int
    level: str
    """``memory`` or the URL of the level it was read from."""
    seconds: float
    """Time from the question to the answer."""
    skipped: tuple[str, ...] = ()
    """Why newer snapshots, or faster levels, were passed over."""
    world_size: int = 1
    """Ranks of the training that it was taken from; with another number of ranks now, what is of each rank alone
    (generators, position in the data) could not be continued exactly."""
    generation: str | None = None
    """With several ranks: which start of theirs took it."""
    parameters: Mapping[str, Sequence[str]] | None = field(default=None, repr=False)
    """By path of an optimizer in the state: the names of its parameters in its order, if they were known."""


def memory_inventory(memory: MemoryHoldings, others: Sequence[Inventory] = ()) -> Inventory:
    """What the keeper holds, as the resolver sees it: its immutable tensors serve every run that refers to them."""
    entries = tuple(
        Entry(
            MEMORY,
            0,
            item.run_id,
            item.run_started_ns,
            item.step,
            item.rank,
            item.world_size,
            str(index),
            item.frozen,
            generation=item.generation,
        )
        for index, item in enumerate(memory.entries)
    )
    known = [*entries, *(entry for inventory in others for entry in inventory.entries)]
    wanted = sorted({(entry.run_id, entry.frozen) for entry in known if entry.frozen in memory.frozen})
    images = tuple(FrozenEntry(MEMORY, 0, run_id, str(digest), str(digest)) for run_id, digest in wanted)
    return Inventory(MEMORY, entries, images)


LISTINGS = 3
"""How often levels are listed until nothing vanishes between listing and reading."""


class Vanished(Exception):
    """A snapshot that was listed is not there any more."""


class SnapshotReader:
    """Finds and reads the freshest snapshot that verifies, over the keeper's memory and all levels."""

    def __init__(self, levels: Mapping[str, LevelReader], memory: MemoryHoldings) -> None:
        self._levels = levels
        self._memory = memory
        self._images: dict[str, Image] = {}
        self._refused: dict[FrozenEntry, str] = {}
        self._checks: list[Attempt[None]] = []
        self.problems: list[str] = []
        """Everything that was passed over, and why."""

    def list_again(self) -> None:
        """Forget what was listed, and what was passed over. Does not block."""
        self.__dict__.pop("_inventories", None)
        self.problems = []
        self._refused = {}
        for level in self._levels.values():
            level.begin_inventory()

    @cached_property
    def _inventories(self) -> list[Inventory]:
        """Of all levels. One that does not answer is a problem noted, not an error."""
        found = []
        for level in self._levels.values():
            try:
                found.append(level.inventory())
            except Exception as error:  # noqa: BLE001  the rim to storage packages, which raise what they like
                self.problems.append(f"{shown(level.url)} passed over: {error}")
        found.insert(0, memory_inventory(self._memory, found))
        self.problems.extend(problem for inventory in found for problem in inventory.problems)
        return found

    def plans(self, *, step: int | None = None, name: str | None = None) -> list[RestartPlan]:
        """Complete snapshots, best first; those of one step or name, if one is given. Blocks: lists every level."""
        return candidates(self._inventories, step=step, name=name)

    def read(
        self, plans: Sequence[RestartPlan], expected: Mapping[str, torch.Tensor], *, is_last_try: bool = True
    ) -> Snapshot | None:
        """The first snapshot that verifies completely, ``None`` if there is none. Blocks.

        Raises: StateMismatch, if the first one that verifies is of another model. Nothing is loaded in any case.
        Vanished, if one was deleted since it was listed, so that there may be a newer one; not at the last try.
        """
        started = time.perf_counter()
        for plan in plans:
            for entry in plan.sources[0]:
                where = f"step {entry.step} at {shown(entry.level)}"
                try:
                    try:
                        images = self._read(entry, plan, where)
                        check_fits(images, expected, where)
                        state = decode_state(images)
                    finally:
                        self._finish_checks()  # damage is the reason, whatever else was raised
                except StateMismatch:
                    raise
                except Exception as error:
                    if isinstance(error, FileNotFoundError) and not is_last_try:
                        raise Vanished(where) from error
                    self.problems.append(f"{where} passed over: {error}")
                    continue
                return Snapshot(
                    state=state,
                    step=entry.step,
                    run_id=entry.run_id,
                    run_started_ns=entry.run_started_ns,
                    level=entry.level,
                    seconds=time.perf_counter() - started,
                    skipped=tuple(self.problems),
                    parameters=images[0].meta.parameters,
                )
        return None

    def _finish_checks(self) -> None:
        """Wait until what is being compared was compared. Raises: ShardCorrupt."""
        checks, self._checks = self._checks, []
        for check in checks:
            check.result(_CHECK_S)

    def _read(self, entry: Entry, plan: RestartPlan, where: str) -> list[Image]:
        """The shard, and the immutable tensors that it refers to."""
        if entry.level == MEMORY:
            data, meta = self._from_memory(entry)
        else:
            data, meta = self._levels[entry.level].read(entry)
        images = [Image.parse(data, meta, where)]
        if meta.frozen is not None:
            if meta.frozen.digest != entry.frozen:
                raise ShardCorrupt(f"{where}: refers to {meta.frozen.digest}, it was listed with {entry.frozen}")
            images.append(self._frozen(meta.frozen, plan.frozen.get(meta.frozen.digest, ())))
            check_apart(images, where)
        return images

    def _from_memory(self, entry: Entry) -> tuple[memoryview, CaptureMeta]:
        item = self._memory.entries[int(entry.location)]
        meta = CaptureMeta.from_bytes(item.slot.read_meta(), MEMORY)
        image = item.slot.image[: item.slot.status().image_bytes]
        if item.checksums is not None:
            # While it is copied out: either takes about as long.
            compare = partial(item.checksums.verify, image, f"{MEMORY}: step {entry.step}")
            self._checks.append(Attempt(compare, f"comparing step {entry.step} in memory"))
        if meta.step != entry.step or meta.run_id != entry.run_id:
            raise ShardCorrupt(f"{MEMORY}: a slot holds step {meta.step}, the keeper said {entry.step}")
        return image, meta

    def _frozen(self, wanted: FrozenReference, entries: Sequence[FrozenEntry]) -> Image:
        """The image of that digest, from the fastest level where it verifies; read once for all snapshots."""
        for entry in entries:
            if wanted.digest in self._images:
                break
            if entry in self._refused:
                continue
            try:
                self._images[wanted.digest] = self._read_frozen(entry, wanted)
            except Exception as error:  # noqa: BLE001  the rim to storage packages, which raise what they like
                self._refused[entry] = str(error)
                self.problems.append(f"immutable tensors {wanted.digest} at {shown(entry.level)} passed over: {error}")
        if wanted.digest not in self._images:
            raise ShardCorrupt(f"the immutable tensors {wanted.digest} that it refers to are nowhere whole")
        return self._images[wanted.digest]

    def _read_frozen(self, entry: FrozenEntry, wanted: FrozenReference) -> Image:
        where = f"immutable tensors at {shown(entry.level)}"
        if entry.level == MEMORY:
            slot = self._memory.frozen[entry.digest]
            data = slot.image[: slot.status().image_bytes]
            meta = CaptureMeta.from_bytes(slot.read_meta(), MEMORY)
            found = Checksums.of(data).whole
            if found != wanted.digest:
                raise ShardCorrupt(f"{where}: their checksum is {found}, expected {wanted.digest}")
        else:
            data, meta = self._levels[entry.level].read_frozen(entry)
        if len(data) != wanted.size_bytes:
            raise ShardCorrupt(f"{where}: {len(data)} bytes, expected {wanted.size_bytes}")
        return Image.parse(data, meta, where)
