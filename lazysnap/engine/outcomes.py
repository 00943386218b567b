"""What became of the captures since the start, or since the last resume."""

from lazysnap.capture.job import CaptureJob, CapturePhase
from lazysnap.engine.events import EventLog
from lazysnap.keeper.client import KeeperClient
from lazysnap.keeper.client_slots import CaptureState
from lazysnap.memory.arena import SlotPhase

_REMEMBERED = 64


class Outcomes:
    """Of one engine; used on the training thread. Sequence numbers grow with every capture, whatever its step."""

    def __init__(self, client: KeeperClient, log: EventLog) -> None:
        self._client = client
        self._log = log
        self._last_number = 0
        self._newest: tuple[int, int] | None = None
        """Sequence number and step."""
        self._whole: dict[int, int] = {}
        """Steps of the last captures that are whole, by sequence number."""

    def reset(self) -> None:
        """Another state is loaded: what was captured before is of another past."""
        self._newest, self._whole = None, {}
        self._log.statistics.last_whole_step = None

    def next_sequence(self) -> int:
        """The sequence number of the next capture: greater than those of all that the keeper holds."""
        self._last_number = max(self._last_number, self._client.newest_sequence()) + 1
        return self._last_number

    def began(self, job: CaptureJob) -> None:
        """Note a capture that began."""
        self._newest = job.sequence, job.step

    def ended(self, job: CaptureJob) -> None:
        """A capture is over: it is whole, or dropped, and that is logged."""
        statistics = self._log.statistics
        if job.phase is CapturePhase.WHOLE:
            self._whole[job.sequence] = job.step
            while len(self._whole) > _REMEMBERED:
                del self._whole[next(iter(self._whole))]
            statistics.last_whole_step = job.step  # whoever reads it asks whether its keeper lives
            return
        if job.phase is CapturePhase.TORN:
            statistics.torn += 1
        else:
            statistics.failed += 1
        self.lost(job.sequence)
        self._log.note_once("dropped", "the snapshot of step %d is dropped: %s", job.step, job.reason)

    def lost(self, sequence: int) -> None:
        """A capture turned out to be worth nothing, maybe after it was whole."""
        self._whole.pop(sequence, None)
        self._log.statistics.last_whole_step = self.last_held_step()

    @property
    def has_lost_last(self) -> bool:
        """Whether the last capture that began was dropped; behind the gate."""
        return self._newest is not None and self._newest[0] not in self._whole

    def newest_whole(self) -> int | None:
        """The step of the newest capture that became whole and is not void since. Its keeper may just have died."""
        while self._whole:
            sequence = max(self._whole)
            if self._client.state_of(sequence) is not CaptureState.LOST:
                return self._whole[sequence]
            self.lost(sequence)
        return None

    def held_steps(self) -> list[int]:
        """Return the steps of captures that are whole and not void, the newest first. May be called on any thread."""
        whole = sorted(dict(self._whole).items(), reverse=True)
        return [step for number, step in whole if self._client.state_of(number) is not CaptureState.LOST]

    def last_held_step(self) -> int | None:
        """The step of the newest capture that is whole in the memory of a live keeper."""
        held = (n for n in sorted(self._whole, reverse=True) if self._client.state_of(n) is CaptureState.HELD)
        return self._whole.get(next(held, 0))

    def state_of(self, step: int) -> CaptureState:
        """What became of the last capture of ``step``."""
        sequence = max((number for number, whole in self._whole.items() if whole == step), default=0)
        if self._newest is not None and self._newest[1] == step:
            sequence = max(sequence, self._newest[0])
        if sequence:
            return self._client.state_of(sequence)
        statuses = [slot.status() for slot in self._client.slots()]  # what was resumed
        is_there = any(status.step == step and status.phase is SlotPhase.WHOLE for status in statuses)
        return CaptureState.HELD if is_there else CaptureState.LOST
