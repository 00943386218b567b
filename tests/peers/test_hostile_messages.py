"""Messages that no keeper sends: each is refused, and the error says what is wrong with it."""

import os

import msgspec
import pytest
import xxhash
from raw_peer import announced, frame, peak_kib, raw_frame
from support.waiting import TIMEOUT_S

from lazysnap.errors import ConfigError, FormatError, KeeperError
from lazysnap.peers import wire
from lazysnap.peers.messages import (
    MAX_NODES,
    MAX_READ_BYTES,
    MAX_TEXT,
    Answer,
    Block,
    Hello,
    ParityOf,
    PartOf,
    PeerRefused,
    Read,
    Refusal,
    Request,
    SlotOf,
)
from lazysnap.peers.wire import HEAD_BYTES, MAX_FRAME_BYTES, Violation, parse_frame, parse_head

SLOT = SlotOf(0, 7, "image")
MAX_SIZE = 1 << 62
HELLO = Hello("job", 1)
READ = Read(SLOT, 0, 1000)
READ_OF_PART = Read(PartOf("s1", 7, 1), 0, 1000)
READ_OF_PARITY = Read(ParityOf("s1", 7, 0), 0, 1000)
BLOCK = Block(1000, 5, 5000, 1)
REFUSAL = Refusal("the slot was reused")
DECODER = msgspec.msgpack.Decoder(Request | Answer)


# --- the codec ---


def parsed(data):
    _, checksum = parse_head(data[:HEAD_BYTES])
    return parse_frame(data[HEAD_BYTES:], checksum, DECODER)


def flipped(data, position):
    copy = bytearray(data)
    copy[position] ^= 1
    return bytes(copy)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (announced(MAX_FRAME_BYTES + 1), f"a frame of {MAX_FRAME_BYTES + 1} bytes, expected at most {MAX_FRAME_BYTES}"),
        (announced(0xFFFFFFFF), "a frame of 4294967295 bytes"),
        (flipped(wire.frame(HELLO), -1), "a damaged message: xxh3_64 of"),
        (flipped(wire.frame(HELLO), HEAD_BYTES - 1), "a damaged message: xxh3_64 of"),
        (wire.frame(HELLO)[:-1], "a damaged message: xxh3_64 of"),
        (raw_frame(b""), "a malformed message"),
        (raw_frame(bytes(range(200, 220))), "a malformed message"),
        (raw_frame(b"\x91" * 100_000), "a malformed message"),
    ],
    ids=["too long", "far too long", "a bit", "a bit of the checksum", "cut", "empty", "no MessagePack", "nested"],
)
def test_a_frame_that_is_not_as_it_was_sent_is_refused(data, said):
    with pytest.raises(Violation, match=said):
        parsed(data)


def test_a_message_that_the_other_end_would_refuse_is_not_sent():
    with pytest.raises(Violation, match=f"bytes, at most {MAX_FRAME_BYTES} can be sent"):
        wire.frame(Refusal("x" * MAX_FRAME_BYTES))


def with_field(message, path, value):
    """The frame of a message with another value of a field; ``...``: without the field."""
    fields = msgspec.to_builtins(message)
    *parents, last = path.split(".")
    target = fields
    for parent in parents:
        target = target[parent]
    if value is ...:
        del target[last]
    else:
        target[last] = value
    return frame(fields)


@pytest.mark.parametrize(
    ("message", "path", "value"),
    [
        (HELLO, "type", "erase"),
        (HELLO, "job", "x" * (MAX_TEXT + 1)),
        (HELLO, "job", 1),
        (HELLO, "node", -1),
        (HELLO, "node", MAX_NODES),
        (HELLO, "node", 1.5),
        (READ, "offset", -1),
        (READ, "offset", MAX_SIZE + 1),
        (READ, "length", -1),
        (READ, "length", MAX_READ_BYTES + 1),
        (READ, "subject.type", "file"),
        (READ, "subject.local_rank", -1),
        (READ, "subject.local_rank", MAX_NODES),
        (READ, "subject.sequence", -1),
        (READ, "subject.sequence", MAX_SIZE + 1),
        (READ, "subject.part", "words"),
        (READ_OF_PART, "subject.start", ""),
        (READ_OF_PART, "subject.start", "s" * 65),
        (READ_OF_PART, "subject.step", -1),
        (READ_OF_PART, "subject.step", MAX_SIZE + 1),
        (READ_OF_PART, "subject.most_lost", 0),
        (READ_OF_PART, "subject.most_lost", MAX_NODES),
        (READ_OF_PARITY, "subject.start", ""),
        (READ_OF_PARITY, "subject.start", "s" * 65),
        (READ_OF_PARITY, "subject.step", -1),
        (READ_OF_PARITY, "subject.step", MAX_SIZE + 1),
        (READ_OF_PARITY, "subject.stripe", -1),
        (READ_OF_PARITY, "subject.stripe", MAX_NODES),
        (BLOCK, "length", -1),
        (BLOCK, "length", MAX_READ_BYTES + 1),
        (BLOCK, "size_bytes", -1),
        (BLOCK, "size_bytes", MAX_SIZE + 1),
        (BLOCK, "checksum", "x"),
        (BLOCK, "identity", None),
        (REFUSAL, "text", "x" * (MAX_TEXT + 1)),
        (REFUSAL, "is_not_yet", 1),
    ],
    ids=lambda item: repr(item)[:40],
)
def test_a_field_that_is_out_of_bounds_is_named(message, path, value):
    assert parsed(wire.frame(message)) == message
    with pytest.raises(Violation, match=rf"a malformed message: .* - at `\$\.{path}`"):
        parsed(with_field(message, path, value))


