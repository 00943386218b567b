"""Begins captures, holds training at the gate until their sources may change, and remembers the newest of them."""

import time
from collections.abc import Iterator

import torch

from lazysnap import faults
from lazysnap.capture.capture import Capture, CapturePhase
from lazysnap.capture.copier import CopyThread, copy_eager
from lazysnap.capture.device import DeviceCopier
from lazysnap.memory.slot_choice import SlotPhase
from lazysnap.memory.slots import TrainerSlot


class Captures:
    """Used under the engine's lock: on the training thread, and on that of preemption at the end.

    On a CPU the gate leaves no capture in flight. On a device it leaves one: the host continues while the device
    copies, until the next gate. So when a capture begins, the capture before is whole (docs/architecture.md, *How many
    slots*).
    """

    def __init__(self) -> None:
        self.history: list[Capture] = []
        """Oldest first: the newest capture, and earlier ones that are still in their slots or still being written."""
        self._past_sequence = 0
        """Captures up to this number precede the last load of another state."""
        self._thread = CopyThread()
        self._copiers: dict[torch.device, DeviceCopier] = {}
        self._device_waits: list[tuple[torch.Event, torch.Event]] = []
        """Events before and after each wait of a compute stream that is not counted yet."""
        self._headers: dict[int, tuple[int, bytes]] = {}
        """The last header that this process wrote into each slot, by slot id, and the number of that capture."""
        self._is_hung = False
        """True after a wait for a capture failed, until nothing writes for it any more."""

    # The outcome of captures

    def leave_past(self) -> None:
        """Forget all captures, because another state is loaded. Their slots may still be written to."""
        if self.history:
            self._past_sequence = self.history[-1].sequence

    def _newest_first(self) -> Iterator[Capture]:
        for capture in reversed(self.history):
            if capture.phase is not CapturePhase.ABORTED and capture.sequence > self._past_sequence:
                yield capture

    @property
    def newest(self) -> Capture | None:
        """Return the last begun capture."""
        return next(self._newest_first(), None)

    def of_step(self, step: int) -> Capture | None:
        """Return the capture of ``step`` that began last."""
        for capture in self._newest_first():
            if capture.step == step:
                return capture
        return None

    def whole_steps(self) -> list[int]:
        """Return the steps of captures that are whole and still in memory, the newest first.

        Thread-safe. The keeper may just have died.
        """
        return [capture.step for capture in self._newest_first() if _is_whole_in_slot(capture)]

    def newest_whole_step(self) -> int | None:
        """Return the newest of ``whole_steps``."""
        return next(iter(self.whole_steps()), None)

    def is_held(self, step: int) -> bool:
        """True if the keeper holds the capture of ``step``: it is not overwritten before it is stored."""
        capture = self.of_step(step)
        if capture is None:
            return False
        view = capture.slot_view()
        return view is not None and view.is_held

    @property
    def has_lost_newest(self) -> bool:
        """True if the last begun capture was dropped. Call it after the gate."""
        newest = self.newest
        return newest is not None and not _is_whole_in_slot(newest)

    # Copies

    @property
    def before_gate(self) -> Capture | None:
        """Return the capture that no gate has passed yet."""
        if not self.history or self.history[-1].is_past_gate:
            return None
        return self.history[-1]

    @property
    def is_copying(self) -> bool:
        """True if a gate has work to do, for the capture of this boundary or an earlier one. Hot."""
        return self.before_gate is not None or any(not capture.released.is_set() for capture in self.history)

    def wait_released(self, timeout_s: float) -> bool:
        """Block until no earlier capture is written any more, at most ``timeout_s``; ``False`` after that.

        A capture that hangs is dropped, and the wait is not repeated for it.
        """
        deadline = time.monotonic()
        if not self._is_hung:
            deadline += timeout_s
        for capture in self.history:
            if not capture.released.wait(max(0.0, deadline - time.monotonic())):
                self._hang(capture, timeout_s)
                return False
        self._is_hung = False
        return True

    def _hang(self, capture: Capture, timeout_s: float) -> None:
        capture.drop(CapturePhase.FAILED, f"the copy did not end within {timeout_s:g} s")
        self._is_hung = True

    def begin(self, capture: Capture) -> None:
        """Copy eager tensors, and queue lazy ones. Call the slot's ``begin`` first.

        Raises: errors of a copy; then the capture is discarded, and its slot is free when devices have finished queued
        work.
        """
        self.history = [*filter(_is_needed, self.history), capture]
        try:
            self._start(capture)
        except BaseException as error:
            # Otherwise readers would wait for a capture that never continues.
            capture.drop(CapturePhase.ABORTED, f"it could not begin: {type(error).__name__}: {error}")
            capture.is_past_gate = True
            self._gate_devices(capture)
            raise
        finally:
            self._thread.begin(capture)

    def _start(self, capture: Capture) -> None:
        faults.point("capture.begin")
        self._write_header(capture)
        copy_eager(capture)
        faults.point("capture.eager_copied")
        for device in capture.plan.devices:
            if device not in self._copiers:
                self._copiers[device] = DeviceCopier(device)
            self._copiers[device].begin(capture)

    def _write_header(self, capture: Capture) -> None:
        """Write the header into the image, unless the previous capture in this slot left the same header.

        The bytes in shared memory prove nothing: another process may have written them. So only captures of this
        process count, and only if no other capture was begun in between.
        """
        slot = capture.slot
        header = capture.plan.layout.header
        if self._headers.get(slot.slot_id) != (capture.previous_sequence, header):
            slot.image[: len(header)] = header
        self._headers[slot.slot_id] = (capture.sequence, header)

    def finish(self, timeout_s: float) -> Capture | None:
        """Pass the gate: afterwards sources may change. Return the capture that passed; ``None`` if it passed an
        earlier gate, and this gate only waited for the copies of devices.

        Blocks: until the copy thread has read CPU memory, at most ``timeout_s``; then the capture is dropped and never
        becomes whole. The device itself waits for its copies; such a capture becomes whole later.
        """
        capture = self.before_gate
        if capture is None:
            self.wait_released(timeout_s)
            return None
        if not self.wait_read(timeout_s):
            self._hang(capture, timeout_s)
        capture.pass_gate()
        self._gate_devices(capture)
        return capture

    def wait_read(self, timeout_s: float) -> bool:
        """Block until the copy thread has read CPU memory for the capture that no gate has passed yet; ``False`` after
        ``timeout_s``.
        """
        capture = self.before_gate
        if capture is None:
            return True
        if capture.device_copies:
            return capture.cpu_sources_read.wait(timeout_s)
        return capture.released.wait(timeout_s)

    def _gate_devices(self, capture: Capture) -> None:
        if not capture.device_copies:
            return
        for device in capture.plan.devices:
            if device in self._copiers:  # a capture that failed to begin may not have reached all devices
                self._device_waits.append(self._copiers[device].gate())

    def take_ended(self) -> list[Capture]:
        """Return captures that are whole or dropped, and past their gate; each once."""
        ended = []
        for capture in self.history:
            has_outcome = capture.phase not in (CapturePhase.COPYING, CapturePhase.ABORTED)
            if capture.is_past_gate and has_outcome and not capture.is_counted:
                capture.is_counted = True
                ended.append(capture)
        return ended

    def take_device_wait_s(self) -> float:
        """Return the seconds that compute streams waited at gates. Each wait counts once, when the device ended it."""
        ended_ms = 0.0
        unfinished = []
        for before, behind in self._device_waits:
            if behind.query():
                ended_ms += before.elapsed_time(behind)
            else:
                unfinished.append((before, behind))
        self._device_waits = unfinished
        return ended_ms / 1000

    def discard(self, reason: str) -> bool:
        """Drop the running capture, because an optimizer stepped without waiting for it. ``False`` if there is none."""
        return self.before_gate is not None and self.before_gate.drop(CapturePhase.TORN, reason)

    def is_disturbed(self) -> bool:
        """True if a source of the running capture changed before it was whole."""
        capture = self.before_gate
        if capture is None:
            return False
        # TORN: the copy thread noticed it first.
        return capture.phase is CapturePhase.TORN or (
            capture.phase is CapturePhase.COPYING and bool(capture.changed_sources())
        )

    def is_writing(self, slot: TrainerSlot) -> bool:
        """True if something may still write into ``slot`` for an earlier capture."""
        return any(capture.slot is slot and not capture.released.is_set() for capture in self.history)

    def forget(self, slot: TrainerSlot) -> None:
        """Release ``slot``, which is returned to the keeper. The outcome of the newest capture is kept."""
        self.history = [capture for capture in self.history if capture.slot is not slot or capture is self.history[-1]]
        self._headers.pop(slot.slot_id, None)

    def close(self, timeout_s: float) -> None:
        """Stop the copy thread after the copies of devices, so that slots may be unmapped. Blocks: at most
        ``timeout_s``.
        """
        self._thread.close(timeout_s)
        self.history = []
        self._headers.clear()


def _is_whole_in_slot(capture: Capture) -> bool:
    return capture.phase is CapturePhase.WHOLE and capture.slot_phase is SlotPhase.WHOLE


def _is_needed(capture: Capture) -> bool:
    return not capture.released.is_set() or capture.is_in_memory
