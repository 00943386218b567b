"""Retention: which snapshots of a level may be deleted. Pure.

The rule is ``keep_last`` and ``keep_every_n_steps`` of the level's settings. ``keep_last`` is at least 1, so that the
newest complete snapshot stays. All nodes decide alike, because only orders matter. So the parts of one snapshot are
deleted together.
"""

from collections.abc import Collection

from lazysnap.core.messages import LevelSettings, StepKey


def stays_for_ever(step: int, level: LevelSettings) -> bool:
    """Return True if a complete snapshot of this step is never deleted."""
    return level.keep_every_n_steps is not None and step % level.keep_every_n_steps == 0


def may_delete(
    key: StepKey, level: LevelSettings, complete: Collection[StepKey], cancelled: Collection[StepKey]
) -> bool:
    """Return True if a snapshot may be deleted.

    A complete one may be deleted once ``keep_last`` newer ones are complete, unless ``stays_for_ever``. Any other
    one may be deleted by the same rule, or as soon as its grant was cancelled. So the newest complete one always
    stays.

    Args:
        key: the snapshot. It has no name.
        level: the settings of the level, with the rule.
        complete: snapshots that all nodes stored; it may lack old ones.
        cancelled: grants that a node gave up.
    """
    num_newer = sum(other > key for other in complete)
    # An old complete snapshot may be missing in ``complete``: the first rule covers it.
    if is_expired(key.step, level, num_newer):
        return True
    return key in cancelled and key not in complete


def is_expired(step: int, level: LevelSettings, num_newer: int) -> bool:
    """Return True if a complete snapshot may be deleted.

    Args:
        step: its step.
        level: the settings of the level, with the rule.
        num_newer: newer complete snapshots of the run, without damaged ones.
    """
    return num_newer >= level.keep_last and not stays_for_ever(step, level)
