"""Slow work with the memory of slots, on one thread: makes slots, and computes checksums of captures."""

import functools
import logging
import queue
import threading
from collections.abc import Callable

from lazysnap.core.actions import Event, MakeSlot, MemoryRefused
from lazysnap.errors import LazySnapError
from lazysnap.keeper import slot_maker
from lazysnap.keeper.slot_table import SlotTable, compute_checksums
from lazysnap.memory.slot_choice import SlotView
from lazysnap.memory.slots import KeeperSlot, Slot
from lazysnap.shard.checksum import Checksums

logger = logging.getLogger(__name__)

CallSoon = Callable[[Callable[[], None]], object]


class MemoryWork:
    """Begins the work, and passes on the results. Used on the loop's thread."""

    def __init__(
        self,
        slots: SlotTable,
        call_soon: CallSoon,
        post: Callable[[Event], None],
        slot_made: Callable[[int, KeeperSlot], None],
    ) -> None:
        """Start the thread now: a failure to start it later would end the keeper.

        Args:
            slots: all slots of the node.
            call_soon: runs a function on the loop. Thread-safe.
            post: passes an event to the loop. Thread-safe.
            slot_made: receives a new slot of a rank. Called on the loop.
        """
        self._slots = slots
        self._call_soon = call_soon
        self._post = post
        self._slot_made = slot_made
        self._work: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._is_resting = False
        """True while nobody trains, so that nothing is written into the slots."""
        self._is_computing = False
        threading.Thread(target=self._run, name="memory", daemon=True).start()

    def _run(self) -> None:
        """Do all waiting work. Each piece handles its own errors."""
        while True:
            work = self._work.get()
            work()
            del work  # it references slots, which must not be kept while the thread waits

    # Slots

    def make_slot(self, action: MakeSlot) -> None:
        """Make a slot. ``slot_made`` is called, or ``MemoryRefused`` is posted."""
        slots = self._slots.of_rank(action.rank)
        self._work.put(functools.partial(self._allocate, action, slots))

    def _allocate(self, action: MakeSlot, slots: list[KeeperSlot]) -> None:
        """Make a slot. On the thread of memory."""
        refusal = ""
        slot = None
        try:
            slot = slot_maker.make(action.wish, slots)
        except LazySnapError as error:
            refusal = str(error)
        except Exception as error:  # the last handler of this work; the core tries again
            logger.exception("memory")
            refusal = f"the keeper failed to make memory: {type(error).__name__}: {error}"
        if slot is None:
            self._post(MemoryRefused(action.rank, refusal))
        else:
            self._call_soon(functools.partial(self._slot_made, action.rank, slot))

    # Checksums

    def rest(self, *, is_resting: bool) -> None:
        """Compute checksums of captures while nobody trains, the newest first. A restart verifies them."""
        self._is_resting = is_resting
        if not is_resting or self._is_computing:
            return
        next_slot = self._slots.next_without_checksums()
        if next_slot is not None:
            self._is_computing = True
            slot, view = next_slot
            self._work.put(functools.partial(self._compute, slot, view))

    def _compute(self, slot: Slot, view: SlotView) -> None:
        """Compute the checksums of a capture. On the thread of memory."""
        checksums = None
        try:
            checksums = compute_checksums(slot, view, self._must_stop)
        except Exception:  # the last handler of this work; without checksums a restart verifies less
            logger.exception("checksums of captures")
        self._call_soon(functools.partial(self._computed, slot, view, checksums))

    def _must_stop(self) -> bool:
        return not self._is_resting

    def _computed(self, slot: Slot, view: SlotView, checksums: Checksums | None) -> None:
        self._is_computing = False
        if checksums is not None:
            self._slots.note_checksums({(slot.slot_id, view.sequence): checksums})
            self.rest(is_resting=self._is_resting)
