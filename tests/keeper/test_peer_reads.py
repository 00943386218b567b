"""Reads between processes of a job, over real sockets: what arrives, who is let in, what ends in time."""

import contextlib
import dataclasses
import logging
import os
import pathlib
import socket
import threading
import time

import pytest
import xxhash
from raw_peer import (
    WAIT_S,
    announced,
    authenticated,
    exactly,
    frame,
    is_closed,
    peak_kib,
    prove,
    raw_frame,
    refusals,
)
from support.waiting import TIMEOUT_S, until

from lazysnap.errors import ConfigError, FormatError, KeeperError
from lazysnap.links import client as peer_client
from lazysnap.links import server as peer_server
from lazysnap.links.channel import MAX_FRAME_BYTES
from lazysnap.links.client import PeerReader
from lazysnap.links.listener import Deadlines
from lazysnap.links.messages import (
    MAX_READ_BYTES,
    Alive,
    Block,
    Finish,
    Finished,
    Open,
    Opened,
    ParityOf,
    PartOf,
    PeerRefused,
    Read,
    SlotOf,
)
from lazysnap.links.secret import draw_secret
from lazysnap.links.server import PeerServer
from lazysnap.memory.failures import CaptureAborted

pytestmark = pytest.mark.slow

PATIENT = Deadlines(connect_s=60.0, send_s=60.0, alive_s=0.1, silence_s=60.0)
"""Nothing fails by time, except what a test has shortened."""
SLOT = SlotOf(0, 7, "image")
DATA = os.urandom(5 << 20)


class Filling:
    """A source whose bytes are there as far as a test lets them be."""

    def __init__(self, data):
        self.memory, self.size_bytes = bytearray(data) + bytes(4096), len(data)
        self.change = threading.Condition()
        self.upto, self.asked, self.error, self.is_finished = 0, 0, None, False

    def set(self, **values):
        with self.change:
            vars(self).update(values)
            self.change.notify_all()

    def _wait(self, upto):
        with self.change:
            self.asked = upto
            self.change.notify_all()
            assert self.change.wait_for(lambda: self.upto >= upto or self.error, TIMEOUT_S)
            if self.error:
                raise self.error

    def wait_asked(self, upto):
        with self.change:
            assert self.change.wait_for(lambda: self.asked == upto, TIMEOUT_S)

    def view(self, offset, length):
        self._wait(offset + length)
        # As slots do: up to a page more than there is.
        return memoryview(self.memory)[offset : offset + length + 4096]

    def finish(self):
        if self.error:
            raise self.error
        self.is_finished = True


def whole(data=DATA):
    source = Filling(data)
    source.upto = len(data)
    return source


@pytest.fixture(scope="module")
def secret():
    return draw_secret()


@pytest.fixture
def serve(secret):
    """Makes servers of some sources; they are closed after the test."""
    with contextlib.ExitStack() as stack:

        def make(sources, deadlines=PATIENT):
            def find(what):
                if what not in sources:
                    raise CaptureAborted(f"there is no {what}")
                return sources[what]

            server = PeerServer(secret, find, deadlines)
            stack.callback(server.close)
            return server, server.listen("127.0.0.1")

        yield make


@pytest.fixture
def connect(secret):
    """Makes readers of an address; they are closed after the test."""
    with contextlib.ExitStack() as stack:

        def make(address, *, timeout_s=60.0, secret=secret):
            reader = PeerReader(secret, address, timeout_s=timeout_s)
            stack.callback(reader.close)
            return reader

        yield make


@pytest.fixture
def address(serve):
    """Of a server that has ``DATA`` in ``SLOT``."""
    return serve({SLOT: whole()})[1]


def assert_still_serves(connect, address):
    reader = connect(address)
    out = bytearray(1000)
    assert reader.open(SLOT) == len(DATA)
    assert reader.read_into(10, memoryview(out)) == xxhash.xxh3_64_intdigest(out)
    assert out == DATA[10:1010]


# --- what arrives ---


@pytest.mark.parametrize(
    ("offset", "length"), [(0, 1), (0, len(DATA)), (4097, 1 << 20), (len(DATA) - 3, 3)], ids=lambda n: str(n)
)
def test_bytes_and_checksum_arrive_as_they_are(connect, address, offset, length):
    reader, out = connect(address), bytearray(length)
    assert reader.open(SLOT) == len(DATA)

    checksum = reader.read_into(offset, memoryview(out))

    assert out == DATA[offset : offset + length]
    assert checksum == xxhash.xxh3_64_intdigest(out)
    reader.finish()


