"""Which slot the next capture goes to. Pure.

With one rank two slots are enough to always keep the newest whole snapshot while the next one is written; persistence
reads from a slot of its own for long, so it makes three. The argument for many ranks is in docs/architecture.md.
"""

from collections.abc import Sequence

from lazysnap.arena import SlotPhase, SlotStatus
from lazysnap.config import SnapshotConfig


def slots_needed(config: SnapshotConfig, world_size: int = 1) -> int:
    """Slots for one rank: those that are kept, the one being written, and one that persistence reads."""
    needed = kept_whole(config, world_size) + 1 + bool(config.levels)
    if world_size > 1:
        # Fewer would leave no capture that all ranks have, or none at all.
        return max(needed, config.memory.slots or 0)
    return config.memory.slots or needed


def kept_whole(config: SnapshotConfig, world_size: int = 1) -> int:
    """How many of the newest whole captures are never written over: one of them is whole on every rank."""
    if world_size == 1:
        return 1
    if config.averaging_period is not None:
        return -(-config.averaging_period // config.every_n_steps)
    # At every step the newest that is whole everywhere may be the one before the last.
    return 2 if config.every_n_steps == 1 else 1


def choose_slot(statuses: Sequence[SlotStatus], idle: Sequence[bool], kept: int = 1) -> int | None:
    """The index of the slot to write next, ``None`` if all are in use.

    Never a pinned slot (persistence reads it), never one that a device still writes into (not ``idle``), never one of
    the ``kept`` newest whole ones (until the next is whole, they are the restart points in memory); of the others the
    oldest.
    """
    whole = [index for index, status in enumerate(statuses) if status.phase is SlotPhase.WHOLE]
    newest = sorted(whole, key=lambda index: statuses[index].sequence)[-kept:]
    free = [index for index, status in enumerate(statuses) if not status.pinned and idle[index] and index not in newest]
    # What is not whole is worth nothing: it goes first, so that of the whole ones the newest stay.
    return min(
        free, key=lambda index: (statuses[index].phase is SlotPhase.WHOLE, statuses[index].sequence), default=None
    )
