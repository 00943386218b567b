"""Reads one capture from a slot, also while it is being copied."""

import time
from collections.abc import Callable

from lazysnap.errors import FormatError, LazySnapError
from lazysnap.memory.slot_choice import SlotPhase, SlotView
from lazysnap.memory.slots import Slot
from lazysnap.shard.manifest import CaptureMeta

STALL_S = 300.0
"""Seconds without progress of the watermark after which a capture is given up."""
_POLL_S = 0.001


class CaptureAborted(LazySnapError):
    """The capture will never be complete: it is torn, or its trainer died."""


class CaptureReader:
    """The bytes of one capture, block by block while they are copied. See ``levels.source.BlockSource``.

    The keeper is woken when a capture begins, so a reader waits for the watermark. The trainer may overwrite the slot
    at any time unless it is held, so the read bytes are valid only after ``finish``, which compares the sequence
    number. Thread-safe: nothing here changes after the constructor.

    Example::

        reader = CaptureReader(slot, sequence, beat)
        for offset in range(0, reader.size_bytes, block_bytes):
            write(reader.view(offset, block_bytes))
        reader.finish()  # only now the bytes are known to be of that capture
    """

    def __init__(self, slot: Slot, sequence: int, beat: Callable[[], None]) -> None:
        """Read the words and the metadata of a capture.

        Args:
            slot: the slot that holds it.
            sequence: number of the capture.
            beat: called repeatedly while waiting for bytes. Its errors end the wait.

        Raises: CaptureAborted, if the capture is not in the slot; FormatError, if it is damaged.
        """
        self._slot = slot
        self._beat = beat
        self.sequence = sequence
        view = self.check()
        try:
            text = slot.read_meta()
        finally:
            self.check()  # metadata that was overwritten is not damaged
        self.size_bytes = view.image_bytes
        self.meta = CaptureMeta.from_bytes(text, "a slot")
        names = (int(self.meta.start, 16), self.meta.step)
        if names != (view.start, view.step) or self.size_bytes > slot.image_capacity_bytes:
            raise FormatError(
                f"a slot: its words say step {view.step} of start {view.start:016x} and {self.size_bytes} bytes, its "
                f"metadata says step {self.meta.step} of start {self.meta.start}"
            )

    def view(self, offset: int, length: int) -> memoryview:
        """Return the bytes ``[offset, offset + length)``. They may end at the next page boundary after the capture.

        Blocks: until they are copied, at most ``STALL_S`` without progress. Raises: CaptureAborted.
        """
        needed_bytes = min(offset + length, self.size_bytes)
        self._wait(lambda view: view.watermark_bytes >= needed_bytes)
        return self._slot.read(offset, length)

    def check(self) -> SlotView:
        """Return the words of the slot, which prove that all viewed bytes are of this capture. Raises:
        CaptureAborted.
        """
        view = self._slot.view()
        if view.sequence != self.sequence or view.phase not in (SlotPhase.CAPTURING, SlotPhase.WHOLE):
            raise CaptureAborted(f"capture {self.sequence} was discarded, or its slot was overwritten")
        return view

    def finish(self) -> None:
        """Check, after the last byte was read, that the capture is whole and was not replaced.

        Blocks: until its trainer commits it, at most ``STALL_S`` without progress. Raises: CaptureAborted.
        """
        self._wait(lambda view: view.phase is SlotPhase.WHOLE)

    def _wait(self, is_ready: Callable[[SlotView], bool]) -> None:
        watermark_bytes = -1
        deadline = 0.0
        while True:
            view = self.check()
            if is_ready(view):
                return
            if view.watermark_bytes != watermark_bytes:
                watermark_bytes = view.watermark_bytes
                deadline = time.monotonic() + STALL_S
            elif time.monotonic() > deadline:
                raise CaptureAborted(f"the copy of step {view.step} stopped at byte {watermark_bytes}")
            self._beat()
            time.sleep(_POLL_S)
