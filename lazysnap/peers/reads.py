"""Answers to reads: the bytes of a source, with their checksum, made on threads beside the keeper's loop."""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import xxhash

from lazysnap.errors import LazySnapError
from lazysnap.levels.source import BlockSource
from lazysnap.peers.messages import MAX_TEXT, Block, NotYet, Read, Refusal, Subject

logger = logging.getLogger(__name__)

NUM_THREADS = 2
_THREAD = "lazysnap-peer-reads"
Result = TypeVar("Result")


@dataclass(frozen=True)
class OpenedSource:
    """What a keeper lets others read, once it was opened."""

    data: BlockSource
    """The bytes. It never waits: where bytes are missing it raises NotYet."""
    identity: int
    """Number of the captures that are read. Another one: other captures of the same step."""
    check: Callable[[], object]
    """Checks that all that was viewed so far is of these captures. Raises: CaptureAborted."""


class ServedSources(Protocol):
    """What a keeper lets others read. Thread-safe."""

    def open(self, subject: Subject) -> OpenedSource:
        """Return the source. Raises: NotYet; LazySnapError or OSError, if there is none: the reader gets the text."""
        ...

    def forget(self, subject: Subject) -> None:
        """Open this anew the next time: reading it failed."""
        ...


Answered = tuple[Block | Refusal, memoryview | None]
"""An answer, and the bytes behind it."""


def answer_read(sources: ServedSources, read: Read) -> Answered:
    """Return the answer to a read. Blocks: while the bytes are read from memory. Never raises."""
    try:
        return _read(sources.open(read.subject), read)
    except NotYet as error:
        return Refusal(str(error)[:MAX_TEXT], is_not_yet=True), None
    except (LazySnapError, OSError) as error:
        sources.forget(read.subject)
        return Refusal(str(error)[:MAX_TEXT]), None
    except Exception as error:  # a read must not end the keeper
        logger.exception("peers: a read of %s failed", read.subject)
        sources.forget(read.subject)
        return Refusal(f"{type(error).__name__}: {error}"[:MAX_TEXT]), None


def _read(source: OpenedSource, read: Read) -> Answered:
    data = source.data
    stop = read.offset + read.length
    if stop > data.size_bytes:
        text = f"bytes [{read.offset}, {stop}) of {read.subject}, which has {data.size_bytes}"
        return Refusal(text[:MAX_TEXT]), None
    if read.length and stop == data.size_bytes:
        data.finish()
    payload = memoryview(b"")
    if read.length:
        payload = data.view(read.offset, read.length)[: read.length]
    checksum = xxhash.xxh3_64_intdigest(payload)
    # Behind the checksum: a capture that was written over meanwhile is not answered with the checksum of a mixture.
    source.check()
    return Block(read.length, checksum, data.size_bytes, source.identity), payload


class ReadThreads:
    """A few daemon threads that do work for the loop. Not ``ThreadPoolExecutor``: the interpreter joins its threads at
    exit, and a source that hangs would keep the process alive.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._work: queue.SimpleQueue[tuple[Callable[[], Any], asyncio.Future[Any]] | None] = queue.SimpleQueue()
        self._num_threads = 0
        self._is_closed = False

    def run(self, work: Callable[[], Result]) -> "asyncio.Future[Result]":
        """Return a future of what ``work`` returns. If it is cancelled before its turn, the work is not done.

        Raises: ConnectionAbortedError, after ``close``: nothing would end a thread that is started then.
        """
        if self._is_closed:
            raise ConnectionAbortedError("this keeper serves no reads any more")
        future: asyncio.Future[Result] = self._loop.create_future()
        if self._num_threads < NUM_THREADS:
            self._num_threads += 1
            threading.Thread(target=self._run, name=_THREAD, daemon=True).start()
        self._work.put((work, future))
        return future

    def close(self) -> None:
        """End the threads when their work has ended, whenever that is."""
        self._is_closed = True
        for _ in range(self._num_threads):
            self._work.put(None)
        self._num_threads = 0

    def _run(self) -> None:
        while True:
            item = self._work.get()
            if item is None:
                return
            self._do(*item)
            del item  # a view that is kept would keep memory mapped

    def _do(self, work: Callable[[], Any], future: "asyncio.Future[Any]") -> None:
        if future.cancelled():
            return
        try:
            set_outcome = future.set_result
            outcome = work()
        except Exception as error:  # noqa: BLE001  raised where the future is awaited
            set_outcome = future.set_exception
            outcome = error
        try:
            self._loop.call_soon_threadsafe(_settle, future, set_outcome, outcome)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return


def _settle(future: "asyncio.Future[Any]", set_outcome: Callable[[Any], None], outcome: Any) -> None:
    if not future.done():
        set_outcome(outcome)