def test_a_read_of_the_greatest_length_arrives(serve, connect):
    data = os.urandom(1 << 20) * (MAX_READ_BYTES >> 20)
    reader, out = connect(serve({SLOT: whole(data)})[1]), bytearray(MAX_READ_BYTES)
    reader.open(SLOT)

    reader.read_into(0, memoryview(out))

    assert out == data


def test_a_source_is_read_while_it_fills(serve, connect):
    source = Filling(DATA)
    reader = connect(serve({SLOT: source})[1])
    reader.open(SLOT)
    block, out = 1 << 20, bytearray(len(DATA))

    def fill():
        for upto in range(block, len(DATA) + 1, block):
            source.wait_asked(upto)
            source.set(upto=upto)

    filler = threading.Thread(target=fill)
    filler.start()
    for offset in range(0, len(DATA), block):
        reader.read_into(offset, memoryview(out)[offset : offset + block])
    filler.join()
    reader.finish()

    assert out == DATA
    assert source.is_finished


def test_a_server_that_waits_for_bytes_says_that_it_is_alive(serve, secret):
    source = Filling(DATA)
    with authenticated(serve({SLOT: source})[1], secret) as peer:
        peer.sendall(frame(Open(SLOT)) + frame(Read(0, 100)))
        expected = frame(Opened(len(DATA))) + 3 * frame(Alive())
        assert exactly(peer, len(expected)) == expected
        source.set(upto=100)
        expected = frame(Block(100, xxhash.xxh3_64_intdigest(DATA[:100])))
        while (received := exactly(peer, len(frame(Alive())))) == frame(Alive()):
            pass
        assert received + exactly(peer, len(expected) - len(received)) == expected
        assert exactly(peer, 100) == DATA[:100]


def test_a_reader_bears_a_long_wait_while_it_hears_that_the_server_is_alive(impostor, connect):
    def answer(peer, stop):
        opened(peer)
        peer.recv(1 << 16)
        for _ in range(12):
            stop.wait(0.5)
            peer.sendall(frame(Alive()))
        peer.sendall(frame(Block(4, xxhash.xxh3_64_intdigest(b"late"))) + b"late")
        stop.wait(TIMEOUT_S)

    reader, out = connect(impostor(answer), timeout_s=5.0), bytearray(4)
    reader.open(SLOT)
    reader.read_into(0, memoryview(out))
    assert out == b"late"


def test_each_thing_is_its_own_and_the_last_one_opened_is_read(serve, connect):
    things = [SLOT, SlotOf(0, 7, "meta"), PartOf("s1", 7, 1), ParityOf("s1", 7, 0), ParityOf("s1", 7, 1)]
    sources = {thing: whole(os.urandom(100 + number)) for number, thing in enumerate(things)}
    reader = connect(serve(sources)[1])
    for thing, source in sources.items():
        out = bytearray(reader.open(thing))
        reader.read_into(0, memoryview(out))
        assert out == source.memory[: len(out)]


def test_many_readers_are_served_at_once(serve, connect):
    """One waits for bytes that do not come; the others do not wait for it."""
    slow = Filling(DATA)
    _, address = serve({SLOT: whole(), PartOf("s1", 7, 1): slow})
    waiting, errors = connect(address), []
    waiting.open(PartOf("s1", 7, 1))

    def read():
        try:
            waiting.read_into(0, memoryview(bytearray(1)))
        except PeerRefused as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    slow.wait_asked(1)
    for _ in range(8):
        assert_still_serves(connect, address)
    slow.set(error=CaptureAborted("the trainer died"))
    thread.join()
    assert "the trainer died" in str(errors[0])


# --- what fails at the source ---


def test_what_a_source_raises_is_told_and_the_connection_lives_on(serve, connect):
    source = Filling(DATA)
    source.error = CaptureAborted("the slot was reused")
    reader = connect(serve({SLOT: whole(), PartOf("s1", 7, 1): source})[1])

    with pytest.raises(PeerRefused, match=r"there is no ParityOf.*stripe=3"):
        reader.open(ParityOf("s1", 7, 3))
    reader.open(PartOf("s1", 7, 1))
    with pytest.raises(PeerRefused, match="the slot was reused"):
        reader.read_into(0, memoryview(bytearray(10)))
    reader.open(PartOf("s1", 7, 1))
    source.set(error=OSError("no memory for a map"))
    with pytest.raises(PeerRefused, match="no memory for a map"):
        reader.finish()
    out = bytearray(10)
    reader.open(SLOT)
    reader.read_into(0, memoryview(out))
    assert out == DATA[:10]


