"""The names that one level is to give to snapshots, or to take away, in the order in which they were asked for."""

import threading
from collections import deque
from dataclasses import dataclass

_TRIES = 3


@dataclass(eq=False)
class Naming:
    """A name that is to be given, or taken away."""

    name: str
    step: int | None
    """``None`` takes it from all snapshots of the run."""
    tries: int = 0


class LevelNames:
    """Methods may be called from any thread, and do not block."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: deque[Naming] = deque()
        """The first one stays until it is done, or given up."""
        self._asked: set[tuple[int, str]] = set()
        """What need not be asked for again."""
        self._failed: set[tuple[int | None, str]] = set()
        """What was said to fail."""

    def give(self, step: int, name: str) -> None:
        """Give a snapshot a name, once."""
        with self._lock:
            if (step, name) not in self._asked:
                self._asked.add((step, name))
                self._open.append(Naming(name, step))

    def take(self, name: str) -> None:
        """Take a name away. What was still to be given so is not: a later try would give it again."""
        with self._lock:
            self._asked = {(step, other) for step, other in self._asked if other != name}
            self._open = deque(naming for naming in self._open if naming.name != name)
            self._open.append(Naming(name, None))

    def first(self) -> Naming | None:
        """What is to be done next."""
        with self._lock:
            return self._open[0] if self._open else None

    def done(self, naming: Naming) -> None:
        """It was given, or taken away."""
        with self._lock:
            self._failed.discard((naming.step, naming.name))
            self._drop(naming)

    def failed(self, naming: Naming, *, is_final: bool) -> bool:
        """It could not be done, this time or (``is_final``) ever; whether that is news."""
        with self._lock:
            naming.tries += 1
            if naming.tries >= _TRIES and naming.step is not None:
                self._asked.discard((naming.step, naming.name))  # whoever asks again is heard
            if is_final or naming.tries >= _TRIES:
                self._drop(naming)
            key = naming.step, naming.name
            is_news = key not in self._failed
            self._failed.add(key)
            return is_news

    def _drop(self, naming: Naming) -> None:
        if naming in self._open:  # else the name was taken away meanwhile
            self._open.remove(naming)
