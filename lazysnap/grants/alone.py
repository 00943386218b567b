"""The steps that a node stores by itself, once all of its trainers are dead and not all nodes answer. Pure."""

from collections.abc import Sequence

from lazysnap.grants.messages import Progress
from lazysnap.grants.node import NodeGrants, NodeLevel, RankView, Write, common_whole, whole_before_newest

_WRITING = (Progress.WRITING, Progress.VERIFYING)


def to_store_alone(ranks: Sequence[RankView], num_kept: int) -> list[int]:
    """Return the steps that a node stores without the others, the newest first.

    These are the newest capture that a rank began, if it is whole, and the ``num_kept`` (K) captures before it. The
    newest step that all nodes hold is among them (docs/architecture.md, *How many slots*), but without the other nodes
    nobody knows which one it is.
    """
    before = whole_before_newest(ranks)
    return [*(common_whole(ranks) - set(before)), *before[:num_kept]]


class StoringAlone:
    """Stores the newest whole captures of a node, when the nodes cannot agree on one any more. Not thread-safe.

    The faster levels are tried first. A slower one is tried only if a faster one did not take everything. What is
    stored counts for no grant. A restart combines it with what the other nodes stored.
    """

    def __init__(self, node: NodeGrants, num_kept: int, wait_s: float) -> None:
        """``wait_s``: how long the other nodes may be silent before this node acts."""
        self._node, self._num_kept, self._wait_s = node, num_kept, wait_s
        self._since: float | None = None
        self._level = 0
        """The next level to try."""
        self._writes: set[Write] = set()
        self.is_over = False
        """True if everything that this node can do alone is done."""

    def decide(self, ranks: Sequence[RankView], now: float, *, is_parted: bool) -> list[Write]:
        """Return the writes to begin now. Call it after every event, and from time to time.

        ``now``: by the monotonic clock. ``is_parted``: some node does not answer.
        """
        if not is_parted or not ranks or not all(rank.is_gone for rank in ranks):
            self._since, self._level, self._writes, self.is_over = None, 0, set(), False
            return []
        self._since = now if self._since is None else self._since
        if self._writes or self.is_over or now - self._since < self._wait_s:
            return []
        levels = [level for level in self._node.levels if not level.is_memory]
        if self._level < len(levels) and all(self._missing(level, ranks) for level in levels):
            level = levels[self._level]
            if level.progress in _WRITING:  # the last grant
                return []
            steps = self._missing(level, ranks)
            writes = [Write(self._level, step, None, level.attempt, is_alone=True) for step in steps]
            self._level, self._writes = self._level + 1, set(writes)
            return writes
        self.is_over = True
        return []

    def ended(self, write: Write) -> None:
        """Take note that a write succeeded or failed."""
        self._writes.discard(write)

    def _missing(self, level: NodeLevel, ranks: Sequence[RankView]) -> list[int]:
        """Return the steps to store that the level lacks. Steps before a complete one are not worth storing."""
        newest = max((key.step for key in level.complete if key.start == self._node.start), default=-1)
        steps = to_store_alone(ranks, self._num_kept)
        return [step for step in steps if step > newest and step not in level.stored]
