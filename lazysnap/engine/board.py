"""Words and counters that all ranks see, for what they agree on while training runs: no collective, and off its path.

In the store that the process group was made with (under torchrun the agent's or rank 0's TCP store), over a connection
of its own. Each call is one round trip, bounded by a deadline, whatever the number of ranks; call it from a thread that
nobody waits for. What was told outlives the rank that told it, not the store.
"""

import datetime
from collections.abc import Callable
from typing import Any, TypeVar

from lazysnap.errors import LazySnapError, LevelHangs
from lazysnap.levels.watchdog import Watchdog

_Answer = TypeVar("_Answer")


class BoardUnavailable(LazySnapError):
    """The process group's store does not answer: its host is dead, or the group was destroyed."""


class Board:
    """What the ranks of one start of a training have told each other. Thread-safe."""

    def __init__(self, store: Any, timeout_s: float) -> None:
        """``store``: of ``torch.distributed``, with keys of this group alone. Raises: BoardUnavailable."""
        self._timeout_s = timeout_s
        self._store: Any = self._asked("connecting", lambda: self._connected(store))

    def _connected(self, store: Any) -> Any:
        own = store.clone()
        own.set_timeout(datetime.timedelta(seconds=self._timeout_s))
        return own

    def _asked(self, what: str, ask: Callable[[], _Answer]) -> _Answer:
        """In a thread of its own: torch has no deadline for a host that takes a question and does not answer."""
        attempt = Watchdog(lambda beat: ask(), f"the process group's store: {what}")
        try:
            return attempt.result(self._timeout_s)
        except LevelHangs as error:
            raise BoardUnavailable(
                f"the process group's store does not answer: {what}: not within {self._timeout_s:g} s"
            ) from error
        except (RuntimeError, ValueError, AttributeError) as error:  # torch's own errors are RuntimeErrors
            text = str(error).partition("\n")[0]
            raise BoardUnavailable(f"the process group's store does not answer: {what}: {text}") from error

    def add(self, key: str, amount: int = 1) -> int:
        """Add to a counter (0 at first); what it is then. Blocks: one round trip. Raises: BoardUnavailable."""
        return int(self._asked(key, lambda: self._store.add(key, amount)))

    def count(self, key: str) -> int:
        """What a counter is. Blocks: one round trip. Raises: BoardUnavailable."""
        return self.add(key, 0)

    def swap(self, key: str, expected: str, desired: str) -> str:
        """Set a word to ``desired`` if it is ``expected`` (empty: not there yet); what it is then: one atomic act.

        Blocks: one round trip. Raises: BoardUnavailable.
        """
        return bytes(self._asked(key, lambda: self._store.compare_set(key, expected, desired))).decode()

    def forget(self, key: str) -> None:
        """Delete a word or counter, if it is there. Blocks: one round trip. Raises: BoardUnavailable."""
        self._asked(key, lambda: self._store.delete_key(key))
