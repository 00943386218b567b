"""A keeper's connections to the other nodes of its start: links between keepers, and reads of this node's memory.

Both use one port. The first message of a connection decides its purpose: a ``Hello`` begins a link (``peers.links``), a
``Read`` begins reads. Everything runs on the keeper's asyncio loop, except reads: each reader has its own thread
(``peers.reads``).
"""

import asyncio
import functools
import logging
import socket
from collections.abc import Callable, Coroutine
from typing import Any

from msgspec import msgpack

from lazysnap.core.actions import Event, PlainEvent
from lazysnap.core.messages import COORDINATOR_NODE, PeerAddress, PeerSettings
from lazysnap.errors import ConfigError
from lazysnap.peers.links import Links
from lazysnap.peers.listener import ConnectionLimit, Deadlines, listener_at
from lazysnap.peers.messages import Hello, Read, Request, StateMessage
from lazysnap.peers.reads import ServedSources, serve_reads
from lazysnap.peers.streams import Stream
from lazysnap.peers.wire import FAILURES, Violation, reason

logger = logging.getLogger(__name__)

_PORT_AGAIN_S = 0.1
"""Seconds between two attempts to use a port that is taken."""
_ACCEPT_AGAIN_S = 1.0
"""Seconds until connections are accepted again after a failure, such as a lack of descriptors."""
_decoder: "msgpack.Decoder[Request]" = msgpack.Decoder(Request)


