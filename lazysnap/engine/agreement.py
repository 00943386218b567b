"""The thread in which one rank agrees with the others on snapshots that all have, beside training."""

import logging
import threading

from lazysnap.engine.board import BoardUnavailable
from lazysnap.engine.marks import Marks, Presence
from lazysnap.engine.voter import Voter
from lazysnap.engine.world import World
from lazysnap.keeper.client import KeeperClient

logger = logging.getLogger("lazysnap.engine")

_POLL_S = 0.05
_POLL_S_PER_RANK = 0.002
"""All ranks together ask the store's host at most so often."""
_SLOWER = 4.0
"""Where nothing moves for long, times as long between two questions."""
_AGAIN_S = (5.0, 60.0)
"""When a board that did not answer is asked again: first, and at the longest."""
_END_S = 2.0


class Agreement:
    """Of one rank, from one start or resume to the next. Whatever fails in it, training goes on and marks stay."""

    def __init__(self, world: World, client: KeeperClient, key: str, every: int, base: int) -> None:
        """``key``: the same on all ranks, and of this agreement alone; ``base``: the step that all resumed,
        or ``NONE``.
        """
        self._world = world
        self._client = client
        self._key = key
        self.marks = Marks(base, client.newest_sequence())
        self._voter = Voter(self.marks, self._look, world.size, every)
        self._wake = threading.Event()
        self._over = threading.Event()
        self._failures = 0
        """In a row: how often the board did not answer."""
        self._thread = threading.Thread(target=self._run, name="lazysnap-agreement", daemon=True)
        self._thread.start()

    def passed(self, step: int) -> None:
        """The boundary after ``step`` is over: its capture began, or was left out. Hot."""
        self._voter.passed = step
        self.wake()

    def wake(self) -> None:
        """Look again, if there may be something to tell. Hot."""
        if self._voter.has_to_tell():
            self._wake.set()

    def close(self) -> None:
        """Let it end. Blocks: until its present question is answered, at most some seconds."""
        self._over.set()
        self._wake.set()
        self._thread.join(_END_S)

    # ---------------------------------------------------------------- the thread

    def _run(self) -> None:
        while not self._over.is_set():
            try:
                self._agree()
            except BoardUnavailable as error:
                if not self._failures and not self._over.is_set():
                    logger.warning(
                        "ranks agree on no newer snapshot in memory, the last one (step %s) is kept, training goes on: "
                        "%s",
                        self.marks.agreed if self.marks.agreed >= 0 else "none",
                        error,
                    )
                # Not woken by boundaries: they come more often than a store that is away should be asked.
                self._over.wait(min(_AGAIN_S[0] * 2**self._failures, _AGAIN_S[1]))
                self._failures = min(self._failures + 1, 10)
            except Exception:  # the rim of the thread
                logger.exception("the agreement on snapshots in memory ended; training goes on")
                return

    def _agree(self) -> None:
        board = self._world.board()
        least = max(_POLL_S, _POLL_S_PER_RANK * self._world.size)
        pause = least
        while not self._over.is_set():
            if self._voter.act(board, self._key):
                if self._failures:
                    logger.info("ranks agree on snapshots in memory again")
                pause, self._failures = least, 0
                continue
            # Until this rank comes to the candidate nobody needs to hear from it, nor it from them.
            self._wake.wait(None if self._voter.is_idle() else pause)
            self._wake.clear()
            pause = min(1.5 * pause, _SLOWER * least)

    def _look(self, step: int) -> Presence:
        slots = self._client.slots()
        if not slots:
            return Presence.COMING  # between two keepers: the memory is there
        return self.marks.look(slots, step)
