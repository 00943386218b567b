"""Serves reads of a keeper's memory: the bytes of a source, with their checksum. Each reader has its own thread."""

import asyncio
import contextlib
import functools
import logging
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import xxhash
from msgspec import msgpack

from lazysnap.errors import LazySnapError
from lazysnap.levels.source import BlockSource
from lazysnap.peers.listener import Deadlines
from lazysnap.peers.messages import MAX_TEXT, Block, NotYet, Read, Refusal, Request, Subject
from lazysnap.peers.wire import FAILURES, Violation, frame, receive_message

logger = logging.getLogger(__name__)

_THREAD = "lazysnap-peer-reads"
_PIECE_BYTES = 1 << 18
"""Bytes that a reader must receive within the deadline, or it is dropped."""
_NOTHING = memoryview(b"")
_decoder: "msgpack.Decoder[Request]" = msgpack.Decoder(Request)


@dataclass(frozen=True)
class OpenedSource:
    """An open source that a keeper serves to others."""

    data: BlockSource
    """The bytes. Never waits: raises NotYet if bytes are missing."""
    identity: int
    """Identifies the captures. Another number means other captures of the same step."""
    check: Callable[[], object]
    """Checks that all viewed bytes are of these captures. Raises: CaptureAborted."""


class ServedSources(Protocol):
    """The sources that a keeper serves to others. Thread-safe."""

    def open(self, subject: Subject) -> OpenedSource:
        """Return the source. Raises: NotYet; LazySnapError or OSError, if there is none; the reader receives the
        text.
        """
        ...

    def forget(self, subject: Subject) -> None:
        """Open the source again next time, because reading it failed."""
        ...


async def serve_reads(connection: socket.socket, sources: ServedSources, read: Read, deadlines: Deadlines) -> None:
    """Answer this read and the following ones, until the connection ends. Raises: one of ``wire.FAILURES``.

    It runs on a daemon thread. The interpreter joins threads of ``ThreadPoolExecutor`` at exit, and a source that hangs
    would keep the process alive.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()
    work = functools.partial(_serve, connection, sources, read, deadlines)
    thread = threading.Thread(target=_run, args=(work, loop, ended), name=_THREAD, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:  # no thread can be started
        raise ConnectionAbortedError(str(error)) from error
    await ended


def _run(work: Callable[[], None], loop: asyncio.AbstractEventLoop, ended: "asyncio.Future[None]") -> None:
    failure: Exception = EOFError()
    try:
        work()
    except FAILURES as error:
        failure = error.with_traceback(None)  # its frames reference a slot, which would be kept alive
    except Exception as error:  # a reader must not end the keeper
        logger.exception("peers: a reader cannot be served")
        failure = ConnectionAbortedError(str(error))
    with contextlib.suppress(RuntimeError):  # the loop is closed: nothing waits for the result
        loop.call_soon_threadsafe(_fail, ended, failure)


def _fail(ended: "asyncio.Future[None]", error: BaseException) -> None:
    if not ended.done():
        ended.set_exception(error)


def _serve(connection: socket.socket, sources: ServedSources, read: Read, deadlines: Deadlines) -> None:
    """Answer reads. Blocks: until the connection ends. Raises: one of ``wire.FAILURES``."""
    while True:
        _answer(connection, sources, read, deadlines.send_s)
        message = receive_message(connection, _decoder, deadlines.idle_s)
        if not isinstance(message, Read):
            raise Violation(f"{type(message).__name__} instead of a read")
        read = message


def _answer(connection: socket.socket, sources: ServedSources, read: Read, send_s: float) -> None:
    answer, payload = _answer_of(sources, read)
    if isinstance(answer, Refusal) and not answer.is_not_yet:
        logger.debug("peers: a read failed: %s", answer.text)
    connection.settimeout(send_s)
    connection.sendall(frame(answer))
    for start in range(0, len(payload), _PIECE_BYTES):
        connection.sendall(payload[start : start + _PIECE_BYTES])


def _answer_of(sources: ServedSources, read: Read) -> tuple[Block | Refusal, memoryview]:
    """Return the answer to a read, and the bytes after it."""
    try:
        return _read(sources.open(read.subject), read)
    except NotYet as error:
        return Refusal(str(error)[:MAX_TEXT], is_not_yet=True), _NOTHING
    except (LazySnapError, OSError) as error:
        sources.forget(read.subject)
        return Refusal(str(error)[:MAX_TEXT]), _NOTHING
    except Exception as error:  # a read must not end the keeper
        logger.exception("peers: a read of %s failed", read.subject)
        sources.forget(read.subject)
        return Refusal(f"{type(error).__name__}: {error}"[:MAX_TEXT]), _NOTHING


def _read(source: OpenedSource, read: Read) -> tuple[Block | Refusal, memoryview]:
    data = source.data
    stop = read.offset + read.length
    if stop > data.size_bytes:
        text = f"bytes [{read.offset}, {stop}) of {read.subject}, which has {data.size_bytes}"
        return Refusal(text[:MAX_TEXT]), _NOTHING
    if read.length and stop == data.size_bytes:
        data.finish()
    payload = _NOTHING
    if read.length:
        payload = data.view(read.offset, read.length)[: read.length]
    checksum = xxhash.xxh3_64_intdigest(payload)
    # After the checksum, so that a capture that was overwritten meanwhile is never sent with the checksum of mixed
    # bytes.
    source.check()
    return Block(read.length, checksum, data.size_bytes, source.identity), payload