class Peers:
    """All connections of a keeper to other processes of the current start. All calls are made on the loop.

    Example::

        peers = Peers(loop, handle, sources)
        peers.begin(settings)  # ``PlainEvent.PEER_UP`` follows
        peers.send(0, report)
        peers.close()
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        handle: Callable[[Event], None],
        sources: ServedSources,
        deadlines: Deadlines | None = None,
    ) -> None:
        """Begin without a start.

        Args:
            loop: the loop of the keeper.
            handle: receives the messages of other nodes, new links, and the event that others are served. It must
                return at once.
            sources: the sources that other nodes may read.
            deadlines: limits of each wait.
        """
        self._loop = loop
        self._handle = handle
        self._sources = sources
        self._deadlines = deadlines or Deadlines()
        self._settings: PeerSettings | None = None
        self._links: Links | None = None
        self._limit = ConnectionLimit()
        self._listener: socket.socket | None = None
        self._streams: set[Stream] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        """Tasks that are cancelled when the start ends."""
        self._conversations: set[asyncio.Task[None]] = set()
        """Tasks that end with their streams."""

    def begin(self, settings: PeerSettings) -> None:
        """Serve and connect to the nodes of a start from now on. Connections of an earlier start end.

        Does nothing if the settings are the same. Never raises: failures are logged and retried.
        """
        if settings == self._settings:
            return
        self._end_start()
        self._settings = settings
        me = Hello(settings.job, settings.node)
        self._links = Links(settings.secret, me, len(settings.addresses), self._handle, self._deadlines)
        own = settings.addresses[settings.node]
        if own.port:
            self._spawn(self._serve(own), self._tasks)
        first = settings.addresses[COORDINATOR_NODE]
        if settings.node != COORDINATOR_NODE and first.port:
            self._spawn(self._links.keep_up(COORDINATOR_NODE, first.host, first.port), self._tasks)

    def send(self, node: int, message: StateMessage) -> None:
        """Queue a message if there is a link, else drop it. It replaces an unsent message."""
        if self._links is not None:
            self._links.send(node, message)

    def close(self) -> None:
        """End all connections, and accept no more. Tasks that still use one fail, and close it."""
        self._end_start()

    # The start

    def _end_start(self) -> None:
        self._settings = None
        if self._links is not None:
            self._links.close()
        for task in self._tasks:
            task.cancel()
        self._tasks = set()
        for stream in self._streams:
            stream.close()
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
        self._listener = None
        self._streams = set()
        self._limit = ConnectionLimit()

    def _spawn(self, work: Coroutine[Any, Any, None], tasks: "set[asyncio.Task[None]]") -> None:
        task = self._loop.create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: "asyncio.Task[None]") -> None:
        """Let an unexpected error end the keeper, by the error handler of the loop."""
        if task.cancelled():
            return
        error = task.exception()
        if error is not None:
            self._loop.call_exception_handler({"message": "peers failed", "exception": error, "task": task})

    # Listening

    async def _serve(self, address: PeerAddress) -> None:
        """Accept connections from now on, or as soon as the port is free."""
        listener = await self._listen(address)
        if listener is None:
            return
        self._listener = listener
        self._loop.add_reader(listener, self._accept)
        self._handle(PlainEvent.PEERS_LISTENING)

    async def _listen(self, address: PeerAddress) -> socket.socket | None:
        """Return the listener once the port is free; None if that is impossible.

        The previous keeper may just be releasing the port. A lasting failure is logged once.
        """
        warn_at = self._loop.time() + self._deadlines.port_warning_s
        is_logged = False
        while True:
            try:
                return listener_at(address.host, address.port)
            except ConfigError as error:
                logger.warning("other nodes cannot reach this keeper: %s", error)
                return None
            except OSError as error:
                if self._loop.time() >= warn_at and not is_logged:
                    is_logged = True
                    text = "other nodes cannot reach this keeper: %s:%d: %s; trying again"
                    logger.warning(text, address.host, address.port, error)
            await asyncio.sleep(_PORT_AGAIN_S)

    def _accept(self) -> None:
        """Accept a waiting connection. A callback, because a cancelled task could lose a connection."""
        if self._listener is None or self._settings is None:
            return
        try:
            connection, (host, port, *_) = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return  # the client is gone
        except OSError as error:
            logger.warning("peers: a connection cannot be accepted: %s", error)
            self._loop.remove_reader(self._listener)
            self._loop.call_later(_ACCEPT_AGAIN_S, self._accept_again, self._listener)
            return
        if self._limit.enter():
            welcome = self._welcome(connection, (host, port), self._limit, self._settings)
            self._spawn(welcome, self._conversations)
        else:
            self._limit.refuse(f"{host}:{port}", host, Violation("there are too many connections"))
            connection.close()

    def _accept_again(self, listener: socket.socket) -> None:
        if self._listener is listener:
            self._loop.add_reader(listener, self._accept)

    async def _welcome(
        self, connection: socket.socket, remote: tuple[str, int], limit: ConnectionLimit, start: PeerSettings
    ) -> None:
        """Serve a connection of a start until it ends. Not cancelled: it ends when its stream is closed."""
        host = remote[0]
        address = f"{host}:{remote[1]}"
        is_known = False
        stream: Stream | None = None
        try:
            stream = Stream(connection, self._deadlines)
            self._streams.add(stream)
            if start is not self._settings:
                return  # it has ended
            await stream.authenticate(start.secret, is_server=True)
            is_known = True
            limit.leave()
            await self._converse(stream, address, limit)
        except Violation as error:
            limit.refuse(address, host, error)
        except FAILURES as error:
            if is_known or start is not self._settings:  # readers come and go
                logger.debug("peers: %s is gone: %s", address, reason(error))
            else:
                limit.refuse(address, host, error)
        finally:
            if not is_known:
                limit.leave()
            if stream is not None:
                stream.close()
                self._streams.discard(stream)

    # Conversations

    async def _converse(self, stream: Stream, address: str, limit: ConnectionLimit) -> None:
        message = await stream.receive(_decoder, self._deadlines.idle_s)
        if isinstance(message, Hello):
            assert self._links is not None
            await self._links.serve(stream, message, address)
            return
        if not isinstance(message, Read):
            raise Violation(f"{type(message).__name__} instead of a read")
        serve = functools.partial(serve_reads, sources=self._sources, read=message, deadlines=self._deadlines)
        with limit.reading():
            await stream.lend(serve)
