"""A channel between two processes of a start: frames and raw bytes over one TCP connection, by blocking calls.

On the wire: the handshake of ``links.secret``, then messages as frames. A frame is a length (4 bytes, big-endian,
bounded), a checksum (8 bytes, xxh3_64) and that many bytes of MessagePack, of which the checksum is. Nothing is
allocated for a frame that is too long. The raw bytes of a payload go from and to the caller's memory.
"""

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Generic, TypeVar

import xxhash
from msgspec import DecodeError, Struct, msgpack

from lazysnap.links.listener import Violation
from lazysnap.links.secret import Secret, handshake

_HEAD = struct.Struct("!IQ")
M = TypeVar("M", bound=Struct)
PROTOCOL = b"lazysnap", 7
"""Letters, and the version of all messages between keepers: raised with every change that the other end sees."""
MAX_FRAME_BYTES = 1 << 20
_PROGRESS_BYTES = 1 << 18


def keep_alive(connection: socket.socket) -> None:
    """Have small messages sent at once, and a node that is gone without a word noticed within a minute."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 20), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


class Channel(Generic[M]):
    """One connection whose ends have proven themselves (``authenticate``, ``connect``).

    Its calls raise OSError, EOFError or Violation: it is of no use then. One thread uses it. Inside ``waiting`` another
    one may call ``send_beside``.
    """

    def __init__(self, connection: socket.socket, decoder: "msgpack.Decoder[M]", send_s: float) -> None:
        """``send_s``: an other end that takes nothing for so long has failed."""
        self._connection, self._send_s = connection, send_s
        self._decoder = decoder
        self._in_use = threading.Lock()
        self._in_use.acquire()  # by the one thread, except inside ``waiting``

    def send(self, message: Struct, payload: memoryview | None = None) -> None:
        """Send a frame, and behind it the bytes of ``payload``. Blocks: while the other end takes some of them."""
        self._connection.settimeout(self._send_s)
        self._connection.sendall(_frame(message))
        if payload is not None:
            for start in range(0, len(payload), _PROGRESS_BYTES):  # a call fails after ``send_s``, even if bytes move
                self._connection.sendall(payload[start : start + _PROGRESS_BYTES])

    def receive(self, timeout_s: float) -> M:
        """The next message. Blocks: at most ``timeout_s`` until all of it is there."""
        deadline = time.monotonic() + timeout_s
        length, checksum = _HEAD.unpack(_read(self._connection, _HEAD.size, deadline))
        if length > MAX_FRAME_BYTES:
            raise Violation(f"a frame of {length} bytes, expected at most {MAX_FRAME_BYTES}")
        data = _read(self._connection, length, deadline)
        if (got := xxhash.xxh3_64_intdigest(data)) != checksum:
            raise Violation(f"a damaged message: xxh3_64 of {length} bytes is {got:016x}, expected {checksum:016x}")
        try:
            return self._decoder.decode(data)
        except (DecodeError, RecursionError) as error:
            raise Violation(f"a malformed message: {error}") from error

    def receive_into(self, out: memoryview, silence_s: float) -> None:
        """Fill ``out`` with raw bytes. Blocks: while they arrive, at most ``silence_s`` without any."""
        self._connection.settimeout(silence_s)
        got = 0
        while got < len(out):
            if not (received := self._connection.recv_into(out[got:])):
                raise EOFError
            got += received

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """The thread does something else for a while, and does not use the connection."""
        self._in_use.release()
        try:
            yield
        finally:
            self._in_use.acquire()

    def send_beside(self, message: Struct) -> None:
        """Send from another thread, only if the one thread is inside ``waiting``. Never blocks."""
        if not self._in_use.acquire(blocking=False):
            return
        try:
            self._connection.settimeout(0.0)
            self._connection.sendall(_frame(message))
        except OSError:  # the other end is gone, or takes nothing: half a frame may be sent
            shut(self._connection)
        finally:
            self._in_use.release()


def authenticate(connection: socket.socket, secret: Secret, timeout_s: float, *, is_server: bool) -> None:
    """Prove both ends to each other. Blocks: at most ``timeout_s``.

    Raises: Violation, if the other end cannot prove itself; OSError, EOFError.
    """
    deadline, steps = time.monotonic() + timeout_s, handshake(secret, PROTOCOL, is_server=is_server)
    with contextlib.suppress(StopIteration):
        outgoing, expected = next(steps)
        while True:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            connection.sendall(outgoing)
            outgoing, expected = steps.send(bytes(_read(connection, expected, deadline)))


def connect(address: tuple[str, int], secret: Secret, timeout_s: float) -> socket.socket:
    """Connect to a process of the start, and prove both ends to each other.

    Blocks: at most ``timeout_s`` for each of connection and handshake. Raises: OSError, EOFError, Violation.
    """
    connection = socket.create_connection(address, timeout_s)
    try:
        keep_alive(connection)
        authenticate(connection, secret, timeout_s, is_server=False)
    except BaseException:
        connection.close()
        raise
    return connection


def shut(connection: socket.socket) -> None:
    """End a connection from any thread: whoever uses it gets an error at once."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _frame(message: Struct) -> bytes:
    """Return the bytes of a message. Raises: Violation, if it is too long for the other end."""
    data = msgpack.encode(message)
    if len(data) > MAX_FRAME_BYTES:
        raise Violation(f"a message of {len(data)} bytes, at most {MAX_FRAME_BYTES} can be sent")
    return _HEAD.pack(len(data), xxhash.xxh3_64_intdigest(data)) + data


def _read(connection: socket.socket, size_bytes: int, deadline: float) -> bytearray:
    data, got = bytearray(size_bytes), 0
    while got < size_bytes:
        connection.settimeout(max(deadline - time.monotonic(), 0.001))
        if not (received := connection.recv_into(memoryview(data)[got:])):
            raise EOFError
        got += received
    return data
