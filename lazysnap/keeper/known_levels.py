"""The state of a node's levels, as the coordinator's last order describes it."""

import time
from collections.abc import Sequence
from dataclasses import replace

from lazysnap.config import PersistentLevel
from lazysnap.events import Complete
from lazysnap.grants.node import NodeLevel


class KnownLevels:
    """Complete and lost steps of each level, and if it works on all nodes. One thread changes it, any may read."""

    def __init__(self, settings: Sequence[PersistentLevel], levels: Sequence[NodeLevel], start: str) -> None:
        """``levels``: as a new start knows them; they are copied."""
        self._settings, self._start = settings, start
        self.known: tuple[tuple[NodeLevel, float | None], ...] = tuple((copied(level), None) for level in levels)
        """Each level, and the monotonic time since when it does not work on all nodes (``None``: it does). Replaced as
        a whole."""

    @property
    def levels(self) -> tuple[NodeLevel, ...]:
        """The levels, fast to slow."""
        return tuple(level for level, _ in self.known)

    def news(self, levels: Sequence[NodeLevel]) -> list[Complete]:
        """Return what is complete by ``levels``, and was not before."""
        found = []
        for settings, new, old in zip(self._settings, levels, self.levels, strict=True):
            keys = new.complete - old.complete
            steps = sorted(key.step for key in keys if key.start == self._start)
            if steps:
                found.append(Complete(t=time.time(), level=settings.url, steps=steps, start=self._start))
        return found

    def take(self, levels: Sequence[NodeLevel]) -> None:
        """Note what the last order says."""
        now, known = time.monotonic(), zip(levels, self.known, strict=True)
        self.known = tuple((level, None if level.works else since or now) for level, (_, since) in known)


def copied(level: NodeLevel) -> NodeLevel:
    """Return a copy whose stored and complete steps do not change."""
    return replace(level, stored={*level.stored}, complete={*level.complete})
