"""One connection of a keeper to another process of the start, on the keeper's asyncio loop.

Nothing is received before it is requested, so a thread can use the connection between two messages.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

from msgspec import Struct, msgpack

from lazysnap.peers.listener import Deadlines
from lazysnap.peers.secret import Handshake, handshake
from lazysnap.peers.wire import HEAD_BYTES, frame, keep_alive, parse_frame, parse_head

M = TypeVar("M")
Result = TypeVar("Result")


class Stream:
    """A connection. Its coroutines raise one of ``wire.FAILURES``, after which it is unusable.

    At most one coroutine receives at a time, and at most one sends.
    """

    def __init__(self, connection: socket.socket, deadlines: Deadlines) -> None:
        """Own a connected socket. Raises: OSError, after closing it."""
        self._loop = asyncio.get_running_loop()
        self._connection = connection
        self._deadlines = deadlines
        self._num_users = 0
        """Coroutines that receive, send or lend."""
        self._is_closed = False
        try:
            keep_alive(connection)
            connection.setblocking(False)
        except OSError:
            connection.close()
            raise

    @classmethod
    async def connect(cls, address: tuple[str, int], secret: str, deadlines: Deadlines) -> "Stream":
        """Connect to a process of the start, and authenticate both ends."""
        connection = await asyncio.wait_for(_connect(*address), deadlines.connect_s)
        stream = cls(connection, deadlines)
        try:
            await stream.authenticate(secret, is_server=False)
        except BaseException:
            stream.close()
            raise
        return stream

    async def authenticate(self, secret: str, *, is_server: bool) -> None:
        """Authenticate both ends. Raises: Violation, if the other end cannot authenticate."""
        await asyncio.wait_for(self._prove(handshake(secret, is_server=is_server)), self._deadlines.connect_s)

    async def _prove(self, steps: Handshake) -> None:
        outgoing, expected_bytes = next(steps)
        while True:
            await self._send(outgoing)
            received = await self._receive_exactly(expected_bytes)
            try:
                outgoing, expected_bytes = steps.send(bytes(received))
            except StopIteration:
                return

    async def receive(self, decoder: "msgpack.Decoder[M]", timeout_s: float) -> M:
        """Return the next message, once all of it arrived."""
        return await asyncio.wait_for(self._receive(decoder), timeout_s)

    async def _receive(self, decoder: "msgpack.Decoder[M]") -> M:
        length, checksum = parse_head(await self._receive_exactly(HEAD_BYTES))
        data = await self._receive_exactly(length)
        return parse_frame(data, checksum, decoder)

    async def _receive_exactly(self, size_bytes: int) -> bytearray:
        data = bytearray(size_bytes)
        num_received = 0
        with self._used():
            while num_received < size_bytes:
                count = await self._loop.sock_recv_into(self._connection, memoryview(data)[num_received:])
                if not count:
                    raise EOFError
                num_received += count
        return data

    async def send(self, message: Struct) -> None:
        """Send a frame."""
        await asyncio.wait_for(self._send(frame(message)), self._deadlines.send_s)

    async def _send(self, data: bytes) -> None:
        with self._used():
            await self._loop.sock_sendall(self._connection, data)

    async def lend(self, work: "Callable[[socket.socket], Coroutine[Any, Any, Result]]") -> Result:
        """Return the result of ``work``, which uses the connection exclusively. ``close`` shuts the connection down."""
        with self._used():
            return await work(self._connection)

    @contextlib.contextmanager
    def _used(self) -> Iterator[None]:
        """The descriptor is not closed during use: the loop or a thread would then use another file."""
        if self._is_closed:
            raise EOFError
        self._num_users += 1
        try:
            yield
        finally:
            self._num_users -= 1
            self._close_unused()

    def _close_unused(self) -> None:
        if self._is_closed and not self._num_users:
            self._connection.close()

    def close(self) -> None:
        """End the connection at once; unsent messages are lost. Idempotent."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)  # its users fail now
        self._close_unused()


async def _connect(host: str, port: int) -> socket.socket:
    """Return a connection. ``host`` is an address: a name lookup would run on a thread that is joined at exit."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    connection = socket.socket(family, socket.SOCK_STREAM)
    connection.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(connection, (host, port))
    except BaseException:
        connection.close()
        raise
    return connection
