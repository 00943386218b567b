"""The keeper's main loop: connections, deaths and time on one thread; memory and storage on others."""

import logging
import os
import selectors
import signal
import socket
import threading
import time
from collections import deque

from lazysnap import faults
from lazysnap.arena import Check, Slot, SlotPhase, Word
from lazysnap.config import MemoryLevel, PersistentLevel
from lazysnap.errors import KeeperUnavailable, LazySnapError
from lazysnap.keeper.frozen import FrozenPool
from lazysnap.keeper.holdings import Holdings
from lazysnap.keeper.machine import START_GRACE_S, Event, Phase, next_phase
from lazysnap.keeper.memory import SlotPool
from lazysnap.keeper.messages import Connection, Message
from lazysnap.keeper.parts import Desk
from lazysnap.keeper.persist import Persister
from lazysnap.keeper.team import Team
from lazysnap.levels.belongings import Told

logger = logging.getLogger(__name__)

DRAIN_LIMIT_S = 3600.0
"""A keeper without a trainer leaves after so long even if a level still hangs."""
_TICK_S = 0.1


def run_keeper(address: str) -> int:
    """Serve one job until it is over. Returns the exit status: 1 if another keeper has the address already."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        listener.bind(address)
    except OSError:
        logger.info("another keeper serves this job already")
        return 1
    listener.listen(16)
    keeper = Keeper(listener)
    signal.signal(signal.SIGTERM, lambda *_: keeper.terminate())
    keeper.run()
    return 0


class Keeper:
    """One job's keeper. ``run`` returns when the job is over and nothing is left to do."""

    def __init__(self, listener: socket.socket) -> None:
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._phase = Phase.WAITING
        self._deadline = time.monotonic() + START_GRACE_S
        self._linger_s = 0.0
        self._trainer: Connection | None = None
        self._trainer_since = 0.0
        self._pidfd = -1
        self._pool = SlotPool(self._slot_made, self._slot_dropped)
        self._frozen = FrozenPool(lambda digest: self._emit({"type": "frozen_dropped", "digest": digest}))
        self._frozen_asked: deque[tuple[Connection, Message]] = deque()
        self._levels: tuple[PersistentLevel, ...] = ()
        self._team = Team()
        self._persister = self._make_persister()
        self._desk = Desk(lambda: self._persister, self._may_capture)
        self._holdings = Holdings(self._pool, self._frozen, lambda slot: self._persister.checksums_of(slot))
        self._max_bytes: int | None = None
        self._wanted: tuple[int, int, int] | None = None
        self._settled: tuple[int, int, int] | None = None
        self._memory_wake = threading.Event()
        self._drain_request: int | None = None
        self._terminated = False
        threading.Thread(target=self._provide_memory, name="memory", daemon=True).start()

    def _make_persister(self) -> Persister:
        return Persister(self._levels, self._pool.all, self._emit, self._frozen.get, self._team)

    # ---------------------------------------------------------------- main loop

    def run(self) -> None:
        """Block until the job is over."""
        while self._phase is not Phase.GONE:
            for key, _ in self._selector.select(_TICK_S):
                key.data()
            self._tick()
        self._persister.stop()
        self._drop_trainer()
        self._listener.close()

    def terminate(self) -> None:
        """SIGTERM: persist the newest capture, then leave."""
        self._terminated = True

    def _tick(self) -> None:
        if self._terminated:
            self._terminated = False
            self._go(Event.TERMINATE)
        self._memory_wake.set()
        self._desk.answer()
        self._frozen.sweep(self._pool.all(), is_attached=self._trainer is not None)
        if self._drain_request is not None and self._persister.is_drained():
            self._reply_drained()
        if self._phase is Phase.DRAINING and self._persister.is_drained():
            self._go(Event.DRAINED)
        if self._phase is not Phase.ATTACHED and time.monotonic() > self._deadline:
            self._go(Event.TIME_UP)

    def _may_capture(self) -> bool:
        return self._phase in (Phase.WAITING, Phase.ATTACHED)

    def _go(self, event: Event) -> None:
        before, self._phase = self._phase, next_phase(self._phase, event)
        if self._phase is before:
            return
        logger.info("%s -> %s on %s", before.value, self._phase.value, event.value)
        faults.point(f"keeper.{self._phase.name.lower()}")
        limit = self._linger_s if self._phase is Phase.LINGERING else DRAIN_LIMIT_S
        self._deadline = time.monotonic() + limit
        if before is Phase.LINGERING and self._phase is Phase.DRAINING:
            self._persister.try_again()  # a level that was away when the trainer died may be back
        # Of several ranks that died the newest capture that all have may be an older one: each writes what it has.
        many = self._team.world_size > 1 and Phase.LINGERING in (before, self._phase)
        force = len(self._pool.all()) if many else 1
        self._persister.set_force(force if self._phase in (Phase.LINGERING, Phase.DRAINING) else 0)

    # ---------------------------------------------------------------- connections

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:  # out of descriptors, or gone again: never the end of the keeper
            logger.warning("accept: %s", error)
            return
        try:
            connection = Connection(sock)
        except KeeperUnavailable as error:
            logger.warning("refused a connection: %s", error)
            return
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._read(connection))

    def _read(self, connection: Connection, *, wait: bool = True) -> None:
        if connection.is_closed:  # by an event just before, in the same round
            return
        try:
            messages = connection.receive(wait=wait)
        except (KeeperUnavailable, OSError) as error:
            logger.warning("closing a connection: %s", error)
            messages = None
        if messages is None:
            self._close(connection)
            return
        for message, fds in messages:
            is_taken = connection is self._trainer and message["type"] in ("adopt", "adopt_frozen")
            try:
                self._handle(connection, message, fds)
            except (KeyError, TypeError, ValueError, OSError, LazySnapError) as error:
                logger.warning("message %r: %s", message.get("type"), error)
            finally:
                for fd in () if is_taken else fds:  # nothing else comes with descriptors
                    os.close(fd)

    def _close(self, connection: Connection) -> None:
        if connection.is_closed:
            return
        self._selector.unregister(connection.sock)
        connection.close()
        if connection is self._trainer:
            self._trainer = None
            self._trainer_died()

    def _handle(self, connection: Connection, message: Message, fds: tuple[int, ...]) -> None:
        kind = message["type"]
        if kind == "hello":
            self._hello(connection, message)
        elif kind == "look":
            self._holdings.show(connection)
        elif kind == "is_done":
            connection.send(self._desk.known(message))
        elif kind in ("gather", "moving", "gathered"):
            self._desk.take(connection, message)
        elif connection is self._trainer:
            handler = getattr(self, f"_on_{kind}", None)
            if handler is None:
                raise ValueError("unknown")
            handler(message, fds)

    def _hello(self, connection: Connection, message: Message) -> None:
        if self._trainer is not None:
            connection.send({"type": "busy", "pid": self._trainer.peer_pid, "since": self._trainer_since})
            return
        if self._phase is Phase.DRAINING:
            connection.send({"type": "leaving", "pid": os.getpid()})
            return
        levels = tuple(PersistentLevel(**fields) for fields in message["levels"])
        memory = MemoryLevel(linger_s=message["linger_s"], max_bytes=message["max_bytes"])
        team = Team.from_fields(message["team"])
        self._linger_s, self._max_bytes = memory.linger_s, memory.max_bytes
        self._trainer, self._trainer_since = connection, time.time()
        self._watch(connection)
        faults.set_peer(connection.peer_pid)
        if (levels, team) != (self._levels, self._team):
            self._persister.stop()
            self._levels, self._team = levels, team
            self._persister = self._make_persister()
        self._settled = None
        self._go(Event.HELLO)
        connection.send({"type": "welcome", "pid": os.getpid()})
        for number, slot in self._pool.items():
            connection.send({"type": "slot", "slot": number}, (slot.fd,))
        for digest in self._frozen.digests():
            self._hand_over(digest)

    def _hand_over(self, digest: str) -> None:
        slot = dict(self._frozen.items()).get(digest)
        if slot is not None:
            self._emit({"type": "frozen_slot", "digest": digest}, (slot.fd,))

    def _watch(self, connection: Connection) -> None:
        """Notice the trainer's death even if a forked child of it still holds the socket."""
        try:
            self._pidfd = os.pidfd_open(connection.peer_pid)
        except OSError:  # it is dead already, or the kernel is too old: the end of the connection tells
            self._pidfd = -1
            return
        self._selector.register(self._pidfd, selectors.EVENT_READ, self._on_trainer_exit)

    def _on_trainer_exit(self) -> None:
        if self._trainer is not None:
            self._read(self._trainer, wait=False)  # its last words: a goodbye may be among them
        self._drop_trainer()

    def _drop_trainer(self) -> None:
        if self._trainer is not None:
            self._close(self._trainer)

    def _trainer_died(self) -> None:
        if self._pidfd >= 0:
            self._selector.unregister(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1
        self._drain_request = None
        for slot in self._pool.all():
            if slot.status().phase is SlotPhase.CAPTURING:
                slot.discard()
                slot.unpin()
            # No optimizer passed the gate that would have looked at a device's copies: the sources were as at the
            # boundary. Immutable tensors are compared by a trainer alone, and this one is dead.
            is_uncompared = slot.word(Word.UNCHECKED) & (Check.FROZEN | Check.ORPHANED)
            slot.set_word(Word.UNCHECKED, Check.ORPHANED if is_uncompared else 0)
            if is_uncompared:
                slot.unpin()
        faults.point("keeper.trainer_died")
        # An evaluation, or a trainer that fell before its first capture, left nothing that a restart could want.
        has_whole = any(slot.status().phase is SlotPhase.WHOLE for slot in self._pool.all())
        self._go(Event.TRAINER_DEAD if has_whole else Event.NOTHING_KEPT)

    # ---------------------------------------------------------------- messages of the trainer

    def _on_begun(self, message: Message, fds: tuple[int, ...]) -> None:
        self._persister.wake()

    def _on_reserve(self, message: Message, fds: tuple[int, ...]) -> None:
        self._wanted = (int(message["meta"]), int(message["image"]), int(message["count"]))
        self._settled = None  # what was there once may have been let go for other sizes meanwhile
        self._memory_wake.set()

    def _on_adopt(self, message: Message, fds: tuple[int, ...]) -> None:
        """A trainer outlived the keeper before: its slots, and the captures in them, are kept on."""
        for slot in Slot.attach_all(fds):
            inode = os.fstat(slot.fd).st_ino
            number = self._pool.adopt(slot)
            assert self._trainer is not None
            self._trainer.send({"type": "adopted", "slot": number, "inode": inode})
        self._persister.wake()

    def _on_frozen(self, message: Message, fds: tuple[int, ...]) -> None:
        assert self._trainer is not None
        self._frozen_asked.append((self._trainer, message))
        self._memory_wake.set()

    def _on_frozen_whole(self, message: Message, fds: tuple[int, ...]) -> None:
        self._persister.wake()

    def _on_adopt_frozen(self, message: Message, fds: tuple[int, ...]) -> None:
        slots = Slot.attach_all(fds)
        digest = str(message.get("digest"))
        for slot in slots:
            self._frozen.adopt(digest, slot)
            self._hand_over(digest)

    def _on_keep(self, message: Message, fds: tuple[int, ...]) -> None:
        name, sequence = str(message["name"]), int(message["sequence"])
        if not self._persister.keep(name, str(message["run_id"]), sequence):
            logger.warning("step %s is gone: it cannot be kept as %s", message["step"], name)

    def _on_release(self, message: Message, fds: tuple[int, ...]) -> None:
        self._persister.release(str(message["name"]), str(message["run_id"]))

    def _on_complete(self, message: Message, fds: tuple[int, ...]) -> None:
        steps, void = (tuple(map(int, message[name])) for name in ("steps", "void"))
        earlier = tuple((str(generation), int(step)) for generation, step in message["earlier"])
        told = Told(str(message["run_id"]), str(message["generation"]), steps, frozenset(void), earlier)
        self._persister.tell(str(message["level"]), told)

    def _on_inventory(self, message: Message, fds: tuple[int, ...]) -> None:
        assert self._trainer is not None
        self._trainer.send({"type": "inventory", "id": message["id"], **self._holdings.told()})

    def _on_drain(self, message: Message, fds: tuple[int, ...]) -> None:
        self._drain_request = int(message["id"])
        self._persister.try_again()  # whoever waits for a level that failed before wants to know how it is now
        self._persister.set_force(1)

    def _reply_drained(self) -> None:
        request, self._drain_request = self._drain_request, None
        self._persister.set_force(0)
        self._emit({"type": "drained", "id": request, "ok": self._persister.is_durable_everywhere()})

    def _on_goodbye(self, message: Message, fds: tuple[int, ...]) -> None:
        self._drain_request = None
        self._go(Event.GOODBYE)

    # ---------------------------------------------------------------- other threads

    def _emit(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        trainer = self._trainer
        if trainer is not None:
            try:
                trainer.send(message, fds)
            except OSError as error:  # it is dying: the main loop will notice
                logger.info("could not tell the trainer: %s", error)

    def _slot_made(self, number: int, slot: Slot) -> None:
        self._emit({"type": "slot", "slot": number}, (slot.fd,))

    def _slot_dropped(self, number: int) -> None:
        self._emit({"type": "dropped", "slot": number})

    def _provide_memory(self) -> None:
        while True:
            self._memory_wake.wait()
            self._memory_wake.clear()
            while self._frozen_asked:
                self._provide_frozen(*self._frozen_asked.popleft())
            wanted = self._wanted
            if wanted is None or wanted == self._settled or self._phase is not Phase.ATTACHED:
                continue
            bound = None if self._max_bytes is None else self._max_bytes - self._frozen.size_bytes
            try:
                if self._pool.provide(wanted, bound, lambda slot: self._persister.is_reading(slot)):
                    self._settled = wanted
            except LazySnapError as error:
                self._settled = wanted
                self._emit({"type": "memory_refused", "text": str(error)})
            except Exception:  # the rim of the thread
                logger.exception("memory")
                self._settled = wanted

    def _provide_frozen(self, trainer: Connection, message: Message) -> None:
        """Answer with a slot for immutable tensors. Another trainer than the one that asked needs no answer."""
        try:
            digest, meta, image = str(message["digest"]), int(message["meta"]), int(message["image"])
            free = None
            if self._max_bytes is not None:
                others = [slot.size_bytes for other, slot in self._frozen.items() if other != digest]
                free = self._max_bytes - sum(others) - self._capture_bytes()
            slot = self._frozen.provide(digest, meta, image, free)
            reply: Message = {"type": "frozen_slot", "id": message["id"], "digest": digest}
            fds: tuple[int, ...] = (slot.fd,)
        except Exception as error:  # noqa: BLE001  the rim of the thread; the trainer tells what it means
            reply, fds = {"type": "frozen_refused", "id": message["id"], "text": str(error)}, ()
        try:
            trainer.send(reply, fds)
        except OSError as error:
            logger.info("could not tell the trainer: %s", error)

    def _capture_bytes(self) -> int:
        """What the slots for captures take, or will when all are made."""
        held = sum(slot.size_bytes for slot in self._pool.all())
        if self._wanted is None:
            return held
        meta, image, count = self._wanted
        return max(held, count * Slot.bytes_for(meta, image))
