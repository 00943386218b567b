"""The keeper's slots: made, populated and let go within a bound."""

import logging
import os
import threading
from collections.abc import Callable

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
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ):
        try:
            with open(limit) as first, open(used) as second:
                bound = first.read().strip()
                if bound != "max":
                    available = min(available, int(bound) - int(second.read()))
        except (OSError, ValueError):
            continue
    return available


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
                f"{count} slots of {each} bytes need {count * each} bytes, MemoryLevel.max_bytes is {max_bytes}; raise "
                "it, or set MemoryLevel(slots=2), or capture into fewer levels"
            )
        items = self.items()
        fitting = [slot for _, slot in items if fits(slot, meta, image)]
        statuses = [slot.status() for _, slot in items]
        others = 0
        for index, (number, slot) in enumerate(items):
            if fits(slot, meta, image) and len(fitting) <= count:
                continue
            if may_drop(statuses, index) and not is_read(slot):
                self._drop(number)
                fitting = [other for other in fitting if other is not slot]
            elif slot not in fitting:
                others += slot.size_bytes
        for _ in range(count - len(fitting)):
            held = len(fitting) * each + others
            if max_bytes is not None and held + each > max_bytes:
                return False
            if each + _RESERVE_BYTES > available_bytes():
                raise MemoryBoundExceeded(
                    f"one more slot needs {each} bytes, {available_bytes()} are free ({len(fitting)} of {count} slots "
                    "exist); free memory, set MemoryLevel(slots=2), or capture a smaller state"
                )
            fitting.append(self._make(meta, image))
        return not others

    def _make(self, meta: int, image: int) -> Slot:
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
        self._dropped(number)
        slot.close()


def fits(slot: Slot, meta_capacity: int, image_capacity: int) -> bool:
    """Whether ``slot`` serves for captures of this size."""
    return slot.meta_capacity >= meta_capacity and capacity_fits(slot.image_capacity, image_capacity)
