"""Links between the keepers of a job: typed messages over TCP, on one thread per keeper.

Each message carries the whole state of its sender (``grants``), so of each kind only the newest one waits to be sent: a
peer that reads slowly costs no memory. Every wait has a deadline.

On the wire: the handshake of ``links.secret`` with the letters ``lazysnap``, then ``links.framing``. The first message
is a ``Hello``.
"""

import asyncio
import contextlib
import logging
import random
import socket
import threading
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Annotated, Any, Protocol

from msgspec import Meta, Struct, msgpack

from lazysnap.errors import ConfigError
from lazysnap.grants.messages import MAX_NODES, Order, Report, StartId
from lazysnap.links.framing import HEAD_BYTES, Framing
from lazysnap.links.secret import Secret, handshake
from lazysnap.links.strangers import MAX_UNKNOWN, Deadlines, Refusals, Violation, listener_at, reason

logger = logging.getLogger(__name__)

_draws = random.SystemRandom()
"""The global generators are the training's."""
PROTOCOL = 3
"""Version of the messages between keepers. Raised with every change that the other end sees."""
MAX_FRAME_BYTES = 1 << 20
_CLOSE_S, _AGAIN_S = 5.0, 0.1
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0
"""Seconds between two tries to connect: the pause doubles from the first to the second."""


class Hello(Struct, frozen=True, tag="hello", forbid_unknown_fields=True):
    """The greeting: says which node is at the other end."""

    job: Annotated[str, Meta(max_length=4096)]
    start: StartId
    node: Annotated[int, Meta(ge=0, lt=MAX_NODES)]


class Alive(Struct, frozen=True, tag="alive", forbid_unknown_fields=True):
    """Nothing new."""


Message = Report | Order
_decoder: msgpack.Decoder[Hello | Alive | Report | Order] = msgpack.Decoder(Hello | Alive | Report | Order)
_framing = Framing((b"lazysnap", PROTOCOL), MAX_FRAME_BYTES, _decoder)


class Handler(Protocol):
    """Called on the links' thread, which must not be held up: put into a queue what takes time."""

    def link_is_up(self, node: int) -> None:
        """Send the whole state: what was sent before may be lost."""

    def link_is_down(self, node: int) -> None:
        """Nothing arrives until it is up again."""

    def received(self, node: int, message: Message) -> None:
        """A message came from that node."""


