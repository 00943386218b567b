"""Framing, descriptors and names."""

import os
import socket
import struct

import pytest

from lazysnap.config import PersistentLevel, SnapshotConfig
from lazysnap.core.messages import PROTOCOL, JobSettings, KeeperState, LevelSettings, NamedStep, StepKey, TrainerState
from lazysnap.errors import ConfigError
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.questions import Answer, KeptMemory, Question, SlotFacts
from lazysnap.keeper.wire import MAX_BODY_BYTES, MAX_DESCRIPTORS, Channel, OtherVersion, WireError
from lazysnap.shard.checksum import Checksums


def framed(body, fds=0):
    return struct.pack("<IHH", len(body), PROTOCOL, fds) + body


@pytest.fixture
def pair():
    ends = socket.socketpair(socket.AF_UNIX)
    channels = [Channel(end) for end in ends]
    yield channels
    for channel in channels:
        channel.close()


@pytest.fixture
def raw_pair():
    """A plain socket, and a channel at its other end."""
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    channel = Channel(theirs)
    yield ours, channel
    ours.close()
    channel.close()


def messages_in(frames):
    return [frame.message for frame in frames]


def test_a_descriptor_arrives_with_its_message(pair):
    sender, receiver = pair
    memory = os.memfd_create("x")
    os.write(memory, b"hello")
    sender.send(KeeperState(pid=1))
    sender.send(KeeperState(pid=2), [memory])
    os.close(memory)

    frames = receiver.receive()

    assert messages_in(frames) == [KeeperState(pid=1), KeeperState(pid=2)]
    assert frames[0].descriptors == []
    (descriptor,) = frames[1].descriptors
    assert os.pread(descriptor, 5, 0) == b"hello"
    assert not os.get_inheritable(descriptor)
    frames[1].close()


def test_each_message_arrives_as_it_was_sent(pair):
    level = LevelSettings("/no-utf8-\udc80", storage_options={"key": [1, None]})
    named = NamedStep("best", StepKey(start=2**63 + 5, step=7))
    messages = [
        TrainerState(3, start=2**64 - 1, job=JobSettings("ab", (level,)), slots=(2**64 - 1,), names=(named,)),
        KeeperState(names=(named,)),
        Question(number=4, about="memory", local_rank=2),
        Answer(number=4, memory=KeptMemory(slots=(SlotFacts(5, 6, Checksums(1, 2, ("00",))),))),
    ]

    for message in messages:
        pair[0].send(message)

    assert messages_in(pair[1].receive()) == messages


def test_messages_survive_any_fragmentation(raw_pair):
    ours, channel = raw_pair
    for byte in framed(b'{"type":"question","about":"status"}'):
        ours.send(bytes([byte]))
        frames = channel.receive()

    assert messages_in(frames) == [Question(about="status")]


def test_a_long_message_is_sent_as_its_reader_takes_it(pair):
    sender, receiver = pair
    message = Answer(text="x" * (MAX_BODY_BYTES - 1000))
    sender.send(message)
    assert sender.is_sending
    frames = []

    while not frames:
        sender.flush()
        frames = receiver.receive()

    assert messages_in(frames) == [message]
    assert not sender.is_sending


@pytest.mark.parametrize(
    "data",
    [
        framed(b""),
        framed(b"[]"),
        framed(b"1"),
        framed(b"\xff"),
        framed(b"[" * 10**5),
        framed(b'{"type":1}'),
        framed(b'{"type":"nothing"}'),
        framed(b'{"type":"trainer"}'),
        framed(b'{"type":"trainer","local_rank":2.5}'),
        framed(b'{"type":"keeper"}', fds=1),
        struct.pack("<IHH", 1 << 30, PROTOCOL, 0),
    ],
)
def test_bytes_that_are_no_message_are_refused(raw_pair, data):
    ours, channel = raw_pair
    ours.sendall(data)

    with pytest.raises(WireError):
        channel.receive()


def test_another_version_is_told_apart_whatever_it_says(raw_pair):
    ours, channel = raw_pair
    ours.sendall(struct.pack("<IHH", 3, PROTOCOL + 1, 0) + b"\xff\xff\xff")

    with pytest.raises(OtherVersion, match=f"protocol {PROTOCOL + 1}, expected {PROTOCOL}"):
        channel.receive()


@pytest.mark.parametrize(
    ("message", "descriptors"), [(KeeperState(), [0] * (MAX_DESCRIPTORS + 1)), (Answer(text="x" * MAX_BODY_BYTES), [])]
)
def test_a_message_that_is_too_large_is_not_begun(pair, message, descriptors):
    with pytest.raises(WireError, match="at most"):
        pair[0].send(message, descriptors)

    assert not pair[0].is_sending


def test_nothing_arrived_is_not_the_end_of_the_connection(pair):
    assert pair[0].receive() == []


@pytest.mark.parametrize("end", [Channel.close, Channel.shut_down])
def test_the_end_of_the_connection_is_reported_behind_the_last_message(pair, end):
    pair[0].send(KeeperState(pid=9))
    end(pair[0])

    assert messages_in(pair[1].receive()) == [KeeperState(pid=9)]
    assert pair[1].receive() is None


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
