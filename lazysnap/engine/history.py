"""The outcome of steps since the start or the last resume, read from the newest captures."""

from lazysnap.capture.capture import Capture, Phase
from lazysnap.capture.captures import Captures
from lazysnap.keeper.client import KeeperClient
from lazysnap.keeper.client_slots import CaptureState
from lazysnap.memory.arena import SlotPhase


class History:
    """Used on the training thread. Sequence numbers grow with every capture, whatever its step."""

    def __init__(self, captures: Captures, client: KeeperClient) -> None:
        self._captures = captures
        self._client = client
        self._last_number = 0
        self._forgotten = 0
        """Captures up to this number are of another past."""

    def reset(self) -> None:
        """Another state is loaded: what was captured before is of another past."""
        self._forgotten = self._last_number

    def next_sequence(self) -> int:
        """The sequence number of the next capture: greater than those of all that the keeper holds."""
        self._last_number = max(self._last_number, self._client.newest_sequence()) + 1
        return self._last_number

    def _newest_first(self) -> list[Capture]:
        began = [one for one in self._captures.history if one.phase is not Phase.ABORTED]
        return [one for one in reversed(began) if one.sequence > self._forgotten]

    @property
    def newest(self) -> Capture | None:
        """The capture that began last."""
        return next(iter(self._newest_first()), None)

    @property
    def has_lost_last(self) -> bool:
        """True if the capture that began last was dropped, then or later; behind the gate."""
        newest = self.newest
        return newest is not None and (newest.phase is not Phase.WHOLE or self._state(newest) is CaptureState.LOST)

    def newest_whole(self) -> int | None:
        """The step of the newest capture that became whole and is not void since. Its keeper may just have died."""
        return next(iter(self.held_steps()), None)

    def held_steps(self) -> list[int]:
        """Return the steps of captures that are whole and not void, the newest first. May be called on any thread."""
        whole = (one for one in self._newest_first() if one.phase is Phase.WHOLE)
        return [one.step for one in whole if self._state(one) is not CaptureState.LOST]

    def last_held_step(self) -> int | None:
        """The step of the newest capture that is whole in the memory of a live keeper."""
        whole = (one for one in self._newest_first() if one.phase is Phase.WHOLE)
        return next((one.step for one in whole if self._state(one) is CaptureState.HELD), None)

    def state_of(self, step: int) -> CaptureState:
        """Return the state of the last capture of ``step``."""
        for capture in self._newest_first():
            if capture.step == step:
                return self._state(capture)
        statuses = [slot.status() for slot in self._client.slots()]  # what was resumed
        is_there = any(status.step == step and status.phase is SlotPhase.WHOLE for status in statuses)
        return CaptureState.HELD if is_there else CaptureState.LOST

    def _state(self, capture: Capture) -> CaptureState:
        return self._client.state_of(capture.sequence)
