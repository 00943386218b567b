"""Messages as frames on the wire, behind the handshake of ``links.secret``.

A frame is a length (4 bytes, big-endian, bounded), a checksum (8 bytes, xxh3_64) and that many bytes of MessagePack, of
which the checksum is. Nothing is allocated for a frame that is too long.
"""

import struct
from typing import Generic, TypeVar

import xxhash
from msgspec import DecodeError, Struct, msgpack

from lazysnap.links.listener import Violation

_HEAD = struct.Struct("!IQ")
HEAD_BYTES = _HEAD.size

M = TypeVar("M", bound=Struct)


class Framing(Generic[M]):
    """Frames with the kinds of message that one side receives."""

    def __init__(self, max_bytes: int, decoder: "msgpack.Decoder[M]") -> None:
        """``max_bytes``: of a frame."""
        self._max_bytes, self._decoder = max_bytes, decoder

    def frame(self, message: Struct) -> bytes:
        """Return the bytes of a message. Raises: Violation, if it is too long for the other end."""
        data = msgpack.encode(message)
        if len(data) > self._max_bytes:
            raise Violation(f"a message of {len(data)} bytes, at most {self._max_bytes} can be sent")
        return _HEAD.pack(len(data), xxhash.xxh3_64_intdigest(data)) + data

    def head(self, head: bytes | bytearray) -> tuple[int, int]:
        """Return the number of bytes that follow, and their checksum. Raises: Violation, if these are too many."""
        length, checksum = _HEAD.unpack(head)
        if length > self._max_bytes:
            raise Violation(f"a frame of {length} bytes, expected at most {self._max_bytes}")
        return length, checksum

    def decode(self, data: bytes | bytearray, checksum: int) -> M:
        """Return the message. Raises: Violation, if it was damaged on its way, or is none of the messages."""
        if (got := xxhash.xxh3_64_intdigest(data)) != checksum:
            raise Violation(f"a damaged message: xxh3_64 of {len(data)} bytes is {got:016x}, expected {checksum:016x}")
        try:
            return self._decoder.decode(data)
        except (DecodeError, RecursionError) as error:
            raise Violation(f"a malformed message: {error}") from error
