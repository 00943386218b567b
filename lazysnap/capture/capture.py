"""One capture: the state of one boundary's copy on one rank."""

import enum
import threading
from collections.abc import Callable, Sequence

import torch

from lazysnap import faults
from lazysnap.capture.dtypes import stored_form
from lazysnap.capture.plan import CapturePlan, versions_of
from lazysnap.memory.slot_choice import SlotPhase, SlotView
from lazysnap.memory.slots import TrainerSlot


class CapturePhase(enum.Enum):
    """COPYING -> WHOLE, or -> dropped for a reason: TORN (a source changed meanwhile), FAILED (error, deadline),
    ABORTED (it could not begin).
    """

    COPYING = "copying"
    WHOLE = "whole"
    TORN = "torn"
    FAILED = "failed"
    ABORTED = "aborted"


class Capture:
    """The capture of one boundary into ``slot``, and its outcome.

    Phase changes are atomic under a lock, so a late copy of a dropped capture never commits.
    """

    def __init__(
        self, plan: CapturePlan, slot: TrainerSlot, step: int, tensors: Sequence[torch.Tensor], *, sequence: int
    ) -> None:
        """Describe a capture before ``slot.begin`` is called for it."""
        self.plan = plan
        self.slot = slot
        self.step = step
        self.sequence = sequence
        """Number of the capture in its slot."""
        self.previous_sequence = 0
        """Number of the whole capture that was in the slot before, whose bytes are still there; 0: none."""
        view = slot.view()
        if view.is_whole:
            self.previous_sequence = view.sequence
        self.sources = tensors
        """The sources, kept alive until nothing reads them; empty afterwards."""
        if plan.is_converting:
            self.sources = list(map(stored_form, tensors))
        self._versions = versions_of([tensors[index] for index in plan.lazy])
        """The version of each lazy tensor at the boundary."""
        self.phase = CapturePhase.COPYING
        self.reason = ""
        """The reason why it was dropped."""
        self.copy_s = 0.0
        self.arrivals: list[tuple[int, Callable[[], None]]] = []
        """Copies from devices: the place in the image where a copy begins, and a function that blocks until its bytes
        have arrived.
        """
        self.device_copies: list[tuple[torch.Event, torch.Event]] = []
        """Events before and after all copies of each device, also if queueing them failed. A copy that no device orders
        before the work of training after the gate is added only when it is over.
        """
        self.cpu_sources_read = threading.Event()
        """Set when all tensors in CPU memory have been read, so that they may change again."""
        self.released = threading.Event()
        """Set when nothing writes into the slot any more. The phase is final then."""
        self.is_past_gate = False
        """True if its sources may change: no gate on the host waits for it any more."""
        self.is_counted = False
        """True if the engine has counted its outcome."""
        self._lock = threading.Lock()

    @property
    def is_dropped(self) -> bool:
        """True if its result will not be used: the copy may stop."""
        return self.phase in (CapturePhase.TORN, CapturePhase.FAILED, CapturePhase.ABORTED)

    def slot_view(self) -> SlotView | None:
        """Return the words of its slot; ``None`` if it was dropped, or the slot has another capture or is unmapped."""
        if self.is_dropped:
            return None
        try:
            view = self.slot.view()
        except ValueError:  # it is unmapped
            return None
        if view.sequence != self.sequence:
            return None
        return view

    @property
    def slot_phase(self) -> SlotPhase:
        """The phase in its slot; EMPTY if there is no ``slot_view``."""
        view = self.slot_view()
        if view is None:
            return SlotPhase.EMPTY
        return view.phase

    @property
    def is_in_memory(self) -> bool:
        """True if it is still in its slot, whole or being copied."""
        return self.slot_phase in (SlotPhase.CAPTURING, SlotPhase.WHOLE)

    def changed_sources(self) -> list[str]:
        """Names of lazy tensors that something wrote to since the boundary.

        The gate guarantees that nothing changes. This check finds a step that bypassed the gate, unless the optimizer
        is fused: fused optimizers do not count versions.
        """
        all_sources = self.sources  # read once: the copy thread replaces it
        if not all_sources:
            return []
        sources = [all_sources[index] for index in self.plan.lazy]
        versions = versions_of(sources)
        pointers = list(map(torch.Tensor.data_ptr, sources))
        if versions == self._versions and pointers == self.plan.lazy_pointers:
            return []
        names = []
        for place, index in enumerate(self.plan.lazy):
            has_version = versions[place] == self._versions[place]
            has_pointer = pointers[place] == self.plan.lazy_pointers[place]
            if not (has_version and has_pointer):
                names.append(self.plan.records[index].name)
        return names

    def pass_gate(self) -> None:
        """Compare the sources for the last time: later work on the device is ordered after the copies, and may change
        them. Drops the capture if its sources changed.
        """
        with self._lock:
            if self.phase is CapturePhase.COPYING:
                self._compare()
            self.is_past_gate = True

    def commit(self) -> bool:
        """Mark the slot whole, after every byte was read, unless the capture was dropped or its sources changed before
        the gate. The last operation of a capture, on the copy thread.
        """
        with self._lock:
            if self.phase is CapturePhase.COPYING and not self.is_past_gate:
                # Later changes do not matter; earlier ones may have torn the copy.
                self._compare()
            if self.phase is not CapturePhase.COPYING:
                return False
            faults.point("capture.commit")
            self.slot.commit(copied_ns=int(1e9 * self.copy_s))
            self.phase = CapturePhase.WHOLE
        faults.point("capture.committed")
        return True

    def drop(self, phase: CapturePhase, reason: str) -> bool:
        """Discard the capture, unless it is whole already."""
        with self._lock:
            return self._drop(phase, reason)

    def release(self) -> None:
        """Release the sources: nothing reads them or writes into the slot any more. Copy thread."""
        self.sources = ()
        self.arrivals = []
        self.cpu_sources_read.set()
        self.released.set()

    def _compare(self) -> None:
        changed = self.changed_sources()
        if changed:
            self._drop(CapturePhase.TORN, f"{len(changed)} tensors changed while they were copied: {changed[0]}, …")

    def _drop(self, phase: CapturePhase, reason: str) -> bool:
        if self.phase is not CapturePhase.COPYING:
            return False
        self.slot.discard(self.sequence)
        self.phase = phase
        self.reason = reason
        return True
