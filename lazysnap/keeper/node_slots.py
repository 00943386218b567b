"""The slots of a node's ranks, as far as they hold captures of one start."""

from collections.abc import Callable, Sequence
from typing import Protocol

from lazysnap import faults
from lazysnap.grants.node import RankView, SlotView, common_whole
from lazysnap.keeper.starts import Starts
from lazysnap.memory.arena import KEEP, Slot, SlotPhase, SlotStatus, Word
from lazysnap.shard.checksum import Checksums

_HELD = (SlotPhase.CAPTURING, SlotPhase.WHOLE)


class RankMemory(Protocol):
    """One rank of the node, as its keeper serves it."""

    def slots(self) -> Sequence[Slot]:
        """All of them."""

    @property
    def is_gone(self) -> bool:
        """True if its trainer is dead, or said goodbye."""

    @property
    def is_choosing(self) -> bool:
        """True if its trainer did not name its run yet."""

    @property
    def starts(self) -> Starts:
        """The starts that its slots may show."""


Ranks = Callable[[], Sequence[RankMemory | None]]
"""All ranks of the node, in order; ``None`` for one that did not come yet."""


class NodeSlots:
    """May be used on any thread."""

    def __init__(self, ranks: Ranks, start: str, step: int = -1) -> None:
        """``step``: the step that the start resumed from."""
        self._ranks, self._start, self._step = ranks, start, step

    def ranks(self) -> list[RankMemory]:
        """Those that came."""
        return [rank for rank in self._ranks() if rank is not None]

    def all(self) -> list[Slot]:
        """The slots of all ranks, also those of other starts."""
        return [slot for rank in self.ranks() for slot in rank.slots()]

    def views(self) -> list[RankView]:
        """Return the input of ``grants.node``."""
        return [self._view(rank) for rank in self._ranks()]

    def _view(self, rank: RankMemory | None) -> RankView:
        start = self._start
        if rank is None or start not in rank.starts:
            return RankView(-1, False, ())
        is_gone, slots = rank.is_gone or rank.starts.is_over(start), rank.slots()
        begun = max((slot.word(Word.BEGIN) - 1 for slot in slots if rank.starts.holds(slot, start)), default=self._step)
        views = []
        for slot, status in self._held(rank, slots):
            assert status.step is not None
            words = slot.word(Word.PIN) & ~KEEP, slot.word(Word.HOLD)
            pinned, held = (word - 1 if word else None for word in words)
            views.append(SlotView(status.step, status.phase is SlotPhase.WHOLE, pinned, held))
        return RankView(begun, is_gone, tuple(views))

    def _held(self, rank: RankMemory, slots: Sequence[Slot]) -> list[tuple[Slot, SlotStatus]]:
        """The slots that hold a capture of this start, whole or being copied."""
        found = [(slot, slot.status()) for slot in slots]
        return [one for one in found if one[1].phase in _HELD and rank.starts.holds(one[0], self._start)]

    def of_step(self, step: int) -> list[Slot | None]:
        """Return the slot of each rank that holds a capture of that step."""
        found: list[Slot | None] = []
        for rank in self._ranks():
            slots = [] if rank is None else [one for one in self._held(rank, rank.slots()) if one[1].step == step]
            found.append(max((slot for slot, _ in slots), key=lambda slot: slot.word(Word.SEQUENCE), default=None))
        return found

    def release_stale_pins(
        self, granted: int, is_answered: Callable[[int], bool], is_read: Callable[[Slot], bool]
    ) -> None:
        """Store ``granted`` in the control word that trainers read, then remove every pin that nobody needs.

        ``is_answered``: a step that a trainer must have stored is complete or lost. ``is_read``: levels that read a
        slot move.
        """
        for slot in self.all():
            if slot.word(Word.GRANT) != granted:
                slot.set_word(Word.GRANT, granted)
        for rank in self.ranks():
            pinned = [slot for slot in rank.slots() if slot.word(Word.PIN)]
            kept = [slot for slot in pinned if self._is_kept(rank, slot, is_answered)]
            # Memory has one slot to spare: of several that must be stored the oldest is stored first.
            first = min(kept, key=lambda slot: slot.word(Word.SEQUENCE), default=None)
            for slot in pinned:
                # An earlier start may have captured the same step.
                is_granted = rank.starts.holds(slot, self._start) and slot.word(Word.PIN) & ~KEEP == granted
                if slot is not first and not (is_granted and is_read(slot)):
                    slot.unpin()

    def _is_kept(self, rank: RankMemory, slot: Slot, is_answered: Callable[[int], bool]) -> bool:
        """True if a trainer pinned it for a step that is neither complete nor lost yet."""
        step = slot.kept_step
        return step is not None and rank.starts.holds(slot, self._start) and not is_answered(step)

    def newest_common(self) -> int | None:
        """The newest step that all ranks of the node hold whole."""
        return max(common_whole(self.views()), default=None)

    def add_checksums(self) -> bool:
        """Compute the checksums of the newest whole capture that has none; ``False`` if there is none. Blocks.

        By them a restore sees whether the bytes are still the same. Nothing may be written into the slots meanwhile.
        """
        bare = [slot for slot in self.all() if slot.status().phase is SlotPhase.WHOLE and slot.checksums is None]
        if not bare:
            return False
        newest = max(bare, key=lambda slot: slot.word(Word.SEQUENCE))
        faults.point("keeper.persist.checksum")
        status = newest.status()
        newest.set_checksums(status.sequence, Checksums.of(newest.image[: status.image_bytes]))
        return True
