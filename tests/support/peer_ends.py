"""Keepers' ends of connections between nodes, in this process: ``Peers`` on a loop that runs in a thread."""

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable, Iterator
from typing import Any

from msgspec import structs

from lazysnap.core.actions import Event, PlainEvent
from lazysnap.core.messages import PeerAddress, PeerSettings
from lazysnap.memory.capture_reader import CaptureAborted
from lazysnap.peers.listener import Deadlines, ReservedPort
from lazysnap.peers.messages import Subject
from lazysnap.peers.reads import OpenedSource
from lazysnap.peers.server import Peers
from support.waiting import TIMEOUT_S, until

QUICK = Deadlines(connect_s=60.0, send_s=60.0, alive_s=0.2, silence_s=60.0, idle_s=60.0)
"""Messages follow fast; nothing fails by time, except what a test has shortened."""
HOST = "127.0.0.1"


class LoopThread:
    """An asyncio loop that runs in a thread, as a keeper's does."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.errors: list[dict[str, Any]] = []
        """Errors that would end a keeper."""
        self.loop.set_exception_handler(lambda loop, context: self.errors.append(context))
        self._thread = threading.Thread(target=self.loop.run_forever, name="test-loop", daemon=True)
        self._thread.start()

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """Call something on the loop, and return what it returns."""

        async def work() -> Any:
            return function(*args)

        return asyncio.run_coroutine_threadsafe(work(), self.loop).result(TIMEOUT_S)

    def wait_tasks(self) -> None:
        """Block until all tasks of the loop have ended."""
        asyncio.run_coroutine_threadsafe(_others_end(), self.loop).result(TIMEOUT_S)

    def close(self) -> None:
        """End the loop, once all of its tasks have ended."""
        self.wait_tasks()
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(TIMEOUT_S)
        self.loop.close()
        assert not self.errors, str(self.errors)


async def _others_end() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    if tasks:
        await asyncio.wait(tasks)
    for _ in range(3):  # transports close their sockets in the turns behind
        await asyncio.sleep(0)


class Inbox:
    """Keeps what happens, for a test to wait for."""

    def __init__(self) -> None:
        self.events: queue.Queue[Event] = queue.Queue()
        self.is_serving = threading.Event()

    def handle(self, event: Event) -> None:
        if event is PlainEvent.PEERS_LISTENING:
            self.is_serving.set()
        else:
            self.events.put(event)

    def next(self) -> Event:
        return self.events.get(timeout=TIMEOUT_S)

    def until(self, event: Event) -> None:
        """Wait for an event; what comes before is dropped."""
        while self.next() != event:
            pass


class Table:
    """Sources by what they are of."""

    def __init__(self, sources: dict[Subject, Any] | None = None) -> None:
        self.sources = sources or {}
        self.opened: list[Subject] = []
        self.forgotten: list[Subject] = []

    def open(self, what: Subject) -> OpenedSource:
        self.opened.append(what)
        if what not in self.sources:
            raise CaptureAborted(f"there is no {what}")
        source = self.sources[what]
        return OpenedSource(source, source.identity, source.check)

    def forget(self, what: Subject) -> None:
        self.forgotten.append(what)


class End:
    """One keeper's end."""

    def __init__(self, thread: LoopThread, sources: Any = None, deadlines: Deadlines = QUICK) -> None:
        self._thread = thread
        self.inbox = Inbox()
        self.peers: Peers = thread.call(Peers, thread.loop, self.inbox.handle, sources or Table(), deadlines)

    def begin(self, settings: PeerSettings, node: int) -> "End":
        self._thread.call(self.peers.begin, structs.replace(settings, node=node))
        if settings.addresses[node].port:
            assert self.inbox.is_serving.wait(TIMEOUT_S)
        return self

    def send(self, node: int, message: Any) -> None:
        self._thread.call(self.peers.send, node, message)

    def linked_nodes(self) -> set[int]:
        """Return the nodes to which there is a link. On the loop."""
        links = self.peers._links
        if links is None:
            return set()
        return set(links._links)

    def wait_down(self, node: int) -> None:
        until(lambda: node not in self._thread.call(self.linked_nodes))

    def close(self) -> None:
        self._thread.call(self.peers.close)


@contextlib.contextmanager
def ports(count: int) -> Iterator[list[int]]:
    """Yield ports that nobody else gets."""
    with contextlib.ExitStack() as stack:
        reserved = [ReservedPort(HOST) for _ in range(count)]
        for port in reserved:
            stack.callback(port.release)
        yield [port.number for port in reserved]


def settings_of(secret: str, numbers: list[int], job: str = "job") -> PeerSettings:
    """Return the settings of nodes that serve at these ports; 0: that node does not serve."""
    addresses = [PeerAddress(HOST, port) for port in numbers]
    return PeerSettings(job, 0, secret, tuple(addresses))
