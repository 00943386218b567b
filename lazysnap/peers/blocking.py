"""Messages on a connection by blocking calls: for readers, and for the threads that serve them."""

import socket
import time
from typing import TypeVar

from msgspec import msgpack

from lazysnap.peers.wire import HEAD_BYTES, parse_frame, parse_head

M = TypeVar("M")


def receive_message(connection: socket.socket, decoder: "msgpack.Decoder[M]", timeout_s: float) -> M:
    """Return the next message. Blocks: at most ``timeout_s``. Raises: one of ``wire.FAILURES``."""
    deadline = time.monotonic() + timeout_s
    length, checksum = parse_head(receive_exactly(connection, HEAD_BYTES, deadline))
    return parse_frame(receive_exactly(connection, length, deadline), checksum, decoder)


def receive_exactly(connection: socket.socket, size_bytes: int, deadline: float) -> bytearray:
    """Return so many bytes. Blocks: until ``deadline``. Raises: OSError; EOFError, if the connection ended."""
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
    """Return the seconds until then, for ``settimeout``, to which 0 means something else."""
    return max(deadline - time.monotonic(), 0.001)
