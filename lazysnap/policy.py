"""Which captures a level persists and which of its snapshots it may delete. Pure functions."""

from collections.abc import Collection, Sequence

from lazysnap.config import PersistentLevel

STRIDES = (1, 2, 4, 8, 16, 32, 64)
"""A rank whose storage is slow stores every n-th of the captures that are due, and n is one of these."""


def is_due(level: PersistentLevel, step: int, last_step: int | None, world_size: int = 1) -> bool:
    """Whether ``level`` wants the capture at ``step``, having persisted ``last_step`` before.

    With one rank, the newest capture is wanted as soon as ``every_n_steps`` have passed, whatever the step's number.
    With several, the answer depends on nothing but the step, so that all ranks give the same one.
    """
    if is_wanted(level, step):
        return True
    if world_size > 1:
        return step % level.every_n_steps == 0
    return last_step is None or step < last_step or step - last_step >= level.every_n_steps


def is_wanted(level: PersistentLevel, step: int) -> bool:
    """Whether the level's retention asks for this very step, so that it is not left out for a newer one."""
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

    ``sound``: those of the newest that were read back whole. As long as there are fewer than ``keep_last`` of them
    nothing goes; else what is older than they are, but never a multiple of ``keep_every_n_steps`` nor a step in
    ``protected`` (it has a name, or another level has still to copy it).
    """
    newest = kept(steps, level, sound)
    if len(newest) < level.keep_last:
        return []
    return [
        step for step in sorted(set(steps)) if step < newest[0] and step not in protected and not is_wanted(level, step)
    ]


def meeting_points(steps: Collection[int], level: PersistentLevel) -> set[int]:
    """Of the snapshots ``steps`` that one rank has, those that a rank with slower storage stores next, or is storing.

    The newest multiple of each stride: a slow rank stores every n-th of the captures that are due (``STRIDES``), and
    needs less than n of them for one snapshot.
    """
    found = set()
    for stride in STRIDES:
        multiples = [step for step in steps if step // level.every_n_steps % stride == 0]
        found.update(sorted(multiples)[-1:])
    return found
