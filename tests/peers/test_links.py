"""Links between keepers, over real sockets: who is let in, what is refused, what comes back after a death."""

import asyncio
import contextlib
import dataclasses
import errno
import gc
import logging
import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading

import msgspec
import pytest
from raw_peer import (
    WAIT_S,
    announced,
    authenticated,
    exactly,
    frame,
    is_closed,
    peak_kib,
    preamble,
    raw_frame,
    refusals,
    sockets_at,
)
from support.peer_ends import HOST, QUICK, End, LoopThread, ports, settings_of
from support.waiting import until

from lazysnap.core.actions import PlainEvent
from lazysnap.core.messages import GrantProgress, LevelOrder, LevelReport, Order, PeerSettings, Report, StepKey
from lazysnap.peers.links import Links
from lazysnap.peers.messages import Hello, SlotOf
from lazysnap.peers.secret import draw_secret
from lazysnap.peers.wire import MAX_FRAME_BYTES

pytestmark = pytest.mark.slow


def hello(node, job="job"):
    return Hello(job, node)


def report(number, node=1):
    key = StepKey(1 << 60, number)
    return Report(node, 7, number, (LevelReport(number, key, GrantProgress.STORED, True, (key,)),))


def order(number):
    return Order(7, number, (LevelOrder(10, StepKey(5, 6), None, (StepKey(1, 2),), (), (), (), False, True),))


def damaged(data):
    return data[:-1] + bytes([data[-1] ^ 1])


def test_messages_go_both_ways_and_arrive_as_they_were(make_end):
    first = make_end(0)
    other = make_end(1)
    assert first.inbox.next() == PlainEvent.PEER_UP
    assert other.inbox.next() == PlainEvent.PEER_UP

    other.send(0, report(1))
    first.send(1, order(2))

    assert first.inbox.next() == report(1)
    assert other.inbox.next() == order(2)


def test_several_nodes_are_told_apart(make_end):
    first = make_end(0)
    others = [make_end(node) for node in (1, 2)]
    for other in others:
        other.inbox.until(PlainEvent.PEER_UP)
    for node in (1, 2):
        first.send(node, order(node))
    for node, other in enumerate(others, start=1):
        assert other.inbox.next() == order(node)


def test_only_the_newest_message_of_each_kind_waits(make_end, loop_thread):
    first = make_end(0)
    other = make_end(1)
    other.inbox.until(PlainEvent.PEER_UP)

    def send_many():
        for number in range(100):
            first.peers.send(1, order(number))

    loop_thread.call(send_many)
    assert other.inbox.next() == order(99)


def test_another_secret_is_refused_by_both_sides(make_end, caplog):
    first = make_end(0)
    stranger = make_end(1, secret=draw_secret())

    until(lambda: refusals(caplog) and "not reached" in caplog.text)
    assert first.inbox.events.empty()
    assert stranger.inbox.events.empty()


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.0\r\n\r\n", preamble(1) + bytes(32)])
def test_another_protocol_is_refused_with_the_address(make_end, address, caplog, sent):
    first = make_end(0)
    with socket.create_connection(address, timeout=WAIT_S) as peer:
        peer.sendall(sent)
        assert is_closed(peer)

    until(lambda: refusals(caplog))
    assert HOST in refusals(caplog)[0]
    assert "same lazysnap on all nodes?" in refusals(caplog)[0]
    assert first.inbox.events.empty()


@pytest.mark.parametrize(
    "sent",
    [
        frame(report(1)),
        frame(hello(1, job="another")),
        frame(hello(-1)),
        frame(hello(0)),
        frame(hello(77)),
        frame(hello(1 << 40)),
        frame({"type": "hello", "job": "job", "node": 1, "extra": 1}),
        raw_frame(bytes(range(200, 220))),
        raw_frame(b"\x91" * 1000),
        announced(MAX_FRAME_BYTES + 1),
        announced(0xFFFFFFFF),
    ],
    ids=lambda sent: repr(sent[:40]),
)
def test_garbage_before_the_hello_is_refused_with_the_address(make_end, address, secret, caplog, sent):
    first = make_end(0)
    with authenticated(address, secret) as peer:
        peer.sendall(sent)
        assert is_closed(peer)

    until(lambda: refusals(caplog))
    assert HOST in refusals(caplog)[0]
    assert first.inbox.events.empty()


@pytest.mark.parametrize(
    "sent",
    [
        announced(MAX_FRAME_BYTES + 1) + bytes(100),
        damaged(frame(report(4))),
        frame({"type": "report", "node": 1}),
        frame({"type": "report", "node": 1, "job": 1, "coordinator": 1, "levels": [1]}),
        frame(report(4, node=2)),
        raw_frame(b"\x91" * 100_000),
    ],
    ids=["too long", "a bit flipped", "fields missing", "no level", "of another node", "nested"],
)
def test_a_peer_that_sends_what_is_no_message_is_dropped(make_end, address, secret, caplog, sent):
    first = make_end(0)
    with authenticated(address, secret) as peer:
        peer.sendall(frame(hello(1)) + frame(report(3)) + sent)
        assert is_closed(peer)

    assert first.inbox.next() == PlainEvent.PEER_UP
    assert first.inbox.next() == report(3)
    first.wait_down(1)
    assert HOST in caplog.text
    assert first.inbox.events.empty()


