"""The keeper's slots: made, populated and let go within a bound."""

import logging
import os
import threading
import weakref
from collections.abc import Callable

from lazysnap import faults
from lazysnap.arena import Slot, Word, capacity_fits
from lazysnap.errors import MemoryBoundExceeded
from lazysnap.keeper.machine import may_drop

logger = logging.getLogger(__name__)

_RESERVE_BYTES = 256 << 20
"""Free memory that is left to the rest of the machine."""


def available_bytes() -> int:
    """Memory that can be taken without swapping: of the machine, or of this container if that is less."""
    available = 1 << 62
    with open("/proc/meminfo") as file:
        for line in file:
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    for folder, limit, used in (
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        try:
            with open(f"{folder}/{limit}") as first, open(f"{folder}/{used}") as second:
                bound = first.read().strip()
                if bound != "max":
                    held = int(second.read()) - _cache_bytes(f"{folder}/memory.stat")
                    available = min(available, int(bound) - held)
        except (OSError, ValueError):
            continue
    return max(0, available)


def _cache_bytes(path: str) -> int:
    """Pages of files that the kernel lets go when memory is needed, as MemAvailable counts them."""
    with open(path) as file:
        fields = dict(line.split() for line in file)
    return int(fields.get("inactive_file", 0)) + int(fields.get("active_file", 0)) // 2


def check_room(needed: int, what: str) -> None:
    """Raises: MemoryBoundExceeded, if ``what`` would leave too little to the rest of the machine."""
    free = available_bytes() - _RESERVE_BYTES
    if needed > free:
        raise MemoryBoundExceeded(
            f"{what} need {needed} bytes, {max(0, free)} are free; free memory, set MemoryLevel(slots=2), or capture a "
            "smaller state"
        )


class SlotPool:
    """Slots by number. Changes are made by one background thread; readers take ``all``."""

    def __init__(self, made: Callable[[int, Slot], None], dropped: Callable[[int], None]) -> None:
        self._made = made
        self._dropped = dropped
        self._slots: dict[int, Slot] = {}
        self._next = 0
        self._lock = threading.Lock()

    def all(self) -> list[Slot]:
        """Every slot there is."""
        with self._lock:
            return list(self._slots.values())

    def items(self) -> list[tuple[int, Slot]]:
        """Every slot with its number."""
        with self._lock:
            return list(self._slots.items())

    def adopt(self, slot: Slot) -> int:
        """Take over a slot that a trainer kept when an earlier keeper died."""
        with self._lock:
            inode = os.fstat(slot.fd).st_ino
            for number, other in self._slots.items():
                if os.fstat(other.fd).st_ino == inode:
                    # The same memory: the connection broke, not the keeper. Two slots of it would overwrite each other.
                    slot.close()
                    return number
            slot.set_word(Word.GOING, 0)  # its keeper died over it
            number = self._next
            self._next += 1
            self._slots[number] = slot
        return number

    def provide(self, wanted: tuple[int, int, int], max_bytes: int | None, is_read: Callable[[Slot], bool]) -> bool:
        """Bring the pool nearer to ``(meta capacity, image capacity, count)``; ``True`` if it is there.

        Blocks: populates memory. A slot of another size goes only when nothing in it is needed; until then the pool
        holds fewer new ones if the bound wants it so.
        Raises: MemoryBoundExceeded, with the bytes needed and the bytes allowed.
        """
        meta, image, count = wanted
        each = Slot.bytes_for(meta, image)
        if max_bytes is not None and count * each > max_bytes:
            raise MemoryBoundExceeded(
                f"{count} slots of {each} bytes need {count * each} bytes, MemoryLevel.max_bytes leaves {max_bytes}; "
                "raise it, or set MemoryLevel(slots=2), or capture into fewer levels"
            )
        items = self.items()
        fitting = [slot for _, slot in items if fits(slot, meta, image)]
        statuses = [slot.status() for _, slot in items]
        others = 0
        for index, (number, slot) in enumerate(items):
            if fits(slot, meta, image) and len(fitting) <= count:
                continue
            if may_drop(statuses, index) and not is_read(slot) and slot.let_go():
                self._drop(number)
                fitting = [other for other in fitting if other is not slot]
            elif slot not in fitting:
                others += slot.size_bytes
        missing = count - len(fitting)
        if missing > 0 and not others:
            check_room(missing * each, f"{missing} more slots of {each} bytes")
        for _ in range(missing):
            held = len(fitting) * each + others
            if others and fitting and each + _RESERVE_BYTES > available_bytes():
                return False  # the first capture into a new slot frees an old one
            if max_bytes is not None and held + each > max_bytes:
                return False
            check_room(each, f"1 more slot of {each} bytes")
            fitting.append(self._make(meta, image))
        return not others

    def _make(self, meta: int, image: int) -> Slot:
        faults.point("keeper.memory.make")
        slot = Slot.create(meta, image)
        try:
            slot.populate()
        except OSError as error:
            slot.close()
            raise MemoryBoundExceeded(
                f"the machine refused {slot.size_bytes} bytes: {os.strerror(error.errno or 0)}"
            ) from error
        slot.set_word(Word.READY, 1)
        self._made(self.adopt(slot), slot)
        return slot

    def _drop(self, number: int) -> None:
        with self._lock:
            slot = self._slots.pop(number)
        faults.point("keeper.memory.drop")
        self._dropped(number)
        # Another thread may still look at it: the memory goes with the last reference.
        weakref.finalize(slot, os.close, slot.fd)


def fits(slot: Slot, meta_capacity: int, image_capacity: int) -> bool:
    """Whether ``slot`` serves for captures of this size."""
    return slot.meta_capacity >= meta_capacity and capacity_fits(slot.image_capacity, image_capacity)
