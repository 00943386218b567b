"""When a level that fails is tried again."""

import time

_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.2, 5.0
"""Seconds between two small writes to a level that failed: the pause doubles from the first to the second."""


class LevelHealth:
    """The time since when a level fails, and when a small write is tried there. Times are by the monotonic clock."""

    def __init__(self) -> None:
        self.fails_since: float | None = None
        """``None``: the level works."""
        self.failed_at = 0.0
        """When the last operation that failed was begun."""
        self._probe_at = 0.0
        self._pause_s = _SHORTEST_PAUSE_S

    @property
    def rests_s(self) -> float | None:
        """Seconds until the next small write is due; ``None``: the level works."""
        return None if self.fails_since is None else max(0.0, self._probe_at - time.monotonic())

    def failed(self, began: float) -> None:
        """Note that an operation failed that was begun then.

        The pause grows until something is stored, not only until a small write works: a full disk may take that.
        """
        now = time.monotonic()
        self.fails_since = self.fails_since or now
        self.failed_at, self._probe_at = began, now + self._pause_s
        self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def probed(self) -> None:
        """Note that a small write works again."""
        self.fails_since = None

    def stored(self) -> None:
        """Note that a snapshot was stored: after the next failure the pause is short again."""
        self._pause_s = _SHORTEST_PAUSE_S
