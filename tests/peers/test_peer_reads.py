"""Reads between processes of a job, over real sockets: what arrives, who is let in, what ends in time."""

import contextlib
import dataclasses
import gc
import logging
import os
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
    raw_frame,
    refusals,
    sockets_at,
)
from support.peer_ends import QUICK, Table
from support.waiting import TIMEOUT_S, until

from lazysnap.core.actions import PlainEvent
from lazysnap.errors import KeeperError
from lazysnap.memory.capture_reader import CaptureAborted
from lazysnap.peers import listener
from lazysnap.peers.messages import (
    MAX_READ_BYTES,
    Block,
    Hello,
    NotYet,
    ParityOf,
    PartOf,
    PeerRefused,
    Read,
    Refusal,
    SlotOf,
)
from lazysnap.peers.secret import draw_secret
from lazysnap.peers.wire import MAX_FRAME_BYTES

pytestmark = pytest.mark.slow

SLOT = SlotOf(0, 7, "image")
PART = PartOf("s1", 7, 1)
DATA = os.urandom(5 << 20)


class Filling:
    """A source whose bytes are there as far as a test lets them be."""

    def __init__(self, data, identity=1):
        self.memory, self.size_bytes, self.identity = bytearray(data) + bytes(4096), len(data), identity
        self.upto, self.error, self.is_whole, self.num_asked = 0, None, True, 0
        self.goes_on = threading.Event()
        self.goes_on.set()

    def _raise(self):
        self.num_asked += 1
        self.goes_on.wait(TIMEOUT_S)
        if self.error:
            raise self.error

    def view(self, offset, length):
        self._raise()
        if self.upto < offset + length:
            raise NotYet("it is not copied yet")
        # As slots do: up to a page more than there is.
        return memoryview(self.memory)[offset : offset + length + 4096]

    def check(self):
        self._raise()

    def finish(self):
        self._raise()
        if not self.is_whole:
            raise NotYet("it is not whole yet")


def whole(data=DATA):
    source = Filling(data)
    source.upto = len(data)
    return source


@pytest.fixture
def serve(make_end):
    """Makes a keeper of some sources; it is closed after the test."""

    def make(sources, deadlines=QUICK):
        return make_end(0, sources=Table(sources), deadlines=deadlines)

    return make


@pytest.fixture
def served(serve, address):
    """The address of a keeper that has ``DATA`` in ``SLOT``."""
    serve({SLOT: whole()})
    return address


def assert_still_serves(connect):
    reader = connect()
    out = bytearray(1000)
    assert reader.size(SLOT) == len(DATA)
    assert reader.read_into(SLOT, 10, memoryview(out)) == xxhash.xxh3_64_intdigest(out)
    assert out == DATA[10:1010]
    reader.close()


# --- what arrives ---


@pytest.mark.parametrize(
    ("offset", "length"), [(0, 1), (0, len(DATA)), (4097, 1 << 20), (len(DATA) - 3, 3)], ids=lambda n: str(n)
)
def test_bytes_and_checksum_arrive_as_they_are(connect, served, offset, length):
    reader = connect()
    out = bytearray(length)
    assert reader.size(SLOT) == len(DATA)

    checksum = reader.read_into(SLOT, offset, memoryview(out))

    assert out == DATA[offset : offset + length]
    assert checksum == xxhash.xxh3_64_intdigest(out)
    reader.finish(SLOT)


def test_a_read_of_the_greatest_length_arrives(serve, connect):
    data = os.urandom(1 << 20) * (MAX_READ_BYTES >> 20)
    serve({SLOT: whole(data)})
    out = bytearray(MAX_READ_BYTES)

    connect().read_into(SLOT, 0, memoryview(out))

    assert out == data


def test_a_source_is_read_while_it_fills(serve, connect):
    source = Filling(DATA)
    source.is_whole = False
    serve({SLOT: source})
    block = 1 << 20
    out = bytearray(len(DATA))

    def fill():
        """One more block, each time that the reader has to wait; the end of the capture comes behind the last one."""
        if source.upto == len(DATA):
            source.is_whole = True
        else:
            source.upto += block

    reader = connect(beat=fill)
    for offset in range(0, len(DATA), block):
        reader.read_into(SLOT, offset, memoryview(out)[offset : offset + block])
    assert source.is_whole, "the block that reaches the end"

    assert out == DATA


