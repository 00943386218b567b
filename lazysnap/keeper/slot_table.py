"""All slots of a node, by rank, as its keeper holds them.

A freed slot lives as long as a thread reads it: only the end of the last reference closes it.
"""

import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence

import msgspec

from lazysnap import faults
from lazysnap.errors import FormatError
from lazysnap.keeper.questions import SlotFacts
from lazysnap.memory.slot_choice import SlotView
from lazysnap.memory.slots import KeeperSlot, Slot
from lazysnap.shard.checksum import BLOCK_BYTES, Checksums, block_ranges, digest

logger = logging.getLogger(__name__)

NodeSlots = Mapping[int, Mapping[int, Slot]]
"""Slots of a node, by local rank and slot id."""
CaptureKey = tuple[int, int]
"""Id of a slot, and the sequence number of the capture in it."""


class SlotTable:
    """Slots of all ranks. Used on the loop's thread."""

    def __init__(self) -> None:
        self._slots: dict[int, dict[int, KeeperSlot]] = {}
        """Slots by rank and slot id."""
        self._checksums: dict[CaptureKey, Checksums] = {}
        """Checksums of captures in the slots."""

    @property
    def by_rank(self) -> NodeSlots:
        """Slots by rank and slot id."""
        return self._slots

    def snapshot(self) -> dict[int, dict[int, Slot]]:
        """Return the current slots, by rank and slot id. Thread-safe."""
        copies: dict[int, dict[int, Slot]] = {}
        for rank, slots in list(self._slots.items()):
            copies[rank] = dict(slots)
        return copies

    @property
    def ranks(self) -> tuple[int, ...]:
        """Return the ranks that have slots."""
        return tuple(sorted(rank for rank, slots in self._slots.items() if slots))

    def of_rank(self, rank: int) -> list[KeeperSlot]:
        """Return all slots of a rank."""
        return list(self._slots.get(rank, {}).values())

    def find(self, rank: int, slot_id: int) -> KeeperSlot | None:
        """Return a slot; None if it was freed."""
        return self._slots.get(rank, {}).get(slot_id)

    def views(self) -> dict[int, tuple[SlotView, ...]]:
        """Return the words of all slots, by rank; an empty tuple for a rank without slots."""
        views = {}
        for rank, slots in self._slots.items():
            views[rank] = tuple(slot.view() for slot in slots.values())
        return views

    # Changes

    def add(self, rank: int, slot: KeeperSlot) -> None:
        """Add a slot."""
        self._slots.setdefault(rank, {})[slot.slot_id] = slot

    def adopt(self, rank: int, descriptors: list[int]) -> None:
        """Add slots that a trainer kept after the death of a keeper. The table owns the descriptors from now on."""
        for descriptor in descriptors:
            try:
                slot = KeeperSlot.attach(descriptor)
            except (FormatError, OSError) as error:
                logger.warning("local rank %d handed over something that is no slot: %s", rank, error)
                continue
            if self.find(rank, slot.slot_id) is not None:
                slot.close()  # the connection failed, not the keeper
                continue
            # Slots stay held until the core decides: parity may need them.
            self.add(rank, slot)
        faults.point("keeper.slots_adopted")

    def free(self, rank: int, slot_id: int) -> None:
        """Remove a slot."""
        slot = self._slots.get(rank, {}).pop(slot_id, None)
        if slot is None:
            return
        faults.point("keeper.memory.drop")
        # Do not close it: a thread may still read it, and could then read another file.
        weakref.finalize(slot, os.close, slot.descriptor)

    # Checksums

    def note_checksums(self, checksums: Mapping[CaptureKey, Checksums]) -> None:
        """Store the checksums of captures, and remove those of overwritten captures."""
        if not checksums:
            return
        current: dict[CaptureKey, Checksums] = {}
        for slots in self._slots.values():
            for slot in slots.values():
                key = (slot.slot_id, slot.view().sequence)
                checksums_of_slot = checksums.get(key) or self._checksums.get(key)
                if checksums_of_slot is not None:
                    current[key] = checksums_of_slot
        self._checksums = current

    def facts(self, rank: int) -> tuple[SlotFacts, ...]:
        """Return the data about the slots of a rank for a restart."""
        facts = []
        for slot in self.of_rank(rank):
            sequence = slot.view().sequence
            checksums = self._checksums.get((slot.slot_id, sequence))
            facts.append(SlotFacts(slot.slot_id, sequence, checksums))
        return tuple(facts)

    def reading_descriptors(self, rank: int, facts: Sequence[SlotFacts]) -> list[int]:
        """Return new read-only descriptors of these slots. Raises: OSError."""
        descriptors: list[int] = []
        try:
            for slot_facts in facts:
                descriptors.append(self._slots[rank][slot_facts.slot_id].reading_descriptor())
        except OSError:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        return descriptors

    def next_without_checksums(self) -> tuple[Slot, SlotView] | None:
        """Return the newest whole capture without checksums; None if all have some."""
        newest: tuple[Slot, SlotView] | None = None
        for slots in self._slots.values():
            for slot in slots.values():
                view = slot.view()
                is_known = (slot.slot_id, view.sequence) in self._checksums
                if view.is_whole and not is_known and (newest is None or view.sequence > newest[1].sequence):
                    newest = (slot, view)
        return newest


def compute_checksums(slot: Slot, view: SlotView, is_stopped: Callable[[], bool]) -> Checksums | None:
    """Compute the checksums of a whole capture; None if stopped, or if the slot was overwritten. Blocks."""
    faults.point("keeper.persist.checksum")
    blocks = []
    for offset, length in block_ranges(view.image_bytes):
        if is_stopped():
            return None
        # One block at a time: mapped bytes count as memory of this process.
        blocks.append(digest(slot.read(offset, length)))
    if slot.view() != view:
        return None
    return Checksums(view.image_bytes, BLOCK_BYTES, tuple(blocks))


class _Captured(msgspec.Struct):
    """The only field of ``CaptureMeta`` that is needed here: reading all of them takes long for a large model."""

    captured_ns: int


def captured_ns(slot: Slot, sequence: int) -> int | None:
    """Return the Unix time in nanoseconds at which a capture began; None if it has left the slot."""
    try:
        meta = msgspec.json.decode(slot.read_meta(), type=_Captured)
    except (FormatError, msgspec.MsgspecError):
        return None
    if slot.view().sequence != sequence:
        return None
    return meta.captured_ns


def reached_step(views: Sequence[SlotView]) -> int | None:
    """Return the newest step that the trainer of these slots passed or captured; None if it is not known."""
    for view in sorted(views, key=_sequence, reverse=True):
        steps = [step for step in (view.step, view.reached_step) if step is not None]
        if steps:
            return max(steps)
    return None


def _sequence(view: SlotView) -> int:
    return view.sequence
