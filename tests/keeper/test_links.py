"""Links between keepers, over real sockets: who is let in, what is refused, what comes back after a death."""

import contextlib
import dataclasses
import gc
import logging
import os
import pathlib
import queue
import signal
import socket
import subprocess
import sys
import threading

import pytest
from raw_peer import WAIT_S, announced, authenticated, frame, is_closed, peak_kib, preamble, raw_frame, refusals
from support.waiting import TIMEOUT_S, until

from lazysnap.errors import ConfigError
from lazysnap.grants.alone import StoringAlone
from lazysnap.grants.core import Core
from lazysnap.grants.messages import LevelOrder, Order, Report
from lazysnap.grants.node import NodeGrants
from lazysnap.keeper.grant_loop import GrantLoop
from lazysnap.links.channel import MAX_FRAME_BYTES
from lazysnap.links.links import Hello, Links
from lazysnap.links.listener import Deadlines
from lazysnap.links.secret import draw_secret
from lazysnap.links.server import PeerServer

pytestmark = pytest.mark.slow

QUICK = Deadlines(connect_s=60.0, send_s=60.0, alive_s=0.2, silence_s=60.0)
"""Messages follow fast; nothing fails by time, except what a test has shortened."""


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
def secret():
    return draw_secret()


@pytest.fixture
def ends(secret):
    """Makes ends of links; they are closed after the test."""
    with contextlib.ExitStack() as stack:

        def make(node, *, job="job", start="s1", secret=secret, deadlines=QUICK):
            inbox = Inbox()
            links = Links(secret, hello(node, job, start), inbox, deadlines)
            stack.callback(links.close)
            return links, inbox

        yield make


@pytest.fixture
def listening(secret):
    """Makes ports that accept links; they are closed after the test."""
    with contextlib.ExitStack() as stack:

        def listen(links, port=0):
            server = stack.enter_context(contextlib.closing(accepting(links)))
            return server.listen("127.0.0.1", port)

        yield listen


@pytest.fixture
def server(ends, listening):
    links, inbox = ends(0)
    return links, inbox, listening(links)


def accepting(links):
    server = PeerServer(links.secret, lambda what: None, QUICK)
    server.admit(links)
    return server


def close(*them):
    for one in them:
        one.close()


def hello(node, job="job", start="s1"):
    return Hello(job, start, node)


def report(number):
    return Report(1, number, ())


def damaged(data):
    return data[:-1] + bytes([data[-1] ^ 1])


def order(number):
    return Order(number, (LevelOrder(10, None, (), (), ()),))


def test_messages_go_both_ways_and_arrive_as_they_were(ends, server):
    links, inbox, (host, port) = server
    other, other_inbox = ends(1)
    other.connect(0, host, port)
    assert (inbox.next(), other_inbox.next()) == (("up", 1), ("up", 0))

    other.send(0, report(1))
    links.send(1, order(2))

    assert inbox.next() == ("message", 1, report(1))
    assert other_inbox.next() == ("message", 0, order(2))


def test_another_secret_is_refused_by_both_sides(ends, server, caplog):
    _, inbox, (host, port) = server
    stranger, stranger_inbox = ends(1, secret=draw_secret())

    stranger.connect(0, host, port)

    until(lambda: refusals(caplog) and "not reached" in caplog.text)
    assert inbox.events.empty()
    assert stranger_inbox.events.empty()


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.0\r\n\r\n", preamble(1) + bytes(32)])
def test_another_protocol_is_refused_with_the_address(server, caplog, sent):
    _, inbox, address = server
    with socket.create_connection(address, timeout=WAIT_S) as peer:
        peer.sendall(sent)
        assert is_closed(peer)

    until(lambda: refusals(caplog))
    assert "127.0.0.1" in refusals(caplog)[0]
    assert "same lazysnap on all nodes?" in refusals(caplog)[0]
    assert inbox.events.empty()


@pytest.mark.parametrize(
    "sent",
    [
        frame(report(1)),
        frame(hello(1, job="another")),
        frame(hello(1, start="s0")),
        frame(hello(-1)),
        frame(hello(1 << 40)),
        raw_frame(bytes(range(200, 220))),
        raw_frame(b"\x91" * 1000),
        announced(MAX_FRAME_BYTES + 1),
        announced(0xFFFFFFFF),
    ],
    ids=lambda sent: repr(sent[:40]),
)
def test_garbage_before_the_hello_is_refused_with_the_address(server, secret, caplog, sent):
    _, inbox, address = server
    with authenticated(address, secret) as peer:
        peer.sendall(sent)
        assert is_closed(peer)

    until(lambda: refusals(caplog))
    assert "127.0.0.1" in refusals(caplog)[0]
    assert inbox.events.empty()


@pytest.mark.parametrize(
    "sent",
    [
        announced(MAX_FRAME_BYTES + 1) + bytes(100),
        damaged(frame(report(4))),
        frame({"type": "report", "node": 1}),
        frame({"type": "report", "node": 1, "owner": 1, "levels": [], "required": [-1]}),
        frame({"type": "report", "node": 1, "owner": 1, "levels": [], "required": [1] * 1000}),
        frame({"type": "report", "node": 1, "owner": 1, "levels": [], "extra": 1}),
        raw_frame(b"\x91" * 100_000),
        frame(hello(1)),
    ],
    ids=[
        "too long",
        "a bit flipped on its way",
        "fields missing",
        "below its bound",
        "list too long",
        "unknown field",
        "nested",
        "hello again",
    ],
)
def test_a_peer_that_sends_what_is_no_message_is_dropped(server, secret, caplog, sent):
    _, inbox, address = server
    with authenticated(address, secret) as peer:
        peer.sendall(frame(hello(1)) + frame(report(3)) + sent)
        assert is_closed(peer)

    assert inbox.next() == ("up", 1)
    assert inbox.next() == ("message", 1, report(3))
    assert inbox.next() == ("down", 1)
    assert "127.0.0.1" in caplog.text


