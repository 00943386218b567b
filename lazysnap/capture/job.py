"""One capture in progress: its sources, its slot and its phase."""

import enum
import threading
from collections.abc import Callable

import torch

from lazysnap import faults
from lazysnap.capture.dtypes import stored_form
from lazysnap.capture.plan import CapturePlan
from lazysnap.memory.arena import Slot


class CapturePhase(enum.Enum):
    """COPYING -> WHOLE, or -> TORN (a source changed meanwhile), or -> FAILED (an error, a deadline)."""

    COPYING = "copying"
    WHOLE = "whole"
    TORN = "torn"
    FAILED = "failed"


class CaptureJob:
    """A capture into ``slot``. Keeps its sources alive. Phase changes are one act under a lock: a late copy that was
    given up on never commits.
    """

    def __init__(self, plan: CapturePlan, slot: Slot, step: int, tensors: list[torch.Tensor]) -> None:
        self.plan = plan
        self.slot = slot
        self.step = step
        self.sequence = 0
        """Number of the capture in its slot."""
        self.sources = list(map(stored_form, tensors)) if plan.is_converting else tensors
        self.versions = [0] * len(tensors)
        """Versions of the lazy tensors at the boundary; zero for all others, of which not all have one."""
        for index in plan.lazy:
            self.versions[index] = tensors[index]._version
        self.phase = CapturePhase.COPYING
        self.reason = ""
        self.copy_s = 0.0
        self.arrivals: list[tuple[int, Callable[[], None]]] = []
        """Copies from devices: the place in the image where one begins, and what blocks until its bytes are there."""
        self.device_copies: list[tuple[torch.Event, torch.Event]] = []
        """Events before and behind all copies of each device, also where queueing them failed. A copy that no device
        orders before what training does behind the gate is none of them until it is over."""
        self.cpu_sources_read = threading.Event()
        """Set when no tensor in CPU memory is read any more: these may change again."""
        self.released = threading.Event()
        """Set when nothing writes into the slot any more."""
        self._lock = threading.Lock()
        self._is_behind_gate = False

    @property
    def is_given_up(self) -> bool:
        """True if the copy may stop: its result will not be used."""
        return self.phase in (CapturePhase.TORN, CapturePhase.FAILED)

    def changed_sources(self) -> list[str]:
        """Names of lazy tensors that something wrote to since the boundary.

        Fused optimizers do not bump versions; the gate is the rule and this is the net under it.
        """
        records, sources, versions = self.plan.records, self.sources, self.versions
        return [
            records[index].name
            for index in self.plan.lazy
            if sources[index]._version != versions[index] or sources[index].data_ptr() != records[index].pointer
        ]

    def pass_gate(self) -> None:
        """Compare the sources for the last time: what is queued from now on is ordered behind the copies, and may
        change them. A capture whose sources changed is given up.
        """
        with self._lock:
            if self.phase is CapturePhase.COPYING:
                self._compare()
                self._is_behind_gate = True

    def commit(self) -> bool:
        """Mark the slot whole, unless the capture was given up or its sources changed before the gate. Every byte of
        every source was read. The last act of a capture, on the copy thread.
        """
        with self._lock:
            if self.phase is CapturePhase.COPYING and not self._is_behind_gate:
                # What changes from now on does not matter; what changed before may be torn.
                self._compare()
            if self.phase is not CapturePhase.COPYING:
                return False
            faults.point("capture.commit")
            self.slot.commit()
            self.phase = CapturePhase.WHOLE
        faults.point("capture.committed")
        return True

    def give_up(self, phase: CapturePhase, reason: str) -> bool:
        """Discard the capture, unless it is whole already."""
        with self._lock:
            return self._drop(phase, reason)

    def _compare(self) -> None:
        changed = self.changed_sources()
        if changed:
            self._drop(CapturePhase.TORN, f"{len(changed)} tensors changed while they were copied: {changed[0]}, …")

    def _drop(self, phase: CapturePhase, reason: str) -> bool:
        if self.phase is not CapturePhase.COPYING:
            return False
        self.slot.discard()
        self.phase = phase
        self.reason = reason
        return True
