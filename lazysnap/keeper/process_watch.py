"""The death of a trainer, noticed even if a forked child of it still holds its connection."""

import os
import select
import selectors
from collections.abc import Callable


class ProcessWatch:
    """Watches one process at a time, by a descriptor of it.

    On a kernel before 5.3, and of a process of another container, it notices nothing: there the end of the connection
    shows the death.
    """

    def __init__(self, selector: selectors.BaseSelector) -> None:
        """``selector``: of the main loop, which calls what ``begin`` is given."""
        self._selector, self._pidfd = selector, -1

    def begin(self, pid: int, exited: Callable[[], None]) -> None:
        """Watch this process from now on, and no other one."""
        self.end()
        try:
            self._pidfd = os.pidfd_open(pid)
        except OSError:  # it is dead already, or cannot be seen
            return
        self._selector.register(self._pidfd, selectors.EVENT_READ, exited)

    def end(self) -> None:
        """Watch nothing any more."""
        if self.is_on:
            self._selector.unregister(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    @property
    def is_on(self) -> bool:
        """True while a process is watched."""
        return self._pidfd >= 0

    @property
    def is_alive(self) -> bool:
        """True if a process is watched, and lives."""
        if not self.is_on:
            return False
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)
        return not poll.poll(0)
