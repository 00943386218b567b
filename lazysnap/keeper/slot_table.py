"""All slots of a node, by rank, as its keeper holds them.

A slot that is freed here lives as long as a thread reads it: nothing closes it but the end of the last reference.
"""

import logging
import os
import weakref
from collections.abc import Callable, Mapping

from lazysnap import faults
from lazysnap.errors import FormatError
from lazysnap.keeper.questions import SlotFacts
from lazysnap.memory.slot_choice import SlotView
from lazysnap.memory.slots import KeeperSlot, Slot
from lazysnap.shard.checksum import BLOCK_BYTES, Checksums, block_ranges, digest

logger = logging.getLogger(__name__)

CaptureKey = tuple[int, int]
"""Id of a slot, and the sequence number of the capture in it."""


class SlotTable:
    """Slots of all ranks. Used on the loop's thread."""

    def __init__(self) -> None:
        self._slots: dict[int, dict[int, KeeperSlot]] = {}
        """By rank and slot id."""
        self._checksums: dict[CaptureKey, Checksums] = {}
        """Checksums of captures that are in the slots."""

    @property
    def by_rank(self) -> Mapping[int, Mapping[int, Slot]]:
        """Slots by rank and slot id."""
        return self._slots

    def of_rank(self, rank: int) -> list[KeeperSlot]:
        """Return all slots of a rank."""
        return list(self._slots.get(rank, {}).values())

    def find(self, rank: int, slot_id: int) -> KeeperSlot | None:
        """Return a slot; None if it was freed."""
        return self._slots.get(rank, {}).get(slot_id)

    def views(self) -> dict[int, tuple[SlotView, ...]]:
        """Return the words of all slots, by rank."""
        views = {}
        for rank, slots in self._slots.items():
            views[rank] = tuple(slot.view() for slot in slots.values())
        return views

    # Changes

    def add(self, rank: int, slot: KeeperSlot) -> None:
        """Take a slot."""
        self._slots.setdefault(rank, {})[slot.slot_id] = slot

    def adopt(self, rank: int, descriptors: list[int]) -> None:
        """Take slots that a trainer kept while another keeper died. The descriptors belong to the table from now on."""
        for descriptor in descriptors:
            try:
                slot = KeeperSlot.attach(descriptor)
            except (FormatError, OSError) as error:
                logger.warning("local rank %d handed over something that is no slot: %s", rank, error)
                continue
            if self.find(rank, slot.slot_id) is not None:
                slot.close()  # the connection broke, not the keeper
                continue
            slot.release()  # the keeper that held it is dead
            self.add(rank, slot)
        faults.point("keeper.slots_adopted")

    def free(self, rank: int, slot_id: int) -> None:
        """Give up a slot."""
        slot = self._slots.get(rank, {}).pop(slot_id, None)
        if slot is None:
            return
        if not self._slots[rank]:
            del self._slots[rank]
        faults.point("keeper.memory.drop")
        # A thread may still read it: closing it now could make that thread read another file.
        weakref.finalize(slot, os.close, slot.descriptor)

    # Checksums

    def note_checksums(self, checksums: Mapping[CaptureKey, Checksums]) -> None:
        """Remember the checksums of captures."""
        self._checksums.update(checksums)

    def facts(self, rank: int) -> tuple[SlotFacts, ...]:
        """Return what a restart must know of the slots of a rank."""
        facts = []
        for slot in self.of_rank(rank):
            sequence = slot.view().sequence
            checksums = self._checksums.get((slot.slot_id, sequence))
            facts.append(SlotFacts(slot.slot_id, sequence, checksums))
        return tuple(facts)

    def next_without_checksums(self) -> tuple[Slot, SlotView] | None:
        """Return the newest whole capture without checksums; None if all have some. Forgets those of old captures."""
        current: dict[CaptureKey, Checksums] = {}
        newest: tuple[Slot, SlotView] | None = None
        for slots in self._slots.values():
            for slot in slots.values():
                view = slot.view()
                key = (slot.slot_id, view.sequence)
                if key in self._checksums:
                    current[key] = self._checksums[key]
                elif view.is_whole and (newest is None or view.sequence > newest[1].sequence):
                    newest = (slot, view)
        self._checksums = current
        return newest


def compute_checksums(slot: Slot, view: SlotView, is_stopped: Callable[[], bool]) -> Checksums | None:
    """Return the checksums of a whole capture; None if it was stopped, or the slot was written over. Blocks."""
    faults.point("keeper.persist.checksum")
    blocks = []
    for offset, length in block_ranges(view.image_bytes):
        if is_stopped():
            return None
        # One block at a time: what is mapped counts as memory of this process.
        blocks.append(digest(slot.read(offset, length)))
    if slot.view() != view:
        return None
    return Checksums(view.image_bytes, BLOCK_BYTES, tuple(blocks))
