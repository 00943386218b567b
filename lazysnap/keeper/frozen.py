"""The keeper's images of immutable tensors: a slot each, called by the checksum of its bytes, apart from the captures.

A slot is whole when its words say so: the trainer compares the checksum of what stands in it before it writes the last
word.
"""

import os
import threading
import weakref
from collections.abc import Callable, Iterable

from lazysnap import faults
from lazysnap.arena import Slot, SlotPhase, Word
from lazysnap.errors import FormatError, MemoryBoundExceeded
from lazysnap.keeper.slot_pool import check_room
from lazysnap.shard.manifest import CaptureMeta


class FrozenPool:
    """Slots by digest, the newest last. Thread-safe."""

    def __init__(self, dropped: Callable[[str], None]) -> None:
        self._dropped = dropped
        self._lock = threading.Lock()
        self._slots: dict[str, Slot] = {}
        self._references: weakref.WeakKeyDictionary[Slot, tuple[int, str | None]] = weakref.WeakKeyDictionary()

    def get(self, digest: str) -> Slot | None:
        """The whole image of that digest."""
        with self._lock:
            slot = self._slots.get(digest)
        return slot if slot is not None and _is_whole(slot) else None

    def items(self) -> list[tuple[str, Slot]]:
        """Every image, whole or not, with its digest."""
        with self._lock:
            return list(self._slots.items())

    def digests(self) -> list[str]:
        """Of the whole ones."""
        return [digest for digest, slot in self.items() if _is_whole(slot)]

    @property
    def size_bytes(self) -> int:
        """Memory that all of them take."""
        return sum(slot.size_bytes for _, slot in self.items())

    def provide(self, digest: str, meta: int, image: int, free_bytes: int | None) -> Slot:
        """The slot for that digest: the one that is there, or a new one of this size.

        Blocks: populates memory. Raises: MemoryBoundExceeded, if it takes more than ``free_bytes``, or than there is.
        """
        with self._lock:
            slot = self._slots.pop(digest, None)
            if slot is not None:
                self._slots[digest] = slot
        if slot is not None:
            return slot
        needed = Slot.bytes_for(meta, image)
        if free_bytes is not None and needed > free_bytes:
            raise MemoryBoundExceeded(
                f"the immutable tensors need {needed} bytes, MemoryLevel.max_bytes leaves {max(0, free_bytes)} beside "
                "the slots for snapshots; raise it"
            )
        check_room(needed, "the immutable tensors")
        faults.point("keeper.frozen.make")
        slot = Slot.create(meta, image)
        try:
            slot.populate()
        except OSError as error:
            slot.close()
            raise MemoryBoundExceeded(
                f"the machine refused {needed} bytes for the immutable tensors: {os.strerror(error.errno or 0)}"
            ) from error
        slot.set_word(Word.READY, 1)
        return self.adopt(digest, slot)

    def adopt(self, digest: str, slot: Slot) -> Slot:
        """Take over a slot that a trainer kept when an earlier keeper died; the one that serves for that digest."""
        with self._lock:
            known = self._slots.get(digest)
            if known is not None and (_is_whole(known) or _inode(known) == _inode(slot)):
                slot.close()
                return known
            self._slots[digest] = slot
        return slot

    def sweep(self, captures: Iterable[Slot], *, is_attached: bool) -> None:
        """Let go of images that no capture refers to, but for the newest; without a trainer also of half ones."""
        items = self.items()
        if not is_attached:
            for digest, slot in items:
                if not _is_whole(slot):
                    self._drop(digest, even_newest=True)
        if len(items) < 2:
            return
        try:
            referred = {self._reference(slot) for slot in captures}
        except FormatError:
            return  # a capture begins right now: next time
        for digest, _ in items[:-1]:
            if digest not in referred:
                self._drop(digest)

    def _reference(self, slot: Slot) -> str | None:
        """The digest that the capture in ``slot`` refers to. Raises: FormatError, if it cannot be told now."""
        status = slot.status()
        if status.phase not in (SlotPhase.WHOLE, SlotPhase.CAPTURING):
            return None
        sequence, digest = self._references.get(slot, (0, None))
        if sequence != status.sequence:
            frozen = CaptureMeta.from_bytes(slot.read_meta()).frozen
            digest = None if frozen is None else frozen.digest
            if slot.status().sequence != status.sequence:
                raise FormatError("another capture began meanwhile")
            self._references[slot] = (status.sequence, digest)
        return digest

    def close(self) -> None:
        """Let all images go."""
        with self._lock:
            slots, self._slots = list(self._slots.values()), {}
        for slot in slots:
            weakref.finalize(slot, os.close, slot.fd)

    def _drop(self, digest: str, *, even_newest: bool = False) -> None:
        with self._lock:
            if digest not in self._slots or (not even_newest and next(reversed(self._slots)) == digest):
                return  # asked for again meanwhile
            slot = self._slots.pop(digest)
            faults.point("keeper.frozen.drop")
            # Told before anybody can ask for another one of that digest.
            self._dropped(digest)
        # Another thread may still read it: the memory goes with the last reference.
        weakref.finalize(slot, os.close, slot.fd)


def _is_whole(slot: Slot) -> bool:
    return slot.status().phase is SlotPhase.WHOLE


def _inode(slot: Slot) -> int:
    return os.fstat(slot.fd).st_ino
