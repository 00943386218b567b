"""Links between the keepers of a start: the newest state of each sender, over TCP.

Node 0 accepts links at the port where others read its memory (``PeerServer``); every other node connects to it. Each
message carries the whole state of its sender (``grants``), so only the newest one of each kind waits to be sent: a peer
that reads slowly costs no memory. Every wait has a deadline.
"""

import logging
import random
import socket
import threading
from collections.abc import Callable
from contextlib import closing
from typing import Annotated, Protocol

from msgspec import Meta, Struct, msgpack

from lazysnap.errors import ConfigError
from lazysnap.grants.messages import MAX_NODES, Order, Report, StartId
from lazysnap.links.channel import Channel, connect, shut
from lazysnap.links.listener import Deadlines, Violation, reason
from lazysnap.links.secret import Secret
from lazysnap.links.threads import Threads

logger = logging.getLogger(__name__)

_draws = random.SystemRandom()
"""The global generators are the training's."""
_CLOSE_S = 5.0
"""Seconds that ``close`` waits at most."""
_THREAD = "lazysnap-link"
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 10.0
"""Seconds between two tries to connect: the pause doubles from the first to the second."""


class Hello(Struct, frozen=True, tag="hello", forbid_unknown_fields=True):
    """The first message in both directions: who is at the other end."""

    job: Annotated[str, Meta(max_length=4096)]
    start: StartId
    node: Annotated[int, Meta(ge=0, lt=MAX_NODES)]


class NoNews(Struct, frozen=True, tag="no news", forbid_unknown_fields=True):
    """A sign of life."""


Message = Report | Order
_decoder: msgpack.Decoder[Hello | NoNews | Report | Order] = msgpack.Decoder(Hello | NoNews | Report | Order)


class Handler(Protocol):
    """Called on the threads of links, one at a time; it must return at once."""

    def link_is_up(self, node: int) -> None:
        """Send the whole state: earlier messages may be lost."""

    def link_is_down(self, node: int) -> None:
        """Nothing arrives until it is up again."""

    def received(self, node: int, message: Message) -> None:
        """A message came from that node."""