def test_an_endless_text_is_cut(serve, connect):
    source = Filling(DATA)
    source.error = CaptureAborted("x" * (2 * MAX_FRAME_BYTES))
    reader = connect(serve({SLOT: source})[1])
    reader.open(SLOT)
    with pytest.raises(PeerRefused, match="xxxx"):
        reader.finish()
    assert reader.open(SLOT) == len(DATA)


def test_what_cannot_be_read_is_refused_and_logged(serve, connect, caplog):
    _, address = serve({SLOT: whole()})
    reader, out = connect(address), memoryview(bytearray(10))
    with pytest.raises(PeerRefused, match="nothing is open"):
        reader.read_into(0, out)
    with pytest.raises(PeerRefused, match="nothing is open"):
        reader.finish()
    reader.open(SLOT)
    for offset in (len(DATA) - 9, len(DATA), 1 << 61):
        with pytest.raises(PeerRefused, match=f"which has {len(DATA)}"):
            reader.read_into(offset, out)
    reader.read_into(len(DATA) - 10, out)
    assert out == DATA[-10:]
    reader.finish()
    with pytest.raises(PeerRefused, match="nothing is open"):
        reader.read_into(0, out)
    for length in (0, MAX_READ_BYTES + 1):
        with pytest.raises(ConfigError):
            reader.read_into(0, memoryview(bytearray(length)))

    assert len(refusals(caplog)) == 1  # as a warning, once per host
    assert "127.0.0.1" in refusals(caplog)[0]


# --- who is let in ---


def test_another_starts_secret_is_refused_by_both_sides(connect, address, impostor, caplog):
    """The reader asks nothing of a server that it does not know, and the server lets no such reader in."""
    stranger = draw_secret()
    with pytest.raises(KeeperError, match=rf"127.0.0.1:{address[1]}"):
        connect(address, secret=stranger)
    until(lambda: refusals(caplog))
    assert "it does not have the secret of this start" in refusals(caplog)[0]
    assert_still_serves(connect, address)

    asked = []
    with pytest.raises(KeeperError, match="it does not have the secret of this start"):
        connect(impostor(lambda peer, stop: asked.append(peer.recv(1)), secret=stranger))
    until(lambda: asked == [b""])


def test_replayed_bytes_of_an_earlier_session_open_nothing(serve, connect, secret, caplog):
    source = whole()
    opened = []

    def find(what):
        opened.append(what)
        return source

    server = PeerServer(secret, find, PATIENT)
    try:
        address = server.listen("127.0.0.1")
        with socket.create_server(("127.0.0.1", 0)) as middle:
            recorded, forwarding = [], threading.Thread(target=lambda: forward(middle, address, recorded))
            forwarding.start()
            reader = connect(middle.getsockname())
            assert reader.open(SLOT) == len(DATA)
            reader.close()
            forwarding.join()
        assert len(opened) == 1
        with socket.create_connection(address, timeout=WAIT_S) as again:
            with contextlib.suppress(OSError):
                again.sendall(b"".join(recorded))
            assert is_closed(again)

        until(lambda: refusals(caplog))
        assert_still_serves(connect, address)
        assert len(opened) == 2
    finally:
        server.close()


def forward(listener, address, recorded):
    """Hand one connection on, and record what its client sent."""
    client, _ = listener.accept()
    with client, socket.create_connection(address) as server:

        def back():
            with contextlib.suppress(OSError):
                while data := server.recv(1 << 16):
                    client.sendall(data)

        backwards = threading.Thread(target=back)
        backwards.start()
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                recorded.append(data)
                server.sendall(data)
        server.shutdown(socket.SHUT_RDWR)
        backwards.join()


@pytest.mark.parametrize(
    "sent",
    [
        announced(MAX_FRAME_BYTES + 1),
        announced(0xFFFFFFFF),
        raw_frame(bytes(range(200, 220))),
        raw_frame(b"\x91" * 1000),
        raw_frame(b""),
        frame(Open(SLOT))[:-1] + b"?",
        frame(Opened(1)),
        frame({"type": "erase"}),
        frame({"type": "open", "what": {"type": "file", "path": "/etc/passwd"}}),
        frame({"type": "open", "what": {"type": "slot", "local_rank": -1, "sequence": 1, "part": "image"}}),
        frame({"type": "open", "what": {"type": "slot", "local_rank": 1, "sequence": 1, "part": "words"}}),
        frame({"type": "open", "what": {"type": "part", "start": "s" * 65, "step": 1}}),
        frame(Open(SLOT)) + frame(Read(0, MAX_READ_BYTES + 1)),
        frame(Open(SLOT)) + frame(Read(0, 0)),
        frame(Open(SLOT)) + frame(Read(-1, 10)),
        frame(Open(SLOT)) + frame(Read((1 << 62) + 1, 10)),
        frame({"type": "finish", "extra": 1}),
    ],
    ids=lambda sent: repr(sent[:60]),
)
def test_what_is_no_request_is_refused_with_the_address(connect, address, secret, caplog, sent):
    with authenticated(address, secret) as peer:
        peer.sendall(sent)
        assert is_closed(peer)

    until(lambda: refusals(caplog))
    assert "127.0.0.1" in refusals(caplog)[0]
    assert_still_serves(connect, address)


