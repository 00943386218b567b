"""One rank as its keeper serves it: what the trainer did not take."""

import contextlib
import os
import selectors
import socket

import pytest

from lazysnap import events
from lazysnap.config import MemoryLevel, PersistentLevel
from lazysnap.keeper.frozen import FrozenPool
from lazysnap.keeper.local_rank import LocalRank, Node
from lazysnap.keeper.messages import Connection
from lazysnap.keeper.protocol import Done, Hello, Status
from lazysnap.keeper.status import StatusBoard
from lazysnap.topology import Team


class Served:
    """A rank, and the trainer's end of its connection."""

    def __init__(self, levels):
        self.board = StatusBoard(lambda event: None)
        with contextlib.ExitStack() as stack:
            ours, theirs = socket.socketpair()
            stack.callback(ours.close)
            stack.callback(theirs.close)
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            self.trainer, connection = Connection(theirs), Connection(ours)
            node, selector = Node(FrozenPool(lambda digest: None), self.board), selectors.DefaultSelector()
            stack.callback(selector.close)
            self.rank = LocalRank(selector, Connection.close, lambda connection: None, node)
            self.rank.attach(connection, Hello(levels, MemoryLevel(), Team()))
            stack.callback(self.rank.close)
            self.close = stack.pop_all().close

    def received(self, kind):
        """All messages of a kind that are there."""
        found = []
        while (messages := self.trainer.receive(wait=False)) is not None:
            for message, fds in messages:
                for fd in fds:
                    os.close(fd)
                found += [message] if isinstance(message, kind) else []
        return found


@pytest.fixture
def level(tmp_path):
    return PersistentLevel(tmp_path, every_n_steps=1)


@pytest.fixture
def served(level):
    served = Served((level,))
    yield served
    served.close()


def test_a_trainer_that_took_nothing_for_long_gets_the_newest_status_once_it_takes_one(served, level):
    """It was stopped, or a step took a minute."""
    served.board.begin("s1")
    while served.rank.trainer.post(Done()):
        pass
    for step in range(3):
        served.board.add(events.Complete(t=float(step), level=level.url, steps=[step], start="s1"))
        assert not served.rank.send_status()

    assert served.received(Status) == []
    assert served.rank.send_status()

    assert [status.levels[level.url].complete for status in served.received(Status)] == [[0, 1, 2]]
    assert served.rank.send_status()
    assert served.received(Status) == []
