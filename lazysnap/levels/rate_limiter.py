"""An upper limit for the rate at which a level is written."""

import threading
import time
from collections.abc import Callable

_SLICE_S = 0.2


class RateLimiter:
    """Lets at most ``max_bytes_per_s`` pass, averaged over the time since it was last idle; ``None``: no limit."""

    def __init__(self, max_bytes_per_s: int | None) -> None:
        self._rate = max_bytes_per_s
        self._lock = threading.Lock()
        self._free_at = 0.0

    def take(self, num_bytes: int, beat: Callable[[], None]) -> None:
        """Wait until ``num_bytes`` may pass. Blocks; calls ``beat`` meanwhile, so that a watchdog sees progress."""
        if self._rate is None:
            return
        with self._lock:
            now = time.monotonic()
            start = max(now, self._free_at)
            self._free_at = start + num_bytes / self._rate
        # The bytes may pass when those before them have.
        while (left := start - time.monotonic()) > 0:
            beat()
            time.sleep(min(left, _SLICE_S))
