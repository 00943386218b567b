"""The codec of connections between keepers, and receiving by blocking calls; ``peers.streams`` receives on the loop.

On the wire: the handshake of ``peers.secret``, then messages as frames. A frame is a length (4 bytes, big-endian,
bounded), a checksum (8 bytes, xxh3_64) and that many bytes of MessagePack, of which the checksum is. Nothing is
allocated for a frame that is too long. The raw bytes of a block follow after its frame.
"""

import asyncio
import socket
import struct
import time
from typing import TypeVar

import xxhash
from msgspec import DecodeError, Struct, msgpack

_HEAD = struct.Struct("!IQ")
HEAD_BYTES = _HEAD.size
PROTOCOL = b"lazysnap", 11
"""Letters, and the version of all messages between keepers, incremented with every visible change."""
MAX_FRAME_BYTES = 4 << 20
"""Maximum bytes of a message, as between a trainer and its keeper: each is the whole state of its sender."""
TIMEOUTS = (TimeoutError, asyncio.TimeoutError)
"""Python 3.10 has two timeout errors."""
M = TypeVar("M")


class Violation(Exception):
    """The other end is no process of the job, or violates the protocol."""


FAILURES = (OSError, EOFError, Violation, asyncio.TimeoutError)
"""Errors that end a connection."""


def frame(message: Struct) -> bytes:
    """Return the bytes of a message. Raises: Violation, if it is too long for the other end."""
    data = msgpack.encode(message)
    if len(data) > MAX_FRAME_BYTES:
        raise Violation(f"a message of {len(data)} bytes, at most {MAX_FRAME_BYTES} can be sent")
    return _HEAD.pack(len(data), xxhash.xxh3_64_intdigest(data)) + data


def parse_head(data: bytes | bytearray) -> tuple[int, int]:
    """Return length and checksum of the frame that begins here. Raises: Violation, if it is too long."""
    length, checksum = _HEAD.unpack(data)
    if length > MAX_FRAME_BYTES:
        raise Violation(f"a frame of {length} bytes, expected at most {MAX_FRAME_BYTES}")
    return length, checksum


def parse_frame(data: bytes | bytearray, expected_checksum: int, decoder: "msgpack.Decoder[M]") -> M:
    """Return the message of a frame. Raises: Violation, if it is damaged or no message."""
    checksum = xxhash.xxh3_64_intdigest(data)
    if checksum != expected_checksum:
        raise Violation(
            f"a damaged message: xxh3_64 of {len(data)} bytes is {checksum:016x}, expected {expected_checksum:016x}"
        )
    try:
        return decoder.decode(data)
    except (DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Violation(f"a malformed message: {error}") from error


def receive_message(connection: socket.socket, decoder: "msgpack.Decoder[M]", timeout_s: float) -> M:
    """Return the next message. Blocks: at most ``timeout_s``. Raises: one of ``FAILURES``."""
    deadline = time.monotonic() + timeout_s
    length, checksum = parse_head(receive_exactly(connection, HEAD_BYTES, deadline))
    return parse_frame(receive_exactly(connection, length, deadline), checksum, decoder)


def receive_exactly(connection: socket.socket, size_bytes: int, deadline: float) -> bytearray:
    """Return the given number of bytes. Blocks: until ``deadline``. Raises: OSError; EOFError, if the connection
    ended.
    """
    data = bytearray(size_bytes)
    num_received = 0
    while num_received < size_bytes:
        connection.settimeout(left_s(deadline))
        count = connection.recv_into(memoryview(data)[num_received:])
        if not count:
            raise EOFError
        num_received += count
    return data


def left_s(deadline: float) -> float:
    """Return the positive seconds until the deadline, for ``settimeout``, where 0 means non-blocking."""
    return max(deadline - time.monotonic(), 0.001)


def keep_alive(connection: socket.socket) -> None:
    """Send small messages at once, and detect a node that disappeared within a minute."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 20)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def reason(error: BaseException) -> str:
    """Return the reason why a connection failed, for a message."""
    if isinstance(error, TIMEOUTS):
        return "it does not answer in time"
    if isinstance(error, EOFError):
        return "it closed the connection"
    if isinstance(error, Violation):
        return str(error)
    return f"{type(error).__name__}: {error}"
