"""The keeper's slots: made in memory within a bound, else as files, and freed when the trainer returns them."""

import errno
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterable

from rich.filesize import decimal

from lazysnap import faults
from lazysnap.memory.arena import Slot, Word, capacity_fits
from lazysnap.memory.budget import NODE
from lazysnap.memory.failures import MemoryBoundExceeded
from lazysnap.memory.slot_files import check_room

logger = logging.getLogger(__name__)

_ADVICE = {
    errno.EFBIG: "the keeper has the limit of its training for the size of a file: raise it (ulimit -f)",
    errno.EMFILE: "raise the limit of open files of the training (ulimit -n), which its keeper has, too",
    errno.ENFILE: "the whole machine has too many open files: raise fs.file-max",
}
"""What helps against errors that are not a want of memory."""


def make_slot(meta_capacity: int, image_capacity: int, what: str) -> Slot:
    """Make a slot of these capacities for ``what``, with its pages in place. Blocks. Raises: MemoryBoundExceeded."""
    needed = Slot.bytes_for(meta_capacity, image_capacity)
    with NODE.reserved(needed, what) as populated:
        try:
            slot = Slot.create(meta_capacity, image_capacity)
        except OSError as error:
            raise MemoryBoundExceeded(_refusal_of_machine(needed, what, error)) from error
        try:
            slot.populate(progress=populated)
        except OSError as error:
            slot.close()
            raise MemoryBoundExceeded(_refusal_of_machine(needed, what, error)) from error
        except BaseException:
            slot.close()
            raise
    slot.set_word(Word.READY, 1)
    return slot


def _refusal_of_machine(size_bytes: int, what: str, error: OSError) -> str:
    """Return why the machine does not give that memory, and what would help."""
    advice = _ADVICE.get(error.errno or 0, "free memory, use a larger machine, or capture a smaller state")
    reason = os.strerror(error.errno or 0)
    return f"the machine refused {size_bytes} bytes ({decimal(size_bytes)}) for {what}: {reason}; {advice}"


def make_slot_or_file(capacities: tuple[int, int], what: str, refused: str, directory: str | None) -> Slot:
    """Make a slot of these capacities (metadata, image) for ``what``: in memory, else as a file in ``directory``.

    ``refused``: why there is no memory for it; empty, if there may be some. Blocks. Raises: MemoryBoundExceeded.
    """
    if not refused:
        try:
            return make_slot(*capacities, what)
        except MemoryBoundExceeded as error:  # other processes may have taken it meanwhile
            refused = str(error)
    _check_files(directory, Slot.bytes_for(*capacities), refused)
    try:
        slot = Slot.create(*capacities, directory)
    except (MemoryBoundExceeded, OSError) as error:
        raise MemoryBoundExceeded(f"{refused}; {error}") from error
    logger.info("a slot of %d bytes is a file in %s: %s", slot.size_bytes, directory, refused)
    slot.set_word(Word.READY, 1)
    return slot


def _check_files(directory: str | None, size_bytes: int, refused: str) -> None:
    """Raise MemoryBoundExceeded if there are to be no files, or no room for them."""
    if directory is None:
        raise MemoryBoundExceeded(refused)
    try:
        check_room(directory, size_bytes)
    except MemoryBoundExceeded as error:
        raise MemoryBoundExceeded(f"{refused}; {error}") from error


def refusal(count: int, slot_bytes: int, available_bytes: int, *, least: int, is_bound: bool) -> str:
    """Why ``count`` slots do not fit, and what would.

    ``least``: the smallest number of slots that this training may be given. ``is_bound``: ``available_bytes`` is what
    ``MemoryLevel.max_bytes`` leaves, else what the machine or its container has.
    """
    whose = "MemoryLevel.max_bytes leaves" if is_bound else "this machine (or its container) has"
    asked = f"{count} slots of {slot_bytes} bytes need {count * slot_bytes} bytes ({decimal(count * slot_bytes)})"
    found = f"{whose} {available_bytes} ({decimal(available_bytes)})"
    more = f"raise max_bytes to {count * slot_bytes}" if is_bound else "free memory, or use a larger machine"
    fitting = available_bytes // slot_bytes
    if least < count and fitting >= least:
        advice = f"set MemoryLevel(slots={fitting}), which fits, or {more}"
    elif fitting == 0:
        advice = f"not even one fits: {more}, or capture a smaller state"
    elif least < count:
        advice = f"{least} slots, the least that protect a run, do not fit either: {more}, or capture a smaller state"
    else:
        advice = f"fewer would not protect this run: {more}, or capture a smaller state"
    return f"{asked}, {found}; {advice}"


