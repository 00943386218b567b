"""The names that one level is to give to snapshots, or to take away."""

import threading
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

_TRIES = 3


@dataclass(frozen=True)
class Naming:
    """A name that is to be given, or taken away."""

    step: int | None
    """``None`` takes it from all snapshots of the run."""
    name: str


class LevelNames:
    """Methods may be called from any thread, and do not block."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._wanted: frozenset[Naming] = frozenset()
        self._taken: list[Naming] = []
        """Names to take away; before others are given."""
        self._settled: set[Naming] = set()
        """Given, or refused for good."""
        self._tries: Counter[Naming] = Counter()
        """The names that failed."""

    def want(self, wanted: Collection[tuple[int, str]]) -> None:
        """The steps that are here, each with its names. Failed ones are tried again."""
        with self._lock:
            self._wanted = frozenset(Naming(step, name) for step, name in wanted)
            self._tries = Counter({naming: 1 for naming in self._tries})

    def take(self, name: str) -> None:
        """Take a name away, also from what it was still to be given to."""
        with self._lock:
            self._wanted = frozenset(naming for naming in self._wanted if naming.name != name)
            self._settled = {naming for naming in self._settled if naming.name != name}
            self._taken.append(Naming(None, name))

    def first(self) -> Naming | None:
        """Return the next thing to do."""
        with self._lock:
            if self._taken:
                return self._taken[0]
            open_ = (one for one in self._wanted - self._settled if self._tries[one] < _TRIES)
            return min(open_, key=lambda one: (one.step or 0, one.name), default=None)

    def done(self, naming: Naming) -> None:
        """It was given, or taken away."""
        with self._lock:
            self._settle(naming)

    def failed(self, naming: Naming, *, is_final: bool) -> bool:
        """It could not be done, this time or (``is_final``) ever; whether that is news."""
        with self._lock:
            self._tries[naming] += 1
            is_news = self._tries[naming] == 1
            if is_final or (naming.step is None and self._tries[naming] >= _TRIES):
                self._settle(naming)
            return is_news

    def _settle(self, naming: Naming) -> None:
        del self._tries[naming]
        if naming.step is None:
            self._taken.remove(naming)
        elif naming in self._wanted:  # else the name was taken away meanwhile
            self._settled.add(naming)
