"""The copy thread: copies CPU tensors, waits for devices, moves the watermark and writes the end word.

Dense CPU tensors are copied with ``memmove`` in slices of 1 MiB, on this single thread: ``Tensor.copy_`` would start
another team of compute threads. Small tensors that are adjacent in the image are copied with one system call: one by
one, each would take 6 µs.
"""

import ctypes
import errno
import logging
import queue
import threading
import time
from array import array
from operator import itemgetter

import torch

from lazysnap import faults
from lazysnap.capture.batches import Batch
from lazysnap.capture.capture import Capture, CapturePhase
from lazysnap.capture.plan import view_of

logger = logging.getLogger(__name__)

SLICE_BYTES = 1 << 20
"""Bytes between two checks whether the capture was dropped."""


def copy_eager(capture: Capture) -> None:
    """Copy every eager CPU tensor, before control returns to training. Blocks."""
    views = []
    sources = []
    for batch in capture.plan.eager_batches:
        if len(batch.members) > 1:
            addresses = array("Q", [torch.Tensor.data_ptr(capture.sources[i]) for i in batch.members])
            if _gather(capture, batch, batch.pieces_at(addresses)):
                continue
        for index in batch.members:
            views.append(capture.plan.view(capture.slot, index))
            sources.append(capture.sources[index])
    if views:
        with torch.no_grad():
            torch._foreach_copy_(views, sources)


def _gather(capture: Capture, batch: Batch, pieces: "array[int]") -> bool:
    """Copy a batch with one system call; ``False`` if the size of files is limited to less than a slot has."""
    try:
        capture.slot.gather(batch.start, batch.end - batch.start, pieces)
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise
        return False
    return True


class CopyThread:
    """Finishes captures, one after the other; ``begin`` never blocks."""

    def __init__(self) -> None:
        self._queued: queue.SimpleQueue[Capture | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def begin(self, capture: Capture) -> None:
        """Copy the lazy CPU tensors of a capture, wait for copies of devices, commit the capture, release its slot.

        A capture that was dropped is only released.
        """
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="lazysnap-copy", daemon=True)
            self._thread.start()
        self._queued.put(capture)

    def close(self, timeout_s: float) -> None:
        """Stop the thread after its pending captures. Blocks: at most ``timeout_s``."""
        if self._thread is not None:
            self._queued.put(None)
            self._thread.join(timeout_s)
            if self._thread.is_alive():
                logger.warning("a copy into host memory did not end within %g s", timeout_s)
            self._thread = None

    def _run(self) -> None:
        while True:
            capture = self._queued.get()
            if capture is None:
                return
            try:
                if capture.plan.devices:  # a wait on device 0, where a thread begins, would make a context there
                    torch.accelerator.set_device_index(capture.plan.devices[0])
                if not capture.is_dropped:
                    self._copy(capture)
            except Exception as error:  # noqa: BLE001  the outermost handler of the thread: the capture fails, training goes on
                capture.drop(CapturePhase.FAILED, f"{type(error).__name__}: {error}")
            finally:
                capture.cpu_sources_read.set()
                _await_devices(capture)
                capture.release()
            del capture  # so that it is not kept alive until the next one

    def _copy(self, capture: Capture) -> None:
        started = time.perf_counter()
        faults.point("capture.copy")
        arrivals = sorted(capture.arrivals, key=itemgetter(0))
        # When one copy from a device has arrived, all bytes up to the next such copy are in the image.
        complete_up_to = [start for start, _ in arrivals]
        complete_up_to.append(capture.plan.layout.size_bytes)
        _copy_from_cpu(capture, complete_up_to[0])
        capture.copy_s = time.perf_counter() - started
        if capture.device_copies:
            capture.cpu_sources_read.set()
        for (_, wait_arrived), end in zip(arrivals, complete_up_to[1:], strict=True):
            wait_arrived()
            if capture.is_dropped:
                return
            capture.slot.advance(end)
            faults.point("capture.landed_from_device")
        for before, behind in capture.device_copies:
            behind.synchronize()
            capture.copy_s = max(capture.copy_s, before.elapsed_time(behind) / 1000)
        capture.commit()


def _copy_from_cpu(capture: Capture, first_of_device: int) -> None:
    """Copy the lazy CPU tensors in file order; the watermark stops where bytes of a device begin."""
    # One tensor keeps the slot mapped. One for each record would be hundreds, and trigger a garbage collection.
    image = view_of(capture.slot.image, 0, torch.uint8, (1,))
    for batch in capture.plan.lazy_batches:
        if capture.is_dropped:
            return
        # The addresses are of the plan. If one has changed since, the capture is dropped anyway. If it is no longer
        # mapped, the call fails.
        if len(batch.members) == 1 or not _gather(capture, batch, batch.pieces):
            for index in batch.members:
                _copy_one(capture, index, image)
        if batch.start < first_of_device:
            capture.slot.advance(batch.end)
        faults.point("capture.copied_tensor")


def _copy_one(capture: Capture, index: int, image: torch.Tensor) -> None:
    record = capture.plan.records[index]
    source = capture.sources[index].detach()  # keeps the memory alive while it is read
    if record.is_dense:
        _copy_bytes(capture, image.data_ptr() + record.offset, source.data_ptr(), record.nbytes)
    else:
        capture.plan.view(capture.slot, index).copy_(source)


def _copy_bytes(capture: Capture, target: int, source: int, count: int) -> None:
    for start in range(0, count, SLICE_BYTES):
        if capture.is_dropped:
            return
        ctypes.memmove(target + start, source + start, min(SLICE_BYTES, count - start))


def _await_devices(capture: Capture) -> None:
    """Block until no device writes into the slot any more, also for a dropped capture."""
    for _, behind in capture.device_copies:
        try:
            behind.synchronize()
        except Exception as error:  # noqa: BLE001  a device that failed writes nothing more
            capture.drop(CapturePhase.FAILED, f"{type(error).__name__}: {error}")
