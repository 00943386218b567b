"""Which slot may be written over? Pure.

Let K be the number of newest whole captures of a rank that nobody writes over. One of them is whole on every rank:

* one rank: K = 1. While a capture is written, the one before stays.
* many ranks, a capture at every step: K = 2. Who begins step N has the gradients of N from every rank, and each of
  them finished its capture of N - 2 before it sent these. So N - 2 is whole everywhere, and nobody wrote over it.
* devices whose hosts run ahead of them by one step: K = 3.

The same K lets the keeper hold a capture *after* it began, without asking anybody. A capture that is being written, or
is one of the K newest whole ones, is *untouchable*: its slot is not chosen before K newer captures are whole. So a hold
that was written while the capture was untouchable is read by the trainer before it could choose that slot::

    begin N    whole N    ...  whole N+K   begin N+K+1
    |------------ untouchable ----------|
    |---- the keeper may write HELD ----|       the trainer reads HELD here, at the earliest

A rank has K + 1 slots, and one more where anything is stored or protected. Storage and parity read the same step, so
they share that one. While a newer step is being protected the older one is held, too: captures that find no slot then
are left out, and training does not wait.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SlotView:
    """The words of a slot at one moment."""

    slot_id: int
    capacity_bytes: int
    start: int
    """Id of the start whose capture it holds."""
    step: int
    """Step of the capture; -1 if there is none."""
    sequence: int
    """Number of the capture; grows from capture to capture of a rank."""
    is_whole: bool
    is_held: bool
    """True if HELD names the capture that is there."""

    @property
    def is_empty(self) -> bool:
        """True if nothing was ever captured there, or what was is void."""
        return self.step < 0


def slots_needed(num_kept: int, *, is_stored: bool) -> int:
    """Return the slots of a rank.

    Args:
        num_kept: K, see the module's docstring.
        is_stored: True if there is a storage level, or redundancy.
    """
    return num_kept + 1 + int(is_stored)


def newest_whole(slots: Sequence[SlotView], count: int) -> list[SlotView]:
    """Return the newest whole captures, the oldest of them first."""
    whole = [slot for slot in slots if slot.is_whole]
    whole.sort(key=_sequence)
    return whole[-count:]


def is_untouchable(slot: SlotView, slots: Sequence[SlotView], num_kept: int) -> bool:
    """Return True if no trainer can choose this slot before it reads HELD again. See the drawing.

    Args:
        slot: the slot in question, as it is among ``slots``.
        slots: all slots of the rank.
        num_kept: K.
    """
    if slot.is_empty:
        return False
    is_being_written = not slot.is_whole and slot.sequence == max(other.sequence for other in slots)
    return is_being_written or slot in newest_whole(slots, num_kept)


def choose_slot(slots: Sequence[SlotView], num_kept: int, image_bytes: int) -> SlotView | None:
    """Return the slot for the next capture; None if all are in use.

    Torn captures go first, then the oldest, stored or not: so memory has the newest captures without a gap.

    Args:
        slots: all slots of the rank.
        num_kept: K.
        image_bytes: size of the capture.
    """
    untouchable = newest_whole(slots, num_kept)
    candidates = []
    for slot in slots:
        if slot.is_held or slot in untouchable or slot.capacity_bytes < image_bytes:
            continue
        candidates.append(slot)
    return min(candidates, key=_worth, default=None)


def _sequence(slot: SlotView) -> int:
    return slot.sequence


def _worth(slot: SlotView) -> tuple[bool, int]:
    return slot.is_whole, slot.sequence
