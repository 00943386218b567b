"""Links between the keepers of a start: the newest state of each sender.

Node 0 accepts links at the port where others read its memory; every other node connects to it. Each message is the
whole state of its sender (``core.messages``), so only the newest one of each kind waits to be sent: a peer that reads
slowly costs no memory. Every wait has a deadline.
"""

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Callable

from msgspec import msgpack

from lazysnap.core.actions import Event, PlainEvent
from lazysnap.core.messages import COORDINATOR_NODE, Report
from lazysnap.peers.listener import Deadlines
from lazysnap.peers.messages import Hello, LinkMessage, StateMessage
from lazysnap.peers.streams import Stream
from lazysnap.peers.wire import FAILURES, TIMEOUTS, Violation, reason

logger = logging.getLogger(__name__)

_draws = random.SystemRandom()
"""The global generators are the training's."""
_SHORTEST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 10.0
"""Seconds between two attempts to connect: the pause doubles from the first to the second value."""
_decoder: "msgpack.Decoder[LinkMessage]" = msgpack.Decoder(LinkMessage)


class _Link:
    """One connection to another node, with its pending messages."""

    def __init__(self, stream: Stream, address: str, me: Hello) -> None:
        """``me``: sent as a heartbeat when nothing else is sent."""
        self.stream = stream
        self._me = me
        self.address = address
        self.failure: BaseException | None = None
        """The error that ended sending."""
        self._waiting: dict[type, StateMessage] = {}
        """The newest unsent message of each kind."""
        self._changed = asyncio.Event()

    def put(self, message: StateMessage) -> None:
        """Queue a message; it replaces an unsent one of the same kind."""
        self._waiting[type(message)] = message
        self._changed.set()

    async def send_all(self, alive_s: float) -> None:
        """Send queued messages until the connection ends. Ends the connection if it cannot send."""
        try:
            while True:
                await self._wait_for_message(alive_s)
                messages: list[LinkMessage] = list(self._waiting.values())
                self._waiting.clear()
                if not messages:
                    messages.append(self._me)
                for message in messages:
                    await self.stream.send(message)
        except FAILURES as error:
            self.failure = error
            self.stream.close()

    async def _wait_for_message(self, alive_s: float) -> None:
        with contextlib.suppress(*TIMEOUTS):
            await asyncio.wait_for(self._changed.wait(), alive_s)
        self._changed.clear()


class Links:
    """The links of one node, for one start. On the loop's thread.

    Of two connections of one node the later one is kept: after a restart of the node the earlier one may seem alive for
    a while.
    """

    def __init__(
        self, secret: str, me: Hello, num_nodes: int, handle: Callable[[Event], None], deadlines: Deadlines
    ) -> None:
        """Begin without any link.

        Args:
            secret: the secret of the start.
            me: this node.
            num_nodes: nodes of the start.
            handle: receives new links and the messages of other nodes. It must return at once. Nothing of an earlier
                connection of a node comes after a later one.
            deadlines: limits of each wait.
        """
        self._secret = secret
        self._me = me
        self._num_nodes = num_nodes
        self._handle = handle
        self._deadlines = deadlines
        self._links: dict[int, _Link] = {}
        self._down: set[int] = set()
        """Nodes that were logged as unreachable."""
        self._is_closed = False

    def send(self, node: int, message: StateMessage) -> None:
        """Queue a message if there is a link, else drop it: a new link requests the state. Never blocks."""
        link = self._links.get(node)
        if link is not None:
            link.put(message)

    def close(self) -> None:
        """End all links. Their tasks end by themselves."""
        self._is_closed = True
        for link in self._links.values():
            link.stream.close()

    async def serve(self, stream: Stream, hello: Hello, address: str) -> None:
        """Use the connection of an authenticated node that sent ``hello``, until it fails.

        Raises: Violation, if it belongs to another job, or connects to the wrong node; OSError; EOFError.
        """
        self._check(hello)
        if self._me.node != COORDINATOR_NODE or not 0 < hello.node < self._num_nodes:
            raise Violation(f"node {hello.node} wants a link to node {self._me.node}; all nodes connect to node 0")
        await stream.send(self._me)
        await self._use(hello.node, stream, address)

    async def keep_up(self, node: int, host: str, port: int) -> None:
        """Keep a link to that node, until cancelled."""
        address = f"{host}:{port}"
        pause_s = 0.0
        while not self._is_closed:
            await asyncio.sleep(pause_s * _draws.uniform(0.5, 1.0))
            pause_s = min(max(2 * pause_s, _SHORTEST_PAUSE_S), _LONGEST_PAUSE_S)
            try:
                stream = await self._connect(node, host, port)
            except FAILURES as error:
                self._become_down(node, address, error)
                continue
            linked_at = time.monotonic()
            await self._use(node, stream, address)
            # The other end may drop each link at once, because of the messages.
            if time.monotonic() - linked_at > _LONGEST_PAUSE_S:
                pause_s = 0.0

    async def _connect(self, node: int, host: str, port: int) -> Stream:
        stream = await Stream.connect((host, port), self._secret, self._deadlines)
        try:
            await stream.send(self._me)
            hello = await stream.receive(_decoder, self._deadlines.connect_s)
            if not isinstance(hello, Hello):
                raise Violation("a message before the hello")
            self._check(hello)
            if hello.node != node:
                raise Violation(f"node {hello.node}, expected node {node}")
        except BaseException:
            stream.close()
            raise
        return stream

    def _check(self, hello: Hello) -> None:
        if hello.job != self._me.job:
            raise Violation(f"job {hello.job!r}, expected job {self._me.job!r}")

    async def _use(self, node: int, stream: Stream, address: str) -> None:
        """Exchange messages with a node until the link fails."""
        if self._is_closed:  # ``wait_for`` of Python 3.10 and 3.11 may lose the cancellation, and return the result
            stream.close()
            return
        link = _Link(stream, address, self._me)
        earlier = self._links.get(node)
        if earlier is not None:
            earlier.stream.close()
        self._links[node] = link
        self._become_up(node, address)
        sender = asyncio.get_running_loop().create_task(link.send_all(self._deadlines.alive_s))
        try:
            self._handle(PlainEvent.PEER_UP)
            await self._receive_all(node, link)
        except FAILURES as error:
            if self._links.get(node) is link:
                self._become_down(node, address, link.failure or error)
        finally:
            stream.close()
            sender.cancel()
            if self._links.get(node) is link:
                del self._links[node]

    async def _receive_all(self, node: int, link: _Link) -> None:
        while True:
            message = await link.stream.receive(_decoder, self._deadlines.silence_s)
            if isinstance(message, Hello):
                continue
            if isinstance(message, Report) and message.node != node:
                raise Violation(f"a report of node {message.node}, expected node {node}")
            is_newest = self._links.get(node) is link and not self._is_closed
            if is_newest:
                self._handle(message)

    def _become_up(self, node: int, address: str) -> None:
        if node in self._down:
            self._down.discard(node)
            logger.info("links: node %d (%s) is back", node, address)

    def _become_down(self, node: int, address: str, error: BaseException) -> None:
        """Log an unreachable node, once until it is connected again."""
        if node not in self._down and not self._is_closed:
            self._down.add(node)
            logger.warning("links: node %d (%s) is not reached: %s; trying again", node, address, reason(error))
