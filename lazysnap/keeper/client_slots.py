"""The slots that a trainer maps: by the keeper's numbers while one is attached, as orphans between two keepers."""

import enum
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable

from lazysnap.keeper.protocol import SlotName
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
    """Slots for captures by their number, slots of frozen tensors by their digest. Those that no live keeper holds are
    orphans, for the next keeper to adopt.

    Not thread-safe but for ``want`` and its own populating threads: they take ``lock``, the caller holds it.
    """

    def __init__(self, lock: threading.Condition) -> None:
        self._lock = lock
        self._slots: dict[SlotName, Slot] = {}
        self._ready: set[Slot] = set()
        self._orphans: list[tuple[str | None, Slot]] = []
        """Each with its digest, if there are frozen tensors in it."""
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

    def get(self, name: SlotName) -> Slot | None:
        """The slot that the keeper holds under that name; good for reading."""
        return self._slots.get(name)

    def ready(self) -> tuple[Slot, ...]:
        """Slots whose pages are in this process's tables; good for writing at full speed."""
        return tuple(slot for slot in self.all() if slot in self._ready)

    def newest_sequence(self) -> int:
        """The greatest sequence number of any capture."""
        return max((slot.status().sequence for slot in self.all()), default=0)

    def state_of(self, sequence: int) -> CaptureState:
        """Return the state of the capture with that sequence number."""
        held, alone = self.all(), [slot for digest, slot in self._orphans if digest is None]
        for slot, whole in (*((one, CaptureState.HELD) for one in held), *((one, CaptureState.ALONE) for one in alone)):
            status = slot.status()
            if status.sequence == sequence and status.phase is SlotPhase.CAPTURING:
                return CaptureState.COPYING
            if status.sequence == sequence and status.phase is SlotPhase.WHOLE:
                return whole
        return CaptureState.LOST

    def map(self, name: SlotName, fd: int) -> None:
        """Map a slot that the keeper handed over, unless it is mapped already.

        The pages of one for captures follow in the background. Raises: FormatError or OSError, if it cannot be mapped.
        """
        for known in (*self._slots.values(), *(slot for _, slot in self._orphans)):
            if os.path.sameopenfile(known.fd, fd):
                os.close(fd)
                self._slots[name] = known
                self._orphans = [orphan for orphan in self._orphans if orphan[1] is not known]
                return
        slot = Slot.attach(fd)
        if isinstance(name, str):
            self.drop(name)
        self._slots[name] = slot
        if isinstance(name, int) and self._is_wanted:
            self._begin_populating(slot)
        elif isinstance(name, int):
            self._waiting.append(slot)

    def drop(self, digest: str) -> None:
        """Forget frozen tensors: no keeper holds them any more."""
        gone = [slot for known, slot in self._orphans if known == digest]
        self._orphans = [orphan for orphan in self._orphans if orphan[0] != digest]
        if (held := self._slots.pop(digest, None)) is not None:
            gone.append(held)
        for slot in gone:
            weakref.finalize(slot, os.close, slot.fd)  # another thread may still look at it

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
            if any(slot is held for held in (*self._slots.values(), *(orphan for _, orphan in self._orphans))):
                self._ready.add(slot)
                self._lock.notify_all()

    def all(self) -> tuple[Slot, ...]:
        """Every slot for captures of the live keeper."""
        return tuple(slot for name, slot in self._slots.items() if isinstance(name, int))

    def remove(self, slot: Slot) -> int | None:
        """Forget a slot for captures; its number, or ``None`` if the live keeper has no such slot."""
        for number, known in self._slots.items():
            if known is slot and isinstance(number, int):
                del self._slots[number]
                self._ready.discard(slot)
                self._waiting = [other for other in self._waiting if other is not slot]
                weakref.finalize(slot, os.close, slot.fd)  # somebody may still look at it
                return number
        return None

    def orphan_all(self) -> None:
        """The keeper is gone: its numbers mean nothing any more, the memory stays."""
        self._orphans += [(name if isinstance(name, str) else None, slot) for name, slot in self._slots.items()]
        self._slots.clear()

    def orphans(self) -> list[tuple[str | None, Slot]]:
        """Slots for the next keeper to adopt, with the digest of what is frozen in them.

        Frozen tensors come first: no capture is taken up before what it refers to.
        """
        return sorted(self._orphans, key=lambda orphan: orphan[0] is None)

    def take_all(self) -> list[Slot]:
        """Forget all slots and return them, for the caller to close."""
        self.orphan_all()
        slots, self._orphans, self._waiting = [slot for _, slot in self._orphans], [], []
        self._ready.clear()
        return slots
