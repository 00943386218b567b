"""The captures that the keeper of this node holds for one rank, from its answer and the mapped slots."""

from collections.abc import Mapping
from dataclasses import dataclass

from lazysnap.errors import LazySnapError
from lazysnap.keeper.questions import HeldParity, KeptMemory, SlotFacts, TrainerEnd
from lazysnap.memory.slots import Slot
from lazysnap.shard.checksum import Checksums
from lazysnap.shard.manifest import CaptureMeta


@dataclass(frozen=True)
class MemoryEntry:
    """A whole capture, and its slot."""

    step: int
    run_id: str
    start: str
    """Id of the start that made it, 16 hexadecimal digits."""
    sequence: int
    rank: int
    world_size: int
    checksums: Checksums | None
    """None if the keeper has not computed them."""
    slot: Slot
    is_repeatable: bool
    """See ``SlotView``."""


@dataclass(frozen=True)
class MemoryInventory:
    """All captures that the keeper holds for one rank."""

    entries: tuple[MemoryEntry, ...] = ()
    end: TrainerEnd | None = None
    """The end of the last trainer."""
    local_ranks: tuple[int, ...] = ()
    """Ranks for which the keeper has slots, this one included."""
    parity: tuple[HeldParity, ...] = ()
    """Parity that the node holds; only for the first rank of a node."""

    @classmethod
    def of(cls, memory: KeptMemory, slots: Mapping[int, Slot]) -> "MemoryInventory":
        """Return the contents of a keeper's answer, without unreadable captures.

        Args:
            memory: the keeper's answer.
            slots: the slots of that rank that this process mapped, by id.
        """
        entries = []
        for facts in memory.slots:
            slot = slots.get(facts.slot_id)
            if slot is None:
                continue
            entry = _entry(slot, facts)
            if entry is not None:
                entries.append(entry)
        return cls(tuple(entries), memory.end, memory.local_ranks, memory.parity)


def _entry(slot: Slot, facts: SlotFacts) -> MemoryEntry | None:
    """Return the whole capture in a slot; None if there is none, or its metadata is unreadable."""
    view = slot.view()
    if not view.is_whole:
        return None
    try:
        meta = CaptureMeta.from_bytes(slot.read_meta())
    except LazySnapError:
        return None
    if slot.view().sequence != view.sequence:
        return None  # its trainer is alive, and began another capture
    checksums = None
    if facts.sequence == view.sequence:
        checksums = facts.checksums
    return MemoryEntry(
        step=meta.step,
        run_id=meta.run_id,
        start=meta.start,
        sequence=view.sequence,
        rank=meta.rank,
        world_size=meta.world_size,
        checksums=checksums,
        slot=slot,
        is_repeatable=view.is_repeatable,
    )
