"""Links between keepers, over real sockets: who is let in, what is refused, what comes back after a death."""

import contextlib
import dataclasses
import logging
import os
import pathlib
import queue
import signal
import socket
import ssl
import struct
import subprocess
import sys

import msgspec
import pytest
from support.waiting import TIMEOUT_S, until

from lazysnap.errors import ConfigError
from lazysnap.keeper.certificate import Certificate, make_certificate
from lazysnap.keeper.grant_messages import Epoch, LevelOrder, Order, Report
from lazysnap.keeper.links import MAX_FRAME_BYTES, MAX_UNKNOWN, Deadlines, Hello, Links

PREAMBLE = struct.pack("!8sH", b"lazysnap", 1)
QUICK = Deadlines(connect_s=60.0, send_s=60.0, alive_s=0.2, silence_s=60.0, shortest_pause_s=0.02, longest_pause_s=0.2)
"""Messages and tries to connect follow fast; nothing fails by time, except what a test has shortened."""

WAIT_S = 30.0
"""For the other end to close: less than the deadlines by which it closes what it could not refuse."""


class Inbox:
    """Keeps what happens, for a test to wait for."""

    def __init__(self):
        self.events = queue.Queue()

    def link_is_up(self, node):
        self.events.put(("up", node))

    def link_is_down(self, node):
        self.events.put(("down", node))

    def received(self, node, message):
        self.events.put(("message", node, message))

    def next(self, timeout_s=TIMEOUT_S):
        return self.events.get(timeout=timeout_s)

    def until(self, *event):
        while self.next()[: len(event)] != event:
            pass


@pytest.fixture(scope="module")
def certificate():
    return Certificate(*make_certificate())


@pytest.fixture
def ends(certificate):
    """Makes ends of links; they are closed after the test."""
    with contextlib.ExitStack() as stack:

        def make(node, *, job="job", start="s1", certificate=certificate, deadlines=QUICK):
            inbox = Inbox()
            links = Links(certificate, Hello(job, start, node), inbox, deadlines)
            stack.callback(links.close)
            return links, inbox

        yield make


@pytest.fixture
def server(ends):
    links, inbox = ends(0)
    return links, inbox, links.listen("127.0.0.1")


def report(number):
    return Report(1, Epoch(number, 7), ())


def order(number):
    return Order(Epoch(number, 7), False, (LevelOrder(10, None, (), (), ()),))


def tls(address, certificate):
    """A raw connection of one who has the certificate."""
    connection = socket.create_connection(address, timeout=WAIT_S)
    return certificate.context(ssl.PROTOCOL_TLS_CLIENT).wrap_socket(connection)


def frame(message):
    data = msgspec.msgpack.encode(message)
    return struct.pack("!I", len(data)) + data


def is_closed(connection):
    """Whether the other end closes; what it had sent is read first."""
    try:
        while connection.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def peak_kib(*, since_now=False):
    """The most memory that this process had; ``since_now``: what it had earlier is forgotten."""
    if since_now:
        pathlib.Path("/proc/self/clear_refs").write_text("5")
    return int(pathlib.Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])


def refusals(caplog):
    return [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]


def test_messages_go_both_ways_and_arrive_as_they_were(ends, server):
    links, inbox, (host, port) = server
    other, other_inbox = ends(1)
    other.connect(0, host, port)
    assert (inbox.next(), other_inbox.next()) == (("up", 1), ("up", 0))

    other.send(0, report(1))
    links.send(1, order(2))

    assert inbox.next() == ("message", 1, report(1))
    assert other_inbox.next() == ("message", 0, order(2))


def test_nobody_without_the_certificate_is_let_in(server, certificate, caplog):
    _, inbox, address = server
    naked = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    naked.check_hostname, naked.verify_mode = False, ssl.CERT_NONE

    with socket.create_connection(address, timeout=WAIT_S) as connection, naked.wrap_socket(connection) as secure:
        with contextlib.suppress(OSError):
            secure.sendall(PREAMBLE + frame(Hello("job", "s1", 1)))
        assert is_closed(secure)

    until(lambda: refusals(caplog))
    assert "127.0.0.1" in refusals(caplog)[0]
    assert inbox.events.empty()


def test_another_certificate_is_refused_by_both_sides(ends, server, caplog):
    _, inbox, (host, port) = server
    stranger, stranger_inbox = ends(1, certificate=Certificate(*make_certificate()))

    stranger.connect(0, host, port)

    until(lambda: refusals(caplog) and "not reached" in caplog.text)
    assert inbox.events.empty()
    assert stranger_inbox.events.empty()


