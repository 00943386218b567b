"""Questions of a trainer to its keeper that have no answer yet."""

import threading
import time
from collections.abc import Callable

import msgspec

from lazysnap.keeper.messages import Connection
from lazysnap.keeper.protocol import Answer, Message, Question

_SEND_S = 5.0


class Questions:
    """Asked by any thread; another one hands over the answers."""

    def __init__(self, lock: threading.Condition, connection: Callable[[], Connection | None]) -> None:
        """``lock`` is notified when the connection, which is looked at under it, ends."""
        self._lock = lock
        self._connection = connection
        self._last = 0
        self._open: dict[int, Answer | None] = {}
        """The answers by number; ``None``: not answered yet."""

    def ask(
        self,
        question: Question,
        timeout_s: float,
        meanwhile: Callable[[], bool] = lambda: False,
    ) -> Answer | None:
        """Send a question, wait for its answer; ``None`` if none came in time. Blocks.

        ``meanwhile`` is called whenever the keeper sent something else; no lock is held then. ``True``: wait no longer.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            connection = self._connection()
            if connection is None:
                return None
            self._last += 1
            number = self._last
            self._open[number] = None
        try:
            connection.send(msgspec.structs.replace(question, id=number), timeout_s=max(0.05, min(timeout_s, _SEND_S)))
            return self._answer(number, connection, deadline, meanwhile)
        except OSError:
            return None
        finally:
            with self._lock:
                del self._open[number]

    def _answer(
        self, number: int, connection: Connection, deadline: float, meanwhile: Callable[[], bool]
    ) -> Answer | None:
        while True:
            with self._lock:
                answer = self._open[number]
                if answer is not None:
                    return answer
                left_s = deadline - time.monotonic()
                if left_s <= 0 or self._connection() is not connection:
                    return None
                self._lock.wait(left_s)
            if meanwhile():
                return None

    def receive(self, message: Message) -> None:
        """A message, which may be an answer; one that comes too late is for nobody. The caller holds the lock."""
        if isinstance(message, Answer) and message.id in self._open:
            self._open[message.id] = message
