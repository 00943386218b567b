"""Whoever has not the job's certificate gets nowhere, at every port of a keeper, and costs nothing."""

import contextlib
import datetime
import os
import queue
import socket
import ssl
import struct
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from raw_peer import WAIT_S, frame, is_closed, peak_kib, refusals, tls
from support.waiting import TIMEOUT_S, until

from lazysnap.errors import CaptureAborted, ConfigError, PeerRefused, PeerUnreachable
from lazysnap.links.certificate import make_certificate
from lazysnap.links.client import PeerReader
from lazysnap.links.mesh import Hello, Links
from lazysnap.links.messages import Open, SlotOf
from lazysnap.links.server import PeerServer
from lazysnap.links.strangers import MAX_UNKNOWN, Deadlines

PATIENT = Deadlines(connect_s=60.0, send_s=60.0, alive_s=0.2, silence_s=60.0)


@dataclass
class Port:
    """One that listens."""

    address: tuple[str, int]
    opening: bytes
    """Its preamble."""
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


@pytest.fixture(scope="module")
def certificate():
    return make_certificate()


@pytest.fixture(params=["links", "reads"])
def open_port(request, certificate):
    """Makes a port with some deadlines."""
    with contextlib.ExitStack() as stack:

        def links(deadlines=PATIENT):
            inbox = Inbox()
            one = Links(certificate, Hello("job", "s1", 0), inbox, deadlines)
            stack.callback(one.close)
            address = one.listen("127.0.0.1")

            def visit():
                other = Links(certificate, Hello("job", "s1", 1), Inbox(), PATIENT)
                stack.callback(other.close)
                other.connect(0, *address)

            opening = struct.pack("!8sH", b"lazysnap", 1)
            return Port(address, opening, frame(Hello("job", "s1", 1)), inbox.up, visit, one.listen)

        def reads(deadlines=PATIENT):
            reached = queue.Queue()

            def find(what):
                reached.put(what)
                raise CaptureAborted("nothing is here")

            one = PeerServer(certificate, find, deadlines)
            stack.callback(one.close)
            address, slot = one.listen("127.0.0.1"), SlotOf(0, 7, "image")

            def ask():
                with contextlib.suppress(PeerUnreachable):  # strangers may just be leaving
                    reader = PeerReader(certificate, address, timeout_s=TIMEOUT_S)
                    with contextlib.closing(reader), contextlib.suppress(PeerRefused):
                        reader.open(slot)
                    return True

            opening = struct.pack("!8sH", b"lazyread", 1)
            return Port(address, opening, frame(Open(slot)), reached, lambda: until(ask), one.listen)

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


def check_no_entry(port, context, caplog):
    with (
        socket.create_connection(port.address, timeout=WAIT_S) as connection,
        context.wrap_socket(connection) as secure,
    ):
        with contextlib.suppress(OSError):
            secure.sendall(port.opening + port.request)
        assert is_closed(secure)
    check_refused(port, caplog)


def test_a_plain_connection_is_refused(port, caplog):
    with socket.create_connection(port.address, timeout=WAIT_S) as plain:
        plain.sendall(port.opening + port.request)
        assert is_closed(plain)
    check_refused(port, caplog)


def test_nobody_without_the_certificate_is_let_in(port, caplog):
    naked = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    naked.check_hostname, naked.verify_mode = False, ssl.CERT_NONE
    check_no_entry(port, naked, caplog)


def test_another_jobs_certificate_is_refused(port, caplog):
    blind = make_certificate().context(ssl.PROTOCOL_TLS_CLIENT)
    blind.verify_mode = ssl.CERT_NONE
    check_no_entry(port, blind, caplog)


def test_a_certificate_that_the_job_key_signed_is_not_the_jobs(port, certificate, caplog):
    """Nothing is delegated: there is one certificate."""
    ours = x509.load_pem_x509_certificate(certificate.cert_pem.encode())
    key = serialization.load_pem_private_key(certificate.key_pem.encode(), None)
    now = datetime.datetime.now(datetime.timezone.utc)
    signed = (
        x509.CertificateBuilder(ours.subject, x509.Name([]), key.public_key(), 7)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .sign(key, hashes.SHA256())
    )
    context = certificate.context(ssl.PROTOCOL_TLS_CLIENT)
    with open(os.memfd_create("chain"), "wb") as chain:
        chain.write(signed.public_bytes(serialization.Encoding.PEM) + certificate.key_pem.encode())
        chain.flush()
        context.load_cert_chain(f"/proc/self/fd/{chain.fileno()}")
    check_no_entry(port, context, caplog)


def test_older_tls_is_refused(port, certificate):
    context = certificate.context(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_connection(port.address, timeout=WAIT_S) as connection, pytest.raises(ssl.SSLError):
        context.wrap_socket(connection)


def test_a_frame_that_is_announced_as_long_takes_no_memory(port, certificate, caplog):
    """The process's peak stays: four gigabytes are announced, on many connections."""
    before = peak_kib(since_now=True)
    for _ in range(20):
        with tls(port.address, certificate) as secure:
            secure.sendall(port.opening + struct.pack("!I", 0xFFFFFFF0))
            assert is_closed(secure)

    assert peak_kib() - before < 64 << 10
    assert "a frame of 4294967280 bytes" in refusals(caplog)[0]
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1, "once per host"


def test_many_connections_of_strangers_are_bounded(port):
    with contextlib.ExitStack() as stack:
        for _ in range(MAX_UNKNOWN):
            stack.enter_context(socket.create_connection(port.address, timeout=WAIT_S))
        assert is_closed(stack.enter_context(socket.create_connection(port.address, timeout=WAIT_S)))
    check_serves(port)


def test_connections_that_say_nothing_are_closed_in_time(open_port, certificate):
    port = open_port(Deadlines(connect_s=2.0, silence_s=2.0))
    with socket.create_connection(port.address, timeout=WAIT_S) as plain, tls(port.address, certificate) as secure:
        assert is_closed(plain)
        assert is_closed(secure)
    assert port.reached.empty()


def test_only_the_chosen_interface_is_listened_on(port):
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port.address[1]), timeout=WAIT_S)
    for host in ("0.0.0.0", "::"):
        with pytest.raises(ConfigError, match="one interface"):
            port.listen(host)
