"""Which slot the next capture goes to, and which slots the keeper may free. Pure.

With one rank, two slots keep the newest whole snapshot while the next one is written. Storage reads a third one for
long. docs/architecture.md has the argument for many ranks.
"""

from collections.abc import Sequence

from lazysnap.config import SnapshotConfig
from lazysnap.memory.arena import SlotPhase, SlotStatus


def slots_needed(
    config: SnapshotConfig, world_size: int = 1, *, runs_ahead: bool = False, is_redundant: bool = False
) -> int:
    """Return the number of slots for one rank: those that are kept, one to write, and one that storage reads.

    Where other nodes protect this one, also the slot that is protected, and the next one.
    """
    needed = kept_whole(config, world_size, runs_ahead=runs_ahead) + 1 + bool(config.levels) + 2 * is_redundant
    if world_size > 1:
        # Fewer would leave no capture that all ranks have, or none at all.
        return max(needed, config.memory.slots or 0)
    return config.memory.slots or needed


def kept_whole(config: SnapshotConfig, world_size: int, *, runs_ahead: bool) -> int:
    """Return how many of the newest whole captures are never written over: one of them is whole on every rank.

    ``runs_ahead``: some rank trains on a device, whose copies the host does not wait for at the gate.
    """
    if world_size == 1:
        return 1
    # At every step the newest that is whole everywhere may be the one before the last; on devices one before that.
    return 1 + (config.every_n_steps == 1) + runs_ahead


def newest_whole(statuses: Sequence[SlotStatus], count: int) -> list[int]:
    """The indices of the newest whole captures."""
    whole = [index for index, status in enumerate(statuses) if status.phase is SlotPhase.WHOLE]
    return sorted(whole, key=lambda index: statuses[index].sequence)[-count:] if count else []


def choose_slot(statuses: Sequence[SlotStatus], idle: Sequence[bool], kept: int) -> int | None:
    """Return the index of the slot to write next, ``None`` if all are in use.

    It is not pinned (storage reads it) or written by a device (not ``idle``). It is not one of the ``kept`` newest
    whole ones: until the next is whole, these are the restart points in memory. Of the others it is the oldest,
    durable or not: so memory has the newest captures without a gap (docs/architecture.md, *How many slots*).
    """
    return next(iter(_free(statuses, idle, kept)), None)


def slots_to_return(
    statuses: Sequence[SlotStatus], idle: Sequence[bool], kept: int, fits: Sequence[bool], count: int
) -> list[int]:
    """Indices of slots that the keeper may free: those that do not fit captures, and fitting ones beyond ``count``.

    A slot goes only if ``choose_slot`` could choose it: then nothing in it is needed.
    """
    free = [i for i in _free(statuses, idle, kept) if statuses[i].phase is not SlotPhase.CAPTURING]
    surplus = max(0, sum(fits) - count)
    return [i for i in free if not fits[i]] + [i for i in free if fits[i]][:surplus]


def _free(statuses: Sequence[SlotStatus], idle: Sequence[bool], kept: int) -> list[int]:
    """Indices of the slots that nobody needs, those first whose captures are worth the least."""
    untouched = newest_whole(statuses, kept)
    free = [i for i, status in enumerate(statuses) if idle[i] and not status.pinned and i not in untouched]
    # What is not whole is worth nothing: it goes first, so that of the whole ones the newest stay.
    return sorted(free, key=lambda i: (statuses[i].phase is SlotPhase.WHOLE, statuses[i].sequence))
