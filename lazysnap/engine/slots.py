"""Which slot the next capture goes to. Pure.

With one rank two slots are enough to always keep the newest whole snapshot while the next one is written; persistence
reads from a slot of its own for long, so it makes three. The argument for many ranks is in docs/architecture.md.
"""

from collections.abc import Sequence

from lazysnap.arena import SlotPhase, SlotStatus
from lazysnap.config import SnapshotConfig


def slots_needed(config: SnapshotConfig) -> int:
    """Slots for one rank: newest whole, the one being written, and one that persistence reads."""
    return config.memory.slots or (3 if config.levels else 2)


def choose_slot(statuses: Sequence[SlotStatus], idle: Sequence[bool]) -> int | None:
    """The index of the slot to write next, ``None`` if all are in use.

    Never a pinned slot (persistence reads it), never one that a device still writes into (not ``idle``), never the
    newest whole one (until the next is whole, it is the only restart point in memory); of the others the oldest.
    """
    whole = [index for index, status in enumerate(statuses) if status.phase is SlotPhase.WHOLE]
    newest = max(whole, key=lambda index: statuses[index].sequence, default=None)
    free = [index for index, status in enumerate(statuses) if not status.pinned and idle[index] and index != newest]
    return min(free, key=lambda index: statuses[index].sequence, default=None)