def test_a_reader_that_does_not_read_the_end_can_ask_if_all_is_whole(serve, connect):
    source = whole()
    source.is_whole = False
    serve({SLOT: source})
    reader = connect(patience_s=0.1)
    reader.read_into(SLOT, 0, memoryview(bytearray(100)))
    with pytest.raises(PeerRefused, match="not whole yet"):
        reader.finish(SLOT)
    source.is_whole = True
    reader.finish(SLOT)
    source.error = CaptureAborted("it was torn")
    with pytest.raises(PeerRefused, match="it was torn"):
        reader.finish(SLOT)


def test_a_server_that_waits_for_bytes_says_so_at_once(serve, address, secret):
    source = Filling(DATA)
    serve({SLOT: source})
    with authenticated(address, secret) as peer:
        peer.sendall(2 * frame(Read(SLOT, 0, 100)))
        expected = 2 * frame(Refusal("it is not copied yet", is_not_yet=True))
        assert exactly(peer, len(expected)) == expected
        source.upto = 100
        peer.sendall(frame(Read(SLOT, 0, 100)))
        expected = frame(Block(100, xxhash.xxh3_64_intdigest(DATA[:100]), len(DATA), 1)) + DATA[:100]
        assert exactly(peer, len(expected)) == expected


def test_a_reader_waits_while_its_caller_wants_it(serve, connect):
    serve({SLOT: Filling(DATA)})
    beats = iter(range(5))

    def beat():
        if next(beats) == 4:
            raise CaptureAborted("the job was cancelled")

    with pytest.raises(CaptureAborted, match="the job was cancelled"):
        connect(beat=beat).read_into(SLOT, 0, memoryview(bytearray(1)))


def test_a_reader_does_not_wait_for_ever(serve, connect):
    serve({SLOT: Filling(DATA)})
    with pytest.raises(PeerRefused, match="not copied yet"):
        connect(patience_s=0.3).read_into(SLOT, 0, memoryview(bytearray(1)))


def test_a_source_that_hangs_holds_up_its_reader_alone(serve, connect, address, secret):
    slow = whole()
    slow.goes_on.clear()
    serve({SLOT: whole(), PART: slow})
    with contextlib.ExitStack() as stack:
        for _ in range(5):
            stack.enter_context(authenticated(address, secret)).sendall(frame(Read(PART, 0, 1)))
        until(lambda: slow.num_asked >= 5)
        assert_still_serves(connect)
        slow.goes_on.set()


def test_readers_whose_source_hangs_keep_out_other_readers_and_no_link(serve, make_end, address, secret, monkeypatch):
    monkeypatch.setattr(listener, "MAX_READERS", 2)
    slow = whole()
    slow.goes_on.clear()
    first = serve({PART: slow})
    with contextlib.ExitStack() as stack:
        for number in range(1, 4):
            peer = stack.enter_context(authenticated(address, secret))
            peer.sendall(frame(Read(PART, 0, 1)))
            if number <= 2:
                until(lambda number=number: slow.num_asked == number)
        assert is_closed(peer)
        make_end(1)
        first.inbox.until(PlainEvent.PEER_UP)
        slow.goes_on.set()


def test_each_thing_is_its_own(serve, connect):
    things = [SLOT, SlotOf(0, 7, "meta"), PART, ParityOf("s1", 7, 0), ParityOf("s1", 7, 1)]
    sources = {thing: whole(os.urandom(100 + number)) for number, thing in enumerate(things)}
    serve(sources)
    reader = connect()
    for thing, source in sources.items():
        out = bytearray(reader.size(thing))
        reader.read_into(thing, 0, memoryview(out))
        assert out == source.memory[: len(out)]


