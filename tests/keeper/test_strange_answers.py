"""What a process at the other end of a socket sends is checked: nothing torn, no descriptor lost."""

import contextlib
import os
import socket
import struct
import threading

import pytest
from support.waiting import until

from lazysnap.config import SnapshotConfig
from lazysnap.errors import FormatError, KeeperError
from lazysnap.keeper.attach import attach
from lazysnap.keeper.client import KeeperClient
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.launch import try_connect
from lazysnap.keeper.messages import Connection
from lazysnap.keeper.neighbour import NeighbourMemory
from lazysnap.keeper.protocol import (
    PROTOCOL,
    HandOver,
    Hello,
    Inventory,
    Message,
    SlotsChanged,
    Welcome,
    encode,
)
from lazysnap.memory.arena import PAGE, Slot
from lazysnap.topology import Team


@pytest.fixture
def slot():
    with contextlib.closing(Slot.create(PAGE, PAGE)) as slot:
        yield slot


class StrangeHello(Message, frozen=True, tag="Hello"):
    levels: tuple[dict, ...] = ({"url": 7, "pace": "fast"},)
    memory: dict = {}
    team: Team = Team(local_rank=1)


@contextlib.contextmanager
def keeper_at(identity, answer):
    """A process at the socket of a keeper, with an ``answer(message)`` to each message: messages with descriptors."""
    lock = identity.files.try_lock()
    listener = lock.bind()
    listener.listen()

    def talk(connection):
        while (received := connection.receive()) is not None:
            for message, fds in ((message, fds) for got, _ in received for message, fds in answer(got)):
                connection.send(message, fds)

    def serve():
        with contextlib.suppress(OSError):
            while True:
                sock, _ = listener.accept()
                # Whoever cannot use an answer hangs up, it may be before the next one is sent.
                with contextlib.closing(Connection(sock)) as connection, contextlib.suppress(OSError):
                    talk(connection)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(20)
        listener.close()
        lock.remove()
        lock.close()


def too_large():
    """Says that it is a slot, and cannot be mapped."""
    fd, size = os.memfd_create("large"), 1 << 60
    os.ftruncate(fd, size)
    os.pwrite(fd, struct.pack("<3Q", 0x31504E53595A414C, PAGE, size - 2 * PAGE), 0)
    return fd


def copies(*fds):
    """Descriptors in this process of the same memory: other tests' threads, which open what they like, do not count."""
    inodes, count = {os.fstat(fd).st_ino for fd in fds}, 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed just now
            count += os.fstat(int(name)).st_ino in inodes
    return count


def test_a_slot_is_mapped_or_its_descriptor_closed(slot):
    with open(os.memfd_create("empty")) as empty:
        before = copies(slot.fd, empty.fileno())
        found = Slot.attach(os.dup(slot.fd))
        assert found.status() == slot.status()
        found.close()

        with pytest.raises(FormatError):
            Slot.attach(os.dup(empty.fileno()))

        assert copies(slot.fd, empty.fileno()) == before


@pytest.mark.parametrize("told", [HandOver(slot=7), HandOver(slot="7" * 32)], ids=["slot", "frozen"])
def test_what_cannot_be_mapped_costs_a_trainer_no_descriptor_and_nothing_else(tmp_path, told, slot):
    """Neither a slot for which there is no room, nor what follows a message that cannot be used."""
    config = SnapshotConfig(job_id=str(tmp_path), io_timeout_s=20.0)
    identity = JobIdentity.from_config(config)
    has_more = threading.Event()
    with contextlib.ExitStack() as stack:
        large = too_large()
        stack.callback(os.close, large)

        def answer(message):
            if isinstance(message, Hello):
                return [(Welcome(os.getpid()), ()), (told, (large,))]
            has_more.set()
            return [(told, ()), (told, (slot.fd,))]

        stack.enter_context(keeper_at(identity, answer))
        before = copies(large, slot.fd)
        client = KeeperClient(identity, config)
        client.connect(20)
        client.tell(SlotsChanged())

        assert has_more.wait(20)
        assert until(lambda: [type(event).__name__ for event in client.poll_events()][-1:] == ["KeeperUnreachable"])
        assert until(lambda: copies(large, slot.fd) <= before)
        client.abandon()


def test_keepers_of_others_are_looked_at_without_what_cannot_be_mapped(tmp_path):
    identity = JobIdentity.from_config(SnapshotConfig(job_id=str(tmp_path)))
    with contextlib.ExitStack() as stack:
        large = too_large()
        stack.callback(os.close, large)
        nothing = Inventory(entries=[], frozen=[], end=None, local_ranks=[0])
        told = [(HandOver(slot=7), (large,)), (nothing, ())]
        stack.enter_context(keeper_at(identity, lambda _: told))
        before = copies(large)

        with contextlib.closing(NeighbourMemory(identity, 0, 20)) as neighbour:
            assert neighbour.inventory.entries == ()
        assert until(lambda: copies(large) <= before)


def test_descriptors_before_bytes_that_are_no_message_are_closed():
    ours, theirs = socket.socketpair()
    body = encode(HandOver(slot=None))
    data = struct.pack("<IHH", len(body), PROTOCOL, 1) + body + struct.pack("<IHH", 1, PROTOCOL, 0) + b"{"
    with contextlib.closing(Connection(ours)) as connection, theirs, open(os.memfd_create("sent")) as sent:
        socket.send_fds(theirs, [data], [sent.fileno()])

        with pytest.raises(KeeperError):
            connection.receive()

        assert copies(sent.fileno()) == 1


@pytest.mark.slow
def test_a_hello_that_cannot_be_understood_makes_nobody_the_trainer(job):
    first = job.trainer()
    with contextlib.closing(try_connect(job.identity)) as other:
        other.send(StrangeHello())

        config = SnapshotConfig(job_id=job.job_id)
        connection, _ = attach(job.identity, config, Team(local_rank=1))  # else refused while the other stays
        connection.close()
    assert first.capture(step=1)
