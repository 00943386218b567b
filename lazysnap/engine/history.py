"""The outcome of steps since the start or the last resume, read from the newest captures and their slots."""

import enum
from collections.abc import Iterator

from lazysnap.capture.capture import Capture, Phase
from lazysnap.capture.captures import Captures
from lazysnap.keeper.client import KeeperClient
from lazysnap.memory.slot_choice import SlotPhase, SlotView


class CaptureState(enum.Enum):
    """The state of a capture, as the words of its slot show it."""

    COPYING = "copying"
    HELD = "held"
    """Whole, in the memory of a live keeper."""
    ALONE = "alone"
    """Whole, in memory that only this process holds until a keeper takes it over."""
    LOST = "lost"
    """Dropped, written over, or returned."""


class History:
    """Used on the training thread. Sequence numbers grow with every capture, whatever its step."""

    def __init__(self, captures: Captures, client: KeeperClient) -> None:
        self._captures = captures
        self._client = client
        self._last_sequence = 0
        self._forgotten_sequence = 0
        """Captures up to this number are of another past."""

    def reset(self) -> None:
        """Another state is loaded: what was captured before is of another past."""
        self._forgotten_sequence = self._last_sequence

    def next_sequence(self) -> int:
        """Return the sequence number of the next capture."""
        self._last_sequence = self._client.next_sequence()
        return self._last_sequence

    def _newest_first(self) -> Iterator[Capture]:
        for capture in reversed(self._captures.history):
            if capture.phase is not Phase.ABORTED and capture.sequence > self._forgotten_sequence:
                yield capture

    @property
    def newest(self) -> Capture | None:
        """The capture that began last."""
        return next(self._newest_first(), None)

    @property
    def has_lost_last(self) -> bool:
        """True if the capture that began last was dropped, then or later; behind the gate."""
        newest = self.newest
        return newest is not None and (newest.phase is not Phase.WHOLE or self._state(newest) is CaptureState.LOST)

    def held_steps(self) -> list[int]:
        """Return the steps of captures that are whole and still in memory, the newest first.

        May be called on any thread. The keeper may just have died.
        """
        steps = []
        for capture in self._newest_first():
            if capture.phase is Phase.WHOLE and self._state(capture) is not CaptureState.LOST:
                steps.append(capture.step)
        return steps

    def newest_whole(self) -> int | None:
        """Return the step of the newest capture that is whole and still in memory."""
        return next(iter(self.held_steps()), None)

    def last_held_step(self) -> int | None:
        """Return the step of the newest capture that is whole in the memory of a live keeper."""
        if not self._client.is_connected:
            return None
        return self.newest_whole()

    def state_of(self, step: int) -> CaptureState:
        """Return the state of the last capture of ``step``."""
        for capture in self._newest_first():
            if capture.step == step:
                return self._state(capture)
        for slot in self._client.mapped():  # what was resumed
            view = slot.view()
            if view.is_whole and view.step == step:
                return self._whole_state()
        return CaptureState.LOST

    def _whole_state(self) -> CaptureState:
        return CaptureState.HELD if self._client.is_connected else CaptureState.ALONE

    def is_in_slot(self, capture: Capture) -> bool:
        """True if a capture is still in its slot, whole or being copied."""
        return self._state(capture) is not CaptureState.LOST

    def is_kept(self, step: int) -> bool:
        """True if the keeper holds the capture of ``step``: it is not written over before it is stored."""
        for capture in self._newest_first():
            if capture.step == step:
                view = view_of(capture)
                return view is not None and view.is_held
        return False

    def _state(self, capture: Capture) -> CaptureState:
        if capture.is_dropped:
            return CaptureState.LOST
        view = view_of(capture)
        if view is None:
            return CaptureState.LOST
        if view.phase is SlotPhase.CAPTURING:
            return CaptureState.COPYING
        if view.phase is not SlotPhase.WHOLE:
            return CaptureState.LOST
        return self._whole_state()


def view_of(capture: Capture) -> SlotView | None:
    """Return the words of a capture's slot; ``None`` if the slot has another one, or was returned."""
    try:
        view = capture.slot.view()
    except ValueError:  # it is unmapped
        return None
    return view if view.sequence == capture.sequence else None
