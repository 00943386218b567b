"""The slots that a trainer maps: by the keeper's numbers while one is attached, as orphans between two keepers."""

import enum
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable

from lazysnap.errors import FormatError
from lazysnap.memory.arena import Slot, SlotPhase

logger = logging.getLogger(__name__)


class CaptureState(enum.Enum):
    """The state of a trainer's capture, as the words in the slots show it."""

    COPYING = "copying"
    HELD = "held"
    """Whole, in the memory of a live keeper."""
    ALONE = "alone"
    """Whole, in memory that only this process holds until a keeper takes it over."""
    LOST = "lost"
    """Void, written over, or returned."""


class MappedSlots:
    """Not thread-safe but for ``want`` and its own populating threads: they take ``lock``, the caller holds it."""

    def __init__(self, lock: threading.Condition) -> None:
        self._lock = lock
        self._slots: dict[int, Slot] = {}
        self._ready: set[Slot] = set()
        self._orphans: list[Slot] = []
        self._waiting: list[Slot] = []
        self._is_wanted = False
        self._populating: list[threading.Thread] = []
        self.make_ready: Callable[[Slot], None] = lambda slot: None
        """Called in the background for a slot with its pages in place, before it counts as ready."""

    def want(self) -> None:
        """Captures will come: from now on pages are put in place for them, in the background.

        Not before: beside a restart, which only reads, that takes a processor and the lock of the address space; a
        restore of 1.2 GB took twice as long.
        """
        with self._lock:
            self._is_wanted = True
            while self._waiting:
                self._begin_populating(self._waiting.pop())

    def get(self, number: int) -> Slot | None:
        """The slot that the keeper calls ``number``; good for reading."""
        return self._slots.get(number)

    def ready(self) -> tuple[Slot, ...]:
        """Slots whose pages are in this process's tables; good for writing at full speed."""
        return tuple(slot for slot in self._slots.values() if slot in self._ready)

    def newest_sequence(self) -> int:
        """The greatest sequence number in any slot."""
        return max((slot.status().sequence for slot in self._slots.values()), default=0)

    def state_of(self, sequence: int) -> CaptureState:
        """Return the state of the capture with that sequence number."""
        for slot in (*self._slots.values(), *self._orphans):
            status = slot.status()
            if status.sequence == sequence and status.phase is SlotPhase.CAPTURING:
                return CaptureState.COPYING
            if status.sequence == sequence and status.phase is SlotPhase.WHOLE:
                is_held = any(slot is held for held in self._slots.values())
                return CaptureState.HELD if is_held else CaptureState.ALONE
        return CaptureState.LOST

    def map(self, number: int, fd: int) -> None:
        """Map a slot that the keeper handed over, unless it is mapped already; its pages follow in the background."""
        inode = os.fstat(fd).st_ino
        for known in (*self._slots.values(), *self._orphans):
            if os.fstat(known.fd).st_ino == inode:
                os.close(fd)
                self._slots[number] = known
                self._orphans = [slot for slot in self._orphans if slot is not known]
                return
        try:
            slot = Slot.attach(fd)
        except (FormatError, OSError) as error:
            logger.warning("a slot of the keeper cannot be mapped: %s", error)
            return
        self._slots[number] = slot
        if self._is_wanted:
            self._begin_populating(slot)
        else:
            self._waiting.append(slot)

    def _begin_populating(self, slot: Slot) -> None:
        thread = threading.Thread(target=self._populate, args=(slot,), name="lazysnap-populate", daemon=True)
        self._populating = [other for other in self._populating if other.is_alive()] + [thread]
        thread.start()

    def join(self, timeout_s: float) -> None:
        """Block until no thread populates a slot any more, at most ``timeout_s``. Call it without ``lock``."""
        deadline = time.monotonic() + timeout_s
        for thread in self._populating:
            thread.join(max(0.0, deadline - time.monotonic()))

    def _populate(self, slot: Slot) -> None:
        try:
            slot.populate()
            if not slot.is_file:  # a device must not pin pages of files, which the kernel writes to the disk
                self.make_ready(slot)
        except (OSError, ValueError) as error:  # no memory for page tables, or closed meanwhile
            logger.debug("a slot cannot be populated: %s", error)
            return
        except Exception as error:  # noqa: BLE001  the last handler of the thread: a capture tries once more
            logger.warning("a slot could not be made ready: %s: %s", type(error).__name__, error)
        with self._lock:
            # Else it was dropped meanwhile, and nothing may hold it.
            if any(slot is held for held in (*self._slots.values(), *self._orphans)):
                self._ready.add(slot)
                self._lock.notify_all()

    def all(self) -> tuple[Slot, ...]:
        """Every slot of the live keeper."""
        return tuple(self._slots.values())

    def remove(self, slot: Slot) -> int | None:
        """Forget a slot; its number, or ``None`` if the live keeper has no such slot."""
        number = next((number for number, known in self._slots.items() if known is slot), None)
        if number is not None:
            del self._slots[number]
            self._ready.discard(slot)
            self._waiting = [other for other in self._waiting if other is not slot]
            weakref.finalize(slot, os.close, slot.fd)  # somebody may still look at it
        return number

    def orphan_all(self) -> None:
        """The keeper is gone: its numbers mean nothing any more, the memory stays."""
        self._orphans += self._slots.values()
        self._slots.clear()

    def orphans(self) -> list[Slot]:
        """Slots for the next keeper to adopt."""
        return list(self._orphans)

    def take_all(self) -> list[Slot]:
        """Forget all slots and return them, for the caller to close."""
        self.orphan_all()
        slots, self._orphans, self._waiting = self._orphans, [], []
        self._ready.clear()
        return slots


class MappedFrozen:
    """Slots of frozen tensors by digest; those that no live keeper holds are orphans. Not thread-safe."""

    def __init__(self) -> None:
        self._slots: dict[str, Slot] = {}
        self._held: set[str] = set()

    def get(self, digest: str) -> Slot | None:
        """The slot that the keeper holds for ``digest``."""
        return self._slots.get(digest) if digest in self._held else None

    def take(self, digest: str, fd: int) -> None:
        """Map what the keeper handed over, unless it is mapped already."""
        known = self._slots.get(digest)
        if known is not None and os.fstat(known.fd).st_ino == os.fstat(fd).st_ino:
            os.close(fd)
        else:
            try:
                slot = Slot.attach(fd)
            except (FormatError, OSError) as error:
                logger.warning("the keeper's frozen tensors cannot be mapped: %s", error)
                return
            self.drop(digest)
            self._slots[digest] = slot
        self._held.add(digest)

    def drop(self, digest: str) -> None:
        """The keeper let it go."""
        self._held.discard(digest)
        slot = self._slots.pop(digest, None)
        if slot is not None:
            # Another thread may still look at it.
            weakref.finalize(slot, os.close, slot.fd)

    def orphan_all(self) -> None:
        """The keeper is gone, the memory stays."""
        self._held.clear()

    def orphans(self) -> list[tuple[str, Slot]]:
        """Return the slots for the next keeper to adopt."""
        return [(digest, slot) for digest, slot in self._slots.items() if digest not in self._held]

    def take_all(self) -> list[Slot]:
        """Forget all and return them, for the caller to close."""
        slots = list(self._slots.values())
        self._slots.clear()
        self._held.clear()
        return slots
