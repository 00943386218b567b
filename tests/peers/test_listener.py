"""Whoever does not have the secret of a start gets nowhere at the port of a keeper, and costs nothing."""

import contextlib
import os
import select
import socket

import pytest
from raw_peer import WAIT_S, announced, authenticated, exactly, frame, is_closed, peak_kib, preamble, prove, refusals
from support.peer_ends import Table, settings_of
from support.waiting import TIMEOUT_S, until

from lazysnap.errors import ConfigError, KeeperError
from lazysnap.peers.listener import MAX_UNKNOWN, Deadlines, ReservedPort, listener_at
from lazysnap.peers.messages import Hello, PeerRefused, Read, SlotOf
from lazysnap.peers.reader import PeerReader
from lazysnap.peers.secret import draw_secret, handshake
from lazysnap.peers.wire import HEAD_BYTES, Violation, parse_head

SLOT = SlotOf(0, 7, "image")


def fail():
    raise AssertionError("what was refused is asked for again")


class Port:
    """A port of a keeper, and what tells that a peer was let in."""

    def __init__(self, make_end, address, secret, kind):
        self.make_end, self.address, self.secret, self.kind = make_end, address, secret, kind
        self.request = frame(Hello("job", 1)) if kind == "links" else frame(Read(SLOT, 0, 1))
        self.table = Table()

    def open(self, deadlines=None):
        settings = {} if deadlines is None else {"deadlines": deadlines}
        self.end = self.make_end(0, sources=self.table, **settings)
        return self

    def was_reached(self):
        return bool(self.table.opened) or not self.end.inbox.events.empty()

    def check_serves(self):
        """Nobody was let in so far, and a peer is."""
        assert not self.was_reached()
        if self.kind == "links":
            self.make_end(1)
        else:
            until(self._ask)
        until(self.was_reached)

    def _ask(self):
        reader = PeerReader(self.secret, self.address, beat=fail, timeout_s=TIMEOUT_S)
        with contextlib.closing(reader):
            try:
                reader.size(SLOT)
            except PeerRefused:
                return True
            except KeeperError:  # strangers may just be leaving
                return False


@pytest.fixture(params=["links", "reads"])
def closed_port(request, make_end, address, secret):
    return Port(make_end, address, secret, request.param)


@pytest.fixture
def keeper(closed_port):
    return closed_port.open()


def check_refused(keeper, caplog):
    until(lambda: refusals(caplog))
    assert "127.0.0.1" in refusals(caplog)[0]
    keeper.check_serves()


def test_a_proof_by_another_secret_is_none(secret):
    for other, is_let_in in ((secret, True), (draw_secret(), False)):
        server = handshake(secret, is_server=True)
        client = handshake(other, is_server=False)
        opening, preamble_bytes = next(client)
        answer, _ = next(server)
        for end, received in ((server, opening), (client, answer)):
            end.send(received[:preamble_bytes])
        server.send(opening[preamble_bytes:])
        proof, _ = client.send(answer[preamble_bytes:])
        with pytest.raises(StopIteration if is_let_in else Violation):
            server.send(proof)


def test_the_same_settings_again_end_no_connection(make_end, address, secret, port):
    end = make_end(0)
    with authenticated(address, secret) as peer:
        for _ in range(2):
            peer.sendall(frame(Read(SLOT, 0, 1)))
            head = exactly(peer, HEAD_BYTES)
            assert len(head) == HEAD_BYTES, "it is still open"
            length, _ = parse_head(head)
            exactly(peer, length)
            end.begin(settings_of(secret, [port, 0, 0], "job"), 0)


def test_a_guess_is_no_proof(keeper, caplog):
    with socket.create_connection(keeper.address, timeout=WAIT_S) as stranger:
        stranger.sendall(preamble() + os.urandom(64) + keeper.request)
        assert is_closed(stranger)
    check_refused(keeper, caplog)