def test_a_client_that_asks_nothing_is_dropped_in_time(serve, secret):
    _, address = serve({}, dataclasses.replace(PATIENT, silence_s=2.0))
    with authenticated(address, secret) as idle:
        assert is_closed(idle)


def test_a_client_that_takes_nothing_is_dropped(serve, connect, secret, caplog):
    caplog.set_level(logging.DEBUG)
    _, address = serve({SLOT: whole()}, dataclasses.replace(PATIENT, send_s=1.0))
    with authenticated(address, secret) as peer:
        peer.sendall(frame(Open(SLOT)) + frame(Read(0, len(DATA))) * 20)
        until(lambda: "is gone: it does not answer in time" in caplog.text)
        assert is_closed(peer)
    assert_still_serves(connect, address)


def test_the_secret_is_in_no_log(connect, address, secret, caplog):
    caplog.set_level(logging.DEBUG)
    assert_still_serves(connect, address)
    with authenticated(address, secret) as peer:
        peer.sendall(b"x" * 100)
        assert is_closed(peer)
    until(lambda: refusals(caplog))

    assert secret.hex not in caplog.text
    assert secret.hex not in repr(secret)


# --- servers that fail ---


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


def opened(peer, size_bytes=1 << 20):
    """Take the first request, and answer that it is open."""
    exactly(peer, len(frame(Open(SLOT))))
    peer.sendall(frame(Opened(size_bytes)))


@pytest.mark.parametrize(
    ("sent", "hangs"),
    [(b"", True), (bytes(2), False), (frame(Block(1 << 20, 0)), False), (frame(Block(1 << 20, 0)) + bytes(9999), True)],
    ids=["no answer", "half a length", "no payload", "half a payload"],
)
def test_a_server_that_fails_in_the_middle_is_given_up_in_time(impostor, connect, sent, hangs):
    def answer(peer, stop):
        opened(peer)
        peer.recv(1 << 16)
        peer.sendall(sent)
        if hangs:
            stop.wait(TIMEOUT_S)

    address = impostor(answer)
    reader = connect(address)
    reader.open(SLOT)
    if hangs:
        reader._timeout_s = 2.0
    begin = time.monotonic()
    with pytest.raises(KeeperError, match=rf"127.0.0.1:{address[1]}.*{'in time' if hangs else 'closed'}"):
        reader.read_into(0, memoryview(bytearray(1 << 20)))
    assert time.monotonic() - begin < 30.0

    with pytest.raises(KeeperError, match="Bad file descriptor"):  # it is closed: nobody knows what would come next
        reader.open(SLOT)


def test_a_server_that_never_answers_is_given_up_in_time(connect):
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(KeeperError, match="in time"):
        connect(silent.getsockname(), timeout_s=1.0)


def test_a_server_that_says_only_that_it_is_alive_is_given_up_in_time(impostor, connect, monkeypatch):
    monkeypatch.setattr(peer_client, "ANSWER_S", 1.0)

    def answer(peer, stop):
        opened(peer)
        while not stop.wait(0.1):
            peer.sendall(frame(Alive()))

    reader = connect(impostor(answer))
    reader.open(SLOT)
    with pytest.raises(KeeperError, match="in time"):
        reader.read_into(0, memoryview(bytearray(1)))


def test_whether_it_was_whole_is_waited_for_longer(impostor, connect, monkeypatch):
    """A trainer may evaluate for minutes before it can say so."""
    monkeypatch.setattr(peer_client, "ANSWER_S", 0.2)

    def answer(peer, stop):
        opened(peer)
        peer.recv(1 << 16)
        for _ in range(10):
            stop.wait(0.1)
            peer.sendall(frame(Alive()))
        peer.sendall(frame(Finished()))
        stop.wait(TIMEOUT_S)

    reader = connect(impostor(answer))
    reader.open(SLOT)
    reader.finish()