class _Peer:
    """One connection. Lives on the links' loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, address: str) -> None:
        self.reader, self.writer, self.address = reader, writer, address
        self.waiting: dict[type, Message] = {}
        self.is_waiting = asyncio.Event()

    def put(self, message: Message) -> None:
        """Send it soon; it replaces one of the same kind that was not sent yet."""
        self.waiting[type(message)] = message
        self.is_waiting.set()

    async def write(self, message: Struct, timeout_s: float) -> None:
        self.writer.write(_framing.frame(message))
        await asyncio.wait_for(self.writer.drain(), timeout_s)

    async def read(self, timeout_s: float) -> Hello | Alive | Report | Order:
        """The next message."""
        length, checksum = _framing.head(await asyncio.wait_for(self.reader.readexactly(HEAD_BYTES), timeout_s))
        data = await asyncio.wait_for(self.reader.readexactly(length), timeout_s)
        return _framing.decode(data, checksum)

    async def greet(self, me: Hello, timeout_s: float) -> Hello:
        """Exchange hellos; who is at the other end."""
        await self.write(me, timeout_s)
        hello = await self.read(timeout_s)
        if not isinstance(hello, Hello):
            raise Violation("a message before the hello")
        if (hello.job, hello.start) != (me.job, me.start):
            raise Violation(f"start {hello.start} of job {hello.job!r}, expected start {me.start} of job {me.job!r}")
        return hello

    async def exchange(self, received: Callable[[Message], None], deadlines: Deadlines) -> None:
        """Exchange messages until the connection fails, which raises."""
        tasks = [
            asyncio.ensure_future(self._send_all(deadlines)),
            asyncio.ensure_future(self._receive(received, deadlines)),
        ]
        try:
            await asyncio.gather(*tasks)
        finally:
            self.close()  # first: before Python 3.12 ``wait_for`` may lose a cancellation, and the task goes on
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _send_all(self, deadlines: Deadlines) -> None:
        while True:
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self.is_waiting.wait(), deadlines.alive_s)
            self.is_waiting.clear()
            waiting, self.waiting = self.waiting, {}
            for message in waiting.values() or (Alive(),):
                await self.write(message, deadlines.send_s)

    async def _receive(self, received: Callable[[Message], None], deadlines: Deadlines) -> None:
        while True:
            message = await self.read(deadlines.silence_s)
            if isinstance(message, Hello):
                raise Violation("a second hello")
            if not isinstance(message, Alive):
                received(message)

    def close(self) -> None:
        self.writer.transport.abort()


class Links:
    """All links of one keeper. Only ``send`` may be called on the links' own thread, by the handler.

    Of two nodes the one with the greater number connects, and keeps trying. Of two connections of one node the later
    one stays: after a restart of the node the earlier one may look alive for a while.
    """

    def __init__(self, secret: Secret, me: Hello, handler: Handler, deadlines: Deadlines | None = None) -> None:
        self._me, self._handler, self._deadlines = me, handler, deadlines or Deadlines()
        self._secret = secret
        self._peers: dict[int, _Peer] = {}
        self._down: set[int] = set()
        self._refusals = Refusals("links")
        self._num_unknown = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing, self._is_over = threading.Lock(), False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name="lazysnap-links", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()

    def listen(self, host: str, port: int = 0) -> tuple[str, int]:
        """Accept links on one address of this machine; return the address. Blocks: until it is bound.

        Raises: ConfigError, if ``host`` means every interface; OSError, if the address cannot be had, or all is closed.
        """
        listener = listener_at(host, port)
        listener.setblocking(False)
        bound = listener.getsockname()
        with self._closing:
            if self._is_over:
                listener.close()
                raise OSError("these links were closed")
            self._loop.call_soon_threadsafe(self._start_accepting, listener)
        return bound[0], bound[1]

    def connect(self, node: int, host: str, port: int) -> None:
        """Keep a link to that node from now on. Raises: ConfigError, if that node is to connect to this one."""
        if node >= self._me.node:
            raise ConfigError(f"node {self._me.node} cannot connect to node {node}: the greater number connects")
        self._loop.call_soon_threadsafe(self._start, self._keep_up(node, host, port))

    def send(self, node: int, message: Message) -> None:
        """Send soon, if the link is up; else it is dropped, ``link_is_up`` asks for the state. Never blocks."""
        with contextlib.suppress(RuntimeError):  # all links were closed meanwhile
            self._loop.call_soon_threadsafe(self._send, node, message)

    def close(self) -> None:
        """End all links. Blocks: for a moment."""

        async def end() -> None:
            while self._tasks:  # before Python 3.12 ``wait_for`` may lose a cancellation
                for task in self._tasks:
                    task.cancel()
                await asyncio.wait(self._tasks, timeout=_AGAIN_S)

        with self._closing:  # who began them may find out late that they are over
            is_first, self._is_over = not self._is_over, True
        if not is_first:
            return
        with contextlib.suppress(TimeoutError, asyncio.TimeoutError):
            asyncio.run_coroutine_threadsafe(asyncio.wait_for(end(), _CLOSE_S), self._loop).result(2 * _CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _start_accepting(self, listener: socket.socket) -> None:
        self._start(self._accept(listener)).add_done_callback(partial(_close_if_cancelled, listener))

    def _send(self, node: int, message: Message) -> None:
        peer = self._peers.get(node)
        if peer is not None:
            peer.put(message)

    async def _accept(self, listener: socket.socket) -> None:
        with listener:
            while True:
                # Not ``sock_accept``: cancelled at the wrong moment, it drops a connection without closing it.
                is_ready = asyncio.Event()
                self._loop.add_reader(listener, is_ready.set)
                try:
                    await is_ready.wait()
                finally:
                    self._loop.remove_reader(listener)
                try:
                    connection, address = listener.accept()
                except OSError as error:  # no descriptors left, for example
                    logger.warning("links: a connection cannot be accepted: %s", error)
                    await asyncio.sleep(1.0)
                    continue
                if self._num_unknown >= MAX_UNKNOWN:
                    connection.close()
                    continue
                self._num_unknown += 1
                task = self._start(self._serve(connection, address))
                task.add_done_callback(partial(_close_if_cancelled, connection))

    async def _serve(self, connection: socket.socket, address: tuple[str, int]) -> None:
        peer = node = None
        try:
            peer = await self._open(connection, f"{address[0]}:{address[1]}", is_server=True)
            node = (await peer.greet(self._me, self._deadlines.connect_s)).node
        except (OSError, EOFError, asyncio.TimeoutError, Violation) as error:
            self._refusals.warn(address, error)
        finally:
            self._num_unknown -= 1
            if node is None:
                peer.close() if peer is not None else connection.close()
        if peer is not None and node is not None:
            await self._use(node, peer)

    async def _open(self, connection: socket.socket, address: str, *, is_server: bool) -> _Peer:
        """The peer at the other end, which has proven itself. Until it has, nothing that it sends is buffered."""
        connection.setblocking(False)
        await asyncio.wait_for(self._authenticate(connection, is_server=is_server), self._deadlines.connect_s)
        reader = asyncio.StreamReader(limit=1 << 16, loop=self._loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=self._loop)
        transport, _ = await self._loop.connect_accepted_socket(lambda: protocol, connection)
        return _Peer(reader, asyncio.StreamWriter(transport, protocol, reader, self._loop), address)

    async def _authenticate(self, connection: socket.socket, *, is_server: bool) -> None:
        steps = handshake(self._secret, _framing.protocol, is_server=is_server)
        outgoing, expected = next(steps)
        while True:
            await self._loop.sock_sendall(connection, outgoing)
            received = b""
            while len(received) < expected:
                if not (data := await self._loop.sock_recv(connection, expected - len(received))):
                    raise EOFError
                received += data
            try:
                outgoing, expected = steps.send(received)
            except StopIteration:
                return

    async def _keep_up(self, node: int, host: str, port: int) -> None:
        pause_s = 0.0
        while True:
            await asyncio.sleep(pause_s * _draws.uniform(0.5, 1.0))
            pause_s = min(max(2 * pause_s, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S)
            try:
                peer = await self._dial(node, host, port)
            except (OSError, EOFError, asyncio.TimeoutError, Violation) as error:
                self._say_down(node, f"{host}:{port}", error)
                continue
            pause_s = 0.0
            await self._use(node, peer)

    async def _dial(self, node: int, host: str, port: int) -> _Peer:
        timeout_s = self._deadlines.connect_s
        connection = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            await asyncio.wait_for(self._loop.sock_connect(connection, (host, port)), timeout_s)
            peer = await self._open(connection, f"{host}:{port}", is_server=False)
        except BaseException:
            connection.close()
            raise
        try:
            hello = await peer.greet(self._me, timeout_s)
            if hello.node != node:
                raise Violation(f"node {hello.node}, expected node {node}")
        except BaseException:
            peer.close()
            raise
        return peer

    async def _use(self, node: int, peer: _Peer) -> None:
        """Exchange messages with a node until the link fails."""
        earlier = self._peers.get(node)
        self._peers[node] = peer
        if earlier is not None:
            earlier.close()
        if node in self._down:
            self._down.discard(node)
            logger.info("links: node %d (%s) is back", node, peer.address)
        error: BaseException | None = None
        try:
            self._handler.link_is_up(node)
            await peer.exchange(lambda message: self._handler.received(node, message), self._deadlines)
        except (OSError, EOFError, asyncio.TimeoutError, Violation) as failure:
            error = failure
        finally:
            peer.close()
            if self._peers.get(node) is peer:
                del self._peers[node]
                if error is not None:
                    self._say_down(node, peer.address, error)
                    self._handler.link_is_down(node)

    def _say_down(self, node: int, address: str, error: BaseException) -> None:
        """Once until it is up again."""
        if node not in self._down:
            self._down.add(node)
            logger.warning("links: node %d (%s) is not reached: %s; trying again", node, address, reason(error))


def _close_if_cancelled(connection: socket.socket, task: "asyncio.Task[None]") -> None:
    """A task that is cancelled before it ran closes nothing itself."""
    if task.cancelled():
        connection.close()