def test_a_peer_that_stops_reading_is_dropped_and_costs_no_memory(make_end, address, secret, caplog, loop_thread):
    """Of each kind of message only the newest waits; nothing else waits for that peer. Its silence does not count."""
    first = make_end(0, deadlines=dataclasses.replace(QUICK, send_s=1.0))

    def send_large():
        """Half a megabyte in memory, each its own."""
        for _ in range(20):
            levels = []
            for _ in range(16):
                keys = tuple(StepKey(1 << 60, step) for step in range(500))
                levels.append(LevelOrder(1, None, None, keys, (), (), (), False, True))
            first.peers.send(1, Order(7, 1, tuple(levels)))
        return 1 not in first.linked_nodes()

    with authenticated(address, secret) as peer:
        peer.sendall(frame(hello(1)))
        assert first.inbox.next() == PlainEvent.PEER_UP
        before_kib = peak_kib(since_now=True)
        until(lambda: loop_thread.call(send_large))

    assert "does not answer in time" in caplog.text
    assert peak_kib() - before_kib < 64 << 10


def test_a_silent_peer_is_dropped(make_end, address, secret, caplog):
    first = make_end(0, deadlines=dataclasses.replace(QUICK, silence_s=1.0))
    with authenticated(address, secret) as peer:
        peer.sendall(frame(hello(1)))
        assert first.inbox.next() == PlainEvent.PEER_UP
        assert is_closed(peer)
    assert "does not answer in time" in caplog.text


@pytest.mark.slow
def test_a_link_on_which_nothing_is_said_lives_on(make_end, loop_thread):
    # So long that a busy machine does not stop this process for all of it.
    first = make_end(0, deadlines=dataclasses.replace(QUICK, silence_s=5.0))
    other = make_end(1, deadlines=dataclasses.replace(QUICK, silence_s=5.0))
    other.inbox.until(PlainEvent.PEER_UP)
    first.inbox.until(PlainEvent.PEER_UP)
    with pytest.raises(AssertionError):
        until(lambda: not first.inbox.events.empty(), timeout_s=7.0)
    assert loop_thread.call(first.linked_nodes) == {1}


def test_a_link_comes_back_by_itself_and_each_change_is_logged_once(make_end, address, caplog):
    caplog.set_level(logging.INFO)
    first = make_end(0)
    other = make_end(1)
    other.inbox.until(PlainEvent.PEER_UP)

    first.close()
    other.wait_down(0)
    with contextlib.closing(until(lambda: listening(address))) as nobody:  # it answers nothing: the tries fail
        for _ in range(3):
            nobody.accept()[0].close()
    again = make_end(0)
    again.inbox.until(PlainEvent.PEER_UP)
    other.inbox.until(PlainEvent.PEER_UP)
    other.send(0, report(5))

    assert again.inbox.next() == report(5)
    of_node_0 = [record.getMessage() for record in caplog.records if "node 0" in record.getMessage()]
    assert len([text for text in of_node_0 if "not reached" in text]) == 1
    assert len([text for text in of_node_0 if "is back" in text]) == 1


def listening(address):
    try:
        return socket.create_server(address)
    except OSError:
        return None


def test_a_port_that_a_dead_keeper_just_leaves_is_waited_for(loop_thread, secret, port, address, caplog):
    with contextlib.ExitStack() as stack:
        earlier = stack.enter_context(socket.create_server(address))
        first = End(loop_thread, deadlines=dataclasses.replace(QUICK, port_warning_s=0.3))
        stack.callback(first.close)
        settings = settings_of(secret, [port])
        loop_thread.call(first.peers.begin, settings)
        until(lambda: "other nodes cannot reach this keeper" in caplog.text)
        assert not first.inbox.is_serving.is_set()
        earlier.close()
        assert first.inbox.is_serving.wait(WAIT_S)
    assert caplog.text.count("other nodes cannot reach this keeper") == 1


def start_peer(secret, port):
    script = pathlib.Path(__file__).parent / "link_peer.py"
    peer = subprocess.Popen([sys.executable, str(script), str(port)], stdin=subprocess.PIPE)
    peer.stdin.write(secret.encode())
    peer.stdin.close()
    return peer


def test_a_killed_peers_successor_is_linked_and_the_secret_is_seen_nowhere(make_end, secret, port, caplog):
    first = make_end(0)
    caplog.set_level(logging.DEBUG)
    seen = []
    for number in (1, 2):
        peer = start_peer(secret, port)
        try:
            first.inbox.until(PlainEvent.PEER_UP)
            first.send(1, order(number))
            first.inbox.until(Report(1, 0, number, ()))
            process = pathlib.Path("/proc") / str(peer.pid)
            seen += [(process / name).read_bytes().decode(errors="replace") for name in ("cmdline", "environ")]
            for descriptor in (process / "fd").iterdir():
                with contextlib.suppress(FileNotFoundError):  # one that was just closed
                    seen.append(os.readlink(descriptor))
        finally:
            os.kill(peer.pid, signal.SIGKILL)
            peer.wait()
        first.wait_down(1)

    assert not any(secret in text for text in (*seen, caplog.text))


