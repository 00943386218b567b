"""The trainer's end: slots to write into, and news from the keeper. Nothing here blocks training.

One daemon thread owns the connection: it starts a keeper where there is none, maps slots, takes events. The training
thread reads ``slots`` and ``poll_events`` and sends short notes; it waits only where it asks a question, with a
deadline.
"""

import contextlib
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

from lazysnap.arena import Slot
from lazysnap.config import SnapshotConfig
from lazysnap.errors import JobBusy, KeeperUnavailable, MemoryBoundExceeded
from lazysnap.keeper.attach import attach
from lazysnap.keeper.durable import DurableSteps
from lazysnap.keeper.events import (
    KeeperEvent,
    KeeperLost,
    KeeperReady,
    MemoryEntry,
    MemoryHoldings,
    event_of,
)
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.mapped import MappedImages, MappedSlots
from lazysnap.keeper.messages import Connection, Message, Received, Unclaimed
from lazysnap.keeper.questions import Questions
from lazysnap.keeper.team import Team

logger = logging.getLogger(__name__)

_FROZEN_S = 600.0
"""The keeper has to find and populate memory for the immutable tensors: some seconds per 10 GB."""
_live_clients: "weakref.WeakSet[KeeperClient]" = weakref.WeakSet()


class KeeperClient:
    """Connection to this job's keeper. Thread-safe."""

    def __init__(self, identity: JobIdentity, config: SnapshotConfig, team: Team | None = None) -> None:
        self._identity = identity
        self._config = config
        self._team = team or Team()
        self._changed = threading.Condition()
        self._connection: Connection | None = None
        self._thread: threading.Thread | None = None
        self._closing = False
        self._fatal: Exception | None = None
        self._slots = MappedSlots(self._changed)
        self._frozen = MappedImages()
        self._wanted: tuple[int, int, int] | None = None
        self._events: deque[KeeperEvent] = deque()
        self._questions = Questions(self._changed, lambda: self._connection)
        self._durable = DurableSteps()
        self.listener: Callable[[KeeperEvent], None] = lambda event: None
        """Is told every event at once, on this client's thread; must not block."""
        self._said_goodbye = False
        self.was_attached = False
        _live_clients.add(self)

    # ---------------------------------------------------------------- connecting

    def start(self) -> None:
        """Connect in the background, starting a keeper if there is none, for captures. Never raises; does not block."""
        self._slots.want()
        self._begin()

    def _begin(self) -> None:
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
        self._begin()
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._connection is None:
                if self._closing or self._fatal is not None:
                    raise self._fatal or KeeperUnavailable("this connection was closed: make another client")
                if not self._changed.wait(max(0.0, deadline - time.monotonic())) and time.monotonic() >= deadline:
                    raise KeeperUnavailable(
                        f"the keeper of job {self._identity.job_id!r} did not answer within {timeout_s:g} s"
                    )

    def _serve(self) -> None:
        try:
            while not self._closing:
                connection, received = attach(self._identity, self._config, self._team)
                try:
                    self._take_all(received)
                    self._adopt_orphans(connection)
                except BaseException:
                    connection.close()
                    raise
                with self._changed:
                    if self._is_closing():  # said while the keeper was starting
                        if self._said_goodbye:
                            connection.send({"type": "goodbye"})
                        connection.close()
                        return
                    self._connection = connection
                    self.was_attached = True
                    self._events.append(KeeperReady(connection.peer_pid))
                    self._changed.notify_all()
                self.listener(KeeperReady(connection.peer_pid))
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

    def _adopt_orphans(self, connection: Connection) -> None:
        """After a keeper's death: its successor gets the slots that this process still maps."""
        with self._changed:
            orphans, images = self._slots.orphans(), self._frozen.orphans()
        # The images first: no capture is taken up before what it refers to.
        for digest, slot in images:
            connection.send({"type": "adopt_frozen", "digest": digest}, (slot.fd,))
        for slot in orphans:
            connection.send({"type": "adopt"}, (slot.fd,))

    def _listen(self, connection: Connection) -> None:
        connection.set_receive_timeout(None)
        try:
            while True:
                try:
                    received = connection.receive()
                except (OSError, KeeperUnavailable):
                    received = None
                if received is None:
                    break
                self._take_all(received)
        finally:
            with self._changed:
                self._connection = None
                self._slots.orphan_all()
                self._frozen.orphan_all()
                connection.close()
                if not self._closing:
                    self._events.append(KeeperLost("its connection ended"))
                self._changed.notify_all()

    # ---------------------------------------------------------------- messages of the keeper

    def _take_all(self, received: Received) -> None:
        with Unclaimed(received) as messages:
            for message, fds in messages:
                self._take(message, fds)

    def _take(self, message: Message, fds: tuple[int, ...]) -> None:
        kind = message["type"]
        with self._changed:
            if kind == "slot":
                self._slots.map(int(message["slot"]), fds[0])
            elif kind == "adopted":
                self._slots.readopt(int(message["slot"]), int(message["inode"]))
            elif kind == "dropped":
                self._slots.drop(int(message["slot"]))
            elif kind == "frozen_slot":
                self._frozen.take(message["digest"], fds[0])
            elif kind == "frozen_dropped":
                self._frozen.drop(message["digest"])
            event = event_of(message)
            if event is not None:
                self._events.append(event)
            self._durable.hear(message)
            self._questions.hear(message)
            self._changed.notify_all()
        if event is not None:
            self.listener(event)

    # ---------------------------------------------------------------- what training uses

    def adopt_run(self, run_id: str, run_started_ns: int) -> None:
        """Say which run goes on; what is in the slots says by itself which run it is of.

        From now on ``wait_durable`` counts only captures of this run that begin after this call: what an earlier
        attempt got to storage, even at a greater step, does not make this one's steps safe.
        """
        with self._changed:
            self._durable.adopt(run_id, self._slots.newest_sequence())

    def reserve(self, meta_capacity: int, image_capacity: int, count: int) -> None:
        """Ask for ``count`` slots. Does not block; they show up in ``slots``, or a ``MemoryRefused`` in the events."""
        self._wanted = (meta_capacity, image_capacity, count)
        self._slots.want()
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
        return self._fatal if isinstance(self._fatal, JobBusy) and not self.was_attached else None

    def begun(self, slot: Slot, step: int) -> None:
        """A capture began. A hint: the words in the slot are the truth."""
        self._note({"type": "begun", "step": step})

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
        with contextlib.suppress(OSError):
            connection.sock.shutdown(2)

    def complete(self, url: str, fields: Message) -> None:
        """Say what all ranks have at a level (``levels.belongings.Told``). Does not block."""
        self._note({"type": "complete", "level": url, **fields})

    def poll_events(self) -> list[KeeperEvent]:
        """What happened since the last call."""
        with self._changed:
            events, self._events = list(self._events), deque()
            return events

    # ---------------------------------------------------------------- questions

    def inventory(self, timeout_s: float) -> MemoryHoldings:
        """Whole captures that the keeper holds, of this or of a dead trainer, and what they refer to. Blocks.

        Raises: KeeperUnavailable, if there is no answer in time.
        """
        reply = self._questions.ask({"type": "inventory"}, timeout_s)
        if reply is None:
            raise KeeperUnavailable(f"the keeper did not tell what it holds within {timeout_s:g} s")
        with self._changed:
            found = [(item, self._slots.get(item["slot"])) for item in reply["entries"]]
            images = [(digest, self._frozen.get(digest)) for digest in reply["frozen"]]
            return MemoryHoldings(
                tuple(MemoryEntry.of(item, slot) for item, slot in found if slot is not None),
                {digest: slot for digest, slot in images if slot is not None},
            )

    def frozen_slot(self, digest: str) -> Slot | None:
        """Where immutable tensors of that digest are, or go; ``None`` if no live keeper holds them."""
        with self._changed:
            return self._frozen.get(digest)

    def ask_frozen(self, digest: str, meta_bytes: int, image_bytes: int) -> Slot | None:
        """Ask for a slot for immutable tensors; it may be there and whole. ``None``: no keeper answered.

        Blocks: while the keeper finds memory. Raises: MemoryBoundExceeded, if there is none.
        """
        question = {"type": "frozen", "digest": digest, "meta": meta_bytes, "image": image_bytes}
        reply = self._questions.ask(question, _FROZEN_S)
        if reply is None:
            return None
        if reply["type"] != "frozen_slot":
            raise MemoryBoundExceeded(reply["text"])
        return self.frozen_slot(digest)

    def frozen_whole(self, digest: str) -> None:
        """The immutable tensors of that digest are whole in their slot. A hint: its words are the truth."""
        self._note({"type": "frozen_whole", "digest": digest})

    def keep(self, name: str, step: int, run_id: str, sequence: int) -> None:
        """Have the capture with that sequence number kept on every level, under ``name``. Does not block."""
        self._note({"type": "keep", "name": name, "step": step, "run_id": run_id, "sequence": sequence})

    def release(self, name: str, run_id: str) -> None:
        """Take ``name`` from the run's snapshots. Does not block."""
        self._note({"type": "release", "name": name, "run_id": run_id})

    def wait_durable(self, step: int, timeout_s: float) -> bool:
        """Block until ``step`` or a later one is committed at the first level; ``False`` after the deadline."""
        url = self._config.levels[0].url
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._durable.newest(url) < step:
                remaining = deadline - time.monotonic()
                if remaining <= 0 or self._fatal is not None:
                    return False
                self._changed.wait(min(remaining, 0.5))
            return True

    def drain(self, timeout_s: float, progress: Callable[[int, int], None] | None = None) -> bool:
        """Block until the newest whole capture is committed at every level, and not found damaged; ``False`` if not.

        ``progress`` is called with the number of levels done and of all levels.
        """
        if not self._config.levels:
            return True
        tell, count = progress or (lambda done, of: None), len(self._config.levels)
        tell(0, count)
        reply = self._questions.ask({"type": "drain"}, timeout_s)
        if reply is not None:
            tell(count, count)
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
            slots = [*self._slots.take_all(), *self._frozen.take_all()]
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
