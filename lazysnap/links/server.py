"""The port of a keeper at which other processes of the start read this node's memory, and keepers link to node 0.

Each connection has a thread. The first message says what it is for: a ``Hello`` begins a link (``links.links``), which
takes the connection over; anything else reads. Reads are answered one after the other, out of a ``BlockSource``, which
may still fill.
"""

import contextlib
import logging
import socket
import threading
from collections.abc import Callable

import xxhash
from msgspec import Struct, msgpack

from lazysnap.errors import LazySnapError
from lazysnap.levels.source import BlockSource
from lazysnap.links.channel import Channel, authenticate, keep_alive, shut
from lazysnap.links.links import Hello, Links
from lazysnap.links.listener import MAX_UNKNOWN, Deadlines, Refusals, Violation, listener_at, reason
from lazysnap.links.messages import (
    MAX_TEXT,
    Alive,
    Block,
    Finished,
    Open,
    Opened,
    PeerRefused,
    Read,
    Refusal,
    Request,
    What,
)
from lazysnap.links.secret import Secret
from lazysnap.links.threads import Threads

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 1024
"""More are closed at once."""
_DEADLINES = Deadlines(alive_s=1.0, silence_s=300.0)
"""Seconds between two ``Alive`` messages; seconds that a client may ask nothing."""
_CLOSE_S = 5.0
"""Seconds that ``close`` waits at most."""
_decoder: msgpack.Decoder[Hello | Request] = msgpack.Decoder(Hello | Request)


