"""One rank as its keeper serves it: what the trainer did not take, and what other threads still read."""

import contextlib
import os
import selectors
import socket

import pytest
from support.node_rig import EVERY, RUN, STARTS
from support.waiting import until

from lazysnap.config import MemoryLevel, PersistentLevel
from lazysnap.keeper.frozen import FrozenPool
from lazysnap.keeper.local_rank import LocalRank
from lazysnap.keeper.messages import Connection
from lazysnap.keeper.protocol import Complete, Done, Hello, Run
from lazysnap.topology import Team


class Served:
    """A rank, and the trainer's end of its connection. ``storages``: the keeper's, the newest last."""

    def __init__(self, levels):
        self.storages = []
        with contextlib.ExitStack() as stack:
            ours, theirs = socket.socketpair()
            stack.callback(ours.close)
            stack.callback(theirs.close)
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            self.trainer, connection = Connection(theirs), Connection(ours)
            pool, selector = FrozenPool(lambda digest: None), selectors.DefaultSelector()
            stack.callback(selector.close)
            self.rank = LocalRank(
                selector, Connection.close, lambda connection: None, pool, lambda: (self.storages or [None])[-1]
            )
            self.rank.attach(connection, Hello(levels, MemoryLevel(), Team()))
            stack.callback(self.rank.close)
            self.close = stack.pop_all().close

    def begin_run(self, level):
        facts = {"step": 0, "floor": 0, "every_n_steps": EVERY, "num_kept": 1, "stored": {level.url: []}}
        run = Run(RUN, STARTS[0], **facts, shared=[], peers=None, is_new=True)
        self.rank.begin_run(run)

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


def test_a_trainer_that_took_nothing_for_long_hears_later_what_is_complete(served, level, rig):
    """It was stopped, or a step took a minute. Nobody repeats the message of a step."""
    trainer = rig(level)
    served.storages = trainer.storages
    served.begin_run(level)
    step = trainer.store()
    while served.rank.trainer.post(Done()):
        pass
    served.rank.emit(Complete(level.url, [step], STARTS[0]))
    assert served.received(Complete) == []

    found = []

    def is_told():
        served.rank.tick()
        found.extend(served.received(Complete))
        return found

    assert until(is_told)[0].steps == [step]
    served.rank.tick()
    assert served.received(Complete) == []
