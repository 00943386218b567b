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

import msgspec

from lazysnap.config import SnapshotConfig
from lazysnap.errors import JobBusy, KeeperUnavailable, MemoryBoundExceeded
from lazysnap.keeper.attach import attach
from lazysnap.keeper.client_slots import CaptureState, MappedSlots
from lazysnap.keeper.events import (
    DurableSteps,
    KeeperAnswers,
    KeeperEvent,
    KeeperLost,
    KeeperReady,
    KeeperSilent,
    KeeperUnreachable,
    MemoryInventory,
    News,
)
from lazysnap.keeper.heartbeat import Heartbeat, Patience
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.messages import Connection, Received, Unclaimed
from lazysnap.keeper.protocol import (
    Adopt,
    Answer,
    AskFrozen,
    AskInventory,
    Complete,
    Done,
    Drain,
    DrainProgress,
    Ending,
    FrozenDropped,
    Goodbye,
    Inventory,
    MemoryRefused,
    Message,
    Protected,
    Question,
    Reserve,
    Return,
    Run,
    ServePeers,
    SlotMade,
    Welcome,
)
from lazysnap.keeper.questions import Questions
from lazysnap.keeper.standing import Standing
from lazysnap.links.port import ReservedPort
from lazysnap.links.secret import Secret
from lazysnap.memory.arena import Slot
from lazysnap.topology import Team

logger = logging.getLogger(__name__)

_FROZEN_S = 600.0
"""The keeper has to find and populate memory for the frozen tensors: some seconds per 10 GB."""
_RECONNECT_S = 0.05
_EARLY_S = 5.0
"""Keepers that die sooner than this after they began are replaced more and more slowly."""
_REPLACE_S = 0.1
_REPLACE_AT_MOST_S = 1.0
_MOST_ASKED = 3
"""Keepers that may die over one question."""
_SEND_AGAIN_S = 0.002
_LAST_WORD_S = 0.5
_JOIN_S = 5.0
"""Wait so long at most for threads of this process that end."""
_live_clients: "weakref.WeakSet[KeeperClient]" = weakref.WeakSet()


