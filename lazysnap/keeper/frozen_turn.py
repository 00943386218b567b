"""Turns of nodes to write frozen tensors at a level that all nodes see, so that one node writes what several hold.

The coordinator names one node of those that ask. When that node is done, or has no link, it names the next one, which
finds the file or writes it.
"""

import contextlib
import logging
import time
from collections.abc import Iterator

from lazysnap import faults
from lazysnap.config import PersistentLevel
from lazysnap.keeper.grant_loop import GrantLoop
from lazysnap.levels import SnapshotStore
from lazysnap.levels.redaction import shown
from lazysnap.levels.watchdog import Beat
from lazysnap.shard.manifest import FrozenReference

logger = logging.getLogger(__name__)

_POLL_S = 0.02
"""Pause of a waiting node between two checks of the last order."""
_SHORTEST_LOOK_S, _LONGEST_LOOK_S = 1.0, 10.0
"""Pauses of a waiting node between two checks of the level: each is twice as long as the one before."""
_SLOWEST_BYTES_PER_S = 10 << 20
"""The lowest rate of writing that the deadline allows for, unless ``max_bytes_per_s`` of the level is lower."""


class FrozenTurn:
    """The turns of this node at one level."""

    def __init__(self, loop: GrantLoop, index: int, level: PersistentLevel) -> None:
        """``index``: of the level."""
        self._loop, self._index, self._level = loop, index, level

    @contextlib.contextmanager
    def taken(self, store: SnapshotStore, frozen: FrozenReference, beat: Beat) -> Iterator[None]:
        """Ask for the turn, and give it back at the end.

        Blocks: until this node is named, the tensors are there, or the deadline passed: ``timeout_s`` of the level, and
        the time that a slow node takes to write them. Raises: LevelError; what ``beat`` raises.
        """
        self._loop.ask(self._index, frozen.digest)
        try:
            self._wait(store, frozen, beat)
            yield
        finally:
            self._loop.ask(self._index, None)

    def _wait(self, store: SnapshotStore, frozen: FrozenReference, beat: Beat) -> None:
        rate = min(_SLOWEST_BYTES_PER_S, self._level.max_bytes_per_s or _SLOWEST_BYTES_PER_S)
        began, pause_s = time.monotonic(), _SHORTEST_LOOK_S
        deadline, look_at = began + self._level.timeout_s + frozen.size_bytes / rate, began + pause_s
        while not self._loop.is_to_write(self._index, frozen.digest):
            faults.point("keeper.frozen.wait")
            if time.monotonic() > deadline:
                seconds, where = time.monotonic() - began, shown(store.url)
                logger.warning(
                    "%s: another node was to write the frozen tensors %s and did not in %.0f s: this node writes them",
                    *(where, frozen.digest, seconds),
                )
                return
            if time.monotonic() > look_at:
                if store.has_frozen(frozen.digest, beat):
                    return
                pause_s = min(2 * pause_s, _LONGEST_LOOK_S)
                look_at = time.monotonic() + pause_s
            beat()
            time.sleep(_POLL_S)
