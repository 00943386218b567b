"""How messages are framed between keepers, behind the TLS handshake.

Both sides send the eight letters and the number of their protocol, then frames: a length (4 bytes, big-endian, bounded)
and that many bytes of MessagePack. Nothing is allocated for a frame that is too long.
"""

import struct
from typing import Generic, TypeVar

from msgspec import DecodeError, Struct, msgpack

from lazysnap.links.strangers import Violation

_PREAMBLE, _LENGTH = struct.Struct("!8sH"), struct.Struct("!I")
PREAMBLE_BYTES, LENGTH_BYTES = _PREAMBLE.size, _LENGTH.size

M = TypeVar("M", bound=Struct)


class Framing(Generic[M]):
    """One protocol, with the kinds of message that one side receives."""

    def __init__(self, protocol: tuple[bytes, int], max_bytes: int, decoder: "msgpack.Decoder[M]") -> None:
        """``protocol``: letters and number. ``max_bytes``: of a frame."""
        self._protocol, self._max_bytes, self._decoder = protocol, max_bytes, decoder
        self.preamble = _PREAMBLE.pack(*protocol)

    def check_preamble(self, preamble: bytes | bytearray) -> None:
        """Raises: Violation, if the other end speaks another protocol."""
        magic, number = _PREAMBLE.unpack(preamble)
        wanted, expected = self._protocol
        if (magic, number) != self._protocol:
            raise Violation(f"protocol {magic!r} {number}, expected {wanted!r} {expected}: same lazysnap on all nodes?")

    def frame(self, message: Struct) -> bytes:
        """Raises: Violation, if it is too long for the other end."""
        data = msgpack.encode(message)
        if len(data) > self._max_bytes:
            raise Violation(f"a message of {len(data)} bytes, at most {self._max_bytes} can be sent")
        return _LENGTH.pack(len(data)) + data

    def length(self, head: bytes | bytearray) -> int:
        """The bytes that follow. Raises: Violation, if these are too many."""
        (length,) = _LENGTH.unpack(head)
        if length > self._max_bytes:
            raise Violation(f"a frame of {length} bytes, expected at most {self._max_bytes}")
        return int(length)

    def decode(self, data: bytes | bytearray) -> M:
        """Raises: Violation, if it is none of the messages."""
        try:
            return self._decoder.decode(data)
        except (DecodeError, RecursionError) as error:
            raise Violation(f"a malformed message: {error}") from error
