"""Which captures a level stores, and which of its snapshots may be deleted. Pure functions."""

from collections.abc import Collection, Sequence

from lazysnap.config import PersistentLevel

STRIDES = (1, 2, 4, 8, 16, 32, 64)
"""A rank with slow storage stores every n-th of the captures that are due; n is one of these."""


def is_due(level: PersistentLevel, step: int, last_step: int | None, world_size: int = 1) -> bool:
    """Whether ``level`` stores the capture at ``step``, if it stored ``last_step`` before.

    With one rank, as soon as ``every_n_steps`` have passed. With several, only the step decides, so that all ranks
    agree.
    """
    if is_wanted(level, step):
        return True
    if world_size > 1:
        return step % level.every_n_steps == 0
    return last_step is None or step < last_step or step - last_step >= level.every_n_steps


def is_wanted(level: PersistentLevel, step: int) -> bool:
    """Whether retention keeps this step for ever, so that it is never left out for a newer one."""
    return level.keep_every_n_steps is not None and step % level.keep_every_n_steps == 0


def kept(steps: Collection[int], level: PersistentLevel, sound: Collection[int]) -> list[int]:
    """The newest ``keep_last`` of ``steps`` that are ``sound``, oldest first; fewer, if there are no more."""
    return sorted(set(sound) & set(steps))[-level.keep_last :]


def expired(
    steps: Sequence[int],
    level: PersistentLevel,
    *,
    sound: Collection[int],
    protected: Collection[int] = (),
) -> list[int]:
    """Of the complete snapshots ``steps`` of one run, those that ``level`` need not keep, oldest first.

    ``sound``: the newest ones that were read back whole. If there are fewer than ``keep_last``, nothing expires. Else
    older steps do, except multiples of ``keep_every_n_steps`` and steps in ``protected`` (they have a name, or another
    level still has to copy them).
    """
    newest = kept(steps, level, sound)
    if len(newest) < level.keep_last:
        return []
    return [
        step for step in sorted(set(steps)) if step < newest[0] and step not in protected and not is_wanted(level, step)
    ]


def meeting_points(steps: Collection[int], level: PersistentLevel) -> set[int]:
    """Of the snapshots ``steps`` of one rank, those that a rank with slower storage may be storing, or store next.

    The newest multiple of each stride: a slow rank stores every n-th of the captures that are due (``STRIDES``).
    """
    found = set()
    for stride in STRIDES:
        multiples = [step for step in steps if step // level.every_n_steps % stride == 0]
        found.update(sorted(multiples)[-1:])
    return found
