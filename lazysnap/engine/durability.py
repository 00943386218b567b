"""When what was captured is durable: at this rank's levels, and with several ranks at those of all of them."""

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from lazysnap.config import SnapshotConfig
from lazysnap.engine.direct import DirectStorage
from lazysnap.engine.tally import tally_of
from lazysnap.engine.world import World
from lazysnap.errors import WaitTimeout
from lazysnap.keeper.client import Capture
from lazysnap.keeper.events import KeeperEvent

logger = logging.getLogger("lazysnap.engine")

Progress = Callable[[int, int], None]
"""Is told how many bytes of this rank's part are stored, and how many there are at all levels together."""


class Durability:
    """Of one engine, from its making to its end."""

    def __init__(self, config: SnapshotConfig, direct: DirectStorage, world: World, start: str) -> None:
        self._config = config
        self._direct = direct
        self._client = client = direct.client
        self._world = world
        self._tally = tally_of(config, client, world, start)

    def begin(self, start: str, stored: Mapping[str, Sequence[tuple[str, int]]]) -> None:
        """What is captured from now on is of that start, and goes on from what is ``stored`` (``Snapshot``)."""
        if self._tally is not None:
            self._tally.begin(start, stored)

    def events(self) -> list[KeeperEvent]:
        """What the keeper told, and what became durable on all ranks, since the last call."""
        return [*self._client.poll_events(), *(self._tally.news() if self._tally is not None else ())]

    def has(self, step: int) -> bool:
        """Whether that step or a later one is durable at the first level."""
        if self._tally is not None:
            return self._tally.wait(step, 0.0, levels=1)
        return self._client.wait_durable(step, 0.0)

    def has_any(self) -> bool:
        """Whether a snapshot of this start is known to be durable on all ranks. Does not block."""
        return self._tally.has_any() if self._tally is not None else self._client.wait_durable(0, 0.0)

    def flush(self, newest: Capture | None, timeout_s: float, progress: Progress | None) -> bool:
        """Block until what is in memory, ``newest`` of this rank, is durable at every level on all ranks; ``False``
        after the deadline. Without levels: until a keeper has it.
        """
        deadline = time.monotonic() + timeout_s
        done = self._drain(timeout_s, progress, newest)
        return done and self._is_everywhere(newest, max(0.0, deadline - time.monotonic()))

    def _drain(self, timeout_s: float, progress: Progress | None, newest: Capture | None) -> bool:
        """The newest capture, at every level of this rank: brought there by who has it."""
        if self._direct.has_newest:
            return self._direct.drain(timeout_s)
        return self._client.drain(timeout_s, progress, newest)

    def _is_everywhere(self, newest: Capture | None, timeout_s: float) -> bool:
        return self._tally is None or newest is None or self._tally.wait(newest.step, timeout_s)

    def end(self, newest: Capture | None, progress: Progress | None, *, is_common: bool) -> bool:
        """As ``flush``, at the end: all ranks wait for each other, and hear if one of them failed. Blocks: at most
        ``drain_timeout_s``, and ``keeper_timeout_s`` for what has still to be counted.

        Collective, if ``is_common``: all ranks came here.
        """
        tally, timeout_s = self._tally, self._config.drain_timeout_s
        if tally is None:
            return self.flush(newest, timeout_s, progress)

        def drain() -> tuple[bool, int | None]:
            has_any = self._client.was_attached or self._direct.has_newest
            done = self._drain(timeout_s, progress, newest) if has_any else True
            tally.settle(self._config.keeper_timeout_s)
            return done, None if newest is None else newest.step

        if not is_common:
            return drain()[0] and self._is_everywhere(newest, 0.0)
        try:
            told = self._world.exchange_after("making the last snapshot durable", drain)
            # Of different steps there is no whole snapshot, however durable each part is.
            done = all(each for each, _ in told) and len({last for _, last in told}) == 1
        except WaitTimeout as error:
            logger.warning("whether the last snapshot is durable on all ranks is not known: %s", error)
            return False
        # Now that all have counted theirs: so that the keeper learns what it may delete.
        tally.settle(self._config.keeper_timeout_s)
        return done

    def close(self) -> None:
        """Count no more. Does not block."""
        if self._tally is not None:
            self._tally.close()