def test_of_two_connections_of_one_node_the_later_one_stays(make_end, address, secret):
    """After a node's restart its old connection may look alive for a while."""
    first = make_end(0)
    with authenticated(address, secret) as earlier:
        earlier.sendall(frame(hello(1)))
        first.inbox.until(PlainEvent.PEER_UP)
        later = make_end(1)
        first.inbox.until(PlainEvent.PEER_UP)

        assert is_closed(earlier)
    later.inbox.until(PlainEvent.PEER_UP)
    first.send(1, order(1))
    assert later.inbox.next() == order(1)
    assert first.inbox.events.empty()


def test_a_link_to_another_node_than_0_is_refused(loop_thread, secret, port, address, caplog):
    end = End(loop_thread)
    end.begin(settings_of(secret, [0, port, 0]), 1)
    with authenticated(address, secret) as peer:
        peer.sendall(frame(hello(2)))
        assert is_closed(peer)
    assert "all nodes connect to node 0" in refusals(caplog)[0]
    end.close()


def test_the_next_start_has_links_of_its_own_and_those_of_the_earlier_one_end(make_end, loop_thread, secret, port):
    first = make_end(0)
    other = make_end(1)
    other.inbox.until(PlainEvent.PEER_UP)
    next_settings = settings_of(draw_secret(), [port, 0, 0])

    first.begin(next_settings, 0)
    other.wait_down(0)
    other.begin(next_settings, 1)
    other.inbox.until(PlainEvent.PEER_UP)
    other.send(0, report(9))
    first.inbox.until(report(9))

    first.begin(next_settings, 0)  # the same again: nothing ends
    other.send(0, report(10))
    assert first.inbox.next() == report(10)


def test_ends_that_are_closed_while_others_connect_leave_nothing(secret):
    """What is accepted or made just then is closed, too: a warning of an open socket would fail this."""
    thread = LoopThread()
    for _ in range(20):
        with ports(1) as [port]:
            sockets_before = sockets_at(port)
            settings = settings_of(secret, [port, 0])
            with contextlib.ExitStack() as stack:
                first = End(thread).begin(settings, 0)
                other = End(thread).begin(settings, 1)
                for _ in range(5):
                    stack.enter_context(socket.create_connection((HOST, port), timeout=WAIT_S))
                first.close()
                other.close()
            until(lambda port=port, before=sockets_before: sockets_at(port) <= before)
    thread.close()
    gc.collect()


def test_a_link_that_is_made_after_the_end_is_closed_at_once(loop_thread, secret, impostor):
    """The cancel of its task may be lost: what arrived at the same moment is returned instead (Python 3.11)."""
    is_connecting = threading.Event()
    is_closed_here = threading.Event()

    def answer(connection, stop):
        exactly(connection, len(frame(hello(1))))
        is_connecting.set()
        is_closed_here.wait(WAIT_S)
        connection.sendall(frame(hello(0)))

    events = []
    links = Links(secret, hello(1), 2, events.append, QUICK)
    task = asyncio.run_coroutine_threadsafe(links.keep_up(0, *impostor(answer)), loop_thread.loop)
    assert is_connecting.wait(WAIT_S)

    loop_thread.call(links.close)
    is_closed_here.set()

    task.result(WAIT_S)
    assert events == []


def test_a_connection_that_is_given_up_before_it_is_accepted_holds_up_nobody(make_end, monkeypatch, caplog):
    first = make_end(0)
    accept = socket.socket.accept
    failures = [ConnectionAbortedError(errno.ECONNABORTED, os.strerror(errno.ECONNABORTED))]

    def accept_later(listener):
        if failures:
            raise failures.pop()
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accept_later)
    make_end(1)

    first.inbox.until(PlainEvent.PEER_UP)
    assert not failures
    assert "cannot be accepted" not in caplog.text


def test_settings_that_cannot_be_listened_at_are_logged_and_harm_nobody(loop_thread, secret, caplog):
    address = msgspec.structs.replace(settings_of(secret, [1]).addresses[0], host="0.0.0.0")
    end = End(loop_thread)
    loop_thread.call(end.peers.begin, PeerSettings("job", 0, secret, (address,)))
    until(lambda: "one interface" in caplog.text)
    assert not end.inbox.is_serving.is_set()
    end.close()


def test_a_read_on_a_link_is_refused(make_end, address, secret):
    first = make_end(0)
    with authenticated(address, secret) as peer:
        peer.sendall(
            frame(hello(1)) + frame({"type": "read", "subject": SlotOf(0, 1, "image"), "offset": 0, "length": 1})
        )
        assert is_closed(peer)
    first.wait_down(1)
