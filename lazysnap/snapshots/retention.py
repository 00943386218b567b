"""Which snapshots of a run need not stay at a level. Pure. Keepers and ``lazysnap prune`` delete by this rule alone."""

from collections.abc import Collection
from typing import Any, Protocol, TypeVar

from lazysnap.config import PersistentLevel


class Key(Protocol):
    """A snapshot of one run. Keys sort by age: by step, then by start."""

    @property
    def step(self) -> int:
        """Of the training."""

    def __gt__(self, other: Any, /) -> bool:
        """Whether it is newer."""


K = TypeVar("K", bound=Key)


def is_milestone(level: PersistentLevel, step: int) -> bool:
    """Whether a complete snapshot of the step stays for ever (``keep_every_n_steps``)."""
    return level.keep_every_n_steps is not None and step % level.keep_every_n_steps == 0


def is_over(
    key: K, level: PersistentLevel, complete: Collection[K], *, is_complete: bool, protected: Collection[int] = ()
) -> bool:
    """Whether a snapshot may be deleted.

    A complete one may when ``keep_last`` newer ones are complete, an incomplete one when one newer is. So the newest
    complete one always stays. Milestones stay as well, and steps in ``protected``.

    ``complete``: the snapshots of its run that count, at least the ``keep_last`` newest. A damaged one does not.
    """
    if key.step in protected or (is_complete and is_milestone(level, key.step)):
        return False
    return sum(other > key for other in complete) >= (level.keep_last if is_complete else 1)
