"""Starting and finishing captures: copies on every device of the state, and what the gate waits for."""

import logging
import time

import torch

from lazysnap import faults
from lazysnap.capture.copier import CpuCopier, copy_eager
from lazysnap.capture.cuda import CudaCopier
from lazysnap.capture.job import CaptureJob, CapturePhase
from lazysnap.capture.plan import CapturePlan
from lazysnap.memory.arena import Slot, Word
from lazysnap.shard.checksum import digest

logger = logging.getLogger(__name__)


class Captures:
    """At most one capture is in flight. All methods are called on the training thread."""

    def __init__(self) -> None:
        self._cpu = CpuCopier()
        self._cuda: dict[torch.device, CudaCopier] = {}
        self._events: list[tuple[CudaCopier, torch.cuda.Event]] = []
        self._retired: list[tuple[CaptureJob, list[torch.cuda.Event]]] = []
        self.job: CaptureJob | None = None
        """The capture that no gate has passed yet."""
        self._hung: CaptureJob | None = None

    def is_stuck(self) -> bool:
        """Whether a copy that was given up on may still write into its slot."""
        if self._hung is not None and self._hung.released.is_set():
            self._hung = None
        return self._hung is not None

    def begin(self, job: CaptureJob) -> None:
        """Copy what is eager, queue what is lazy. The slot's ``begin`` was called before.

        Raises: whatever a copy meets; then the capture is discarded, and nothing is in flight but what devices run.
        """
        self._events = []
        self.job = job
        try:
            self._start(job)
        except BaseException as error:
            # The copy thread is the last to start, so it does not write here. A pinned slot that stayed half begun
            # would hold persistence for ever.
            job.give_up(CapturePhase.FAILED, f"it could not begin: {type(error).__name__}: {error}")
            job.released.set()
            self.job = None
            self._retire(job)
            raise

    def _start(self, job: CaptureJob) -> None:
        faults.point("capture.begin")
        write_header(job.plan, job.slot)
        copy_eager(job)
        faults.point("capture.eager_copied")
        devices, on_cpu = job.plan.gpus, bool(job.plan.lazy_on_cpu)
        for device in devices:
            copier = self._cuda.setdefault(device, CudaCopier(device))
            # Only a lone device can commit in stream order; with several, the thread that waits for all of them does.
            alone = len(devices) == 1 and not on_cpu
            if alone:
                job.slot.set_word(Word.UNCHECKED, 1)
            self._events.append((copier, copier.begin(job, last=alone)))
        if on_cpu or not devices or len(devices) > 1:
            job.wait_for_devices = [event for _, event in self._events]
            self._cpu.begin(job)
        else:
            job.released.set()

    def finish(self, timeout_s: float) -> CaptureJob | None:
        """The gate: when it returns, sources may change. The job that it waited for, ``None`` if there was none.

        Blocks: until the copy thread is done, at most ``timeout_s``; device copies are waited for by the device.
        After the deadline the capture is given up; it never becomes whole.
        """
        job, self.job = self.job, None
        if job is None:
            return None
        by_device = job.released.is_set() and bool(self._events) and job.phase is CapturePhase.COPYING
        if by_device:
            changed = job.changed_sources()
            if changed:
                job.give_up(
                    CapturePhase.TORN, f"{len(changed)} tensors changed while they were copied: {changed[0]}, …"
                )
            else:
                job.committed_by_device()
                job.slot.set_word(Word.UNCHECKED, 0)
        elif not job.released.wait(timeout_s):
            job.give_up(CapturePhase.FAILED, f"the copy did not end within {timeout_s:g} s")
            self._hung = job
        for copier, event in self._events:
            copier.gate(event)
        self._retire(job)
        return job

    def discard(self, reason: str) -> CaptureJob | None:
        """Give up the capture in flight: something stepped beside it."""
        job = self.job
        if job is not None and job.give_up(CapturePhase.TORN, reason):
            return job
        return None

    def is_disturbed(self) -> bool:
        """Whether a source of the capture in flight changed since the boundary, before it was whole."""
        # TORN: the copy thread found it first.
        open_ = (CapturePhase.COPYING, CapturePhase.TORN)
        return self.job is not None and self.job.phase in open_ and bool(self.job.changed_sources())

    def is_writing(self, slot: Slot) -> bool:
        """Whether a device may still write into ``slot`` for a capture that passed its gate already."""
        return any(job.slot is slot and not all(map(_is_done, events)) for job, events in self._retired)

    def _retire(self, job: CaptureJob) -> None:
        """Keep the sources alive until the devices have read them."""
        self._retired = [item for item in self._retired if not all(map(_is_done, item[1]))]
        if self._events:
            self._retired.append((job, [event for _, event in self._events]))

    def close(self, timeout_s: float) -> None:
        """Stop the copy thread, and wait for copies of devices, so that the slots may go. Blocks: at most twice
        ``timeout_s``.
        """
        self._cpu.close(timeout_s)
        deadline = time.monotonic() + timeout_s
        while not all(_is_done(event) for _, events in self._retired for event in events):
            if time.monotonic() > deadline:
                logger.warning("a device did not finish its copies into host memory within %g s", timeout_s)
                return
            time.sleep(0.001)


def _is_done(event: torch.cuda.Event) -> bool:
    return bool(event.query())  # type: ignore[no-untyped-call]


def write_header(plan: CapturePlan, slot: Slot) -> None:
    """Put the plan's header into the image, if another stands there."""
    mark = int(digest(plan.layout.header)[:15], 16) | 1
    if slot.word(Word.PLAN) != mark:
        slot.set_word(Word.PLAN, 0)
        slot.image[: len(plan.layout.header)] = plan.layout.header
        slot.set_word(Word.PLAN, mark)