def test_a_certificate_that_the_job_key_signed_is_not_the_jobs(server, certificate, caplog):
    """Nothing is delegated: there is one certificate."""
    _, inbox, address = server
    import datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization

    ours = x509.load_pem_x509_certificate(certificate.cert_pem)
    key = serialization.load_pem_private_key(certificate.key_pem, None)
    now = datetime.datetime.now(datetime.timezone.utc)
    signed = (
        x509.CertificateBuilder(ours.subject, x509.Name([]), key.public_key(), 7)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    context = certificate.context(ssl.PROTOCOL_TLS_CLIENT)
    with open(os.memfd_create("chain"), "wb") as chain:
        chain.write(signed.public_bytes(serialization.Encoding.PEM) + certificate.key_pem)
        chain.flush()
        context.load_cert_chain(f"/proc/self/fd/{chain.fileno()}")

    with socket.create_connection(address, timeout=WAIT_S) as connection, context.wrap_socket(connection) as secure:
        assert is_closed(secure)
    until(lambda: refusals(caplog))
    assert inbox.events.empty()


@pytest.mark.parametrize(
    "sent",
    [
        b"GET / HTTP/1.0\r\n\r\n",
        struct.pack("!8sH", b"lazysnap", 2) + frame(Hello("job", "s1", 1)),
        PREAMBLE + frame(report(1)),
        PREAMBLE + frame(Hello("another", "s1", 1)),
        PREAMBLE + frame(Hello("job", "s0", 1)),
        PREAMBLE + frame(Hello("job", "s1", -1)),
        PREAMBLE + frame(Hello("job", "s1", 1 << 40)),
        PREAMBLE + struct.pack("!I", 20) + bytes(range(200, 220)),
        PREAMBLE + struct.pack("!I", 1000) + b"\x91" * 1000,
        PREAMBLE + struct.pack("!I", MAX_FRAME_BYTES + 1),
        PREAMBLE + struct.pack("!I", 0xFFFFFFFF),
    ],
    ids=lambda sent: repr(sent[:40]),
)
def test_garbage_before_the_hello_is_refused_with_the_address(server, certificate, caplog, sent):
    _, inbox, address = server
    with tls(address, certificate) as secure:
        secure.sendall(sent)
        assert is_closed(secure)

    until(lambda: refusals(caplog))
    assert "127.0.0.1" in refusals(caplog)[0]
    assert inbox.events.empty()


@pytest.mark.parametrize(
    "sent",
    [
        struct.pack("!I", MAX_FRAME_BYTES + 1) + bytes(100),
        frame({"type": "report", "node": 1}),
        frame({"type": "report", "node": 1, "epoch": [1, 1], "levels": [], "wishes": [-1]}),
        frame({"type": "report", "node": 1, "epoch": [1, 1], "levels": [], "wishes": [1] * 1000}),
        frame({"type": "report", "node": 1, "epoch": [1, 1], "levels": [], "extra": 1}),
        struct.pack("!I", 100_000) + b"\x91" * 100_000,
        frame(Hello("job", "s1", 1)),
    ],
    ids=["too long", "fields missing", "below its bound", "list too long", "unknown field", "nested", "hello again"],
)
def test_a_peer_that_sends_what_is_no_message_is_dropped(server, certificate, caplog, sent):
    _, inbox, address = server
    with tls(address, certificate) as secure:
        secure.sendall(PREAMBLE + frame(Hello("job", "s1", 1)) + frame(report(3)) + sent)
        assert is_closed(secure)

    assert inbox.next() == ("up", 1)
    assert inbox.next() == ("message", 1, report(3))
    assert inbox.next() == ("down", 1)
    assert "127.0.0.1" in caplog.text


def test_a_frame_that_is_announced_as_long_takes_no_memory(server, certificate, caplog):
    """The process's peak stays: four gigabytes are announced, on many connections."""
    _, _, address = server
    before = peak_kib(since_now=True)
    for _ in range(20):
        with tls(address, certificate) as secure:
            secure.sendall(PREAMBLE + struct.pack("!I", 0xFFFFFFF0))
            assert is_closed(secure)

    assert peak_kib() - before < 64 << 10
    assert "a frame of 4294967280 bytes" in refusals(caplog)[0]


def test_a_connection_that_says_nothing_is_closed_in_time(ends, certificate):
    links, inbox = ends(0, deadlines=dataclasses.replace(QUICK, connect_s=2.0))
    address = links.listen("127.0.0.1")
    with socket.create_connection(address, timeout=WAIT_S) as plain, tls(address, certificate) as secure:
        assert is_closed(plain)
        assert is_closed(secure)
    assert inbox.events.empty()


def test_a_peer_that_stops_reading_is_dropped_and_costs_no_memory(ends, certificate, caplog):
    """Of each kind of message only the newest waits; nothing else waits for that peer. Its silence does not count."""
    links, inbox = ends(0, deadlines=dataclasses.replace(QUICK, send_s=1.0))

    def large():
        """Half a megabyte in memory, each its own."""
        levels = (LevelOrder(1, None, (), tuple(range(500)), tuple(range(500))) for _ in range(16))
        return Order(Epoch(1, 1), False, tuple(levels))

    with tls(links.listen("127.0.0.1"), certificate) as secure:
        secure.sendall(PREAMBLE + frame(Hello("job", "s1", 1)))
        assert inbox.next() == ("up", 1)
        before = peak_kib(since_now=True)

        def is_dropped():
            for _ in range(20):
                links.send(1, large())
            return not inbox.events.empty()

        until(is_dropped)

    assert inbox.next() == ("down", 1)
    assert "does not answer in time" in caplog.text
    assert peak_kib() - before < 64 << 10


def test_many_connections_of_strangers_are_bounded(server, ends):
    _, inbox, (host, port) = server
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_UNKNOWN):
            stack.enter_context(socket.create_connection((host, port), timeout=WAIT_S))
        assert is_closed(stack.enter_context(socket.create_connection((host, port), timeout=WAIT_S)))
    other, _ = ends(1)
    other.connect(0, host, port)

    inbox.until("up", 1)