def test_a_peer_that_stops_reading_is_dropped_and_costs_no_memory(ends, listening, secret, caplog):
    """Of each kind of message only the newest waits; nothing else waits for that peer. Its silence does not count."""
    links, inbox = ends(0, deadlines=dataclasses.replace(QUICK, send_s=1.0))

    def large():
        """Half a megabyte in memory, each its own."""
        levels = (LevelOrder(1, None, (), tuple(range(500)), tuple(range(500))) for _ in range(16))
        return Order(1, tuple(levels))

    with authenticated(listening(links), secret) as peer:
        peer.sendall(frame(hello(1)))
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


def test_a_silent_peer_is_dropped(ends, listening, secret):
    links, inbox = ends(0, deadlines=dataclasses.replace(QUICK, silence_s=1.0))
    with authenticated(listening(links), secret) as peer:
        peer.sendall(frame(hello(1)))

        assert inbox.next() == ("up", 1)
        assert inbox.next() == ("down", 1)


def test_a_link_comes_back_by_itself_and_each_change_is_logged_once(ends, listening, caplog):
    caplog.set_level(logging.INFO)
    first, inbox = ends(0)
    keeper = accepting(first)
    host, port = keeper.listen("127.0.0.1")
    other, other_inbox = ends(1)
    other.connect(0, host, port)
    other_inbox.until("up", 0)
    inbox.until("up", 1)

    keeper.close()
    first.close()
    other_inbox.until("down", 0)
    with socket.create_server((host, port)) as nobody:  # it accepts and answers nothing: the tries fail
        for _ in range(3):
            nobody.accept()[0].close()
    again, again_inbox = ends(0)
    listening(again, port)
    again_inbox.until("up", 1)
    other_inbox.until("up", 0)
    other.send(0, report(5))

    assert again_inbox.next() == ("message", 1, report(5))
    of_node_0 = [record.getMessage() for record in caplog.records if "node 0" in record.getMessage()]
    assert len([text for text in of_node_0 if "not reached" in text]) == 1
    assert len([text for text in of_node_0 if "is back" in text]) == 1


def start_peer(secret, port):
    script = pathlib.Path(__file__).parent / "link_peer.py"
    peer = subprocess.Popen([sys.executable, str(script), str(port)], stdin=subprocess.PIPE)
    peer.stdin.write(secret.hex.encode())
    peer.stdin.close()
    return peer


def test_a_killed_peers_successor_is_linked_and_the_secret_is_seen_nowhere(server, secret, caplog):
    links, inbox, (_, port) = server
    caplog.set_level(logging.DEBUG)
    seen = []
    for number in (1, 2):
        peer = start_peer(secret, port)
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

    assert not any(secret.hex in text for text in (*seen, caplog.text, repr(secret)))


def test_of_two_connections_of_one_node_the_later_one_stays(ends, server, secret):
    """After a node's restart its old connection may look alive for a while."""
    links, inbox, (host, port) = server
    with authenticated((host, port), secret) as old:
        old.sendall(frame(hello(1)))
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


def test_links_that_are_closed_while_others_connect_leave_nothing(secret):
    """What is accepted or made just then is closed, too: a warning of an open socket would fail this."""
    for _ in range(40):
        links, other = (Links(secret, hello(node), Inbox(), QUICK) for node in (0, 1))
        keeper = accepting(links)
        host, port = keeper.listen("127.0.0.1")
        other.connect(0, host, port)
        with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
            for _ in range(5):
                stack.enter_context(socket.create_connection((host, port), timeout=WAIT_S))
            closing = threading.Thread(target=close, args=(keeper, links))
            closing.start()
            while closing.is_alive():
                stack.enter_context(socket.create_connection((host, port), timeout=WAIT_S))
        closing.join()
        other.close()
    gc.collect()
    until(lambda: not [thread for thread in threading.enumerate() if thread.name.startswith("lazysnap-")])


def test_a_link_goes_on_when_the_port_serves_the_next_start(ends, listening):
    links, inbox = ends(0)
    keeper = accepting(links)
    other, other_inbox = ends(1)
    other.connect(0, *keeper.listen("127.0.0.1"))
    inbox.until("up", 1)
    other_inbox.until("up", 0)

    keeper.close()
    other.send(0, report(1))
    inbox.until("message", 1, report(1))
    links.send(1, order(1))
    other_inbox.until("message", 0, order(1))


def test_a_keeper_that_is_not_ready_for_a_link_is_tried_again(ends, secret, caplog):
    links, inbox = ends(0)
    other, other_inbox = ends(1)
    with contextlib.closing(PeerServer(secret, lambda what: None, QUICK)) as keeper:
        other.connect(0, *keeper.listen("127.0.0.1"))
        until(lambda: "not reached" in caplog.text)
        keeper.admit(links)

        other_inbox.until("up", 0)
        inbox.until("up", 1)
    assert not refusals(caplog)


def test_links_of_grants_that_are_closed_before_they_begin_are_closed(secret):
    node = NodeGrants(0, "s1", ())
    loop = GrantLoop(Core(node, None, StoringAlone(node, 1, 0.5), 0.0), list, lambda action: None)
    links = Links(secret, hello(0), loop, QUICK)
    loop.close()
    loop.start(links)
    until(
        lambda: not [thread for thread in threading.enumerate() if thread.name in ("lazysnap-link", "lazysnap-grants")]
    )
