"""Reading a snapshot back: verified as a whole before anything is handed out, decoded without running anything."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from lazysnap.capture.dtypes import DTYPES, logical_facts, logical_form
from lazysnap.capture.plan import view_of
from lazysnap.errors import FormatError, LazySnapError, ShardCorrupt, StateMismatch
from lazysnap.keeper.events import MemoryEntry
from lazysnap.levels import SnapshotStore
from lazysnap.levels.local import map_anonymous
from lazysnap.resolver import Entry, Inventory, RestartPlan, candidates
from lazysnap.shard.layout import Layout, TensorSpec
from lazysnap.shard.manifest import CaptureMeta
from lazysnap.state.codec import decode

logger = logging.getLogger(__name__)

MEMORY = "memory"
_SHOWN = 5


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


def memory_inventory(entries: Sequence[MemoryEntry]) -> Inventory:
    """What the keeper holds, as the resolver sees it."""
    return Inventory(
        MEMORY,
        tuple(
            Entry(MEMORY, 0, item.run_id, item.run_started_ns, item.step, 0, 1, str(index))
            for index, item in enumerate(entries)
        ),
    )


class SnapshotReader:
    """Finds and reads the freshest snapshot that verifies, over the keeper's memory and all levels."""

    def __init__(self, stores: Mapping[str, SnapshotStore], memory: Sequence[MemoryEntry]) -> None:
        self._stores = stores
        self._memory = memory
        self.problems: list[str] = []
        """Everything that was passed over, and why."""

    def plans(self, step: int | None) -> list[RestartPlan]:
        """Complete snapshots, best first. A level that does not answer is a problem noted, not an error."""
        inventories = [memory_inventory(self._memory)]
        for store in self._stores.values():
            try:
                inventories.append(store.inventory())
            except LazySnapError as error:
                self.problems.append(str(error))
        for inventory in inventories:
            self.problems.extend(inventory.problems)
        return candidates(inventories, step=step)

    def read(self, step: int | None, expected: Mapping[str, torch.Tensor]) -> Snapshot | None:
        """The best snapshot that verifies completely, ``None`` if there is none.

        Raises: StateMismatch, if the best one that verifies is of another model. Nothing is loaded in any case.
        """
        started = time.perf_counter()
        for plan in self.plans(step):
            for entry in plan.sources[0]:
                try:
                    image, meta = self._read_image(entry)
                    layout = Layout.parse(image, len(image), f"{entry.level}: step {entry.step}")
                    check_fits(layout, meta, expected, f"step {entry.step} at {entry.level}")
                    state = _decode(image, layout, meta)
                except StateMismatch:
                    raise
                except (FormatError, LazySnapError, OSError) as error:
                    self.problems.append(f"step {entry.step} at {entry.level} passed over: {error}")
                    continue
                return Snapshot(
                    state=state,
                    step=entry.step,
                    run_id=entry.run_id,
                    run_started_ns=entry.run_started_ns,
                    level=entry.level,
                    seconds=time.perf_counter() - started,
                    skipped=tuple(self.problems),
                )
        return None

    def _read_image(self, entry: Entry) -> tuple[memoryview, CaptureMeta]:
        if entry.level == MEMORY:
            item = self._memory[int(entry.location)]
            meta = CaptureMeta.from_bytes(item.slot.read_meta(), MEMORY)
            image = item.slot.image[: item.slot.status().image_bytes]
            if item.checksums is not None:
                item.checksums.verify(image, f"{MEMORY}: step {entry.step}")
            if meta.step != entry.step or meta.run_id != entry.run_id:
                raise ShardCorrupt(f"{MEMORY}: a slot holds step {meta.step}, the keeper said {entry.step}")
            return image, meta
        store = self._stores[entry.level]
        manifest = store.read_manifest(entry)
        image = map_anonymous(manifest.size_bytes)
        store.read_image(entry, manifest, image)
        return image, manifest.meta


def check_fits(layout: Layout, meta: CaptureMeta, expected: Mapping[str, torch.Tensor], where: str) -> None:
    """Compare a snapshot with the live model. Raises: StateMismatch, naming the first tensors that differ."""
    differences = []
    for name, tensor in expected.items():
        stored = meta.aliases.get(name, name)
        if stored not in layout:
            differences.append(f"{name}: not in the snapshot")
            continue
        spec, _ = layout.find(stored)
        logical = meta.tensors.get(stored, {}).get("dtype")
        try:
            dtype, shape = logical_facts(_dtype(spec), spec.shape, logical)
        except ValueError as error:
            raise ShardCorrupt(f"tensor {name}: {error}") from error
        if dtype != tensor.dtype or shape != tuple(tensor.shape):
            differences.append(f"{name}: {dtype} {list(shape)} there, {tensor.dtype} {list(tensor.shape)} here")
    prefixes = tuple({name.split(".", 1)[0] + "." for name in expected})
    held = [*(spec.name for spec in layout.specs), *meta.aliases]
    differences += [f"{name}: not in the model" for name in held if name.startswith(prefixes) and name not in expected]
    if differences:
        more = f" and {len(differences) - _SHOWN} more" if len(differences) > _SHOWN else ""
        raise StateMismatch(
            f"{where} is of another model: {'; '.join(differences[:_SHOWN])}{more}. Nothing was loaded. Use the model "
            'it was taken from, another directory, or start fresh without "latest"'
        )


def _dtype(spec: TensorSpec) -> torch.dtype:
    if spec.dtype not in DTYPES:
        raise ShardCorrupt(f"tensor {spec.name}: torch has no dtype for {spec.dtype}")
    return DTYPES[spec.dtype]


def _decode(image: memoryview, layout: Layout, meta: CaptureMeta) -> dict[str, Any]:
    """Build the state. Every tensor is cloned: loaders keep what they are given, and the image is not theirs."""

    def tensor(name: str) -> torch.Tensor:
        stored = meta.aliases.get(name, name)
        spec, offset = layout.find(stored)
        logical = meta.tensors.get(stored, {}).get("dtype")
        copy = view_of(image, offset, _dtype(spec), spec.shape).clone()
        try:
            return logical_form(copy, logical)
        except ValueError as error:
            raise ShardCorrupt(f"tensor {name}: {error}") from error

    state = decode(meta.state, tensor=tensor)
    if not isinstance(state, dict):
        raise ShardCorrupt(f"the small state is {type(state).__name__}, expected a dict")
    return state
