"""Ask the keeper of a job one question, without becoming its trainer."""

import select
import time
from collections.abc import Iterator

from lazysnap.keeper.messages import Connection, Unclaimed
from lazysnap.keeper.protocol import Message

_SEND_S = 0.05
"""Least time that the keeper has to take the question."""


def answers(connection: Connection, question: Message, deadline: float) -> Iterator[tuple[Message, tuple[int, ...]]]:
    """Send the question, and yield each message that comes back, with its descriptors.

    Descriptors of messages that are not taken are closed. ``deadline``: by the monotonic clock. Blocks: until then.
    Raises: TimeoutError, if nothing more comes in time; other OSErrors, if the keeper ends; KeeperError, if it
    sends no messages of this protocol.
    """
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)

    def wait() -> bool:
        return bool(poll.poll(1000 * max(0.0, deadline - time.monotonic())))

    connection.send(question, timeout_s=max(_SEND_S, deadline - time.monotonic()))
    while wait():
        received = connection.receive(wait=False)
        if received is None:
            raise ConnectionResetError("the keeper ended")
        with Unclaimed(received) as messages:
            yield from messages
    raise TimeoutError("no answer in time")