def test_a_silent_peer_is_dropped(ends, certificate):
    links, inbox = ends(0, deadlines=dataclasses.replace(QUICK, silence_s=1.0))
    with tls(links.listen("127.0.0.1"), certificate) as secure:
        secure.sendall(PREAMBLE + frame(Hello("job", "s1", 1)))

        assert inbox.next() == ("up", 1)
        assert inbox.next() == ("down", 1)


def test_only_the_chosen_interface_is_listened_on(ends, server):
    _, _, (_, port) = server
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=WAIT_S)

    links, _ = ends(2)
    for host in ("0.0.0.0", "::"):
        with pytest.raises(ConfigError):
            links.listen(host)


def test_a_link_comes_back_by_itself_and_each_change_is_logged_once(ends, certificate, caplog):
    caplog.set_level(logging.INFO)
    first, inbox = ends(0)
    host, port = first.listen("127.0.0.1")
    other, other_inbox = ends(1)
    other.connect(0, host, port)
    other_inbox.until("up", 0)
    inbox.until("up", 1)

    first.close()
    other_inbox.until("down", 0)
    with socket.create_server((host, port)) as nobody:  # it accepts and answers nothing: the tries fail
        for _ in range(3):
            nobody.accept()[0].close()
    again, again_inbox = ends(0)
    again.listen(host, port)
    again_inbox.until("up", 1)
    other_inbox.until("up", 0)
    other.send(0, report(5))

    assert again_inbox.next() == ("message", 1, report(5))
    of_node_0 = [record.getMessage() for record in caplog.records if "node 0" in record.getMessage()]
    assert len([text for text in of_node_0 if "not reached" in text]) == 1
    assert len([text for text in of_node_0 if "is back" in text]) == 1


def start_peer(certificate, port):
    script = pathlib.Path(__file__).parent / "link_peer.py"
    arguments = [sys.executable, str(script), str(len(certificate.cert_pem)), str(port)]
    peer = subprocess.Popen(arguments, stdin=subprocess.PIPE)
    peer.stdin.write(certificate.cert_pem + certificate.key_pem)
    peer.stdin.close()
    return peer


def test_a_killed_peers_successor_is_linked_and_the_key_is_seen_nowhere(server, certificate, caplog):
    links, inbox, (_, port) = server
    caplog.set_level(logging.DEBUG)
    secrets = [line for line in certificate.key_pem.decode().splitlines() if not line.startswith("---")]
    seen = []
    for number in (1, 2):
        peer = start_peer(certificate, port)
        try:
            inbox.until("up", 1)
            links.send(1, order(number))
            inbox.until("message", 1, report(number))
            proc = pathlib.Path("/proc") / str(peer.pid)
            seen += [(proc / name).read_bytes().decode(errors="replace") for name in ("cmdline", "environ")]
            for fd in (proc / "fd").iterdir():
                with contextlib.suppress(FileNotFoundError):  # one that was just closed
                    seen.append(os.readlink(fd))
        finally:
            os.kill(peer.pid, signal.SIGKILL)
            peer.wait()
        inbox.until("down", 1)

    assert not any(secret in text for secret in secrets for text in (*seen, caplog.text, repr(certificate)))
    assert not any("lazysnap-link" in text for text in seen)  # no descriptor of the key stays open


def test_of_two_connections_of_one_node_the_later_one_stays(ends, server, certificate):
    """After a node's restart its old connection may look alive for a while."""
    links, inbox, (host, port) = server
    with tls((host, port), certificate) as old:
        old.sendall(PREAMBLE + frame(Hello("job", "s1", 1)))
        inbox.until("up", 1)
        new, new_inbox = ends(1)
        new.connect(0, host, port)
        inbox.until("up", 1)

        assert is_closed(old)
    new_inbox.until("up", 0)
    links.send(1, order(1))
    assert new_inbox.next() == ("message", 0, order(1))
    assert inbox.events.empty()


def test_of_two_nodes_the_one_with_the_greater_number_connects(server):
    links, _, (host, port) = server
    with pytest.raises(ConfigError, match="greater number"):
        links.connect(1, host, port)
