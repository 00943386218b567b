"""Copies CPU tensors into a slot from a thread of their own, in slices, without the interpreter lock.

``memmove`` through ctypes is single-threaded on purpose: ``Tensor.copy_`` would start a second team of compute
threads in this thread, which then fight with training's own. Slices of 1 MiB at normal priority won over whole
tensors, lower priorities and an inline copy (docs/benchmarks.md, "copy strategies").
"""

import ctypes
import logging
import queue
import threading
import time

import torch

from lazysnap import faults
from lazysnap.capture.job import CaptureJob, CapturePhase
from lazysnap.capture.plan import view_of

logger = logging.getLogger(__name__)

SLICE_BYTES = 1 << 20


def copy_eager(job: CaptureJob) -> None:
    """Copy every CPU tensor that may change at any time, before control returns to training. Blocks."""
    chosen = job.plan.eager_on_cpu
    if chosen:
        views = [job.plan.view(job.slot, index) for index in chosen]
        with torch.no_grad():
            torch._foreach_copy_(views, [job.sources[index] for index in chosen])


class CpuCopier:
    """The copy thread. One job at a time; ``begin`` never blocks."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[CaptureJob | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, job: CaptureJob) -> None:
        """Start to copy ``job``'s lazy CPU tensors; the thread commits the capture when it is whole."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="lazysnap-copy", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def close(self, timeout_s: float) -> None:
        """Stop the thread after its current job."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(timeout_s)
            self._thread = None

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._copy(job)
            except Exception as error:  # noqa: BLE001  the rim of the thread: the capture fails, training goes on
                job.give_up(CapturePhase.FAILED, f"{type(error).__name__}: {error}")
            finally:
                job.released.set()
            del job  # sources must not live until the next boundary

    def _copy(self, job: CaptureJob) -> None:
        started = time.perf_counter()
        faults.point("capture.copy")
        # A tensor, so that the slot stays mapped meanwhile. One for each record would be hundreds, and start a
        # collection.
        image = view_of(job.slot.buffer, job.slot.image_offset, torch.uint8, (1,))
        for index in job.plan.lazy_on_cpu:
            if job.is_given_up:
                return
            record = job.plan.records[index]
            source = job.sources[index].detach()  # its memory stays while it is read, whatever the owner does
            if record.is_dense:
                _copy_bytes(job, image.data_ptr() + record.offset, source.data_ptr(), record.nbytes)
            else:
                job.plan.view(job.slot, index).copy_(source)
            job.slot.advance(record.offset + record.nbytes)
            faults.point("capture.copied_tensor")
        for event in job.wait_for_devices:
            event.synchronize()
        job.copy_s = time.perf_counter() - started
        changed = job.changed_sources()
        if changed:
            # Everything was read by now: what changes later does not matter, what changed before may be torn.
            job.give_up(CapturePhase.TORN, f"{len(changed)} tensors changed while they were copied: {changed[0]}, …")
        else:
            job.commit()


def _copy_bytes(job: CaptureJob, target: int, source: int, count: int) -> None:
    for start in range(0, count, SLICE_BYTES):
        if job.is_given_up:
            return
        ctypes.memmove(target + start, source + start, min(SLICE_BYTES, count - start))
