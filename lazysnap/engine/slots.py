"""Which slot the next capture goes to. Pure.

With one rank two slots are enough to always keep the newest whole snapshot while the next one is written; persistence
reads from a slot of its own for long, so it makes three. The argument for many ranks is in docs/architecture.md.
"""

from collections.abc import Collection, Sequence

from lazysnap.arena import SlotPhase, SlotStatus
from lazysnap.config import SnapshotConfig

_KEPT_BY_AGREEMENT = 2
"""The last snapshot that was agreed on, and the candidate that may become the next."""
_MOST_KEPT = 8
"""Where ranks that train apart for long cannot tell each other what they have: more would be no memory at all."""


def wants_agreement(config: SnapshotConfig, world_size: int) -> bool:
    """Whether ranks have to tell each other what they have: where the argument costs more memory, or does not hold."""
    if world_size == 1 or config.averaging_period is None:
        return False
    return config.averaging_period == "never" or kept_whole(config, world_size) > _KEPT_BY_AGREEMENT


def slots_needed(config: SnapshotConfig, world_size: int = 1, *, agrees: bool = False) -> int:
    """Slots for one rank: those that are kept, the one being written, and one that persistence reads.

    ``agrees``: what is kept is agreed on by the ranks.
    """
    kept = _KEPT_BY_AGREEMENT if agrees else kept_whole(config, world_size)
    needed = kept + 1 + bool(config.levels)
    if world_size > 1:
        # Fewer would leave no capture that all ranks have, or none at all.
        return max(needed, config.memory.slots or 0)
    return config.memory.slots or needed


def kept_whole(config: SnapshotConfig, world_size: int = 1) -> int:
    """How many of the newest whole captures are never written over: one of them is whole on every rank, but where
    ranks never synchronise.
    """
    if world_size == 1:
        return 1
    if config.averaging_period == "never":
        return _KEPT_BY_AGREEMENT
    if config.averaging_period is not None:
        return min(-(-config.averaging_period // config.every_n_steps), _MOST_KEPT)
    # At every step the newest that is whole everywhere may be the one before the last.
    return 2 if config.every_n_steps == 1 else 1


def kept_instead(config: SnapshotConfig, world_size: int) -> str:
    """What ranks do that have to agree on what they keep and cannot, for a message."""
    kept, period = kept_whole(config, world_size), config.averaging_period
    is_enough = isinstance(period, int) and kept * config.every_n_steps >= period
    return f"each keeps the {kept} newest ones instead" + ("" if is_enough else ", which may have no step in common")


def newest_whole(statuses: Sequence[SlotStatus], count: int) -> list[int]:
    """The indices of the newest whole captures."""
    whole = [index for index, status in enumerate(statuses) if status.phase is SlotPhase.WHOLE]
    return sorted(whole, key=lambda index: statuses[index].sequence)[-count:] if count else []


def choose_slot(
    statuses: Sequence[SlotStatus], idle: Sequence[bool], kept: int = 1, held: Collection[int] = ()
) -> int | None:
    """The index of the slot to write next, ``None`` if all are in use.

    Never a pinned slot (persistence reads it), never one that a device still writes into (not ``idle``), never one of
    the ``kept`` newest whole ones (until the next is whole, they are the restart points in memory), never one that is
    ``held`` by agreement; of the others the oldest.
    """
    untouched = {*newest_whole(statuses, kept), *held}
    free = [i for i, status in enumerate(statuses) if not status.pinned and idle[i] and i not in untouched]
    # What is not whole is worth nothing: it goes first, so that of the whole ones the newest stay.
    return min(
        free, key=lambda index: (statuses[index].phase is SlotPhase.WHOLE, statuses[index].sequence), default=None
    )
