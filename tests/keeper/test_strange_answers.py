"""What another keeper of the node says is checked: nothing outside the level, nothing torn, no descriptor lost."""

import contextlib
import os
import socket
import struct
import threading
import time

import pytest
from keeper_jobs import until
from node_jobs import GENERATION, RUN, Member, capture

from lazysnap.arena import PAGE, Slot
from lazysnap.config import SnapshotConfig
from lazysnap.errors import FormatError, KeeperUnavailable, LevelUnavailable
from lazysnap.keeper.client import KeeperClient
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.launch import connect_to, reach_keeper
from lazysnap.keeper.messages import Connection
from lazysnap.keeper.parts import CaptureKey, Known, Outcome
from lazysnap.keeper.visit import Visit

KEY = CaptureKey(GENERATION, RUN, 5).fields()
NODE = "node-00000-of-00001"
DONE = {"text": "", "location": "step-00000005", "file": NODE, "seconds": 0.5}


@contextlib.contextmanager
def keeper_at(address, answer):
    """Something at a keeper's address that answers each message by ``answer(message)``: messages with descriptors."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(address)
    listener.listen()

    def serve():
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                connection = Connection(sock)
                while (received := connection.receive()) is not None:
                    for message, fds in ((message, fds) for got, _ in received for message, fds in answer(got)):
                        connection.send(message, fds)
                connection.close()

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(20)
        listener.close()


def too_large():
    """Says that it is a slot, and cannot be mapped."""
    fd, size = os.memfd_create("large"), 1 << 60
    os.ftruncate(fd, size)
    os.pwrite(fd, struct.pack("<3Q", 0x31504E53595A414C, PAGE, size - 2 * PAGE), 0)
    return fd


def descriptors():
    return len(os.listdir("/proc/self/fd"))


def copies(*fds):
    """Descriptors in this process of the same memory: other tests' threads, which open what they like, do not count."""
    inodes, count = {os.fstat(fd).st_ino for fd in fds}, 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed just now
            count += os.fstat(int(name)).st_ino in inodes
    return count


SLOT = {"type": "part", "url": None, "sequence": 5, "frozen": False}
FILE = {"type": "part", "url": "/level", "location": "step-00000005", "rank": 1, "frozen": False}


@pytest.mark.parametrize(
    ("messages", "kinds", "reason"),
    [
        ([SLOT], "", "0 descriptors"),
        ([{**SLOT, "frozen": True}], "s", "1 descriptors"),
        ([{**SLOT, "frozen": "no"}], "s", "1 descriptors"),
        ([{**SLOT, "sequence": "5"}], "s", "a capture '5'"),
        ([{**SLOT, "sequence": -5}], "s", "a capture -5"),
        ([SLOT], "e", "no arena slot"),
        ([SLOT], "l", "Cannot allocate memory"),
        ([{**SLOT, "frozen": True}], "sl", "Cannot allocate memory"),
        ([FILE], "s", "1 descriptors"),
        ([{**FILE, "location": "../../other/step-00000005"}], "", "step 5 in '../../other"),
        ([{**FILE, "location": "step-00000006"}], "", "step 5 in 'step-00000006'"),
        ([{**FILE, "location": None}], "", "cannot be used"),
        ([{**FILE, "url": 7}], "", "at 7"),
        ([{**FILE, "rank": 0}], "", "the file of rank 0"),
        ([{"type": "part"}], "", "cannot be used"),
        ([{"type": "surprise", "url": None, "frozen": False}], "s", "'surprise' with 1"),
        ([{"type": "no_part", "text": "no"}] * 2, "ss", "rank 1 of this node: no"),
    ],
)
def test_a_part_that_is_none_is_refused_and_nothing_stays_open(tmp_path, messages, kinds, reason):
    member = Member(tmp_path)
    make = {"s": lambda: os.dup(slot.fd), "e": lambda: os.memfd_create("empty"), "l": too_large}
    with contextlib.closing(capture(1, 5)) as slot, contextlib.ExitStack() as stack:
        sent = tuple(make[kind]() for kind in kinds)
        for fd in sent:
            stack.callback(os.close, fd)
        stack.enter_context(
            keeper_at(member.teams[0].addresses[1], lambda _: [(message, sent) for message in messages])
        )
        before = descriptors()

        with pytest.raises(LevelUnavailable, match=reason):
            member.offer(5)

        assert until(lambda: descriptors() <= before)


def test_all_slots_are_mapped_or_none():
    with contextlib.closing(capture(1, 5)) as slot:
        before = descriptors()
        [found] = Slot.attach_all([os.dup(slot.fd)])
        assert found.status() == slot.status()
        found.close()

        with pytest.raises(FormatError):
            Slot.attach_all([os.dup(slot.fd), os.memfd_create("empty"), os.dup(slot.fd)])

        assert descriptors() == before