class PeerServer:
    """All connections from other processes of the start."""

    def __init__(self, secret: Secret, open: Callable[[What], BlockSource], deadlines: Deadlines = _DEADLINES) -> None:
        """``open`` finds what is read, on the thread of the connection.

        It may raise LazySnapError or OSError, and so may the source: the client is sent its text.
        """
        self.secret, self._open, self._deadlines = secret, open, deadlines
        self._lock = threading.Lock()
        self._listeners: list[socket.socket] = []
        self._links: Links | None = None
        """The links that are accepted."""
        self._connections: dict[socket.socket, Channel[Hello | Request] | None] = {}
        """``None``: it has not proven that it has the secret yet."""
        self._threads = Threads()
        self._refusals = Refusals()
        self._is_closed = threading.Event()
        self._threads.start(self._send_alive, "lazysnap-peer-alive")

    def listen(self, host: str, port: int = 0) -> tuple[str, int]:
        """Serve on one address of this machine; return the address.

        Raises: ConfigError, if ``host`` means every interface; OSError, if the address is taken.
        """
        listener = listener_at(host, port)
        bound = listener.getsockname()
        with self._lock:
            self._listeners.append(listener)
        self._threads.start(lambda: self._accept(listener), "lazysnap-peer-accept")
        return bound[0], bound[1]

    def admit(self, links: Links) -> None:
        """Hand connections of these links over to them from now on. Until then they are closed, and tried again."""
        self._links = links

    def close(self) -> None:
        """End all reads, and accept nothing more; links go on.

        Blocks: some seconds; a source that is waited for may hold its thread longer.
        """
        self._is_closed.set()
        with self._lock:
            connections, listeners = list(self._connections), list(self._listeners)
        for listener in listeners:
            with contextlib.suppress(OSError):
                listener.shutdown(socket.SHUT_RDWR)  # wakes ``accept``; its thread closes it
        for connection in connections:
            shut(connection)
        self._threads.join(_CLOSE_S)

    def _send_alive(self) -> None:
        while not self._is_closed.wait(self._deadlines.alive_s):
            with self._lock:
                channels = [channel for channel in self._connections.values() if channel is not None]
            for channel in channels:
                channel.send_beside(Alive())

    def _accept(self, listener: socket.socket) -> None:
        with listener:
            while not self._is_closed.is_set():
                try:
                    connection, address = listener.accept()
                except OSError as error:  # no descriptors left, for example
                    if not self._is_closed.is_set():
                        logger.warning("peers: a connection cannot be accepted: %s", error)
                        self._is_closed.wait(1.0)
                    continue
                try:
                    self._take(connection, address)
                except (OSError, RuntimeError, Violation) as error:  # RuntimeError: no thread can be started
                    connection.close()
                    self._refusals.warn(address, error)

    def _take(self, connection: socket.socket, address: tuple[str, int]) -> None:
        """Serve this connection on a thread of its own."""
        keep_alive(connection)
        with self._lock:
            num_unknown = sum(channel is None for channel in self._connections.values())
            if num_unknown >= MAX_UNKNOWN or len(self._connections) >= MAX_CONNECTIONS:
                raise Violation(f"{len(self._connections)} connections, {num_unknown} of them unknown: too many")
            self._connections[connection] = None
        if self._is_closed.is_set():  # ``close`` may not have seen it
            shut(connection)
        try:
            self._threads.start(lambda: self._serve(connection, address), "lazysnap-peer-connection")
        except RuntimeError:
            self._forget(connection)
            raise

    def _forget(self, connection: socket.socket) -> None:
        with self._lock:
            self._connections.pop(connection, None)
        connection.close()

    def _serve(self, connection: socket.socket, address: tuple[str, int]) -> None:
        is_known = False
        try:
            authenticate(connection, self.secret, self._deadlines.connect_s, is_server=True)
            channel = Channel(connection, _decoder, self._deadlines.send_s)
            is_known = True
            with self._lock:
                self._connections[connection] = channel
            reads = _Reads(channel, self._open)
            while True:
                request = channel.receive(self._deadlines.silence_s)
                if isinstance(request, Hello):
                    self._link(connection, request, address)
                    return
                try:
                    answer, payload = reads.do(request)
                except (LazySnapError, OSError) as error:  # of the source; the connection itself is well
                    if isinstance(error, PeerRefused):
                        self._refusals.warn(address, error)
                    logger.debug("peers: a read of %s failed: %s", address, error)
                    answer, payload = Refusal(str(error)[:MAX_TEXT]), None
                channel.send(answer, payload)
                payload = None  # memory that is viewed cannot be unmapped
        except Violation as error:
            self._refusals.warn(address, error)
        except (OSError, EOFError) as error:
            if is_known or self._is_closed.is_set():  # clients come and go
                logger.debug("peers: %s is gone: %s", address, reason(error))
            else:
                self._refusals.warn(address, error)
        finally:
            self._forget(connection)

    def _link(self, connection: socket.socket, hello: Hello, address: tuple[str, int]) -> None:
        """Hand the connection over to the links that it is for; they outlive this server."""
        links = self._links
        if links is None:
            logger.debug("links: node %d is closed: this keeper does not decide on grants yet", hello.node)
            return
        with self._lock:
            self._connections.pop(connection, None)
        self._threads.remove(threading.current_thread())
        links.serve(connection, hello, f"{address[0]}:{address[1]}")


class _Reads:
    """The open reads of one client."""

    def __init__(self, channel: "Channel[Hello | Request]", open: Callable[[What], BlockSource]) -> None:
        self._channel, self._open = channel, open
        self._what: What | None = None
        self._source: BlockSource | None = None

    def do(self, request: Request) -> tuple[Struct, memoryview | None]:
        """The answer, and the bytes behind it.

        Raises: PeerRefused, if no client of ours asks for it; LazySnapError and OSError, of the source.
        """
        if isinstance(request, Open):
            self._source = None
            with self._channel.waiting():
                source = self._open(request.what)
            self._what, self._source = request.what, source
            return Opened(source.size_bytes), None
        if self._source is None:
            raise PeerRefused("nothing is open")
        if isinstance(request, Read):
            return self._read(self._source, request)
        source, self._source = self._source, None
        with self._channel.waiting():
            source.finish()
        return Finished(), None

    def _read(self, source: BlockSource, request: Read) -> tuple[Struct, memoryview | None]:
        stop = request.offset + request.length
        if stop > source.size_bytes:
            raise PeerRefused(f"bytes [{request.offset}, {stop}) of {self._what}, which has {source.size_bytes}")
        with self._channel.waiting():
            payload = source.view(request.offset, request.length)[: request.length]
            checksum = xxhash.xxh3_64_intdigest(payload)
        return Block(len(payload), checksum), payload
