import contextlib

import pytest
from support.peer_ends import HOST, QUICK, End, LoopThread, ports, settings_of

from lazysnap.peers.secret import draw_secret


@pytest.fixture
def loop_thread():
    thread = LoopThread()
    yield thread
    thread.close()


@pytest.fixture(scope="module")
def secret():
    return draw_secret()


@pytest.fixture
def port():
    """The port of node 0."""
    with ports(1) as [number]:
        yield number


@pytest.fixture
def address(port):
    return HOST, port


@pytest.fixture
def make_end(loop_thread, secret, port):
    """Makes ends of keepers; they are closed after the test."""
    with contextlib.ExitStack() as stack:

        def make(node, *, job="job", secret=secret, deadlines=QUICK, sources=None):
            end = End(loop_thread, sources, deadlines)
            stack.callback(end.close)
            return end.begin(settings_of(secret, [port, 0, 0], job), node)

        yield make
