"""The state of a trainer that outlives its keeper: a keeper may die at any moment, and the next one must get it."""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

import msgspec

from lazysnap.errors import FormatError
from lazysnap.events import Complete, Protected
from lazysnap.keeper import protocol
from lazysnap.keeper.client_slots import MappedSlots
from lazysnap.keeper.events import DurableSteps, KeeperEvent
from lazysnap.keeper.held import LevelStatus
from lazysnap.keeper.messages import Connection
from lazysnap.links.listener import ReservedPort

logger = logging.getLogger(__name__)

_JOIN_S = 5.0
"""Wait so long at most for threads that populate slots."""


class TrainerState:
    """Slots, facts that each keeper gets when it is reached, and events that nobody read yet. Thread-safe."""

    def __init__(self, on_notice: Callable[[], None]) -> None:
        """``on_notice``: called when the keeper says that this process is about to be killed."""
        self._on_notice = on_notice
        self.lock = threading.Condition()
        """Notified when anything here or the connection changes. May be taken again by the thread that holds it."""
        self.slots = MappedSlots(self.lock)
        """Used under ``lock``."""
        self.durable = DurableSteps()
        """Used under ``lock``."""
        self.port: ReservedPort | None = None
        """The port for the keepers of this node."""
        self.serving: protocol.ServePeers | None = None
        """The address at which a keeper serves other nodes."""
        self.run: protocol.Run | None = None
        """The run that is captured. ``is_new`` until a keeper got it."""
        self.names: list[protocol.Store | protocol.Release] = []
        """Names given and released since the run began, in order: those that still hold, and the last releases."""
        self.ending: protocol.Leave | None = None
        """The notice that this process is about to be killed."""
        self.wanted: protocol.Reserve | None = None
        """The slots that captures need."""
        self._newest_held = 0
        """The greatest sequence number that a keeper held when this process came to it."""
        self.status = protocol.Status()
        """The last status that a keeper sent."""
        self._events: deque[KeeperEvent] = deque()

    # ---------------------------------------------------------------- what a keeper gets

    def hand_over(self, connection: Connection) -> None:
        """Give a keeper, before it even runs, the slots that an earlier one left to this process."""
        with self.lock:
            orphans, run = self.slots.orphans(), self.run
        for digest, slot in orphans:
            connection.send(protocol.HandOver(slot=digest), (slot.fd,))
        if run is not None and not run.is_new:  # else it would not know the owner of its captures if this one dies
            connection.send(run)

    def for_new_keeper(self) -> list[protocol.Message]:
        """Return the facts for a keeper that was just reached, in order."""
        with self.lock:
            if self.run is not None and self.run.is_new:
                self.run = msgspec.structs.replace(self.run, floor=self.newest_sequence())
            told = self.serving, self.run, *self.names, self.ending, self.wanted
            facts = [one for one in told if one is not None]
            self.run_was_told()
            return list[protocol.Message](facts)

    def run_was_told(self) -> None:
        """Note that a keeper got the run: the next one does not begin it, but takes it over."""
        with self.lock:
            if self.run is not None:
                self.run = msgspec.structs.replace(self.run, is_new=False)

    def adopt_run(self, run: protocol.Run) -> protocol.Run:
        """Take the run that is captured from now on; return it with its ``floor``.

        What earlier starts got to storage, or protected, does not count any more.
        """
        with self.lock:
            self.durable, self.names = DurableSteps(), []
            self.run = msgspec.structs.replace(run, floor=self.newest_sequence())
            self._events = deque(event for event in self._events if not isinstance(event, Complete | Protected))
            return self.run

    def newest_sequence(self) -> int:
        """The greatest sequence number of any capture that the keeper holds, also in slots of another size."""
        with self.lock:  # the welcome lists what is held; the slots come later
            return max(self._newest_held, self.slots.newest_sequence())

    # ---------------------------------------------------------------- what a keeper says

    def take(self, message: protocol.Message, fds: tuple[int, ...]) -> None:
        """Act on a message, with its descriptors."""
        with self.lock:
            match message:
                case protocol.Welcome():
                    self._newest_held = max(self._newest_held, message.newest)
                case protocol.HandOver(slot=str() | int() as name):
                    self._map(name, fds[0])
                case protocol.Return(slot=str(digest)):
                    self.slots.drop(digest)
                case protocol.Status():
                    self._events.extend(self._news(message))
                case protocol.MemoryRefused(id=0):
                    self._events.append(message)

    def _map(self, name: protocol.SlotName, fd: int) -> None:
        """Map a slot. One for captures that cannot be mapped is memory that was refused: nothing goes into it."""
        try:
            self.slots.map(name, fd)
        except (FormatError, OSError) as error:
            text = f"a slot of the keeper cannot be mapped: {error}"
            if isinstance(name, int):
                self._events.append(protocol.MemoryRefused(text=text))
            else:
                logger.warning("%s", text)

    def _news(self, status: protocol.Status) -> Iterator[KeeperEvent]:
        """Yield what a status says that the last one did not. Of an earlier start only errors of the keeper count."""
        before, self.status = self.status, status
        yield from (alert for alert in status.alerts if alert.about == "keeper" and alert not in before.alerts)
        if self.run is None or status.start != self.run.start:
            return
        if before.start != status.start:
            before = protocol.Status(status.start)
        for url, level in status.levels.items():
            known = before.levels.get(url, LevelStatus())
            if level.failed is not None and level.failed != known.failed:
                yield level.failed
            if level.stored is not None and level.stored != known.stored:
                yield level.stored
            if steps := self.durable.add(url, level.complete):
                yield Complete(t=level.complete_at, level=url, steps=steps, start=status.start)
        if status.protected != before.protected:
            yield Protected(t=time.time(), step=status.protected, start=status.start)
        yield from (failed for failed in status.names if failed not in before.names)
        yield from (alert for alert in status.alerts if alert.about != "keeper" and alert not in before.alerts)
        if status.is_ending and not before.is_ending:
            self._on_notice()

    def say(self, event: KeeperEvent) -> None:
        """Add an event for the training thread."""
        with self.lock:
            self._events.append(event)
            self.lock.notify_all()

    def poll_events(self) -> list[KeeperEvent]:
        """Return the events since the last call."""
        with self.lock:
            events, self._events = list(self._events), deque()
            return events

    # ---------------------------------------------------------------- ending

    def release_port(self) -> None:
        """Let go of the port. May be called again."""
        if self.port is not None:
            self.port.release()

    def release(self) -> None:
        """Let go of port and slots: nobody uses them any more. Blocks: at most ``_JOIN_S``."""
        self.release_port()
        with self.lock:
            slots = self.slots.take_all()
        for slot in slots:
            slot.close()
        self.slots.join(_JOIN_S)
