"""How does a trainer wake its keeper? One load of a word, and only where somebody waits one system call."""

import contextlib
import os
import weakref

from lazysnap.errors import FormatError, KeeperError
from lazysnap.keeper.search import Served
from lazysnap.memory.words import NodePage

_NUM_DESCRIPTORS = 2


class Doorbell:
    """Page and eventfd of a keeper. They are closed when no thread uses them any more.

    Example::

        doorbell = Doorbell.of(served)
        doorbell.ring(step=7)
    """

    def __init__(self, keeper_pid: int, page: NodePage, event: int) -> None:
        self.keeper_pid = keeper_pid
        self._page = page
        self._event = event
        weakref.finalize(self, _close, page, event).atexit = False

    @classmethod
    def of(cls, served: Served) -> "Doorbell":
        """Take page and eventfd out of the first state of a keeper. Raises: KeeperError, if they are not there."""
        pid = served.state.pid
        frame = next(frame for frame in served.frames if frame.message is served.state)
        if len(frame.descriptors) < _NUM_DESCRIPTORS:
            raise KeeperError(f"keeper {pid} sent no page of its words; end it with `kill {pid}`")
        try:
            page = NodePage.attach(frame.descriptors.pop(0))
        except (FormatError, OSError) as error:
            raise KeeperError(
                f"the page of keeper {pid} cannot be mapped: {error}; end it with `kill {pid}`"
            ) from error
        return cls(pid, page, frame.descriptors.pop(0))

    def ring(self, step: int) -> None:
        """Wake the keeper if it awaits the capture of ``step``. Hot."""
        if self._page.is_awaited(step):
            with contextlib.suppress(BlockingIOError):
                os.eventfd_write(self._event, 1)


def _close(page: NodePage, event: int) -> None:
    page.close()
    os.close(event)