def test_a_read_goes_on_at_the_next_keeper_of_the_node(serve, connect):
    """It has no session: only what is asked for counts, and that the captures are the same."""
    first = serve({SLOT: whole(), PART: whole()})
    reader = connect()
    out = bytearray(len(DATA))
    half = len(DATA) // 2
    reader.read_into(SLOT, 0, memoryview(out)[:half])
    reader.size(PART)
    first.close()

    with pytest.raises(KeeperError, match="refused"):
        reader.read_into(SLOT, half, memoryview(out)[half:])
    serve({SLOT: whole(), PART: Filling(DATA, identity=2)})
    reader.read_into(SLOT, half, memoryview(out)[half:])

    assert out == DATA
    with pytest.raises(PeerRefused, match="captured again"):
        reader.size(PART)


def test_a_connection_that_the_keeper_closed_meanwhile_is_made_again(serve, connect, port):
    serve({SLOT: whole()}, dataclasses.replace(QUICK, idle_s=0.3))
    reader = connect()
    assert reader.size(SLOT) == len(DATA)
    both_ends = sockets_at(port)
    until(lambda: sockets_at(port) < both_ends)
    assert reader.size(SLOT) == len(DATA)


def test_many_readers_are_served_at_once(serve, connect, address, secret):
    """One does not take what it asked for; the others do not wait for it."""
    serve({SLOT: whole()})
    with authenticated(address, secret) as slow:
        slow.sendall(frame(Read(SLOT, 0, len(DATA))) * 20)
        for _ in range(8):
            assert_still_serves(connect)


# --- what fails at the source ---


def test_what_a_source_raises_is_told_and_the_connection_lives_on(serve, connect):
    source = whole()
    source.error = CaptureAborted("the slot was reused")
    end = serve({SLOT: whole(), PART: source})
    reader = connect()

    with pytest.raises(PeerRefused, match=r"there is no ParityOf.*stripe=3"):
        reader.size(ParityOf("s1", 7, 3))
    with pytest.raises(PeerRefused, match="the slot was reused"):
        reader.read_into(PART, 0, memoryview(bytearray(10)))
    assert PART in end.peers._sources.forgotten, "a source that failed is opened anew"
    source.error = OSError("no memory for a map")
    with pytest.raises(PeerRefused, match="no memory for a map"):
        reader.size(PART)
    source.error = ZeroDivisionError("a defect")
    with pytest.raises(PeerRefused, match="ZeroDivisionError: a defect"):
        reader.size(PART)
    out = bytearray(10)
    reader.read_into(SLOT, 0, memoryview(out))
    assert out == DATA[:10]


def test_a_reader_that_cannot_be_answered_is_dropped_and_the_keeper_lives_on(serve, connect):
    source = whole()
    source.error = CaptureAborted("no text can be sent of this: \ud800")
    serve({SLOT: whole(), PART: source})
    with pytest.raises(KeeperError, match="closed the connection"):
        connect().size(PART)
    assert_still_serves(connect)


def test_an_endless_text_is_cut(serve, connect):
    source = whole()
    source.error = CaptureAborted("x" * (2 * MAX_FRAME_BYTES))
    serve({SLOT: source})
    with pytest.raises(PeerRefused, match="xxxx"):
        connect().size(SLOT)


def test_what_is_beyond_the_end_is_refused(connect, served):
    reader = connect()
    out = memoryview(bytearray(10))
    for offset in (len(DATA) - 9, len(DATA), 1 << 61):
        with pytest.raises(PeerRefused, match=f"which has {len(DATA)}"):
            reader.read_into(SLOT, offset, out)
    reader.read_into(SLOT, len(DATA) - 10, out)
    assert out == DATA[-10:]


# --- who is let in ---


def test_another_starts_secret_is_refused_by_both_sides(connect, served, impostor, caplog):
    """The reader asks nothing of a server that it does not know, and the server lets no such reader in."""
    stranger = draw_secret()
    with pytest.raises(KeeperError, match=rf"127.0.0.1:{served[1]}"):
        connect(secret=stranger).size(SLOT)
    until(lambda: refusals(caplog))
    assert "it does not have the secret of this start" in refusals(caplog)[0]
    assert_still_serves(connect)

    asked = []
    with pytest.raises(KeeperError, match="it does not have the secret of this start"):
        connect(impostor(lambda peer, stop: asked.append(peer.recv(1)), secret=stranger)).connect()
    until(lambda: asked == [b""])


