"""Makes memory for slots, within the limits of trainer and machine, or as a file if memory does not suffice.

This blocks until the kernel found the pages, a third of a second per GB, so it runs on its own thread.
"""

import errno
import logging
import os
from collections.abc import Iterable, Sequence

from rich.filesize import decimal

from lazysnap import faults
from lazysnap.core.messages import MemoryWish
from lazysnap.memory.budget import NODE, MemoryBoundExceeded
from lazysnap.memory.slot_choice import is_fitting
from lazysnap.memory.slot_files import check_room
from lazysnap.memory.slots import KeeperSlot, Slot, make_slot, slot_bytes

logger = logging.getLogger(__name__)

_PURPOSE = "more slots"
_ADVICE = {
    errno.EFBIG: "the keeper has the limit of its training for the size of a file: raise it (ulimit -f)",
    errno.EMFILE: "raise the limit of open files of the training (ulimit -n), which its keeper has, too",
    errno.ENFILE: "the whole machine has too many open files: raise fs.file-max",
}
"""Advice for errors other than a lack of memory."""


def make(wish: MemoryWish, slots: Sequence[Slot]) -> KeeperSlot | None:
    """Make one of the requested slots of a trainer.

    Blocks: until the memory is allocated.

    Args:
        wish: the request of the trainer.
        slots: all slots that the rank has now, also those of another size.

    Returns: the slot; None if slots of another size are in the way, which the trainer will return soon.
    Raises: MemoryBoundExceeded, with the bytes needed and the bytes allowed.
    """
    fitting: list[Slot] = []
    unfitting: list[Slot] = []
    for slot in slots:
        if is_fitting(slot.view(), wish.meta_bytes, wish.image_bytes):
            fitting.append(slot)
        else:
            unfitting.append(slot)
    refusal = _refusal(wish, fitting, unfitting)
    if refusal:
        missing = max(1, wish.num_slots - len(fitting))
        _check_files(wish.spill_directory, missing * _size_of_one(wish), refusal)
    elif _must_wait(wish, fitting, unfitting):
        return None
    faults.point("keeper.memory.make")
    return _make_slot_or_file(wish, refusal)


def refusal_text(count: int, each_bytes: int, available_bytes: int, *, is_bound: bool) -> str:
    """Return the reason why slots do not fit, and advice.

    Args:
        count: number of requested slots.
        each_bytes: bytes of one slot.
        available_bytes: bytes that are available for them.
        is_bound: True if ``MemoryLevel.max_bytes`` limits ``available_bytes``; otherwise the machine does.
    """
    limit = "MemoryLevel.max_bytes leaves" if is_bound else "this machine (or its container) has"
    needed_bytes = count * each_bytes
    needed = f"{count} slots of {each_bytes} bytes need {needed_bytes} bytes ({decimal(needed_bytes)})"
    available = f"{limit} {available_bytes} ({decimal(available_bytes)})"
    remedy = f"raise max_bytes to {needed_bytes}" if is_bound else "free memory, or use a larger machine"
    return f"{needed}, {available}; {remedy}, name a local disk in MemoryLevel.spill_dir, or capture a smaller state"


def _refusal(wish: MemoryWish, fitting: Sequence[Slot], unfitting: Sequence[Slot]) -> str:
    """Return the reason why memory does not suffice for all slots of a request; empty if it may suffice.

    Slots that are files count as missing. Otherwise the last slot would fit into memory, and take memory that the
    training will need.
    """
    each_bytes = _size_of_one(wish)
    num_in_memory = sum(1 for slot in fitting if not slot.is_file)
    missing_bytes = max(1, wish.num_slots - num_in_memory) * each_bytes
    held_bytes = _memory_of(fitting)
    free_bytes = NODE.free_bytes()
    if wish.max_bytes is not None and held_bytes + missing_bytes > wish.max_bytes:
        return refusal_text(wish.num_slots, each_bytes, wish.max_bytes, is_bound=True)
    if not _memory_of(unfitting) and missing_bytes > free_bytes:
        return refusal_text(wish.num_slots, each_bytes, free_bytes + held_bytes, is_bound=False)
    return ""


def _must_wait(wish: MemoryWish, fitting: Sequence[Slot], unfitting: Sequence[Slot]) -> bool:
    """Return True if there is memory for the slot once slots of another size are returned.

    A first slot of the new size is made in addition, if the machine has the memory: after a capture into it an old slot
    is no longer needed.
    """
    each_bytes = _size_of_one(wish)
    taken_bytes = _memory_of(unfitting)
    if taken_bytes and fitting and each_bytes > NODE.free_bytes():
        return True
    used_bytes = _memory_of(fitting) + taken_bytes
    return wish.max_bytes is not None and used_bytes + each_bytes > wish.max_bytes


def _make_slot_or_file(wish: MemoryWish, refusal: str) -> KeeperSlot:
    """Make the slot in memory unless that is refused, else as a file. Raises: MemoryBoundExceeded."""
    if not refusal:
        try:
            return _make_in_memory(wish)
        except MemoryBoundExceeded as error:  # other processes may have taken the memory
            refusal = str(error)
    _check_files(wish.spill_directory, _size_of_one(wish), refusal)
    try:
        slot = make_slot(wish.meta_bytes, wish.image_bytes, wish.spill_directory)
    except (MemoryBoundExceeded, OSError) as error:
        raise MemoryBoundExceeded(f"{refusal}; {error}") from error
    logger.info("a slot of %d bytes is a file in %s: %s", slot.size_bytes, wish.spill_directory, refusal)
    return slot


def _make_in_memory(wish: MemoryWish) -> KeeperSlot:
    size_bytes = _size_of_one(wish)
    with NODE.reserved(size_bytes, _PURPOSE) as allocated:
        try:
            return make_slot(wish.meta_bytes, wish.image_bytes, progress=allocated)
        except OSError as error:
            raise MemoryBoundExceeded(_refusal_of_machine(size_bytes, error)) from error


def _refusal_of_machine(size_bytes: int, error: OSError) -> str:
    """Return the reason why the machine refuses that memory, and advice."""
    advice = _ADVICE.get(error.errno or 0, "free memory, use a larger machine, or capture a smaller state")
    reason = os.strerror(error.errno or 0)
    return f"the machine refused {size_bytes} bytes ({decimal(size_bytes)}) for {_PURPOSE}: {reason}; {advice}"


def _check_files(directory: str | None, size_bytes: int, refusal: str) -> None:
    """Raise MemoryBoundExceeded if files are forbidden or do not fit."""
    if directory is None:
        raise MemoryBoundExceeded(refusal)
    try:
        check_room(directory, size_bytes)
    except MemoryBoundExceeded as error:
        raise MemoryBoundExceeded(f"{refusal}; {error}") from error


def _size_of_one(wish: MemoryWish) -> int:
    return slot_bytes(wish.meta_bytes, wish.image_bytes)


def _memory_of(slots: Iterable[Slot]) -> int:
    return sum(slot.memory_bytes for slot in slots)