class SlotPool:
    """Slots by number. Changes are made by one background thread; readers take ``all``."""

    def __init__(self, made: Callable[[int, Slot], None]) -> None:
        self._made = made
        self.is_outdated: Callable[[tuple[int, int, int]], bool] = lambda wanted: False
        """True if other slots are wanted by now. Called before each new slot, since populating one may take seconds."""
        self._slots: dict[int, Slot] = {}
        self._returned: list[Slot] = []
        """Their memory counts as long as a level reads them."""
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

    def adopt(self, slot: Slot) -> tuple[int, Slot]:
        """Take over a slot that a trainer kept when an earlier keeper died; its number, and the slot that is used."""
        with self._lock:
            for number, other in self._slots.items():
                if os.path.sameopenfile(other.fd, slot.fd):
                    # The same memory: the connection broke, not the keeper. Two slots of it would overwrite each other.
                    slot.close()
                    return number, other
            number = self._next
            self._next += 1
            self._slots[number] = slot
        return number, slot

    def provide(
        self,
        wanted: tuple[int, int, int],
        max_bytes: int | None,
        is_read: Callable[[Slot], bool],
        least: int | None = None,
        spill_dir: str | None = None,
    ) -> bool:
        """Bring the pool nearer to ``(meta capacity, image capacity, count)``; ``True`` if it is there.

        ``max_bytes``: the bound for memory. ``least``: the smallest count that the trainer may be configured to, for
        messages. ``spill_dir``: where slots are made as files if memory is refused; ``None``: nowhere.

        Blocks: populates memory. Slots of another size stay until the trainer returns them; until then the pool holds
        fewer new ones if the bound wants it so.
        Raises: MemoryBoundExceeded, with the bytes needed and the bytes allowed.
        """
        meta, image, count = wanted
        each, least = Slot.bytes_for(meta, image), least or count
        with self._lock:
            self._returned = [slot for slot in self._returned if is_read(slot)]
            slots, returned = list(self._slots.values()), list(self._returned)
        fitting = [slot for slot in slots if fits(slot, meta, image)]
        others = [slot for slot in (*slots, *returned) if slot not in fitting]
        missing, held, taken = count - len(fitting), _memory_of(fitting), _memory_of(others)
        refused, free = "", NODE.free_bytes()
        if max_bytes is not None and held + missing * each > max_bytes:
            refused = refusal(count, each, max_bytes, least=least, is_bound=True)
        elif not taken and missing > 0 and missing * each > free:
            refused = refusal(count, each, free + held, least=least, is_bound=False)
        if refused and missing > 0:
            _check_files(spill_dir, missing * each, refused)
        for _ in range(missing):
            if self.is_outdated(wanted):
                return False
            if not refused:
                if taken and fitting and each > NODE.free_bytes():
                    return False  # the first capture into a new slot frees an old one
                if max_bytes is not None and _memory_of(fitting) + taken + each > max_bytes:
                    return False
            faults.point("keeper.memory.make")
            fitting.append(make_slot_or_file((meta, image), "more slots", refused, spill_dir))
            self._made(*self.adopt(fitting[-1]))
        return not others

    def close(self) -> None:
        """Let all slots go."""
        with self._lock:
            slots, self._slots, self._returned = list(self._slots.values()), {}, []
        for slot in slots:
            weakref.finalize(slot, os.close, slot.fd)

    def take_back(self, number: int) -> None:
        """The trainer needs nothing in this slot and will not write into it again."""
        with self._lock:
            slot = self._slots.pop(number)
            self._returned.append(slot)
        faults.point("keeper.memory.drop")
        # A level may still read it: the memory goes with the last reference.
        weakref.finalize(slot, os.close, slot.fd)


def _memory_of(slots: Iterable[Slot]) -> int:
    return sum(slot.memory_bytes for slot in slots)


def fits(slot: Slot, meta_capacity: int, image_capacity: int) -> bool:
    """True if ``slot`` serves for captures of this size."""
    return slot.meta_capacity >= meta_capacity and capacity_fits(slot.image_capacity, image_capacity)