def test_a_text_that_is_no_utf_8_is_refused():
    data = msgspec.msgpack.encode(Refusal("unlikely")).replace(b"unlikely", 8 * b"\xff")
    with pytest.raises(Violation, match="a malformed message: "):
        parsed(raw_frame(data))


@pytest.mark.parametrize("message", [HELLO, READ, READ_OF_PART, READ_OF_PARITY, BLOCK, REFUSAL])
def test_fields_that_are_missing_or_unknown_are_named(message):
    for path in msgspec.to_builtins(message):
        if path not in ("type", "is_not_yet"):
            with pytest.raises(Violation, match=f"missing required field `{path}`"):
                parsed(with_field(message, path, ...))
    with pytest.raises(Violation, match="unknown field `more`"):
        parsed(with_field(message, "more", 1))


# --- answers to a read ---


def answering(impostor, *answers):
    """The address of a server that gives these answers, one to each read."""

    def answer(peer, stop):
        for sent in answers:
            peer.recv(1 << 16)
            peer.sendall(sent)
        stop.wait(TIMEOUT_S)

    return impostor(answer)


def block_of(data, payload=None, *, size_bytes=5000, identity=1):
    """An answer, ``data`` by its checksum; in its place other bytes are sent, if they are given."""
    message = Block(len(data), xxhash.xxh3_64_intdigest(data), size_bytes, identity)
    return frame(message) + (data if payload is None else payload)


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (announced(0xFFFFFFF0), "a frame of 4294967280 bytes"),
        (flipped(frame(BLOCK), -1), "a damaged message"),
        (raw_frame(b"\x91" * 1000), "a malformed message"),
        (frame(READ), "a malformed message: Invalid value 'read'"),
        (frame(Block(1000, 0, -1, 1)), r"at `\$\.size_bytes`"),
        (frame(Block(999, 0, 1000, 1)), r"the answer to a read of 1000 bytes is Block\(length=999"),
        (frame(Block(1001, 0, 1001, 1)), r"the answer to a read of 1000 bytes is Block\(length=1001"),
        (frame(Block(MAX_READ_BYTES, 0, MAX_READ_BYTES, 1)), "the answer to a read of 1000 bytes is Block"),
    ],
    ids=lambda item: repr(item)[:40],
)
def test_a_server_that_answers_what_is_no_answer_is_left(impostor, connect, sent, said):
    to = answering(impostor, sent)
    before_kib = peak_kib(since_now=True)
    with pytest.raises(KeeperError, match=rf"127\.0\.0\.1:{to[1]} cannot be read from: .*{said}"):
        connect(to).read_into(SLOT, 0, memoryview(bytearray(1000)))
    assert peak_kib() - before_kib < 64 << 10


def test_other_bytes_than_the_source_has_are_corrupt(impostor, connect):
    """The peer and the range are named, and the connection lives on."""
    data = os.urandom(1000)
    to = answering(impostor, block_of(data, bytes(1000)), block_of(b""), block_of(data))
    out = bytearray(1000)
    reader = connect(to)
    with pytest.raises(FormatError, match=rf"127.0.0.1:{to[1]}: bytes \[500, 1500\) of SlotOf"):
        reader.read_into(SLOT, 500, memoryview(out))
    reader.read_into(SLOT, 500, memoryview(out))
    assert out == data


@pytest.mark.parametrize(
    ("answer_then", "expected"),
    [
        (block_of(b"", identity=2), "captured again"),
        (block_of(b"", size_bytes=5001), "captured again"),
        (frame(Refusal("the slot was reused")), "the slot was reused"),
        (frame(Refusal("step 8 is not captured by all ranks", is_not_yet=True)), "not captured by all"),
    ],
    ids=["another capture", "another size", "gone", "not yet"],
)
def test_a_capture_that_is_written_over_while_it_is_sent_is_refused(impostor, connect, answer_then, expected):
    """It is not corrupt: the step is missed, and the other node is well."""
    reader = connect(answering(impostor, block_of(os.urandom(1000), bytes(1000)), answer_then))
    with pytest.raises(PeerRefused, match=expected):
        reader.read_into(SLOT, 500, memoryview(bytearray(1000)))


@pytest.mark.parametrize("length", [0, MAX_READ_BYTES + 1])
def test_a_read_that_no_keeper_would_answer_is_not_sent(connect, length):
    with pytest.raises(ConfigError, match=f"a read has 1 to {MAX_READ_BYTES} bytes, got {length}"):
        connect().read_into(SLOT, 0, memoryview(bytearray(length)))
