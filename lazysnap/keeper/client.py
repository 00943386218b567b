"""The trainer's end: slots to write into, and news from the keeper. Nothing here blocks training.

One daemon thread owns the connection: it starts a keeper where there is none, maps slots, takes events. The training
thread reads ``slots`` and ``poll_events`` and sends short notes; it waits only where it asks a question, with a
deadline.
"""

import dataclasses
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

from lazysnap import faults
from lazysnap.arena import Slot
from lazysnap.config import SnapshotConfig
from lazysnap.errors import JobBusy, KeeperUnavailable
from lazysnap.keeper.events import (
    Durable,
    KeeperEvent,
    KeeperLost,
    KeeperReady,
    LevelFailed,
    MemoryEntry,
    MemoryRefused,
)
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.launch import reach_keeper
from lazysnap.keeper.mapped import MappedSlots
from lazysnap.keeper.messages import Connection, Message

logger = logging.getLogger(__name__)

_BUSY_GRACE_S = 3.0
"""A trainer that was just killed may take a moment to be gone."""
_live_clients: "weakref.WeakSet[KeeperClient]" = weakref.WeakSet()


class KeeperClient:
    """Connection to this job's keeper. Thread-safe."""

    def __init__(self, identity: JobIdentity, config: SnapshotConfig) -> None:
        self._identity = identity
        self._config = config
        self._changed = threading.Condition()
        self._connection: Connection | None = None
        self._thread: threading.Thread | None = None
        self._closing = False
        self._fatal: Exception | None = None
        self._slots = MappedSlots(self._changed)
        self._wanted: tuple[int, int, int] | None = None
        self._events: deque[KeeperEvent] = deque()
        self._replies: dict[int, Message] = {}
        self._next_id = 0
        self._durable: dict[str, int] = {}
        self._run_id: str | None = None
        self._floor = 0
        self._said_goodbye = False
        self._was_attached = False
        _live_clients.add(self)

    # ---------------------------------------------------------------- connecting

    def start(self) -> None:
        """Connect in the background, starting a keeper if there is none. Never raises; does not block."""
        with self._changed:
            if self._closing or (self._thread is not None and self._thread.is_alive()):
                return
            self._fatal = None
            self._thread = threading.Thread(target=self._serve, name="lazysnap-keeper", daemon=True)
            self._thread.start()

    def connect(self, timeout_s: float) -> None:
        """Connect, starting a keeper if there is none. Blocks: at most ``timeout_s``.

        Raises: JobBusy, if another trainer of this job is attached; KeeperUnavailable.
        """
        self.start()
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._connection is None:
                if self._fatal is not None:
                    raise self._fatal
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    raise KeeperUnavailable(
                        f"the keeper of job {self._identity.job_id!r} did not answer within {timeout_s:g} s"
                    )

    def _serve(self) -> None:
        try:
            while not self._closing:
                connection = self._attach(time.monotonic() + self._config.keeper_timeout_s)
                self._adopt_orphans(connection)
                with self._changed:
                    if self._is_closing():  # said while the keeper was starting
                        if self._said_goodbye:
                            connection.send({"type": "goodbye"})
                        connection.close()
                        return
                    self._connection = connection
                    self._was_attached = True
                    self._events.append(KeeperReady(connection.peer_pid))
                    self._changed.notify_all()
                if self._wanted is not None:
                    self._reserve()
                self._listen(connection)
        except (KeeperUnavailable, JobBusy) as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001  the rim of the thread: training goes on without a memory level
            self._fail(KeeperUnavailable(f"the keeper's client failed: {type(error).__name__}: {error}"))

    def _is_closing(self) -> bool:
        return self._closing

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._fatal = error
            if not self._closing:
                self._events.append(KeeperLost(str(error)))
            self._changed.notify_all()

    def _attach(self, deadline: float) -> Connection:
        busy_until = time.monotonic() + _BUSY_GRACE_S
        while True:
            connection = reach_keeper(self._identity, deadline)
            reply = self._say_hello(connection, deadline)
            if reply is not None and reply["type"] == "welcome":
                faults.set_peer(int(reply["pid"]))
                return connection
            connection.close()
            if reply is not None and reply["type"] == "busy" and time.monotonic() > busy_until:
                since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(reply["since"]))
                raise JobBusy(
                    f"job {self._identity.job_id!r} runs already on this node: process {reply['pid']}, since {since}; "
                    "end it, or give this one another directory or SnapshotConfig(job_id=...)"
                )
            if time.monotonic() > deadline:
                raise KeeperUnavailable(
                    f"the keeper of job {self._identity.job_id!r} is still writing what an earlier run left; try again "
                    "when it is done"
                )
            time.sleep(0.02)

    def _say_hello(self, connection: Connection, deadline: float) -> Message | None:
        config = self._config
        levels = [dataclasses.asdict(level) for level in config.levels]
        memory = config.memory
        try:
            connection.send(
                {"type": "hello", "levels": levels, "linger_s": memory.linger_s, "max_bytes": memory.max_bytes}
            )
            connection.set_receive_timeout(max(0.1, deadline - time.monotonic()))
            received = connection.receive()
        except OSError:
            return None
        if not received:
            return None
        for message, fds in received[1:]:
            self._take(message, fds)
        return received[0][0]

    def _adopt_orphans(self, connection: Connection) -> None:
        """After a keeper's death: its successor gets the slots that this process still maps."""
        with self._changed:
            orphans = self._slots.orphans()
        for slot in orphans:
            connection.send({"type": "adopt"}, (slot.fd,))

    def _listen(self, connection: Connection) -> None:
        connection.set_receive_timeout(None)
        while True:
            try:
                received = connection.receive()
            except (OSError, KeeperUnavailable):
                received = None
            if received is None:
                break
            for message, fds in received:
                self._take(message, fds)
        with self._changed:
            self._connection = None
            self._slots.orphan_all()
            connection.close()
            if not self._closing:
                self._events.append(KeeperLost("its connection ended"))
            self._changed.notify_all()

    # ---------------------------------------------------------------- messages of the keeper

    def _take(self, message: Message, fds: tuple[int, ...]) -> None:
        kind = message["type"]
        with self._changed:
            if kind == "slot":
                self._slots.map(int(message["slot"]), fds[0])
            elif kind == "adopted":
                self._slots.readopt(int(message["slot"]), int(message["inode"]))
            elif kind == "dropped":
                self._slots.drop(int(message["slot"]))
            elif kind == "durable":
                event = Durable(message["level"], message["step"], message["bytes"], message["seconds"])
                if self._run_id in (None, message["run_id"]) and message["sequence"] > self._floor:
                    self._durable[event.level] = event.step
                self._events.append(event)
            elif kind == "level_failed":
                self._events.append(LevelFailed(message["level"], message["step"], message["text"]))
            elif kind == "memory_refused":
                self._events.append(MemoryRefused(message["text"]))
            elif kind in ("inventory", "drained"):
                self._replies[int(message["id"])] = message
            self._changed.notify_all()

    # ---------------------------------------------------------------- what training uses

    def adopt_run(self, run_id: str, run_started_ns: int) -> None:
        """Say which run goes on; what is in the slots says by itself which run it is of.

        From now on ``wait_durable`` counts only captures of this run that begin after this call: what an earlier
        attempt got to storage, even at a greater step, does not make this one's steps safe.
        """
        with self._changed:
            self._run_id = run_id
            self._floor = self._slots.newest_sequence()
            self._durable.clear()

    def reserve(self, meta_capacity: int, image_capacity: int, count: int) -> None:
        """Ask for ``count`` slots. Does not block; they show up in ``slots``, or a ``MemoryRefused`` in the events."""
        self._wanted = (meta_capacity, image_capacity, count)
        self._reserve()

    def _reserve(self) -> None:
        assert self._wanted is not None
        meta, image, count = self._wanted
        self._note({"type": "reserve", "meta": meta, "image": image, "count": count})

    def slots(self) -> tuple[Slot, ...]:
        """Slots that are populated on both sides and kept by a live keeper, in no order; empty before that."""
        with self._changed:
            return self._slots.ready() if self._connection is not None else ()

    def newest_sequence(self) -> int:
        """The greatest sequence number of any capture that the keeper holds, also in slots of another size."""
        with self._changed:
            return self._slots.newest_sequence()

    def refusal(self) -> JobBusy | None:
        """Why this process is not the job's trainer: another one is attached. ``None`` as long as nothing says so."""
        return self._fatal if isinstance(self._fatal, JobBusy) and not self._was_attached else None

    def begun(self, slot: Slot, step: int) -> None:
        """A capture began. A hint: the words in the slot are the truth."""
        self._note({"type": "begun", "step": step})

    def captured(self, slot: Slot, step: int) -> None:
        """A capture is whole. A hint."""
        self._note({"type": "captured", "step": step})

    def _note(self, message: Message) -> None:
        connection = self._connection
        if connection is None:
            return
        try:
            connection.send(message, timeout_s=0.05)
        except OSError as error:  # the reading thread notices a dead keeper; a hanging one is shut out here
            logger.debug("the keeper takes no messages: %s", error)
            self._cut(connection)

    @staticmethod
    def _cut(connection: Connection) -> None:
        try:
            connection.sock.shutdown(2)
        except OSError:
            return

    def poll_events(self) -> list[KeeperEvent]:
        """What happened since the last call."""
        with self._changed:
            events = list(self._events)
            self._events.clear()
            return events

    # ---------------------------------------------------------------- questions

    def _ask(self, message: Message, timeout_s: float) -> Message | None:
        """Send a question, wait for its answer; ``None`` if none came in time. Blocks."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._next_id += 1
            question = self._next_id
            connection = self._connection
        if connection is None:
            return None
        try:
            connection.send({**message, "id": question}, timeout_s=max(0.05, min(timeout_s, 5.0)))
        except OSError:
            return None
        with self._changed:
            while question not in self._replies:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or self._connection is not connection:
                    return None
                self._changed.wait(min(remaining, 0.5))
            return self._replies.pop(question)

    def inventory(self, timeout_s: float) -> list[MemoryEntry]:
        """Whole captures that the keeper holds, of this or of a dead trainer. Blocks.

        Raises: KeeperUnavailable, if there is no answer in time.
        """
        reply = self._ask({"type": "inventory"}, timeout_s)
        if reply is None:
            raise KeeperUnavailable(f"the keeper did not tell what it holds within {timeout_s:g} s")
        with self._changed:
            found = [(item, self._slots.get(item["slot"])) for item in reply["entries"]]
            return [MemoryEntry.of(item, slot) for item, slot in found if slot is not None]

    def wait_durable(self, step: int, timeout_s: float) -> bool:
        """Block until ``step`` or a later one is committed at the first level; ``False`` after the deadline."""
        url = self._config.levels[0].url
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._durable.get(url, -1) < step:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or self._fatal is not None:
                    return False
                self._changed.wait(min(remaining, 0.5))
            return True

    def drain(self, timeout_s: float, progress: Callable[[int, int], None] | None = None) -> bool:
        """Block until the newest whole capture is committed at every level; ``False`` if it could not be.

        ``progress`` is called with the number of levels done and of all levels.
        """
        if not self._config.levels:
            return True
        if progress is not None:
            progress(0, len(self._config.levels))
        reply = self._ask({"type": "drain"}, timeout_s)
        if progress is not None and reply is not None:
            progress(len(self._config.levels), len(self._config.levels))
        return reply is not None and bool(reply["ok"])

    # ---------------------------------------------------------------- ending

    def goodbye(self, timeout_s: float) -> None:
        """The job is over: the keeper makes durable what it holds and leaves. Blocks: until then, with a deadline."""
        self._said_goodbye = True
        connection = self._stop()
        if connection is not None:
            try:
                connection.send({"type": "goodbye"}, timeout_s=max(0.05, min(timeout_s, 5.0)))
            except OSError as error:
                logger.debug("no goodbye: %s", error)
        if self._thread is not None:
            self._thread.join(timeout_s)
        if connection is not None:
            self._cut(connection)
        self._release()

    def abandon(self) -> None:
        """Leave as a crash would: the keeper persists the newest capture and waits for a restart."""
        connection = self._stop()
        if connection is not None:
            self._cut(connection)
            if self._thread is not None:
                self._thread.join(5.0)
        self._release()

    def _stop(self) -> Connection | None:
        with self._changed:
            self._closing = True
            return self._connection

    def _release(self) -> None:
        with self._changed:
            slots = self._slots.take_all()
        for slot in slots:
            slot.close()

    def forget_in_child(self) -> None:
        """In a forked child: the connection and the slots are the parent's."""
        self._closing = True
        if self._connection is not None:
            os.close(self._connection.sock.detach())
            self._connection = None


def _after_fork_in_child() -> None:
    for client in list(_live_clients):
        client.forget_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
