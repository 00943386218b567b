"""Which snapshots of one level may go. Pure: what is there and what was published in, what to delete out."""

from collections.abc import Collection
from dataclasses import dataclass

from lazysnap.config import PersistentLevel
from lazysnap.keeper.grant_messages import SnapshotKey
from lazysnap.keeper.granted import NodeLevel


@dataclass(frozen=True)
class Retention:
    """What one level keeps of the run that a start goes on with."""

    settings: PersistentLevel
    start: str

    def is_over(self, key: SnapshotKey, level: NodeLevel, protected: Collection[int] = ()) -> bool:
        """Whether a snapshot of this run, complete or not, need not stay.

        A complete one goes when ``keep_last`` newer ones are complete, an incomplete one when a newer one is complete,
        or when its grant was cancelled and the step was not granted again. The newest complete one always stays.
        ``protected``: steps with a name, and those that ``still_to_copy`` tells.
        """
        if key in level.complete:
            return not self._is_kept(key.step, protected) and self._newer(key, level) >= self.settings.keep_last
        if key.start == self.start and key.step in level.cancelled and key.step != level.grant:
            return True
        # A step that is kept for ever may be complete though it is too old to be told.
        is_granted = key.start == self.start and key.step == level.grant
        return not is_granted and not self._is_kept(key.step, protected) and self._newer(key, level) > 0

    def _is_kept(self, step: int, protected: Collection[int]) -> bool:
        every = self.settings.keep_every_n_steps
        return step in protected or (every is not None and step % every == 0)

    @staticmethod
    def _newer(key: SnapshotKey, level: NodeLevel) -> int:
        return sum(other > key for other in level.complete)


def still_to_copy(faster: NodeLevel, slower: NodeLevel, settings: PersistentLevel, start: str) -> set[int]:
    """Steps of the faster level that the slower one, with its ``settings``, has granted or never leaves out."""
    every = settings.keep_every_n_steps
    own = {key.step for key in faster.complete if key.start == start}
    wanted = {step for step in own if step == slower.grant or (every is not None and step % every == 0)}
    return {step for step in wanted if step not in slower.lost and SnapshotKey(step, start) not in slower.complete}
