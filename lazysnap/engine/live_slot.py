"""A slot without memory for the image: readers get the bytes from the tensors of the state, while training waits."""

import bisect
import ctypes
import mmap
import os
import weakref

import torch

from lazysnap.capture.job import CaptureJob
from lazysnap.errors import CaptureAborted
from lazysnap.levels.source import map_anonymous
from lazysnap.memory.arena import Slot, SlotPhase

_ANY_SIZE = 1 << 62


class LiveSlot(Slot):
    """Control words and metadata are those of any slot; the image is put together block by block as it is read.

    ``read`` is thread-safe. The tensors must not change from ``hold`` to ``drop``; what is read of one that did, or
    after ``drop``, raises CaptureAborted and so is never committed.
    """

    def __init__(self, fd: int, buffer: mmap.mmap) -> None:
        super().__init__(fd, buffer)
        self.image_capacity = _ANY_SIZE
        self._job: CaptureJob | None = None
        self._ends: list[int] = []

    @classmethod
    def make(cls, meta_capacity: int) -> "LiveSlot":
        """A slot for metadata of at most so many bytes. It goes with its last reference: nobody closes it.

        Raises: OSError, if there is no memory for it.
        """
        slot = cls.create(meta_capacity, 0)
        assert isinstance(slot, LiveSlot)
        weakref.finalize(slot, os.close, slot.fd)
        return slot

    def hold(self, job: CaptureJob) -> None:
        """Let readers see the tensors of ``job``, of which the slot is this one."""
        records = job.plan.records
        self._ends = [records[index].offset + records[index].nbytes for index in job.plan.order]
        self._job = job

    def end(self) -> None:
        """No reader sees a tensor any more; the capture in the slot counts for nothing to those that still read."""
        self.discard()
        self.unpin()
        self._job = None

    def let_go(self) -> None:
        """No reader sees a tensor any more; the words stay as they are."""
        self._job = None

    def read(self, offset: int, length: int) -> memoryview:
        """Copies of the bytes, zeros behind the end. Raises: CaptureAborted."""
        job = self._job
        if job is None:
            raise CaptureAborted("training went on: the tensors of this capture may have changed")
        out, plan = map_anonymous(length), job.plan
        header = plan.layout.header[offset : offset + length]
        out[: len(header)] = header
        first = bisect.bisect_right(self._ends, offset)
        for index in plan.order[first:]:
            record = plan.records[index]
            if record.offset >= offset + length:
                break
            start, end = max(offset, record.offset), min(offset + length, record.offset + record.nbytes)
            if start < end:
                _copy(job.sources[index].detach(), start - record.offset, out[start - offset : end - offset])
        changed = job.changed_sources()
        if changed:
            # Tried again it would be no better: this capture is over.
            self.discard()
            raise CaptureAborted(f"{len(changed)} tensors changed while they were written: {changed[0]}, …")
        if self._job is not job or self.status().phase is SlotPhase.VOID:
            raise CaptureAborted("training went on while the tensors of this capture were read")
        return out


def _copy(source: torch.Tensor, start: int, out: memoryview) -> None:
    """Copy bytes of a tensor, from ``start`` on, as a shard holds them."""
    address = ctypes.addressof(ctypes.c_ubyte.from_buffer(out))
    if source.device.type == "cpu" and source.is_contiguous() and not source.is_conj() and not source.is_neg():
        ctypes.memmove(address, source.data_ptr() + start, len(out))
        return
    with torch.no_grad():
        flat = source.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
        torch.frombuffer(out, dtype=torch.uint8).copy_(flat[start : start + len(out)])
