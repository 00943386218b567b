"""Retention: which snapshots of a level may be deleted. Pure.

All nodes decide alike, because only orders matter. So the parts of one snapshot are deleted together.
"""

from collections.abc import Collection
from dataclasses import dataclass

from lazysnap.core.messages import StepKey


@dataclass(frozen=True)
class Retention:
    """The rule of one level."""

    keep_last: int
    """Invariant: at least 1, so that the newest complete snapshot stays."""
    keep_every_n_steps: int | None = None

    def stays_for_ever(self, step: int) -> bool:
        """Return True if a complete snapshot of this step is never deleted."""
        return self.keep_every_n_steps is not None and step % self.keep_every_n_steps == 0

    def may_delete(self, key: StepKey, complete: Collection[StepKey], cancelled: Collection[StepKey]) -> bool:
        """Return True if a snapshot may be deleted.

        A complete one may be deleted once ``keep_last`` newer ones are complete, unless ``stays_for_ever``. Any other
        one may be deleted by the same rule, or as soon as its grant was cancelled. So the newest complete one always
        stays.

        Args:
            key: the snapshot. It has no name.
            complete: snapshots that all nodes stored; it may lack old ones.
            cancelled: grants that a node gave up.
        """
        num_newer = sum(other > key for other in complete)
        # An old complete snapshot may be missing in ``complete``: the first rule covers it.
        if self.is_expired(key.step, num_newer):
            return True
        return key in cancelled and key not in complete

    def is_expired(self, step: int, num_newer: int) -> bool:
        """Return True if a complete snapshot may be deleted.

        Args:
            step: its step.
            num_newer: newer complete snapshots of the run, without damaged ones.
        """
        return num_newer >= self.keep_last and not self.stays_for_ever(step)
