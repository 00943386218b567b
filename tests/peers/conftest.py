import contextlib
import socket
import threading

import pytest
from raw_peer import prove
from support.peer_ends import HOST, QUICK, End, LoopThread, ports, settings_of
from support.waiting import TIMEOUT_S

from lazysnap.peers.reader import PeerReader
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


@pytest.fixture
def impostor(secret):
    """Makes servers of one connection that have the secret, and answer as a test says."""
    with contextlib.ExitStack() as stack:

        def make(answer, *, secret=secret):
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            stop = threading.Event()

            def run():
                connection, _ = listener.accept()
                connection.settimeout(TIMEOUT_S)
                with connection, contextlib.suppress(OSError):
                    prove(connection, secret, is_server=True)
                    answer(connection, stop)

            thread = threading.Thread(target=run)
            thread.start()
            stack.callback(thread.join)
            stack.callback(stop.set)
            return listener.getsockname()

        yield make


@pytest.fixture
def connect(secret, address):
    """Makes readers; they are closed after the test."""
    with contextlib.ExitStack() as stack:

        def make(to=address, *, secret=secret, **settings):
            settings.setdefault("timeout_s", 60.0)
            reader = PeerReader(secret, to, **settings)
            stack.callback(reader.close)
            return reader

        yield make
