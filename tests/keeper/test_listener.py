"""Whoever does not have the secret of a start gets nowhere, at every port of a keeper, and costs nothing."""

import contextlib
import os
import queue
import select
import socket
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from raw_peer import WAIT_S, announced, authenticated, exactly, frame, is_closed, peak_kib, preamble, prove, refusals
from support.waiting import TIMEOUT_S, until

from lazysnap.errors import ConfigError, KeeperError
from lazysnap.links.client import PeerReader
from lazysnap.links.links import Hello, Links
from lazysnap.links.listener import MAX_UNKNOWN, Deadlines
from lazysnap.links.messages import Open, PeerRefused, SlotOf
from lazysnap.links.secret import draw_secret
from lazysnap.links.server import PeerServer
from lazysnap.memory.failures import CaptureAborted

PATIENT = Deadlines(connect_s=60.0, send_s=60.0, alive_s=0.2, silence_s=60.0)


@dataclass
class Port:
    """One that listens."""

    address: tuple[str, int]
    request: bytes
    """What a peer asks first."""
    reached: queue.Queue
    """Gets something when a peer was let in."""
    visit: Callable[[], object]
    """Come as a peer does."""
    listen: Callable[[str], object]


class Inbox:
    def __init__(self):
        self.up = queue.Queue()

    def link_is_up(self, node):
        self.up.put(node)

    def link_is_down(self, node):
        pass

    def received(self, node, message):
        pass


def hello(node):
    return Hello("job", "s1", node)


@pytest.fixture(scope="module")
def secret():
    return draw_secret()


@pytest.fixture(params=["links", "reads"])
def open_port(request, secret):
    """Makes a port with some deadlines."""
    with contextlib.ExitStack() as stack:

        def links(deadlines=PATIENT):
            inbox = Inbox()
            one = Links(secret, hello(0), inbox, deadlines)
            stack.callback(one.close)
            server = PeerServer(secret, lambda what: None, deadlines)
            stack.callback(server.close)
            server.admit(one)
            address = server.listen("127.0.0.1")

            def visit():
                other = Links(secret, hello(1), Inbox(), PATIENT)
                stack.callback(other.close)
                other.connect(0, *address)

            return Port(address, frame(hello(1)), inbox.up, visit, server.listen)

        def reads(deadlines=PATIENT):
            reached = queue.Queue()

            def find(what):
                reached.put(what)
                raise CaptureAborted("nothing is here")

            one = PeerServer(secret, find, deadlines)
            stack.callback(one.close)
            address, slot = one.listen("127.0.0.1"), SlotOf(0, 7, "image")

            def ask():
                with contextlib.suppress(KeeperError):  # strangers may just be leaving
                    reader = PeerReader(secret, address, timeout_s=TIMEOUT_S)
                    with contextlib.closing(reader), contextlib.suppress(PeerRefused):
                        reader.open(slot)
                    return True

            return Port(address, frame(Open(slot)), reached, lambda: until(ask), one.listen)

        yield {"links": links, "reads": reads}[request.param]


@pytest.fixture
def port(open_port):
    return open_port()


def check_serves(port):
    """Nobody was let in so far, and a peer is."""
    assert port.reached.empty()
    port.visit()
    port.reached.get(timeout=TIMEOUT_S)


def check_refused(port, caplog):
    until(lambda: refusals(caplog))
    assert "127.0.0.1" in refusals(caplog)[0]
    check_serves(port)


def test_a_guess_is_no_proof(port, caplog):
    with socket.create_connection(port.address, timeout=WAIT_S) as stranger:
        stranger.sendall(preamble() + os.urandom(64) + port.request)
        assert is_closed(stranger)
    check_refused(port, caplog)


def test_the_secret_of_another_start_is_refused(port, caplog):
    with socket.create_connection(port.address, timeout=WAIT_S) as stranger:
        assert not prove(stranger, draw_secret())
        with contextlib.suppress(OSError):
            stranger.sendall(port.request)
        assert is_closed(stranger)
    check_refused(port, caplog)


def test_a_proof_that_is_sent_back_proves_nothing(port, caplog):
    """A stranger repeats whatever the keeper says, its nonce and its proof."""
    with socket.create_connection(port.address, timeout=WAIT_S) as stranger:
        stranger.sendall(exactly(stranger, 42))
        with contextlib.suppress(OSError):
            stranger.sendall(exactly(stranger, 32) + port.request)
        assert is_closed(stranger)
    check_refused(port, caplog)


def test_what_strangers_send_takes_no_memory(port, caplog):
    """As much as they like, on many connections, before a proof that is none."""
    before, flood = peak_kib(since_now=True), bytes(1 << 20)
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_UNKNOWN):
            stranger = stack.enter_context(socket.create_connection(port.address, timeout=WAIT_S))
            stranger.setblocking(False)
            stranger.send(preamble() + bytes(31))  # a byte of the nonce is missing
            for _ in range(16):
                with contextlib.suppress(OSError):
                    stranger.send(flood)
    assert peak_kib() - before < 16 << 10
    check_refused(port, caplog)


@pytest.mark.slow
def test_a_frame_that_is_announced_as_long_takes_no_memory(port, secret, caplog):
    """The process's peak stays: four gigabytes are announced, on many connections."""
    before = peak_kib(since_now=True)
    for _ in range(20):
        with authenticated(port.address, secret) as peer:
            peer.sendall(announced(0xFFFFFFF0))
            assert is_closed(peer)

    assert peak_kib() - before < 64 << 10
    assert "a frame of 4294967280 bytes" in refusals(caplog)[0]
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1, "once per host"


def test_many_connections_of_strangers_are_bounded(port):
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_UNKNOWN):
            stack.enter_context(socket.create_connection(port.address, timeout=WAIT_S))
        assert is_closed(stack.enter_context(socket.create_connection(port.address, timeout=WAIT_S)))
    check_serves(port)


@pytest.mark.slow
def test_connections_that_say_nothing_are_closed_in_time(open_port, secret):
    port = open_port(Deadlines(connect_s=2.0, silence_s=2.0))
    with (
        socket.create_connection(port.address, timeout=WAIT_S) as silent,
        socket.create_connection(port.address, timeout=WAIT_S) as half,
        authenticated(port.address, secret) as peer,
    ):
        half.sendall(preamble() + bytes(32))
        for connection in (silent, half, peer):
            assert is_closed(connection)
    assert port.reached.empty()


@pytest.mark.slow
def test_a_handshake_that_trickles_is_ended_in_time(open_port):
    """Each byte comes soon after the one before; together they would take forever."""
    port, is_open = open_port(Deadlines(connect_s=1.0)), True
    with socket.create_connection(port.address, timeout=WAIT_S) as stranger:
        assert exactly(stranger, 42)
        trickle = iter(preamble() + bytes(64))
        while is_open:
            with contextlib.suppress(OSError):
                stranger.send(bytes([next(trickle)]))  # there are more bytes than the deadline allows
            is_open = not select.select([stranger], [], [], 0.1)[0]
        assert is_closed(stranger)
    assert port.reached.empty()


def test_only_the_chosen_interface_is_listened_on(port):
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port.address[1]), timeout=WAIT_S)
    for host in ("0.0.0.0", "::"):
        with pytest.raises(ConfigError, match="one interface"):
            port.listen(host)
