"""Which files of one level a node deletes. Pure: a listing and what was published in, files out."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from lazysnap.config import PersistentLevel
from lazysnap.keeper.grant_messages import SnapshotKey
from lazysnap.keeper.granted import NodeLevel


class NodeFile(NamedTuple):
    """A node file of this run, by its name."""

    step: int
    start: str
    node: int
    num_nodes: int

    @property
    def key(self) -> SnapshotKey:
        """The snapshot that it belongs to."""
        return SnapshotKey(self.step, self.start)


@dataclass(frozen=True)
class Retention:
    """What one node keeps at one level."""

    settings: PersistentLevel
    start: str
    node: int
    num_nodes: int

    def expired(self, listing: Iterable[NodeFile], level: NodeLevel, protected: Collection[int] = ()) -> list[NodeFile]:
        """The files to delete.

        A complete snapshot goes when ``keep_last`` newer ones are complete, an incomplete one when a newer one is
        complete, or when its grant was cancelled and the step was not granted again. The newest complete one always
        stays. Files of earlier starts are shared out by node number: each goes once, whoever wrote it.

        ``listing``: of this run only. ``protected``: steps with a name, and those that ``still_to_copy`` tells.
        """
        return [file for file in listing if self._is_mine(file) and self._is_over(file, level, protected)]

    def _is_mine(self, file: NodeFile) -> bool:
        if file.start == self.start:
            return (file.node, file.num_nodes) == (self.node, self.num_nodes)
        return file.node % self.num_nodes == self.node

    def _is_over(self, file: NodeFile, level: NodeLevel, protected: Collection[int]) -> bool:
        if file.key in level.complete:
            return not self._is_kept(file.step, protected) and self._newer(file, level) >= self.settings.keep_last
        if file.start == self.start and file.step in level.cancelled and file.step != level.grant:
            return True
        # A step that is kept for ever may be complete though it is too old to be told.
        is_granted = file.start == self.start and file.step == level.grant
        return not is_granted and not self._is_kept(file.step, protected) and self._newer(file, level) > 0

    def _is_kept(self, step: int, protected: Collection[int]) -> bool:
        every = self.settings.keep_every_n_steps
        return step in protected or (every is not None and step % every == 0)

    @staticmethod
    def _newer(file: NodeFile, level: NodeLevel) -> int:
        return sum(key > file.key for key in level.complete)


def still_to_copy(faster: NodeLevel, slower: NodeLevel, settings: PersistentLevel, start: str) -> set[int]:
    """Steps of the faster level that the slower one, with its ``settings``, has granted or never leaves out."""
    every = settings.keep_every_n_steps
    own = {key.step for key in faster.complete if key.start == start}
    wanted = {step for step in own if step == slower.grant or (every is not None and step % every == 0)}
    return {step for step in wanted if step not in slower.lost and SnapshotKey(step, start) not in slower.complete}
