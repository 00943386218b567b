"""Wait until captures are durable at every level, on all ranks."""

import contextlib
import logging
from collections.abc import Callable

from lazysnap.config import SnapshotConfig
from lazysnap.console import has_terminal, said_after
from lazysnap.engine.history import History
from lazysnap.errors import WaitTimeout
from lazysnap.keeper.client import KeeperClient
from lazysnap.levels.redaction import shown
from lazysnap.ranks.world import World

logger = logging.getLogger("lazysnap.engine")

_SILENCE_S = 3.0
"""Seconds that the end of a training waits for storage before it says so."""

Progress = Callable[[int, int], None]
"""Called with the bytes of this node's part that are stored, and with all bytes, of all levels together."""


class Durability:
    """The waits of one engine for storage."""

    def __init__(self, config: SnapshotConfig, client: KeeperClient, world: World, history: History) -> None:
        self._config = config
        self._client = client
        self._world = world
        self._history = history

    def flush(self, timeout_s: float, progress: Progress | None) -> bool:
        """Block until the newest capture of this rank is durable at every level; ``False`` after the deadline. Without
        levels: until a keeper has it.
        """
        return self._client.drain(self._history.newest_whole(), timeout_s, progress)

    def wait_first(self, step: int, timeout_s: float) -> bool:
        """Block until that step, or a later one, is durable at the first level; ``False`` after the deadline.

        A level takes captures as it comes to them: the newest is asked for, by all ranks.
        """

        def is_there() -> bool:
            return self._client.is_durable(step)

        if not (self._world.is_alone and is_there()):
            self._client.drain(self._history.newest_whole(), timeout_s, enough=is_there)
        return is_there()

    def end(self, progress: Progress | None, *, is_common: bool) -> bool:
        """Like ``flush``, at the end: all ranks wait for each other, and fail if one of them failed. Blocks: at most
        ``drain_timeout_s``.

        Collective, if ``is_common``: all ranks came here.
        """
        newest = self._history.newest_whole()

        def drain(last: int | None) -> bool:
            if not self._client.was_attached:
                return True
            with self._telling(last, has_bar=progress is not None and has_terminal()):
                return self._client.drain(last, self._config.drain_timeout_s, progress)

        if self._world.is_alone or not is_common:
            return drain(newest)
        try:
            steps = self._world.exchange("the last snapshot", newest)
            is_same, last = len(set(steps)) == 1, newest
            if not is_same:  # of different steps there is no whole snapshot: what all have is waited for
                last = None if newest is None or None in steps else min(steps)
            done = self._world.exchange_after("making the last snapshot durable", lambda: drain(last))
        except WaitTimeout as error:
            logger.warning("whether the last snapshot is durable on all ranks is not known: %s", error)
            return False
        return all(done) and is_same

    def _telling(self, step: int | None, *, has_bar: bool) -> contextlib.AbstractContextManager[None]:
        """Return a context in which a long wait for storage is reported."""
        if step is None or has_bar or self._world.rank != 0 or not self._config.levels:
            return contextlib.nullcontext()
        limit_s = self._config.drain_timeout_s

        def line() -> str:
            where = ", ".join(map(shown, self._client.lacking(step))) or "the keeper"
            return f"waiting for {where} to store step {step}, at most {limit_s:g} s (drain_timeout_s)"

        return said_after(_SILENCE_S, line)
