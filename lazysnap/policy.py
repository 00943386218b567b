"""Which captures a level persists and which of its snapshots it may delete. Pure functions."""

from collections.abc import Sequence

from lazysnap.config import PersistentLevel


def is_due(level: PersistentLevel, step: int, last_step: int | None, world_size: int = 1) -> bool:
    """Whether ``level`` wants the capture at ``step``, having persisted ``last_step`` before.

    With one rank, the newest capture is wanted as soon as ``every_n_steps`` have passed, whatever the step's number.
    With several, the answer depends on nothing but the step, so that all ranks give the same one.
    """
    if world_size > 1:
        return step % level.every_n_steps == 0
    return last_step is None or step < last_step or step - last_step >= level.every_n_steps


def expired(steps: Sequence[int], level: PersistentLevel) -> list[int]:
    """Of the complete snapshots ``steps`` of one run, those that ``level`` need not keep, oldest first.

    Never the newest one, never one of the last ``keep_last``, never a multiple of ``keep_every_n_steps``.
    """
    ordered = sorted(set(steps))
    every = level.keep_every_n_steps
    return [step for step in ordered[: -level.keep_last] if every is None or step % every != 0]
