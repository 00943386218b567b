"""Framing, descriptors and names."""

import os
import socket
import struct

import pytest

from lazysnap.config import PersistentLevel, SnapshotConfig
from lazysnap.errors import ConfigError, KeeperError
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.messages import Connection, OtherVersion
from lazysnap.keeper.protocol import PROTOCOL, HandOver, MemoryRefused, SlotsChanged, decode, encode


def framed(body, fds=0):
    return struct.pack("<IHH", len(body), PROTOCOL, fds) + body


@pytest.fixture
def pair():
    one, two = map(Connection, socket.socketpair(socket.AF_UNIX))
    yield one, two
    one.close()
    two.close()


def read_on(connection):
    while connection.receive() is not None:
        pass


def send_on(connection):
    for _ in range(100_000):
        connection.send(HandOver(slot="x" * 1000), timeout_s=0.05)


def test_a_descriptor_arrives_with_its_message(pair):
    one, two = pair
    memory = os.memfd_create("x")
    os.write(memory, b"hello")
    one.send(SlotsChanged())
    one.send(HandOver(slot="b"), (memory,))
    os.close(memory)

    received = two.receive()
    while len(received) < 2:
        received += two.receive()

    assert [message for message, _ in received] == [SlotsChanged(), HandOver(slot="b")]
    assert received[0][1] == ()
    (fd,) = received[1][1]
    assert os.pread(fd, 5, 0) == b"hello"
    assert not os.get_inheritable(fd)
    os.close(fd)


def test_messages_survive_any_fragmentation(pair):
    one, two = pair
    for byte in framed(encode(HandOver(slot="x"))):
        one.sock.send(bytes([byte]))
        received = two.receive()

    assert [message for message, _ in received] == [HandOver(slot="x")]


@pytest.mark.parametrize(
    "data",
    [
        framed(b""),
        framed(b"[]"),
        framed(b"1"),
        framed(b"\xff"),
        framed(b"[" * 10**5),
        framed(b'{"type":1}'),
        framed(b'{"type":"Nothing"}'),
        framed(b'{"type":"HandOver"}'),
        framed(b'{"type":"HandOver","slot":2.5}'),
        framed(encode(SlotsChanged()), fds=1),
        struct.pack("<IHH", 1 << 30, PROTOCOL, 0),
    ],
)
def test_what_is_no_message_is_refused(pair, data):
    one, two = pair
    one.sock.sendall(data)

    with pytest.raises(KeeperError):
        read_on(two)


def test_another_version_is_told_apart_whatever_it_says(pair):
    one, two = pair
    one.sock.sendall(struct.pack("<IHH", 3, PROTOCOL + 1, 0) + b"\xff\xff\xff")

    with pytest.raises(OtherVersion, match=f"protocol {PROTOCOL + 1}, expected {PROTOCOL}"):
        read_on(two)


def test_texts_may_hold_names_that_are_no_utf_8():
    message = MemoryRefused(text="no room in /\udc80")

    assert decode(encode(message)) == message


def test_a_peer_that_reads_nothing_costs_at_most_the_deadline(pair):
    one, _ = pair

    with pytest.raises(OSError, match=r"."):
        send_on(one)


def test_not_waiting_returns_at_once_when_nothing_is_there(pair):
    assert pair[0].receive(wait=False) is None


def test_the_end_of_the_connection_is_told(pair):
    one, two = pair
    one.close()

    assert two.receive() is None
    assert one.is_closed


def test_the_same_settings_find_the_same_keeper_and_others_another(tmp_path, monkeypatch):
    monkeypatch.delenv("LAZYSNAP_JOB_ID", raising=False)
    config = SnapshotConfig(levels=(PersistentLevel(str(tmp_path / "a")),))
    monkeypatch.chdir(tmp_path)
    relative = SnapshotConfig(levels=(PersistentLevel("a"),))
    other = SnapshotConfig(levels=(PersistentLevel("b"),))

    assert JobIdentity.from_config(config).files.socket_path == JobIdentity.from_config(relative).files.socket_path
    assert JobIdentity.from_config(config).files.socket_path != JobIdentity.from_config(other).files.socket_path


def test_the_settings_name_beats_the_environments_and_that_beats_the_level(tmp_path, monkeypatch):
    levels = (PersistentLevel(str(tmp_path)),)
    monkeypatch.setenv("LAZYSNAP_JOB_ID", "from-environment")

    assert JobIdentity.from_config(SnapshotConfig(job_id="given", levels=levels)).job_id == "given"
    assert JobIdentity.from_config(SnapshotConfig(levels=levels)).job_id == "from-environment"
    monkeypatch.delenv("LAZYSNAP_JOB_ID")
    assert JobIdentity.from_config(SnapshotConfig(levels=levels)).job_id == str(tmp_path)
    with pytest.raises(ConfigError, match="LAZYSNAP_JOB_ID"):
        JobIdentity.from_config(SnapshotConfig())
