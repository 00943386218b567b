"""The names that trainers gave to snapshots of one start. Every level gives them; some are lost before."""

import threading
from collections.abc import Sequence

from lazysnap.grants.messages import StepKey
from lazysnap.grants.node import NodeLevel

Missing = tuple[int, int, str]
"""Level, step and name of a snapshot that has no such name there."""


class NodeNames:
    """Names by step, of one node. Thread-safe."""

    def __init__(self, start: str) -> None:
        self._start = start
        self._lock = threading.Lock()
        self._given: dict[int, set[str]] = {}
        self._reported: set[Missing] = set()
        """Lost names that were reported."""

    def give(self, step: int, name: str) -> None:
        """Name a snapshot."""
        with self._lock:
            self._given.setdefault(step, set()).add(name)

    def take(self, name: str) -> None:
        """Take a name from every snapshot."""
        with self._lock:
            for names in self._given.values():
                names.discard(name)

    def by_step(self) -> dict[int, set[str]]:
        """Return a copy: the names of each step."""
        with self._lock:
            return {step: set(names) for step, names in self._given.items()}

    def keys(self) -> set[StepKey]:
        """Return the snapshots that have a name."""
        with self._lock:
            return {StepKey(step, self._start) for step, names in self._given.items() if names}

    def newly_lost(self, levels: Sequence[NodeLevel]) -> list[Missing]:
        """Return the names whose snapshot will never be at a level, each once."""
        lost = [
            (index, step, name)
            for index, level in enumerate(levels)
            for step, names in self.by_step().items()
            for name in names
            if step in level.lost
        ]
        with self._lock:
            news = [one for one in lost if one not in self._reported]
            self._reported.update(news)
        return news

    def missing(self, levels: Sequence[NodeLevel]) -> list[Missing]:
        """Return the names that cannot be given yet, because the snapshot is not complete there; none that are lost."""
        return [
            (index, step, name)
            for index, level in enumerate(levels)
            for step, names in self.by_step().items()
            for name in sorted(names)
            if StepKey(step, self._start) not in level.complete and step not in level.lost
        ]

    def are_in_memory_alone(self, levels: Sequence[NodeLevel], works: Sequence[bool]) -> bool:
        """True if a named snapshot is complete at no level, and a level that ``works`` may take it."""
        complete = {key for level in levels for key in level.complete}
        working = [level for level, is_well in zip(levels, works, strict=True) if is_well]
        return any(key.step not in level.lost for key in self.keys() - complete for level in working)