def test_replayed_bytes_of_an_earlier_session_open_nothing(serve, connect, address, caplog):
    end = serve({SLOT: whole()})
    opened = end.peers._sources.opened
    with socket.create_server(("127.0.0.1", 0)) as middle:
        recorded = []
        forwarding = threading.Thread(target=lambda: forward(middle, address, recorded))
        forwarding.start()
        reader = connect(middle.getsockname())
        assert reader.size(SLOT) == len(DATA)
        reader.close()
        forwarding.join()
    assert len(opened) == 1
    with socket.create_connection(address, timeout=WAIT_S) as again:
        with contextlib.suppress(OSError):
            again.sendall(b"".join(recorded))
        assert is_closed(again)

    until(lambda: refusals(caplog))
    assert len(opened) == 1
    assert_still_serves(connect)


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
        frame(Read(SLOT, 0, 1))[:-1] + b"?",
        frame(Block(1, 1, 1, 1)),
        frame({"type": "erase"}),
        frame({"type": "alive"}),
        frame({"type": "read", "subject": {"type": "file", "path": "/etc/passwd"}, "offset": 0, "length": 1}),
        frame(Read(SlotOf(-1, 1, "image"), 0, 1)),
        frame(Read(SlotOf(1, 1, "words"), 0, 1)),
        frame(Read(PartOf("s" * 65, 1, 1), 0, 1)),
        frame(Read(SLOT, 0, MAX_READ_BYTES + 1)),
        frame(Read(SLOT, 0, -1)),
        frame(Read(SLOT, -1, 10)),
        frame(Read(SLOT, (1 << 62) + 1, 10)),
        frame(Read(SLOT, 0, 0)) + frame(Hello("job", 1)),
    ],
    ids=lambda sent: repr(sent[:60]),
)
def test_what_is_no_request_is_refused_with_the_address(connect, served, secret, caplog, sent):
    with authenticated(served, secret) as peer:
        peer.sendall(sent)
        assert is_closed(peer)

    until(lambda: refusals(caplog))
    assert "127.0.0.1" in refusals(caplog)[0]
    assert_still_serves(connect)


def test_a_client_that_asks_nothing_is_dropped_in_time(serve, address, secret):
    serve({}, dataclasses.replace(QUICK, idle_s=1.0))
    with authenticated(address, secret) as idle:
        assert is_closed(idle)


def test_a_client_that_takes_nothing_is_dropped(serve, connect, address, secret, caplog):
    caplog.set_level(logging.DEBUG)
    serve({SLOT: whole()}, dataclasses.replace(QUICK, send_s=1.0))
    with authenticated(address, secret) as peer:
        peer.sendall(frame(Read(SLOT, 0, len(DATA))) * 20)
        until(lambda: "is gone: it does not answer in time" in caplog.text)
        assert is_closed(peer)
    assert_still_serves(connect)


def test_the_secret_is_in_no_log(connect, served, secret, caplog):
    caplog.set_level(logging.DEBUG)
    assert_still_serves(connect)
    with authenticated(served, secret) as peer:
        peer.sendall(b"x" * 100)
        assert is_closed(peer)
    until(lambda: refusals(caplog))

    assert secret not in caplog.text


# --- servers that fail ---


@pytest.mark.parametrize(
    ("sent", "hangs"),
    [
        (b"", True),
        (bytes(2), False),
        (frame(Block(1 << 20, 0, 1 << 20, 1)), False),
        (frame(Block(1 << 20, 0, 1 << 20, 1)) + bytes(9999), True),
    ],
    ids=["no answer", "half a length", "no payload", "half a payload"],
)
def test_a_server_that_fails_in_the_middle_is_given_up_in_time(impostor, connect, sent, hangs):
    def answer(peer, stop):
        peer.recv(1 << 16)
        peer.sendall(sent)
        if hangs:
            stop.wait(TIMEOUT_S)

    to = impostor(answer)
    reader = connect(to, timeout_s=2.0 if hangs else 60.0)
    begin = time.monotonic()
    with pytest.raises(KeeperError, match=rf"127.0.0.1:{to[1]}.*{'in time' if hangs else 'closed|refused|reset'}"):
        reader.read_into(SLOT, 0, memoryview(bytearray(1 << 20)))
    assert time.monotonic() - begin < 30.0


