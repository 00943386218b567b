"""One connection of a keeper to another process of the start, on the keeper's asyncio loop."""

import asyncio
import socket
from typing import TypeVar

from msgspec import Struct, msgpack

from lazysnap.peers.listener import Deadlines
from lazysnap.peers.secret import Handshake, handshake
from lazysnap.peers.wire import HEAD_BYTES, frame, keep_alive, parse_frame, parse_head

_PIECE_BYTES = 1 << 18
"""A peer that takes no piece of so many bytes within the deadline is dropped."""
M = TypeVar("M")


class Stream:
    """A connection. Its coroutines raise one of ``wire.FAILURES``: then it is of no use any more.

    At most one coroutine receives at a time, and at most one sends.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, deadlines: Deadlines) -> None:
        self._reader = reader
        self._writer = writer
        self._deadlines = deadlines

    @classmethod
    async def adopt(cls, connection: socket.socket, deadlines: Deadlines) -> "Stream":
        """Return the stream of a connection that was accepted, which it owns from then on. Raises: OSError."""
        try:
            keep_alive(connection)
            reader, writer = await asyncio.open_connection(sock=connection)
        except OSError:
            connection.close()
            raise
        return cls(reader, writer, deadlines)

    @classmethod
    async def connect(cls, address: tuple[str, int], secret: str, deadlines: Deadlines) -> "Stream":
        """Connect to a process of the start, and prove both ends to each other."""
        reader, writer = await asyncio.wait_for(asyncio.open_connection(*address), deadlines.connect_s)
        stream = cls(reader, writer, deadlines)
        try:
            keep_alive(writer.get_extra_info("socket"))
            await stream.authenticate(secret, is_server=False)
        except BaseException:
            stream.close()
            raise
        return stream

    async def authenticate(self, secret: str, *, is_server: bool) -> None:
        """Prove both ends to each other. Raises: Violation, if the other end cannot prove itself."""
        await asyncio.wait_for(self._prove(handshake(secret, is_server=is_server)), self._deadlines.connect_s)

    async def _prove(self, steps: Handshake) -> None:
        outgoing, expected_bytes = next(steps)
        while True:
            self._writer.write(outgoing)
            received = await self._reader.readexactly(expected_bytes)
            try:
                outgoing, expected_bytes = steps.send(received)
            except StopIteration:
                return

    async def receive(self, decoder: "msgpack.Decoder[M]", timeout_s: float) -> M:
        """Return the next message, once all of it arrived."""
        return await asyncio.wait_for(self._receive(decoder), timeout_s)

    async def _receive(self, decoder: "msgpack.Decoder[M]") -> M:
        length, checksum = parse_head(await self._reader.readexactly(HEAD_BYTES))
        data = await self._reader.readexactly(length)
        return parse_frame(data, checksum, decoder)

    async def send(self, message: Struct, payload: memoryview | None = None) -> None:
        """Send a frame, and behind it the bytes of ``payload``, as fast as the other end takes them."""
        await self._write(frame(message))
        if payload is None:
            return
        for start in range(0, len(payload), _PIECE_BYTES):
            await self._write(payload[start : start + _PIECE_BYTES])
            await asyncio.sleep(0)  # other connections have their turn, too

    async def _write(self, data: bytes | memoryview) -> None:
        self._writer.write(data)
        if self._writer.transport.get_write_buffer_size() == 0:
            await self._writer.drain()
        else:
            await asyncio.wait_for(self._writer.drain(), self._deadlines.send_s)

    def close(self) -> None:
        """End the connection at once; what was not sent yet is lost. May be called again."""
        self._writer.transport.abort()