class KeeperClient:
    """Connection to this job's keeper. Thread-safe.

    It is large because it is all that a trainer has of its keeper, which may be replaced at any moment. What stands
    alone is apart: ``MappedSlots``, ``Questions``, ``Standing``, ``DurableSteps``, ``Heartbeat``, ``attach``.
    """

    def __init__(
        self,
        identity: JobIdentity,
        config: SnapshotConfig,
        team: Team | None = None,
        on_notice: Callable[[], None] = lambda: None,
    ) -> None:
        """``on_notice``: called on the client's thread when the keeper says that this process is about to be killed."""
        self._on_notice = on_notice
        self._identity = identity
        self._config = config
        self._team = team or Team()
        self._changed = threading.Condition()
        self._connection: Connection | None = None
        self._thread: threading.Thread | None = None
        self._closing = False
        self._fatal: Exception | None = None
        self._slots = MappedSlots(self._changed)
        self._standing = Standing()
        self._progress = (0, 0)
        """The progress of a drain: bytes that levels have, and bytes that all shall have."""
        self._newest_held = 0
        """The greatest sequence number that a keeper held when this process came to it."""
        self._notes: deque[Message] = deque()
        """Messages that the keeper has not taken yet."""
        self._notes_lock = threading.Lock()
        self._events: deque[KeeperEvent] = deque()
        self._heartbeat = Heartbeat(config.io_timeout_s)
        self._patience = Patience(config.io_timeout_s)
        """The connection to the keeper that is being reached."""
        self._questions = Questions(self._changed, lambda: self._connection)
        self._durable = DurableSteps()
        self._port: ReservedPort | None = None
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
        """Connect, starting a keeper if there is none. Blocks: at most ``timeout_s``, longer for one that runs slowly.

        Raises: JobBusy, if another trainer of this job is attached; KeeperUnavailable.
        """
        self._begin()
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._connection is None:
                if self._closing or self._fatal is not None:
                    raise self._fatal or KeeperUnavailable("this connection was closed: make another client")
                remaining = self._patience.extend(deadline) - time.monotonic()
                if not self._changed.wait(max(0.0, remaining)) and time.monotonic() >= self._patience.extend(deadline):
                    raise KeeperUnavailable(
                        f"the keeper of job {self._identity.job_id!r} did not answer within {timeout_s:g} s"
                    )

    def _serve(self) -> None:
        died_early = 0
        try:
            while not self._closing:
                if died_early > 1:  # the first successor comes at once, for memory's sake
                    with self._changed:
                        self._changed.wait_for(self._is_closing, min(_REPLACE_S * 2**died_early, _REPLACE_AT_MOST_S))
                self._patience = Patience(self._config.io_timeout_s)
                connection, received = attach(self._identity, self._config, self._team, self._hand_over, self._patience)
                try:
                    self._take_all(received)
                except BaseException:
                    connection.close()
                    raise
                with self._changed:
                    is_over = self._is_closing()  # said while the keeper was starting
                    if not is_over:
                        self._notes.extend(self._standing.for_new_keeper(self._newest_sequence()))
                        self._connection = connection
                        self.was_attached = True
                        self._events.append(KeeperReady())
                        self._changed.notify_all()
                if is_over:
                    self._leave(connection)
                    return
                self._send_notes()
                attached_at = time.monotonic()
                self._listen(connection)
                died_early = died_early + 1 if time.monotonic() - attached_at < _EARLY_S else 0
        except (KeeperUnavailable, JobBusy) as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001  the last handler of the thread: training goes on without a memory level
            self._fail(KeeperUnavailable(f"the keeper's client failed: {type(error).__name__}: {error}"))

    def _leave(self, connection: Connection) -> None:
        """Leave a keeper that was reached too late: nobody uses its slots."""
        try:
            connection.send(Goodbye(is_over=self._said_goodbye))
        finally:
            connection.close()
            self._release()

    def _is_closing(self) -> bool:
        return self._closing

    def _fail(self, error: Exception) -> None:
        with self._changed:
            self._fatal = error
            if not self._closing:
                self._events.append(KeeperUnreachable(str(error), is_refusal=self.refusal() is not None))
            self._changed.notify_all()

    def _hand_over(self, connection: Connection) -> None:
        """After a keeper's death: its successor gets the slots that this process still maps, before it even runs."""
        with self._changed:
            orphans = self._slots.orphans()
        for digest, slot in orphans:
            connection.send(Adopt(digest), (slot.fd,))
        run = self._standing.run
        if run is not None and not run.is_new:  # else it would not know the owner of its captures if this one dies
            connection.send(run)

    def _listen(self, connection: Connection) -> None:
        connection.set_receive_timeout(None)
        self._heartbeat = heartbeat = Heartbeat(self._config.io_timeout_s)
        try:
            while True:
                while not heartbeat.wait(connection):
                    if heartbeat.is_over:
                        self._silent(connection)
                try:
                    received = connection.receive()
                except (OSError, KeeperUnavailable):
                    received = None
                if received is None:
                    break
                if heartbeat.heard():
                    self._say(KeeperAnswers(connection.peer_pid))
                self._take_all(received)
        finally:
            with self._changed:
                self._connection = None
                self._heartbeat = Heartbeat(self._config.io_timeout_s)
                self._notes.clear()  # the next keeper gets it again
                self._slots.orphan_all()
                connection.close()
                if not self._closing:
                    self._events.append(KeeperLost())
                self._changed.notify_all()

    @property
    def is_silent(self) -> bool:
        """True if a keeper is attached that does not answer: frozen, or its machine is overloaded."""
        return self._heartbeat.is_silent

    def _silent(self, connection: Connection) -> None:
        """The keeper did not answer in time."""
        if self._heartbeat.fall_silent():
            keeper = f"the keeper of this node (process {connection.peer_pid} on {self._identity.node})"
            self._say(
                KeeperSilent(
                    f"{keeper} does not answer: training and captures into memory go on, but nothing of rank "
                    f"{self._team.rank} is stored until it answers. Look whether the process is stopped or its machine "
                    "overloaded; if you kill it, another one is started and takes over its memory"
                )
            )

    def _say(self, event: KeeperEvent) -> None:
        with self._changed:
            self._events.append(event)
            self._changed.notify_all()

    # ---------------------------------------------------------------- messages of the keeper

    def _take_all(self, received: Received) -> None:
        with Unclaimed(received) as messages:
            for message, fds in messages:
                self._take(message, fds)

    def _take(self, message: Message, fds: tuple[int, ...]) -> None:
        with self._changed:
            if isinstance(message, Welcome):
                self._newest_held = max(self._newest_held, message.newest)
            elif isinstance(message, SlotMade):
                self._slots.map(message.slot, fds[0])
            elif isinstance(message, FrozenDropped):
                self._slots.drop(message.digest)
            elif isinstance(message, DrainProgress):
                self._progress = message.done, message.total
            elif isinstance(message, Ending):
                self._on_notice()
            if isinstance(message, Complete):
                news = self._durable.add(message)
                if not news:
                    return
                message = msgspec.structs.replace(message, steps=news)
            run = self._standing.run
            if isinstance(message, Protected) and (run is None or message.start != run.start):
                return  # what an earlier start has is not this one's
            if isinstance(message, News) and not (isinstance(message, Answer) and message.id):
                self._events.append(message)
            self._questions.receive(message)
            self._changed.notify_all()

    # ---------------------------------------------------------------- what training uses

    def adopt_run(self, run: Run) -> None:
        """Say what is captured from now on; ``floor`` is set here. Does not block.

        From now on ``is_durable`` counts only captures of that start: what an earlier attempt got to storage, even at
        a greater step, does not make this one's steps safe.
        """
        with self._changed:
            self._durable.begin(run.start)
            run = self._standing.run = msgspec.structs.replace(run, floor=self._newest_sequence())
            # Nor does what an earlier start protected, if nobody took note of it yet.
            self._events = deque(event for event in self._events if not isinstance(event, Protected))
            is_told = self._connection is not None
        self.tell(run)
        if is_told:
            self._standing.run_was_told()

    def set_interval(self, every_n_steps: int) -> None:
        """Say to this keeper and the next how many steps captures are apart from now on. Does not block."""
        with self._changed:
            if self._standing.run is None:
                return
            run = self._standing.run = msgspec.structs.replace(self._standing.run, every_n_steps=every_n_steps)
        self.tell(run)

    def make_ready(self, work: Callable[[Slot], None]) -> None:
        """Have ``work`` done for every slot in the background, before ``slots`` shows it."""
        self._slots.make_ready = work

    def reserve(
        self,
        capacities: tuple[int, int],
        count: int,
        least: int | None = None,
        growth_bytes: int = 0,
        *,
        spills: bool = True,
    ) -> None:
        """Ask for ``count`` slots. Does not block; they show up in ``slots``, or a ``MemoryRefused`` in the events.

        ``capacities``: bytes of metadata and of the image. ``least``: the smallest count that this training may be
        configured to; for the text of a refusal. ``growth_bytes``: what training itself is still going to take.
        ``spills``: slots may be files where memory does not suffice.
        """
        wanted = self._standing.wanted = Reserve(*capacities, count, least or count, growth_bytes, spills)
        self._slots.want()
        self.tell(wanted)

    def slots(self) -> tuple[Slot, ...]:
        """Slots that are populated on both sides and kept by a live keeper, in no order; empty before that."""
        self._send_notes()
        with self._changed:
            return self._slots.ready() if self._connection is not None else ()

    def mapped(self) -> tuple[Slot, ...]:
        """Every slot of a live keeper, of any size, populated or not."""
        with self._changed:
            return self._slots.all()

    def return_slot(self, slot: Slot) -> None:
        """Let the keeper free a slot: nothing in it is needed, and this process writes nothing into it from now on.

        Does not block.
        """
        with self._changed:  # numbers are those of one connection: it must not end in between
            number = self._slots.remove(slot)
            if number is not None:
                self.tell(Return(number))

    def newest_sequence(self) -> int:
        """The greatest sequence number of any capture that the keeper holds, also in slots of another size."""
        with self._changed:
            return self._newest_sequence()

    def _newest_sequence(self) -> int:
        # The welcome lists what is held; the slots come later.
        return max(self._newest_held, self._slots.newest_sequence())

    def refusal(self) -> JobBusy | None:
        """Why this process is not the job's trainer: another one is attached. ``None`` as long as nothing says so."""
        return self._fatal if isinstance(self._fatal, JobBusy) and not self.was_attached else None

    def state_of(self, sequence: int) -> CaptureState:
        """Return the state of the capture with that sequence number."""
        with self._changed:
            return self._slots.state_of(sequence)

    def tell(self, message: Message) -> None:
        """Send a message that has no answer, now or as soon as the keeper takes it: one that is stopped for a moment
        keeps its trainer. Without a keeper it is dropped. Does not block.
        """
        with self._changed:  # what is there when a connection ends is cleared; later notes wait for no keeper
            if self._connection is None:
                return
            self._notes.append(message)
        self._send_notes()

    def give_notice(self, *, is_sealed: bool) -> None:
        """Say that this process is about to be killed, to this keeper and the next. Does not block. See ``Ending``."""
        ending = self._standing.ending = Ending(is_sealed)
        self.tell(ending)

    def newest_durable(self) -> int:
        """The newest step of this start that is known to be complete at the first level; -1: none."""
        with self._changed:
            return self._durable.newest(self._config.levels[0].url) if self._config.levels else -1

    @property
    def keeper_pid(self) -> int | None:
        """The process of the attached keeper."""
        connection = self._connection
        return None if connection is None else connection.peer_pid

    def _send_notes(self) -> None:
        connection = self._connection
        if connection is None or not self._notes:
            return
        with self._notes_lock:
            try:
                while self._notes and connection.post(self._notes[0]):
                    self._notes.popleft()
            except (OSError, IndexError) as error:  # the thread that reads notices a dead keeper
                logger.debug("the keeper takes no messages: %s", error)

    @staticmethod
    def _cut(connection: Connection) -> None:
        with contextlib.suppress(OSError):
            connection.sock.shutdown(2)

    def poll_events(self) -> list[KeeperEvent]:
        """Return the events since the last call."""
        self._send_notes()
        with self._changed:
            events, self._events = list(self._events), deque()
            return events

    # ---------------------------------------------------------------- questions

    def inventory(self, timeout_s: float) -> MemoryInventory:
        """Whole captures that the keeper holds, of this or of a dead trainer, and what they refer to. Blocks.

        Raises: KeeperUnavailable, if there is no answer in time; a keeper that runs slowly has more of it.
        """
        reply = self._questions.ask(
            AskInventory(local_rank=self._team.local_rank), timeout_s, patience=Patience(timeout_s)
        )
        if not isinstance(reply, Inventory):
            raise KeeperUnavailable(f"the keeper did not tell what it holds within {timeout_s:g} s")
        with self._changed:
            return MemoryInventory.of(reply, self._slots.get)

    def frozen_slot(self, digest: str) -> Slot | None:
        """Return the slot of frozen tensors of that digest, filled or to be filled; ``None`` if no live keeper holds
        them."""
        with self._changed:
            return self._slots.get(digest)

    def ask_frozen(self, digest: str, meta_bytes: int, image_bytes: int) -> tuple[Slot | None, bool]:
        """Ask for a slot for frozen tensors, and whether to fill it; it may be whole, or another rank may fill it.
        ``None``: no keeper answered.

        Blocks: while the keeper finds memory. Raises: MemoryBoundExceeded, if there is none.
        """
        reply = self._questions.ask(AskFrozen(digest=digest, meta=meta_bytes, image=image_bytes), _FROZEN_S)
        if isinstance(reply, MemoryRefused):
            raise MemoryBoundExceeded(reply.text)
        return (self.frozen_slot(digest), reply.fills) if isinstance(reply, SlotMade) else (None, False)

    def reserve_port(self, host: str) -> int:
        """Reserve a port of this address for the keepers of this node, until this process ends or releases it.

        It is the same one for the next keeper, so other nodes learn it once. Raises: OSError, if there is none.
        """
        self._release_port()
        self._port = ReservedPort(host)
        return self._port.number

    def serve_peers(self, host: str, secret: Secret, timeout_s: float) -> bool:
        """Have the keeper, and each later one, serve those with that secret at the reserved port.

        Blocks: at most ``timeout_s``. ``False`` if it does not answer in time: it serves as soon as it runs again.
        """
        assert self._port is not None
        serving = self._standing.serving = ServePeers(host=host, port=self._port.number, secret=secret)
        return self._questions.ask(serving, timeout_s) is not None

    def _release_port(self) -> None:
        if self._port is not None:
            self._port.release()

    def lacking(self, step: int) -> list[str]:
        """URLs of the levels that are not known to have that step of this start, or a later one. Thread-safe."""
        with self._changed:
            return [level.url for level in self._config.levels if self._durable.newest(level.url) < step]

    def is_durable(self, step: int) -> bool:
        """True if that step of this start, or a later one, is known to be complete at the first level."""
        with self._changed:
            return self._durable.newest(self._config.levels[0].url) >= step

    def drain(
        self,
        step: int | None,
        timeout_s: float,
        progress: Callable[[int, int], None] | None = None,
        enough: Callable[[], bool] = lambda: False,
    ) -> bool:
        """Block until that step is complete at every level, and not found damaged; without levels until a keeper has
        it. ``False`` if not. ``None``: there is nothing to wait for.

        ``progress`` is called with bytes that levels have, and bytes that all of them together are to have. A keeper
        that is lost meanwhile is replaced, and the next one is asked. ``enough``: once that is true, wait no longer.
        """
        if step is None:
            return True
        self._progress = (0, 0)

        def show() -> bool:
            if progress is not None and self._progress[1]:
                progress(*self._progress)
            return enough()

        reply = self._ask_any_keeper(Drain(step=step), time.monotonic() + timeout_s, show)
        if not isinstance(reply, Done):
            return False
        show()
        return reply.ok

    def _ask_any_keeper(self, question: Question, deadline: float, meanwhile: Callable[[], bool]) -> Answer | None:
        asked: set[int] = set()
        while (remaining := deadline - time.monotonic()) > 0:
            if len(asked) > _MOST_ASKED:
                return None  # each died over it: the next one would, too
            self._send_notes()
            if self._notes:  # what was said before comes before
                time.sleep(_SEND_AGAIN_S)
                continue
            connection = self._connection
            reply = self._questions.ask(question, remaining, meanwhile)
            if reply is not None or meanwhile():
                return reply
            if connection is not None:
                asked.add(connection.peer_pid)
            with self._changed:
                if self._closing or self._thread is None or not self._thread.is_alive():
                    return None
                # Until the thread has noticed the end of this connection, and until there is another one.
                self._changed.wait(min(_RECONNECT_S, max(0.0, deadline - time.monotonic())))
        return None

    # ---------------------------------------------------------------- ending

    def goodbye(self, timeout_s: float) -> None:
        """The job is over: the keeper makes durable what it holds and leaves. Blocks: until then, with a deadline."""
        self._said_goodbye = True
        connection = self._stop()
        if connection is not None:
            try:
                connection.send(Goodbye(), timeout_s=max(0.05, min(timeout_s, 5.0)))
            except OSError as error:
                logger.debug("no goodbye: %s", error)
        self._join(timeout_s)
        if connection is not None:
            self._cut(connection)
            self._join(_LAST_WORD_S)
        self._release()

    def abandon(self) -> None:
        """Leave as a crash would: the keeper persists the newest capture and waits for a restart."""
        connection = self._stop()
        if connection is not None:
            with contextlib.suppress(OSError):
                # A process that lives and only lost its connection would be expected back.
                connection.send(Goodbye(is_over=False), timeout_s=_LAST_WORD_S)
            self._cut(connection)
        self._join(_JOIN_S)  # of a keeper that is just being started it takes leave, too
        self._release()

    def _join(self, timeout_s: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _stop(self) -> Connection | None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            return self._connection

    def _release(self) -> None:
        self._release_port()
        with self._changed:
            slots = self._slots.take_all()
        for slot in slots:
            slot.close()
        self._slots.join(_JOIN_S)

    def forget_in_child(self) -> None:
        """Forget all in a forked child: the connection and the slots are the parent's."""
        self._closing = True
        if self._connection is not None:
            os.close(self._connection.sock.detach())
            self._connection = None


def _after_fork_in_child() -> None:
    for client in list(_live_clients):
        client.forget_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
