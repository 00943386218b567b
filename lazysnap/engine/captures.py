"""Starting and finishing captures: copies on every device of the state, and what the gate waits for."""

import time

import torch

from lazysnap import faults
from lazysnap.capture.copier import CopyThread, copy_eager
from lazysnap.capture.device import DeviceCopier
from lazysnap.capture.job import CaptureJob, CapturePhase
from lazysnap.capture.plan import CapturePlan
from lazysnap.memory.arena import Slot, Word
from lazysnap.shard.checksum import digest


class Captures:
    """All methods are called on the training thread.

    On a CPU the gate leaves no capture in flight. On a device it leaves one: the host goes on while the device copies,
    until the next gate. So when a capture begins, the one before it is whole (docs/architecture.md, *How many slots*).
    """

    def __init__(self) -> None:
        self._thread = CopyThread()
        self._copiers: dict[torch.device, DeviceCopier] = {}
        self._running: list[CaptureJob] = []
        """Captures whose slot something may still write into."""
        self._unsettled: list[CaptureJob] = []
        """Captures that passed the gate before they were whole."""
        self._device_waits: list[tuple[torch.Event, torch.Event]] = []
        """Events round each wait of a compute stream that is not counted yet."""
        self._is_hung = False
        self.job: CaptureJob | None = None
        """The capture that no gate has passed yet."""

    def wait_released(self, timeout_s: float) -> bool:
        """Block until nothing writes for an earlier capture any more, at most ``timeout_s``; ``False`` after that.

        A capture that hangs is given up, and waited for only once.
        """
        deadline = time.monotonic() + (0.0 if self._is_hung else timeout_s)
        for job in self._running:
            if not job.released.wait(max(0.0, deadline - time.monotonic())):
                self._hang(job, timeout_s)
                return False
        self._running, self._is_hung = [], False
        return True

    def _hang(self, job: CaptureJob, timeout_s: float) -> None:
        job.give_up(CapturePhase.FAILED, f"the copy did not end within {timeout_s:g} s")
        self._is_hung = True

    @property
    def is_copying(self) -> bool:
        """True if a gate would wait for a capture, of this boundary or an earlier one. Hot."""
        return bool(self._running)

    def begin(self, job: CaptureJob) -> None:
        """Copy what is eager, queue what is lazy. The slot's ``begin`` was called before.

        Raises: whatever a copy meets; then the capture is discarded, and its slot is free when devices have done what
        was queued.
        """
        self.job = job
        self._running.append(job)
        try:
            self._start(job)
        except BaseException as error:
            # A pinned slot that stayed half begun would hold persistence for ever.
            job.give_up(CapturePhase.FAILED, f"it could not begin: {type(error).__name__}: {error}")
            self.job = None
            self._gate_devices(job)
            raise
        finally:
            self._thread.begin(job)

    def _start(self, job: CaptureJob) -> None:
        faults.point("capture.begin")
        write_header(job.plan, job.slot)
        copy_eager(job)
        faults.point("capture.eager_copied")
        for device in job.plan.devices:
            if device not in self._copiers:
                self._copiers[device] = DeviceCopier(device)
            self._copiers[device].begin(job)

    def finish(self, timeout_s: float) -> CaptureJob | None:
        """The gate: when it returns, sources may change. The capture that may change them now; ``None`` if an earlier
        gate did that, and this one only waited for what devices copy.

        Blocks: until the copy thread has read what is in CPU memory, at most ``timeout_s``; then the capture is given
        up and never becomes whole. Device copies are waited for by the device; such a capture becomes whole later.
        """
        job, self.job = self.job, None
        if job is None:
            self.wait_released(timeout_s)
            return None
        if not (job.cpu_sources_read if job.device_copies else job.released).wait(timeout_s):
            self._hang(job, timeout_s)
        job.pass_gate()
        self._gate_devices(job)
        if job.phase is CapturePhase.COPYING:
            self._unsettled.append(job)
        self._running = [item for item in self._running if not item.released.is_set()]
        return job

    def _gate_devices(self, job: CaptureJob) -> None:
        for device in job.plan.devices if job.device_copies else ():
            self._device_waits.append(self._copiers[device].gate())

    def take_settled(self) -> list[CaptureJob]:
        """Captures that passed their gate while a device copied, and are whole or dropped by now; each once."""
        settled = [job for job in self._unsettled if job.phase is not CapturePhase.COPYING]
        self._unsettled = [job for job in self._unsettled if job.phase is CapturePhase.COPYING]
        return settled

    def take_device_wait_s(self) -> float:
        """Seconds that compute streams stood still at gates, as far as devices have come; each wait counts once."""
        done = [pair for pair in self._device_waits if pair[1].query()]
        self._device_waits = [pair for pair in self._device_waits if pair not in done]
        return sum(before.elapsed_time(behind) for before, behind in done) / 1000

    def discard(self, reason: str) -> CaptureJob | None:
        """Give up the capture in flight: an optimizer stepped without waiting for it."""
        job = self.job
        if job is not None and job.give_up(CapturePhase.TORN, reason):
            return job
        return None

    def is_disturbed(self) -> bool:
        """True if a source of the capture in flight changed since the boundary, before it was whole."""
        # TORN: the copy thread found it first.
        open_ = (CapturePhase.COPYING, CapturePhase.TORN)
        return self.job is not None and self.job.phase in open_ and bool(self.job.changed_sources())

    def is_writing(self, slot: Slot) -> bool:
        """True if something may still write into ``slot`` for an earlier capture."""
        return any(job.slot is slot and not job.released.is_set() for job in self._running)

    def close(self, timeout_s: float) -> None:
        """Stop the copy thread behind the copies of devices: the slots may go. Blocks: at most ``timeout_s``."""
        self._thread.close(timeout_s)


def write_header(plan: CapturePlan, slot: Slot) -> None:
    """Put the plan's header into the image, if another stands there."""
    mark = int(digest(plan.layout.header)[:15], 16) | 1
    if slot.word(Word.PLAN) != mark:
        slot.set_word(Word.PLAN, 0)
        slot.image[: len(plan.layout.header)] = plan.layout.header
        slot.set_word(Word.PLAN, mark)
