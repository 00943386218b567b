"""The image in a slot, readable while it lands."""

import time
from collections.abc import Callable

from lazysnap.errors import FormatError
from lazysnap.memory.arena import Slot, SlotPhase, SlotStatus, Word
from lazysnap.memory.failures import CaptureAborted
from lazysnap.shard.manifest import CaptureMeta

_POLL_S = 0.001
STALL_S = 300.0
"""A capture whose watermark does not move for so long is given up."""
_BEGIN_S = 1.0
"""Seconds that a capture may take to write its metadata, before its slot is readable."""


class SlotSource:
    """One capture of a slot. See ``levels.source.BlockSource``."""

    def __init__(self, slot: Slot, chosen: SlotStatus, while_waiting: Callable[[], None]) -> None:
        """Read the capture that was ``chosen``. ``while_waiting`` is called while its bytes are missing, and may raise.

        Raises: CaptureAborted, if it is gone; FormatError, if unreadable."""
        self._slot = slot
        self._while_waiting = while_waiting
        self._step = chosen.step
        self.sequence = chosen.sequence
        self.size_bytes = chosen.image_bytes
        # Before and after: metadata and numbers must be of one capture, whatever the trainer does meanwhile.
        self._check()
        meta = slot.read_meta()
        self._check()
        # What was chosen may have been seen half begun: its number is written before its size, and that before these.
        if slot.word(Word.IMAGE_BYTES) != self.size_bytes:
            raise CaptureAborted(f"the capture of step {self._step} was just being begun")
        self.meta = CaptureMeta.from_bytes(meta, "a slot of the arena")
        if self.meta.step != chosen.step:
            raise FormatError(f"a slot of the arena: its words say step {chosen.step}, its metadata {self.meta.step}")

    def _check(self) -> int:
        status = self._slot.status()
        if status.sequence != self.sequence or status.phase not in (SlotPhase.CAPTURING, SlotPhase.WHOLE):
            raise CaptureAborted(f"the capture of step {self._step} was dropped or its slot reused")
        return self.size_bytes if status.phase is SlotPhase.WHOLE else status.watermark

    def _wait(self, upto: int) -> None:
        seen, deadline = -1, 0.0
        while (watermark := self._check()) < upto:
            if watermark != seen:
                seen, deadline = watermark, time.monotonic() + STALL_S
            elif time.monotonic() > deadline:
                raise CaptureAborted(f"the capture of step {self._step} stands still at byte {watermark}")
            self._while_waiting()
            time.sleep(_POLL_S)

    def view(self, offset: int, length: int) -> memoryview:
        """See ``BlockSource.view``."""
        self._wait(min(offset + length, self.size_bytes))
        return self._slot.read(offset, length)

    def _is_whole(self) -> bool:
        """True if it is whole and still the same one. Reads the words once. Raises: CaptureAborted."""
        status = self._slot.status()
        self._check()
        return status.phase is SlotPhase.WHOLE and status.sequence == self.sequence

    def finish(self) -> None:
        """Every byte was read: the capture must still be the same one, and whole."""
        self._wait(self.size_bytes)
        deadline = time.monotonic() + STALL_S
        while not self._is_whole():
            if time.monotonic() > deadline:
                raise CaptureAborted(f"the capture of step {self._step} was not committed by its trainer")
            self._while_waiting()
            time.sleep(_POLL_S)


def open_slot(find: Callable[[], Slot | None], step: int, while_waiting: Callable[[], None]) -> tuple[Slot, SlotSource]:
    """The capture of that step in the slot that ``find`` finds: it shows the step before its metadata is there, which
    takes a moment. Blocks: for that. Raises: CaptureAborted, if it is not there any more; FormatError.
    """
    deadline = time.monotonic() + _BEGIN_S
    while True:
        slot = find()
        if slot is None:
            raise CaptureAborted(f"step {step} is not in memory any more")
        try:
            status = slot.status()
            if status.step == step:
                return slot, SlotSource(slot, status, while_waiting)
        except (FormatError, CaptureAborted):
            if time.monotonic() > deadline:
                raise
        if time.monotonic() > deadline:
            raise CaptureAborted(f"step {step} is not in memory any more")
        while_waiting()
        time.sleep(_POLL_S)