def test_a_server_that_never_answers_is_given_up_in_time(connect):
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(KeeperError, match="in time"):
        connect(silent.getsockname(), timeout_s=1.0).connect()


def test_a_read_that_is_interrupted_fails_at_once(impostor, connect):
    asked = threading.Event()

    def answer(peer, stop):
        peer.recv(1 << 16)
        asked.set()
        stop.wait(TIMEOUT_S)

    reader = connect(impostor(answer))

    def interrupt():
        assert asked.wait(TIMEOUT_S)
        reader.interrupt()

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeeperError):
        reader.read_into(SLOT, 0, memoryview(bytearray(1)))
    thread.join()
    with pytest.raises(KeeperError):
        reader.size(SLOT)


def test_nobody_there_is_unreachable(connect):
    with socket.create_server(("127.0.0.1", 0)) as gone:
        to = gone.getsockname()
    with pytest.raises(KeeperError, match=rf"127.0.0.1:{to[1]}.*refused"):
        connect(to).size(SLOT)


# --- the end ---


def read_threads():
    """The threads of this process that serve reads."""
    return {thread for thread in threading.enumerate() if thread.name.startswith("lazysnap-peer")}


def test_close_leaves_no_thread_and_no_socket(serve, connect, address):
    threads_before = read_threads()
    sockets_before = sockets_at(address[1])  # the port is reserved
    end = serve({SLOT: whole()})
    readers = [connect() for _ in range(5)]
    for reader in readers:
        reader.size(SLOT)
    plain = socket.create_connection(address)
    threads = read_threads() - threads_before
    assert len(threads) == len(readers)
    assert len(sockets_at(address[1]) - sockets_before) >= 1 + len(readers)

    end.close()

    for reader in readers:
        with pytest.raises(KeeperError):
            reader.size(SLOT)
    plain.close()
    until(lambda: not threads & read_threads())
    until(lambda: sockets_at(address[1]) <= sockets_before)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address)


@pytest.mark.parametrize("num_turns", range(7))
def test_close_leaves_no_thread_when_a_read_arrives_at_that_moment(serve, loop_thread, address, secret, num_turns):
    """The read is handled in one of the turns of the loop behind its arrival; in each of them ``close`` may come."""
    threads_before = read_threads()
    end = serve({SLOT: whole()})
    is_closed_now = threading.Event()

    def close_after(turns):
        if turns:
            loop_thread.loop.call_soon(close_after, turns - 1)
            return
        end.peers.close()
        is_closed_now.set()

    with authenticated(address, secret) as peer:

        def send():
            peer.sendall(frame(Read(SLOT, 0, 1)))
            close_after(num_turns)

        loop_thread.call(send)
        assert is_closed_now.wait(TIMEOUT_S)
        assert is_closed(peer)
    loop_thread.wait_tasks()
    until(lambda: read_threads() <= threads_before)


def is_viewed(memory):
    try:
        memory.append(0)
    except BufferError:
        return True
    return False


def test_a_reader_that_asks_nothing_holds_no_view(serve, connect):
    """Memory that is viewed cannot be unmapped."""
    source = whole()
    serve({SLOT: source})
    reader = connect()
    reader.read_into(SLOT, 0, memoryview(bytearray(100)))
    until(lambda: not is_viewed(source.memory), timeout_s=WAIT_S)


def test_a_reader_that_ends_while_bytes_are_sent_holds_no_view(serve, address, secret):
    """Without a collection of garbage: those of a keeper are rare."""
    source = whole()
    serve({SLOT: source})
    gc.disable()
    try:
        with authenticated(address, secret) as peer:
            peer.sendall(20 * frame(Read(SLOT, 0, len(DATA))))
            until(lambda: source.num_asked)
        until(lambda: not is_viewed(source.memory), timeout_s=WAIT_S)
    finally:
        gc.enable()


def test_close_does_not_wait_for_a_source_that_hangs(serve, connect):
    source = whole()
    source.goes_on.clear()
    end = serve({SLOT: source})
    errors = []

    def read():
        try:
            connect().size(SLOT)
        except KeeperError as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    until(lambda: source.num_asked)
    end.close()
    thread.join(TIMEOUT_S)
    assert errors
    source.goes_on.set()