class _Peer:
    """One connection to another node, and what waits to be sent there."""

    def __init__(self, connection: socket.socket, address: str, deadlines: Deadlines) -> None:
        self.address = address
        self.failure: OSError | None = None
        """The error by which sending ended."""
        self._connection, self._deadlines = connection, deadlines
        self._waiting: dict[type, Message] = {}
        self._changed = threading.Condition()
        self._is_closed = False

    def put(self, message: Message) -> None:
        """Send it soon; it replaces one of the same kind that was not sent yet."""
        with self._changed:
            self._waiting[type(message)] = message
            self._changed.notify()

    def send_all(self) -> None:
        """Send what is put, until the connection ends."""
        try:
            # A second socket object: sending and receiving have a timeout each.
            with closing(self._connection.dup()) as connection:
                channel = Channel(connection, _decoder, self._deadlines.send_s)
                while True:
                    with self._changed:
                        self._changed.wait_for(lambda: self._waiting or self._is_closed, self._deadlines.alive_s)
                        if self._is_closed:
                            return
                        waiting, self._waiting = self._waiting, {}
                    for message in waiting.values() or (NoNews(),):
                        channel.send(message)
        except OSError as error:
            self.failure = error
            self.close()

    def receive_all(self, received: Callable[[Message], None]) -> None:
        """Receive messages until the connection ends. Raises: OSError, EOFError, Violation."""
        channel = Channel(self._connection, _decoder, self._deadlines.send_s)
        while True:
            message = channel.receive(self._deadlines.silence_s)
            if isinstance(message, Hello):
                raise Violation("a second hello")
            if not isinstance(message, NoNews):
                received(message)

    def close(self) -> None:
        """End the connection. Any thread."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        shut(self._connection)


class Links:
    """The links of one node, for one start. Thread-safe.

    Of two connections of one node the later one stays: after a restart of the node the earlier one may look alive for a
    while.
    """

    def __init__(self, secret: Secret, me: Hello, handler: Handler, deadlines: Deadlines | None = None) -> None:
        self.secret, self.me = secret, me
        self._handler, self._deadlines = handler, deadlines or Deadlines()
        self._lock = threading.RLock()
        """Held while the handler is called, so that nothing of an earlier connection comes behind a later one."""
        self._peers: dict[int, _Peer] = {}
        self._down: set[int] = set()
        """Nodes of which it was logged that they are not reached."""
        self._threads = Threads()
        self._is_closed = threading.Event()

    def connect(self, node: int, host: str, port: int) -> None:
        """Keep a link to that node from now on. Raises: ConfigError, if that node must connect to this one."""
        if node >= self.me.node:
            raise ConfigError(f"node {self.me.node} cannot connect to node {node}: the greater number connects")
        self._threads.start(lambda: self._keep_up(node, (host, port)), _THREAD)

    def serve(self, connection: socket.socket, hello: Hello, address: str) -> None:
        """Use the connection of a node that has proven itself and sent ``hello``. Blocks: until it fails.

        Raises: Violation, if it belongs to another job or start; OSError.
        """
        with self._lock:
            if self._is_closed.is_set():
                return
            threading.current_thread().name = _THREAD
            self._threads.add(threading.current_thread())  # ``close`` waits for it
        self._check(hello)
        Channel(connection, _decoder, self._deadlines.send_s).send(self.me)
        self._use(hello.node, connection, address)

    def send(self, node: int, message: Message) -> None:
        """Send soon, if the link is up; else it is dropped, ``link_is_up`` asks for the state. Never blocks."""
        with self._lock:
            if (peer := self._peers.get(node)) is not None:
                peer.put(message)

    def close(self) -> None:
        """End all links. Blocks: for a moment."""
        with self._lock:
            self._is_closed.set()
            peers = list(self._peers.values())
        for peer in peers:
            peer.close()
        self._threads.join(_CLOSE_S)

    def _check(self, hello: Hello) -> None:
        me = self.me
        if (hello.job, hello.start) != (me.job, me.start):
            raise Violation(f"start {hello.start} of job {hello.job!r}, expected start {me.start} of job {me.job!r}")

    def _keep_up(self, node: int, address: tuple[str, int]) -> None:
        pause_s = 0.0
        while not self._is_closed.wait(pause_s * _draws.uniform(0.5, 1.0)):
            pause_s = min(max(2 * pause_s, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S)
            where = f"{address[0]}:{address[1]}"
            try:
                connection = self._dial(node, address)
            except (OSError, EOFError, Violation) as error:
                self._say_down(node, where, error)
                continue
            pause_s = 0.0
            with closing(connection):
                self._use(node, connection, where)

    def _dial(self, node: int, address: tuple[str, int]) -> socket.socket:
        timeout_s = self._deadlines.connect_s
        connection = connect(address, self.secret, timeout_s)
        try:
            channel = Channel(connection, _decoder, timeout_s)
            channel.send(self.me)
            hello = channel.receive(timeout_s)
            if not isinstance(hello, Hello):
                raise Violation("a message before the hello")
            self._check(hello)
            if hello.node != node:
                raise Violation(f"node {hello.node}, expected node {node}")
        except BaseException:
            connection.close()
            raise
        return connection

    def _use(self, node: int, connection: socket.socket, address: str) -> None:
        """Exchange messages with a node until the link fails."""
        peer = _Peer(connection, address, self._deadlines)
        with self._lock:
            if self._is_closed.is_set():
                return
            if (earlier := self._peers.get(node)) is not None:
                earlier.close()
            self._peers[node] = peer
            if node in self._down:
                self._down.discard(node)
                logger.info("links: node %d (%s) is back", node, address)
            self._handler.link_is_up(node)
            sender = self._threads.start(peer.send_all, _THREAD)
        error: Exception | None = None
        try:
            peer.receive_all(lambda message: self._received(node, peer, message))
        except (OSError, EOFError, Violation) as failure:
            error = failure
        finally:
            peer.close()
            sender.join()
            with self._lock:
                if self._peers.get(node) is peer:
                    del self._peers[node]
                    if error is not None and not self._is_closed.is_set():
                        self._say_down(node, address, peer.failure or error)
                        self._handler.link_is_down(node)

    def _received(self, node: int, peer: _Peer, message: Message) -> None:
        with self._lock:
            if self._peers.get(node) is peer:
                self._handler.received(node, message)

    def _say_down(self, node: int, address: str, error: BaseException) -> None:
        """Log it once until it is up again."""
        with self._lock:
            if node not in self._down and not self._is_closed.is_set():
                self._down.add(node)
                logger.warning("links: node %d (%s) is not reached: %s; trying again", node, address, reason(error))
