"""The words of a slot, the choice of a slot to overwrite, and the number of slots that a rank needs. Pure.

**How many slots.** Claim: after the first snapshot that is whole on every rank, such a snapshot exists at any time. A
rank never overwrites its K newest whole captures or a held one. Of the others it takes the oldest, durable or not, so
that memory has the newest captures without a gap. So it needs K + 1 slots, and one more where storage or redundancy
reads captures: both read the same step, so one slot serves both. While a newer step is being protected the older one is
held, too: a capture that finds no slot then is skipped, and training does not wait.

* *One rank*: K = 1. While it writes a capture, the newest whole one is untouched.
* *Several ranks, a capture at every step*: K = 2. Say rank A begins to capture N. It made optimizer step N, so it
received the gradients of step N from every rank B. B sent them only after its own step N-1, which it made only after
the gate before it, and that gate waits for B's capture of N-2. So N-2 is whole on every rank when A begins N, and A
overwrites neither N-1 nor N-2. Let M be the newest step that any rank began: M-2 is whole everywhere, and no rank wrote
over it, because each began at most M and keeps the two newest before it.
* *Several ranks, a capture every m >= 2 steps*: K = 1. The capture before N is that of N-m. B made step N-1, and N-1 >=
N-m+1, so its gate had waited for its capture of N-m. It is whole everywhere when A begins N.
* *A rank trains on a device*: K is one more, for all ranks. The gate queues a wait on the device. The host continues
until the next gate, which waits until the capture before it is whole. If A's capture W is whole, A's device made step
W, so B's host queued the gradients of step W, after its boundary W-1, which waited for B's capture of W-2 (every m >= 2
steps: W-m). So no rank is more than two captures (every m steps: one) behind another.

docs/architecture.md has the rules of the engine that the argument needs.

**Holds in time.** The same K lets the keeper hold a capture after it began, without asking. A capture that is being
copied, or is one of the K newest whole ones, is *untouchable*: the trainer does not choose its slot before K newer
captures are whole. So a hold that was stored while the capture was untouchable is always loaded by the trainer before
it could choose that slot::

    begin N    whole N    ...    whole N+K    begin N+K+1
    |------------- untouchable -------------|
    |------ the keeper may store HELD ------|  the trainer loads HELD here, at the earliest

A hold of anything else is a race with a trainer that has chosen the slot and not begun yet. The argument counts whole
captures, so two things are forbidden: only the trainer discards a whole capture, and never between a choice and the
``begin`` that follows it.
"""

import enum
from collections.abc import Collection, Sequence

from msgspec import Struct


class SlotPhase(enum.Enum):
    """State of the capture in a slot.

    EMPTY -> CAPTURING -> WHOLE. A trainer that discards the capture, or begins another one, makes the slot EMPTY
    first. CAPTURING -> VOID when the trainer died.
    """

    EMPTY = "empty"
    CAPTURING = "capturing"
    WHOLE = "whole"
    VOID = "void"


class SlotView(Struct, frozen=True):
    """The words of a slot at one moment, all of one capture."""

    slot_id: int
    meta_capacity_bytes: int
    image_capacity_bytes: int
    phase: SlotPhase
    """Invariant: WHOLE only if every byte of the capture was visible to all processes before END was."""
    step: int | None
    """Step of the capture; ``None`` if the slot is empty."""
    start: int
    """Id of the start that made the capture."""
    sequence: int
    """Number of the capture, also of one that was discarded; 0 if there was none yet."""
    image_bytes: int
    watermark_bytes: int
    """Image bytes that are copied. Invariant: at most ``image_bytes``, and equal to it if the phase is WHOLE."""
    copied_ns: int
    reached_step: int | None
    is_held: bool
    """True if the keeper holds this very capture. A hold of an earlier capture in the slot does not count."""
    is_repeatable: bool = False
    """True if a restart may train the step again, to prove itself; False: it resumes exactly this capture."""

    @property
    def is_whole(self) -> bool:
        """True if the slot has a whole capture."""
        return self.phase is SlotPhase.WHOLE