@pytest.mark.parametrize("kind", ["slot", "frozen_slot"])
def test_what_cannot_be_mapped_costs_a_trainer_no_descriptor_and_nothing_else(tmp_path, kind):
    """Neither a slot for which there is no room, nor what follows a message that cannot be used."""
    config = SnapshotConfig(job_id=str(tmp_path), keeper_timeout_s=20.0)
    identity = JobIdentity.from_config(config)
    has_more = threading.Event()
    with contextlib.closing(capture(0, 5)) as slot, contextlib.ExitStack() as stack:
        large = too_large()
        stack.callback(os.close, large)
        names = {"slot": 7, "digest": "7" * 32}

        def answer(message):
            if message["type"] == "hello":
                return [({"type": "welcome", "pid": os.getpid()}, ()), ({"type": kind, **names}, (large,))]
            has_more.set()
            return [({"type": kind}, ()), ({"type": kind, **names}, (slot.fd,))]

        stack.enter_context(keeper_at(identity.address, answer))
        before = copies(large, slot.fd)
        client = KeeperClient(identity, config)
        client.connect(20)
        client.begun(slot, 1)

        assert has_more.wait(20)
        assert until(lambda: [type(event).__name__ for event in client.poll_events()][-1:] == ["KeeperLost"])
        assert until(lambda: copies(large, slot.fd) <= before)
        client.abandon()


def test_keepers_of_others_are_looked_at_without_what_cannot_be_mapped(tmp_path):
    identity = JobIdentity.from_config(SnapshotConfig(job_id=str(tmp_path)))
    with contextlib.ExitStack() as stack:
        large = too_large()
        stack.callback(os.close, large)
        told = [({"type": "slot", "slot": 7}, (large,)), ({"type": "inventory", "entries": []}, ())]
        stack.enter_context(keeper_at(identity.address, lambda _: told))
        before = copies(large)

        with contextlib.closing(Visit(identity, 20)) as visit:
            assert visit.holdings.entries == ()
        assert until(lambda: copies(large) <= before)


def test_descriptors_before_bytes_that_are_no_message_are_closed():
    ours, theirs = socket.socketpair()
    before = descriptors()
    body = b'{"type":"a","fds":1}'
    data = struct.pack("<I", len(body)) + body + struct.pack("<I", 1) + b"{"
    with contextlib.closing(Connection(ours)) as connection, theirs:
        fd = os.memfd_create("sent")
        socket.send_fds(theirs, [data], [fd])
        os.close(fd)

        with pytest.raises(KeeperUnavailable):
            connection.receive()

        assert descriptors() == before


@pytest.mark.parametrize(
    "change",
    [
        {"location": "../step-00000005"},
        {"location": "step-00000006"},
        {"location": None},
        {"file": "rank-00000-of-00001"},
        {"file": f"../{NODE}"},
        {"file": ""},
        {"file": 7},
        {"seconds": "1"},
        {"seconds": float("nan")},
        {"seconds": -1},
        {"text": None},
        {"step": -1},
        {"step": "5"},
        {"step": True},
        {"run_id": "../../run"},
        {"run_id": None},
        {"generation": "x"},
    ],
)
def test_an_outcome_that_is_none_is_refused(change):
    good = {**KEY, **DONE, "type": "gathered"}
    assert Outcome.from_message(good) == Outcome(**DONE)
    assert Known.from_message({"type": "done", "done": True, "outcomes": [good]}).outcomes == {
        CaptureKey(GENERATION, RUN, 5): Outcome(**DONE)
    }

    with pytest.raises((KeyError, TypeError, ValueError)):
        Known.from_message({"type": "done", "done": True, "outcomes": [{**good, **change}]})


def test_a_keeper_outlives_a_lead_that_talks_nonsense(tmp_path):
    """What it asks for is answered with what is none of the protocol; what it is told after that still counts."""
    member, asked = Member(tmp_path), threading.Event()

    def answer(message):
        asked.set()
        return [({"type": "done", "done": False, "outcomes": [{"step": message["level"]}]}, ())]

    with contextlib.closing(member), keeper_at(member.teams[1].addresses[0], answer):
        member.start()
        slot = member.adopt(5, pin=True)
        assert asked.wait(20)
        with contextlib.closing(connect_to(member.identity.address)) as lead:
            for nonsense in ({"location": "../../elsewhere"}, {"file": 7}, {"step": None}):
                lead.send({"type": "gathered", "level": member.url, **KEY, **DONE, **nonsense})
            lead.send({"type": "gather", "level": member.url})
            lead.send({"type": "is_done", "level": member.url, "keys": 5})
            assert member.told("durable") == []
            lead.send({"type": "gathered", "level": member.url, **KEY, **DONE})

            assert until(lambda: member.told("durable") == [5])
        assert until(lambda: not slot.status().pinned)
        assert member.told("level_failed") == []


def test_a_hello_that_cannot_be_understood_makes_nobody_the_trainer(tmp_path):
    member = Member(tmp_path)
    with contextlib.closing(member), contextlib.closing(reach_keeper(member.identity, time.monotonic() + 20)) as other:
        other.send({"type": "hello", "levels": [], "linger_s": 1.0, "max_bytes": None, "team": {"ranks": 7}})

        member.start()  # else this one is refused while the other stays

        member.adopt(5, pin=True)