def test_a_read_that_is_interrupted_fails_at_once(serve, connect):
    source = Filling(DATA)
    reader = connect(serve({SLOT: source})[1])
    reader.open(SLOT)

    def interrupt():
        source.wait_asked(1)
        reader.interrupt()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeeperError):
        reader.read_into(0, memoryview(bytearray(1)))
    thread.join()
    with pytest.raises(KeeperError):
        reader.open(SLOT)
    source.set(upto=1)


def test_nobody_there_is_unreachable(connect):
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = gone.getsockname()
    with pytest.raises(KeeperError, match=rf"127.0.0.1:{address[1]}.*refused"):
        connect(address)


def test_other_bytes_than_the_source_has_are_corrupt(impostor, connect):
    """The peer and the range are named, and the connection lives on."""
    data = os.urandom(1000)

    def answer(peer, stop):
        opened(peer, 5000)
        for payload in (bytes(1000), data):
            peer.recv(1 << 16)
            peer.sendall(frame(Block(1000, xxhash.xxh3_64_intdigest(data))) + payload)
        stop.wait(TIMEOUT_S)

    address, out = impostor(answer), bytearray(1000)
    reader = connect(address)
    reader.open(SLOT)
    with pytest.raises(FormatError, match=rf"127.0.0.1:{address[1]}: bytes \[500, 1500\) of SlotOf"):
        reader.read_into(500, memoryview(out))
    reader.read_into(500, memoryview(out))
    assert out == data


@pytest.mark.parametrize(
    "sent",
    [
        announced(0xFFFFFFF0),
        raw_frame(b"\x91" * 1000),
        frame(Block(MAX_READ_BYTES, 0)),
        frame(Block(999, 0)),
        frame(Finished()),
        frame(Finish()),
        frame(Opened(-1)),
    ],
    ids=lambda sent: repr(sent[:40]),
)
def test_a_server_that_answers_what_is_no_answer_is_left(impostor, connect, sent):
    def answer(peer, stop):
        opened(peer)
        peer.recv(1 << 16)
        peer.sendall(frame(Alive()) + sent)
        stop.wait(TIMEOUT_S)

    reader = connect(impostor(answer))
    reader.open(SLOT)
    before = peak_kib(since_now=True)
    with pytest.raises(KeeperError):
        reader.read_into(0, memoryview(bytearray(1000)))
    assert peak_kib() - before < 64 << 10


# --- the end ---


def of_this_process():
    threads = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("lazysnap-peer"))
    sockets = set()
    for fd in pathlib.Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if (target := os.readlink(fd)).startswith("socket:"):
                sockets.add(target)
    return threads, sockets


def test_close_leaves_no_thread_and_no_socket(secret):
    threads_before, sockets_before = of_this_process()
    server = PeerServer(secret, lambda what: whole(), PATIENT)
    address = server.listen("127.0.0.1")
    readers = [PeerReader(secret, address) for _ in range(5)]
    for reader in readers:
        reader.open(SLOT)
    plain = socket.create_connection(address)
    until(lambda: len(of_this_process()[0]) == len(threads_before) + 2 + 5 + 1)

    server.close()

    for reader in readers:
        with pytest.raises(KeeperError):
            reader.finish()
    plain.close()
    until(lambda: of_this_process() == (threads_before, sockets_before))
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)
    server.close()


def is_viewed(memory):
    try:
        memory.append(0)
    except BufferError:
        return True
    return False


def test_a_reader_that_asks_nothing_holds_no_view_and_one_that_leaves_no_thread(serve, connect):
    """Memory that is viewed cannot be unmapped."""
    source = whole()
    reader, out = connect(serve({SLOT: source})[1]), memoryview(bytearray(100))
    reader.open(SLOT)
    reader.read_into(0, out)
    until(lambda: not is_viewed(source.memory), timeout_s=WAIT_S)
    reader.close()
    until(lambda: not [name for name in of_this_process()[0] if "connection" in name])


def test_close_does_not_wait_for_a_source_that_hangs(secret, monkeypatch):
    monkeypatch.setattr(peer_server, "_CLOSE_S", 0.5)
    source = Filling(DATA)
    server = PeerServer(secret, lambda what: source, PATIENT)
    reader = PeerReader(secret, server.listen("127.0.0.1"))
    reader.open(SLOT)
    errors = []

    def read():
        try:
            reader.read_into(0, memoryview(bytearray(1)))
        except KeeperError as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    source.wait_asked(1)

    server.close()

    thread.join(TIMEOUT_S)
    assert errors
    source.set(error=CaptureAborted("at last"))
    until(lambda: not [name for name in of_this_process()[0] if "connection" in name])