def kept_whole(every_n_steps: int, world_size: int, *, runs_ahead: bool) -> int:
    """Return K, the number of newest whole captures that a rank never overwrites.

    Args:
        every_n_steps: steps from one capture to the next.
        world_size: number of ranks.
        runs_ahead: True if some rank trains on a device, whose copies the host does not wait for at the gate.
    """
    if world_size == 1:
        return 1
    kept = 1
    if every_n_steps == 1:
        kept += 1
    if runs_ahead:
        kept += 1
    return kept


def slots_needed(kept: int, *, is_read: bool) -> int:
    """Return the slots of a rank: the ``kept`` captures, one to write, and one more if levels or redundancy read."""
    return kept + 1 + is_read


SLACK_BYTES = 8 << 20
"""Bytes by which a slot may be larger than a capture needs, beside a twentieth."""


def fits_image(capacity_bytes: int, image_bytes: int) -> bool:
    """True if a capacity is large enough for an image, and not wastefully larger."""
    return image_bytes <= capacity_bytes <= image_bytes + image_bytes // 20 + SLACK_BYTES


def is_fitting(view: SlotView, meta_bytes: int, image_bytes: int) -> bool:
    """True if a slot is large enough for a capture, and its image not wastefully larger."""
    return view.meta_capacity_bytes >= meta_bytes and fits_image(view.image_capacity_bytes, image_bytes)


def newest_whole(views: Sequence[SlotView], count: int) -> list[SlotView]:
    """Return the newest ``count`` whole captures, oldest first."""
    whole = [view for view in views if view.is_whole]
    whole.sort(key=_sequence)
    return whole[max(0, len(whole) - count) :]


def is_untouchable(view: SlotView, views: Sequence[SlotView], kept: int) -> bool:
    """True if the trainer loads HELD of this slot again before it can choose it.

    Args:
        view: the slot in question, one of ``views``.
        views: all slots of the rank.
        kept: K.
    """
    if view.phase is SlotPhase.CAPTURING:
        # Of several incomplete captures all but the newest are torn: those slots are chosen first.
        return view.sequence == max(map(_sequence, views))
    return view in newest_whole(views, kept)


def choose_slot(
    views: Sequence[SlotView],
    kept: int,
    *,
    image_bytes: int,
    meta_bytes: int,
    busy: Collection[int] = (),
) -> SlotView | None:
    """Return the slot for the next capture; ``None`` if all are in use.

    Captures that are not whole are worth nothing: their slots are chosen first. Then the slot of the oldest capture is
    chosen, so that the newest captures stay.

    Args:
        views: all slots of the rank, also those of another size.
        kept: K.
        image_bytes: bytes of the image to be captured.
        meta_bytes: bytes of its metadata.
        busy: ``slot_id`` of slots into which an earlier capture of this process may still be copied.
    """
    for view in _replaceable(views, kept, busy):
        if view.image_capacity_bytes >= image_bytes and view.meta_capacity_bytes >= meta_bytes:
            return view
    return None


def surplus_slots(
    views: Sequence[SlotView],
    kept: int,
    *,
    fitting: Collection[int],
    count: int,
    busy: Collection[int] = (),
) -> list[SlotView]:
    """Return the slots that the keeper may free: those of another size, and fitting ones beyond ``count``.

    A slot is freed only if ``choose_slot`` could choose it: then nothing in it is needed.

    Args:
        views: all slots of the rank.
        kept: K.
        fitting: ``slot_id`` of the slots that have the size of captures.
        count: number of slots that the rank needs.
        busy: see ``choose_slot``.
    """
    num_fitting = sum(view.slot_id in fitting for view in views)
    surplus = []
    for view in _replaceable(views, kept, busy):
        if view.phase is SlotPhase.CAPTURING:
            continue
        if view.slot_id not in fitting:
            surplus.append(view)
        elif num_fitting > count:
            surplus.append(view)
            num_fitting -= 1
    return surplus


def _replaceable(views: Sequence[SlotView], kept: int, busy: Collection[int]) -> list[SlotView]:
    """Return the slots whose captures nobody needs; the least valuable first."""
    untouched = newest_whole(views, kept)
    replaceable = []
    for view in views:
        if not view.is_held and view not in untouched and view.slot_id not in busy:
            replaceable.append(view)
    replaceable.sort(key=_worth)
    return replaceable


def _sequence(view: SlotView) -> int:
    return view.sequence


def _worth(view: SlotView) -> tuple[bool, int]:
    return view.is_whole, view.sequence
