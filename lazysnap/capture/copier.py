"""The copy thread: copies CPU tensors, waits for devices, and alone moves the watermark and writes the end word.

CPU tensors are copied with ``memmove`` through ctypes, which is single-threaded on purpose: ``Tensor.copy_`` would
start a second team of compute threads in this thread, which then fight with training's own. Slices of 1 MiB at normal
priority won over whole tensors, lower priorities and an inline copy (docs/benchmarks.md, "copy strategies").
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


class CopyThread:
    """Finishes captures, one after the other; ``begin`` never blocks."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[CaptureJob | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, job: CaptureJob) -> None:
        """Copy ``job``'s lazy CPU tensors, wait for what devices copy, commit the capture, release its slot. Of a
        capture that was given up only the last.
        """
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="lazysnap-copy", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def close(self, timeout_s: float) -> None:
        """Stop the thread after the captures that it has. Blocks: at most ``timeout_s``."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                logger.warning("a copy into host memory did not end within %g s", timeout_s)
            self._thread = None

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if job.plan.devices:  # a wait on device 0, where a thread begins, would make a context there
                    torch.accelerator.set_device_index(job.plan.devices[0])
                if not job.is_given_up:
                    self._copy(job)
            except Exception as error:  # noqa: BLE001  the outermost handler of the thread: the capture fails, training goes on
                job.give_up(CapturePhase.FAILED, f"{type(error).__name__}: {error}")
            finally:
                job.cpu_sources_read.set()
                _await_devices(job)
                job.released.set()
            del job  # sources must not live until the next boundary

    def _copy(self, job: CaptureJob) -> None:
        started = time.perf_counter()
        faults.point("capture.copy")
        arrivals = sorted(job.arrivals, key=lambda arrival: arrival[0])
        # Behind the bytes of one copy from a device, those up to the next such copy are there as well.
        limits = [*(start for start, _ in arrivals), job.plan.layout.size_bytes]
        _copy_from_cpu(job, limits[0])
        job.copy_s = time.perf_counter() - started
        if job.device_copies:
            job.cpu_sources_read.set()
        for (_, land), end in zip(arrivals, limits[1:], strict=True):
            land()
            if job.is_given_up:
                return
            job.slot.advance(end)
            faults.point("capture.landed_from_device")
        for before, behind in job.device_copies:
            behind.synchronize()
            job.copy_s = max(job.copy_s, before.elapsed_time(behind) / 1000)
        job.commit()


def _copy_from_cpu(job: CaptureJob, first_of_device: int) -> None:
    """Copy the lazy CPU tensors in file order; the watermark stops where bytes of a device begin."""
    # A tensor, so that the slot stays mapped meanwhile. One for each record would be hundreds, and start a collection.
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
        if record.offset < first_of_device:
            job.slot.advance(record.offset + record.nbytes)
        faults.point("capture.copied_tensor")


def _copy_bytes(job: CaptureJob, target: int, source: int, count: int) -> None:
    for start in range(0, count, SLICE_BYTES):
        if job.is_given_up:
            return
        ctypes.memmove(target + start, source + start, min(SLICE_BYTES, count - start))


def _await_devices(job: CaptureJob) -> None:
    """Block until no device writes into the slot any more, whatever became of the capture."""
    for _, behind in job.device_copies:
        try:
            behind.synchronize()
        except Exception as error:  # noqa: BLE001  a device that failed writes nothing more
            job.give_up(CapturePhase.FAILED, f"{type(error).__name__}: {error}")