def test_the_secret_of_another_start_is_refused(keeper, caplog):
    with socket.create_connection(keeper.address, timeout=WAIT_S) as stranger:
        with contextlib.suppress(OSError):
            assert not prove(stranger, draw_secret())
            stranger.sendall(keeper.request)
        assert is_closed(stranger)
    check_refused(keeper, caplog)


def test_a_proof_that_is_sent_back_proves_nothing(keeper, caplog):
    """A stranger repeats whatever the keeper says, its nonce and its proof."""
    with socket.create_connection(keeper.address, timeout=WAIT_S) as stranger:
        stranger.sendall(exactly(stranger, 42))
        with contextlib.suppress(OSError):
            stranger.sendall(exactly(stranger, 32) + keeper.request)
        assert is_closed(stranger)
    check_refused(keeper, caplog)


def test_what_strangers_send_takes_no_memory(keeper, caplog):
    """As much as they like, on many connections, before a proof that is none."""
    before_kib = peak_kib(since_now=True)
    flood = bytes(1 << 20)
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_UNKNOWN):
            stranger = stack.enter_context(socket.create_connection(keeper.address, timeout=WAIT_S))
            stranger.setblocking(False)
            stranger.send(preamble() + bytes(31))  # a byte of the nonce is missing
            for _ in range(16):
                with contextlib.suppress(OSError):
                    stranger.send(flood)
    assert peak_kib() - before_kib < 32 << 10
    check_refused(keeper, caplog)


@pytest.mark.slow
def test_a_frame_that_is_announced_as_long_takes_no_memory(keeper, secret, caplog):
    """The process's peak stays: four gigabytes are announced, on many connections."""
    before_kib = peak_kib(since_now=True)
    for _ in range(20):
        with authenticated(keeper.address, secret) as peer:
            peer.sendall(announced(0xFFFFFFF0))
            assert is_closed(peer)

    assert peak_kib() - before_kib < 64 << 10
    assert "a frame of 4294967280 bytes" in refusals(caplog)[0]
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1, "once per host"


def test_many_connections_of_strangers_are_bounded(keeper):
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_UNKNOWN):
            stack.enter_context(socket.create_connection(keeper.address, timeout=WAIT_S))
        assert is_closed(stack.enter_context(socket.create_connection(keeper.address, timeout=WAIT_S)))
    keeper.check_serves()


@pytest.mark.slow
def test_connections_that_say_nothing_are_closed_in_time(closed_port, secret):
    keeper = closed_port.open(Deadlines(connect_s=2.0, idle_s=2.0))
    with (
        socket.create_connection(keeper.address, timeout=WAIT_S) as silent,
        socket.create_connection(keeper.address, timeout=WAIT_S) as half,
        authenticated(keeper.address, secret) as peer,
    ):
        half.sendall(preamble() + bytes(32))
        for connection in (silent, half, peer):
            assert is_closed(connection)
    assert not keeper.was_reached()


@pytest.mark.slow
def test_a_handshake_that_trickles_is_ended_in_time(closed_port):
    """Each byte comes soon after the one before; together they would take forever."""
    keeper = closed_port.open(Deadlines(connect_s=1.0))
    is_open = True
    with socket.create_connection(keeper.address, timeout=WAIT_S) as stranger:
        assert exactly(stranger, 42)
        trickle = iter(preamble() + bytes(64))
        while is_open:
            with contextlib.suppress(OSError):
                stranger.send(bytes([next(trickle)]))  # there are more bytes than the deadline allows
            is_open = not select.select([stranger], [], [], 0.1)[0]
        assert is_closed(stranger)
    assert not keeper.was_reached()


def test_only_the_chosen_interface_is_listened_on(keeper):
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", keeper.address[1]), timeout=WAIT_S)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_every_interface_is_refused(host):
    with pytest.raises(ConfigError, match="one interface"):
        listener_at(host, 0)
    with pytest.raises(OSError, match="every interface"):
        ReservedPort(host)
