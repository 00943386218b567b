"""The captures that one rank must keep because others count on them. Thread-safe."""

import enum
import threading
from collections.abc import Collection, Sequence

from lazysnap.arena import Check, Slot, SlotPhase, SlotStatus, Word
from lazysnap.engine.ballot import Ballot
from lazysnap.engine.slots import choose_slot, newest_whole


class Presence(enum.Enum):
    """What a rank has of a step."""

    COMING = "coming"
    WHOLE = "whole"
    GONE = "gone"


class Marks:
    """The training thread chooses slots by them, the one that talks to the other ranks moves them.

    Only ever moved by a ballot that was *seen*: whoever has not heard of a change yet still holds what was before it.
    """

    def __init__(self, base: int, floor: int) -> None:
        """``base``: the step that all ranks resumed, or ``NONE``; ``floor``: captures up to this sequence number are
        older than this start of the training.
        """
        self._lock = threading.Lock()
        self._base = base
        self._floor = floor
        self._going: int | None = None
        self.agreed = base
        self.candidate: int | None = None

    def learn(self, ballot: Ballot) -> None:
        """This is how far the ranks have come."""
        with self._lock:
            self.agreed, self.candidate = ballot.agreed, ballot.candidate

    def choose(self, statuses: Sequence[SlotStatus], idle: Sequence[bool]) -> int | None:
        """The slot to write next, as ``choose_slot``; what is in it is not counted on from now on."""
        with self._lock:
            held = self._held(statuses)
            index = choose_slot(statuses, idle, 0, held)
            if index is not None and statuses[index].sequence > self._floor:
                self._going = statuses[index].step
            return index

    def hold(self, slots: Sequence[Slot]) -> None:
        """Say in the slots which captures others count on: the keeper lets none of them go."""
        with self._lock:  # else one thread takes away, by what it knew before, what the other one just gave
            statuses = [slot.status() for slot in slots]
            _hold(slots, statuses, self._held(statuses))

    def look(self, slots: Sequence[Slot], step: int) -> Presence:
        """What is there of ``step``; ``WHOLE``: and neither training nor the keeper takes it away, if it ``keeps``."""
        self.hold(slots)
        for slot in slots:
            status = slot.status()
            if status.step != step or not self.is_ours(status):
                continue
            if slot.word(Word.GOING):
                return Presence.GONE
            is_whole = status.phase is SlotPhase.WHOLE and not slot.word(Word.UNCHECKED) & Check.DEVICE
            if is_whole and status.held:
                return Presence.WHOLE
            if status.phase in (SlotPhase.WHOLE, SlotPhase.CAPTURING):
                return Presence.COMING  # not held: it began after that
        return Presence.GONE

    def _held(self, statuses: Sequence[SlotStatus]) -> set[int]:
        return {index for index, status in enumerate(statuses) if self._holds(status)}

    def keeps(self, step: int) -> bool:
        """Whether a capture of ``step`` that is whole now stays so, until a ballot lets it go."""
        with self._lock:
            return step in (self.agreed, self.candidate) and step != self._going

    def is_ours(self, status: SlotStatus) -> bool:
        """Whether a capture is of this start of the training, not of one before it."""
        return status.sequence > self._floor

    def _holds(self, status: SlotStatus) -> bool:
        if status.phase not in (SlotPhase.WHOLE, SlotPhase.CAPTURING):
            return False
        if status.step not in (self.agreed, self.candidate):
            return False
        return self.is_ours(status) or status.step == self._base


def hold_newest(slots: Sequence[Slot], count: int) -> None:
    """Say so of the ``count`` newest whole captures: ranks that agree by counting go back to none before."""
    statuses = [slot.status() for slot in slots]
    _hold(slots, statuses, newest_whole(statuses, count))


def _hold(slots: Sequence[Slot], statuses: Sequence[SlotStatus], held: Collection[int]) -> None:
    for index, slot in enumerate(slots):
        if statuses[index].held != (index in held):
            slot.set_word(Word.HELD, index in held)
