"""The snapshots that need not stay at a level. Pure.

``may_go`` is the rule, for keepers and for ``lazysnap prune``. ``Retention`` applies it in a keeper, to what orders
say, and adds that a cancelled step goes at once.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from lazysnap.config import PersistentLevel
from lazysnap.grants.messages import MAX_TOLD, StepKey
from lazysnap.grants.node import NodeLevel


def is_milestone(level: PersistentLevel, step: int) -> bool:
    """True if a complete snapshot of the step stays for ever (``keep_every_n_steps``)."""
    return level.keep_every_n_steps is not None and step % level.keep_every_n_steps == 0


def may_go(
    level: PersistentLevel, step: int, newer: int, *, is_complete: bool, protected: Collection[int] = ()
) -> bool:
    """True if a snapshot may be deleted. ``newer``: how many of its run are newer and complete; a damaged one is not.

    A complete one may when ``keep_last`` newer ones are complete, an incomplete one when one newer is. So the newest
    complete one always stays. Milestones stay as well, and steps in ``protected``.
    """
    if step in protected or (is_complete and is_milestone(level, step)):
        return False
    return newer >= (level.keep_last if is_complete else 1)


@dataclass(frozen=True)
class Retention:
    """The snapshots that one level keeps of the run that a start goes on with."""

    settings: PersistentLevel
    start: str

    def is_over(self, key: StepKey, level: NodeLevel, protected: Collection[int] = ()) -> bool:
        """True if a snapshot of this run, complete or not, need not stay.

        Each node deletes its own files by this, and all must come to the same result: so it depends on the settings
        and on what the coordinator's orders say (``level``), never on a clock or on what one node sees.

        What is granted stays. What was cancelled and not granted again goes at once: it can never be complete.
        ``protected``: steps with a name, and those of ``still_to_copy``. While a coordinator does not know yet
        what all nodes have, everything stays.
        """
        if not level.is_open:
            return False
        is_complete = key in level.complete
        if key.start == self.start and not is_complete and (key.step == level.grant or key.step in level.cancelled):
            return key.step != level.grant
        # An order lists the newest alone: milestones, and with a large ``keep_last`` others, may be complete as well.
        if is_milestone(self.settings, key.step):
            return False
        is_complete = is_complete or self._is_untold(key, level)
        newer = sum(other > key for other in level.complete)
        return may_go(self.settings, key.step, newer, is_complete=is_complete, protected=protected)

    def _is_untold(self, key: StepKey, level: NodeLevel) -> bool:
        """True if it may be complete although no order lists it. Of earlier starts the restart saw all.

        An order lists the newest of this start and some older ones that have a name: there are gaps between these.
        """
        if self.settings.keep_last <= MAX_TOLD:
            return False
        return key.start == self.start or key < min(level.complete, default=key)


def still_to_copy(levels: Sequence[NodeLevel], settings: Sequence[PersistentLevel], index: int, start: str) -> set[int]:
    """Steps of one level that a slower one does not have yet, and has granted or never leaves out.

    ``levels`` and ``settings``: of all levels, fast to slow; ``index``: of the one.
    """
    own = {key.step for key in levels[index].complete if key.start == start}
    found, lost = set[int](), set[int]()
    for slower, kept in zip(levels[index + 1 :], settings[index + 1 :], strict=True):
        lost |= slower.lost  # what never comes to a level between does not come to the ones behind it, either
        missing = {step for step in own if StepKey(step, start) not in slower.complete}
        found |= {step for step in missing if step == slower.grant or (is_milestone(kept, step) and step not in lost)}
    return found
