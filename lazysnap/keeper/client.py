"""What does a trainer do with its keeper? It captures into slots, and never waits for the keeper.

The training thread writes words and bytes of slots; it sends no message. A thread of its own has the connection::

    no keeper ──search: one that listens, else start one; slots along──> connected
        ^                                                                    │
        └───────────────────────end of the connection───────────────────────┘

What both threads use is replaced as a whole, so the training thread takes no lock for longer than an assignment.
"""

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable

from msgspec import structs

from lazysnap.core.messages import (
    Farewell,
    JobSettings,
    KeeperState,
    MemoryWish,
    PeerSettings,
    StepKey,
    TrainerState,
)
from lazysnap.errors import FormatError, JobBusy, KeeperError
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.mapped_slots import MappedSlots
from lazysnap.keeper.memory_inventory import MemoryInventory
from lazysnap.keeper.questions import Answer, Question
from lazysnap.keeper.search import KeeperSearch, Seeker, Served, drain
from lazysnap.keeper.trainer_requests import (
    with_name,
    with_protected,
    with_required,
    without_answered,
    without_name,
)
from lazysnap.keeper.wire import MAX_DESCRIPTORS, Channel, Frame, WireError
from lazysnap.links.listener import ReservedPort
from lazysnap.memory.slots import TrainerSlot
from lazysnap.memory.words import NodePage

logger = logging.getLogger(__name__)

_EARLY_S = 5.0
"""Keepers that die sooner than this after they began are replaced more and more slowly."""
_REPLACE_S = 0.1
_REPLACE_AT_MOST_S = 1.0
_MOST_DOUBLINGS = 10
_TURN_S = 0.25
_LEAST_SILENCE_S = 3.0
"""A keeper on a busy machine misses a second."""
_REASON_S = 1.0
"""The thread gives up at its deadline, and says why: who waits for it waits a moment longer."""
_LAST_WORD_S = 0.5
_JOIN_S = 5.0
_live_clients: "weakref.WeakSet[KeeperClient]" = weakref.WeakSet()


class KeeperClient:
    """A trainer's end of the connection to its keeper, with all that it asks of it. Thread-safe.

    Example::

        client = KeeperClient(identity, local_rank=0, linger_s=1800.0, io_timeout_s=60.0)
        client.connect(timeout_s=60.0)
        client.ask_memory(MemoryWish(num_slots=3, meta_bytes=4096, image_bytes=1 << 30))
        client.begin_start(job, start=time.time_ns(), step=-1)
        client.leave(Farewell.OVER, timeout_s=30.0)
    """

    def __init__(self, identity: JobIdentity, local_rank: int, *, linger_s: float, io_timeout_s: float) -> None:
        """Nothing happens before ``start``.

        Args:
            identity: identity of the job, by which its keeper is found.
            local_rank: number of this rank on its node.
            linger_s: seconds for which memory waits for a restart after this trainer died.
            io_timeout_s: seconds after which a keeper that does not answer counts as silent.
        """
        self._identity = identity
        self._local_rank = local_rank
        self._io_timeout_s = io_timeout_s
        self._changed = threading.Condition()
        """Guards all below, but for what only the client's thread uses."""
        self._num_changes = 0
        self.state = KeeperState()
        """The last state of the keeper. It is replaced as a whole."""
        self._trainer = TrainerState(local_rank, linger_s=linger_s)
        """The state that the keeper is to know."""
        self._slots = MappedSlots(self._notify)
        self._doorbell: _Doorbell | None = None
        """None while no keeper is connected."""
        self._newest_given = 0
        """The greatest sequence number that ``next_sequence`` returned."""
        self._port: ReservedPort | None = None
        self._error: KeeperError | JobBusy | None = None
        """Why the client gave up."""
        self._was_connected = False
        self._is_silent = False
        self._leave_by_s: float | None = None
        """Time at which the thread ends, whatever the keeper knows; None while this trainer stays."""
        self._last_number = 0
        self._answers: dict[int, Answer | None] = {}
        """The questions that somebody waits for, by number; None: not answered yet."""
        self._thread: threading.Thread | None = None
        self._wake_descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self._wake_descriptor).atexit = False
        self._channel: Channel | None = None
        """Used by the client's thread alone, as is all from here on."""
        self._sent = self._trainer
        self._asked: set[int] = set()
        """Numbers of the questions that were sent on this connection."""
        self._mapping_problem = ""
        _live_clients.add(self)

    # The connection

    def start(self) -> None:
        """Connect in the background, starting a keeper if there is none. Never raises; does not block.

        After the client gave up, it tries again.
        """
        with self._changed:
            is_running = self._thread is not None and self._thread.is_alive()
            if is_running and self._error is None or self._leave_by_s is not None:
                return
            self._error = None
            self._thread = threading.Thread(target=self._run, name="lazysnap-keeper", daemon=True)
            self._thread.start()

    def connect(self, timeout_s: float) -> None:
        """Connect, starting a keeper if there is none. Blocks: at most ``timeout_s``, and a second.

        Raises: JobBusy, if another trainer of this job is attached; KeeperError.
        """
        self.start()
        deadline_s = time.monotonic() + timeout_s + _REASON_S
        with self._changed:
            while self._doorbell is None:
                if self._error is not None:
                    raise self._error
                if self._leave_by_s is not None:
                    raise KeeperError("this connection was closed: make another client")
                is_woken = self._changed.wait(max(0.0, deadline_s - time.monotonic()))
                if not is_woken:
                    raise KeeperError(
                        f"the keeper of job {self._identity.job_id!r} did not answer within {timeout_s:g} s"
                    )

    @property
    def is_connected(self) -> bool:
        """True if a keeper is connected."""
        return self._doorbell is not None

    @property
    def was_connected(self) -> bool:
        """True once a keeper served this trainer."""
        return self._was_connected

    @property
    def keeper_pid(self) -> int | None:
        """The process of the connected keeper."""
        doorbell = self._doorbell
        if doorbell is None:
            return None
        return doorbell.keeper_pid

    @property
    def is_silent(self) -> bool:
        """True if the connected keeper answered nothing for ``io_timeout_s``: it is stopped, or its machine is
        overloaded."""
        return self._is_silent

    def refusal(self) -> JobBusy | None:
        """Return why this process is not the job's trainer: another one is. None as long as nothing says so."""
        error = self._error
        if isinstance(error, JobBusy) and not self._was_connected:
            return error
        return None

    def failure(self) -> str:
        """Return why no keeper serves this trainer now, and none is sought, or why it does nothing; empty if one works."""
        if self._error is not None:
            return str(self._error)
        pid = self.keeper_pid
        if self._is_silent and pid is not None:
            return (
                f"the keeper of this node (process {pid} on {self._identity.node}) does not answer: training and "
                f"captures into memory go on, but nothing of local rank {self._local_rank} is stored until it answers. "
                "Look whether the process is stopped or its machine overloaded; if you kill it, another one is started "
                "and takes over its memory"
            )
        return ""

    def wait(self, is_true: Callable[[KeeperState], bool], timeout_s: float) -> bool:
        """Block until ``is_true`` of the keeper's state, at most ``timeout_s``.

        It is called again with each new state, when slots become ready, and when the connection is lost.
        Returns: False if it was not true in time, or the client gave up.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            with self._changed:
                num_seen = self._num_changes
                is_hopeless = self._error is not None or self._leave_by_s is not None
            if is_true(self.state):
                return True
            with self._changed:
                remaining_s = deadline_s - time.monotonic()
                if is_hopeless or remaining_s <= 0:
                    return False
                if self._num_changes == num_seen:
                    self._changed.wait(remaining_s)

    # Memory

    def ask_memory(self, wish: MemoryWish | None) -> None:
        """Ask for slots, or for none. Does not block: they show up in ``slots``, or ``state.memory_refusal`` says why
        not."""
        if wish is not None:
            self._slots.want()
        self._change(memory=wish)

    def make_ready(self, work: Callable[[TrainerSlot], None]) -> None:
        """Have ``work`` done for every slot in the background, behind ``populate``, before ``slots`` shows the slot."""
        self._slots.make_ready = work

    def slots(self) -> tuple[TrainerSlot, ...]:
        """Return the slots that are populated, and that a live keeper has, in no order. Hot."""
        if self._doorbell is None:
            return ()
        kept = self.state.slots
        return tuple(slot for slot in self._slots.ready if slot.slot_id in kept)

    def mapped(self) -> tuple[TrainerSlot, ...]:
        """Return all slots, of any size, populated or not, with a live keeper or between two."""
        return self._slots.all

    def return_slot(self, slot: TrainerSlot) -> None:
        """Let the keeper free a slot: nothing in it is needed, and this process writes nothing into it from now on.

        Does not block.
        """
        if not self._slots.remove(slot):
            return
        with self._changed:
            self._trainer = structs.replace(
                self._trainer, slots=self._slot_ids(), returned=(*self._trainer.returned, slot.slot_id)
            )
        self._wake()

    def next_sequence(self) -> int:
        """Return a number greater than that of every capture in memory, and than all it returned before. Hot."""
        newest = max(self._newest_given, self._slots.newest_sequence, self.state.newest_sequence)
        self._newest_given = newest + 1
        return self._newest_given

    def wake(self, step: int) -> None:
        """Wake the keeper if it awaits the capture of ``step``, whose words were stored before this call. Hot."""
        doorbell = self._doorbell
        if doorbell is not None:
            doorbell.ring(step)

    # What the keeper is to know. Nothing here blocks.

    def begin_start(self, job: JobSettings, start: int, step: int, source: str = "") -> None:
        """Begin a start: captures from now on are of it. What was required of the start before counts no more.

        Args:
            job: settings, the same on all ranks of the node.
            start: id of the start.
            step: step from which it goes on; -1 before the first.
            source: the place from which that step was restored, for people.
        """
        self._change(job=job, start=start, step=step, source=source, required=(), protect=(), names=(), released=())

    def set_peers(self, peers: PeerSettings) -> None:
        """Have the keeper serve, and link to, the keepers of other nodes."""
        self._change(peers=peers)

    def reserve_port(self, host: str) -> int:
        """Reserve a port of this address for the keepers of this node, until this process ends or leaves.

        It is the same one for the next keeper, so other nodes learn it once. Raises: OSError, if there is none.
        """
        self._release_port()
        self._port = ReservedPort(host)
        return self._port.number

    def require(self, step: int) -> None:
        """Have a step of this start stored at every level, whatever the interval."""
        with self._changed:
            self._trainer = with_required(self._trainer, step)
        self._wake()

    def protect(self, step: int) -> None:
        """Have a step of this start protected by other nodes, whatever the interval."""
        with self._changed:
            self._trainer = with_protected(self._trainer, step)
        self._wake()

    def keep(self, name: str, step: int) -> None:
        """Give a name to a step of this start, instead of the step that had it."""
        with self._changed:
            self._trainer = with_name(self._trainer, name, step)
        self._wake()

    def release(self, name: str) -> None:
        """Take a name away at every level."""
        with self._changed:
            self._trainer = without_name(self._trainer, name)
        self._wake()

    def preempt(self) -> None:
        """Say that this process is about to be killed: the newest capture is stored now."""
        self._change(is_preempted=True)

    def seal(self) -> None:
        """Say that this process captures nothing more."""
        self._change(is_sealed=True)

    # Answers from the keeper's state

    def is_complete(self, step: int, level: int) -> bool:
        """True if that step of this start, or a later one, is complete at a level."""
        return self.newest_complete(level) >= step

    def newest_complete(self, level: int) -> int:
        """Return the newest step of this start that is complete at a level; -1 if there is none."""
        levels = self.state.levels
        start = self._trainer.start
        newest = -1
        if level < len(levels):
            for key in levels[level].complete:
                if key.start == start:
                    newest = max(newest, key.step)
        return newest

    def memory(self, timeout_s: float) -> MemoryInventory:
        """Return what the keeper holds for this rank, of this trainer or of a dead one. Blocks.

        Raises: KeeperError, if there is no answer in time.
        """
        answer = self._ask(timeout_s)
        if answer is None or answer.memory is None:
            raise KeeperError(self.failure() or f"the keeper did not tell what it holds within {timeout_s:g} s")
        return MemoryInventory.of(answer.memory, {slot.slot_id: slot for slot in self.mapped()})

    def _ask(self, timeout_s: float) -> Answer | None:
        """Ask for this rank's memory, by each keeper that comes until one answers; None if none did in time."""
        with self._changed:
            self._last_number += 1
            number = self._last_number
            self._answers[number] = None
        self._wake()
        self.wait(lambda _: self._answers[number] is not None, timeout_s)
        with self._changed:
            return self._answers.pop(number)

    # The end

    def leave(self, farewell: Farewell, timeout_s: float) -> None:
        """Part from the keeper, and unmap all slots. Nothing can be done with this client afterwards.

        Blocks: with ``OVER`` until the keeper is told, which is not until it ends, at most ``timeout_s``; else only
        for the moment that the thread takes to end.
        """
        patience_s = timeout_s if farewell is Farewell.OVER else _LAST_WORD_S
        with self._changed:
            self._trainer = structs.replace(self._trainer, farewell=farewell)
            self._leave_by_s = time.monotonic() + patience_s
            thread = self._thread
        self._notify()
        self._wake()
        if thread is not None:
            thread.join(patience_s + _JOIN_S)
        self._release_port()
        self._slots.close()

    def _release_port(self) -> None:
        if self._port is not None:
            self._port.release()
            self._port = None

    def forget_in_child(self) -> None:
        """Forget all in a forked child: connection and slots are the parent's."""
        self._changed = threading.Condition()  # another thread of the parent may have it
        self._thread = None
        self._leave_by_s = 0.0
        self._doorbell = None
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    # Changes

    def _change(self, **fields: object) -> None:
        with self._changed:
            self._trainer = structs.replace(self._trainer, **fields)
        self._wake()

    def _wake(self) -> None:
        """Wake the client's thread."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._wake_descriptor, 1)

    def _notify(self) -> None:
        """Wake everybody who waits for a change."""
        with self._changed:
            self._num_changes += 1
            self._changed.notify_all()

    def _slot_ids(self) -> tuple[int, ...]:
        return tuple(slot.slot_id for slot in self._slots.all)

    # The client's thread

    def _run(self) -> None:
        try:
            self._keep_connected()
        except (KeeperError, JobBusy) as error:
            self._give_up(error)
        except Exception as error:  # noqa: BLE001  the last handler of the thread: training goes on without memory
            self._give_up(KeeperError(f"the keeper's client failed: {type(error).__name__}: {error}"))

    def _give_up(self, error: KeeperError | JobBusy) -> None:
        with self._changed:
            self._error = error
        self._notify()

    def _keep_connected(self) -> None:
        """Search a keeper, exchange states with it until it is lost, and search the next one, until the trainer leaves."""
        num_early = 0
        seeker = Seeker(
            self._identity,
            self._local_rank,
            self._io_timeout_s,
            self._hand_over,
            self._must_end,
            self._wake_descriptor,
        )
        while not self._must_end():
            if num_early > 1:  # the first successor comes at once, for memory's sake
                pause_s = min(_REPLACE_S * 2 ** min(num_early, _MOST_DOUBLINGS), _REPLACE_AT_MOST_S)
                with self._changed:
                    self._changed.wait_for(self._must_end, pause_s)
            served = KeeperSearch(seeker).run()
            if served is None:
                return
            began_at_s = time.monotonic()
            has_parted = self._serve(served)
            if has_parted:
                return
            if time.monotonic() - began_at_s < _EARLY_S:
                num_early += 1
            else:
                num_early = 0

    def _must_end(self) -> bool:
        """True if no keeper is to be sought any more. A training that is over still seeks one that it can tell."""
        leave_by_s = self._leave_by_s
        if leave_by_s is None:
            return False
        return self._trainer.farewell is not Farewell.OVER or time.monotonic() > leave_by_s

    def _hand_over(self) -> tuple[TrainerState, list[int]]:
        """Return the state, and the descriptors of its slots: all that a keeper needs that knows nothing."""
        slots = self._slots.all[:MAX_DESCRIPTORS]
        slot_ids = tuple(slot.slot_id for slot in slots)
        with self._changed:
            state = structs.replace(self._trainer, slots=slot_ids)
        return state, [slot.descriptor for slot in slots]

    def _serve(self, served: Served) -> bool:
        """Exchange states until the connection ends. Returns: True if the keeper was told that this trainer leaves."""
        channel = served.channel
        try:
            self._become_connected(served)
            return self._exchange(channel)
        except (OSError, WireError) as error:
            logger.info("the connection to the keeper failed: %s", error)
            return False
        finally:
            self._become_disconnected()

    def _become_connected(self, served: Served) -> None:
        """Take the first messages of a keeper, and with them its page and its eventfd.

        Raises: KeeperError, if they are not of this version; OSError.
        """
        self._channel = served.channel
        self._sent = served.sent
        self._asked = set()
        self._mapping_problem = ""
        frames = list(served.frames)
        try:
            doorbell = _Doorbell.of(served)
            while frames:
                self._take(frames.pop(0))
        finally:
            for frame in frames:
                frame.close()
        with self._changed:
            self._doorbell = doorbell
            self._was_connected = True
        self._notify()

    def _become_disconnected(self) -> None:
        """The memory stays: its captures are good, and the next keeper gets the slots."""
        with self._changed:
            self._doorbell = None
            self._is_silent = False
        channel = self._channel
        self._channel = None
        if channel is not None:
            channel.close()
        self._notify()

    def _exchange(self, channel: Channel) -> bool:
        """Send what changed, and take what comes. Returns: see ``_serve``. Raises: OSError, WireError."""
        silence = _Silence(self._io_timeout_s)
        while True:
            self._send_changes(channel, silence)
            leave_by_s = self._leave_by_s
            wait_s = silence.wait_s()
            if leave_by_s is not None:
                is_told = self._sent.farewell is not Farewell.NONE and not channel.is_sending
                remaining_s = leave_by_s - time.monotonic()
                if is_told or remaining_s <= 0:
                    return True
                wait_s = min(wait_s, remaining_s)
            began_at_s = time.monotonic()
            channel.wait(wait_s, self._wake_descriptor)
            drain(self._wake_descriptor)
            channel.flush()
            frames = channel.receive()
            if frames is None:
                return False
            silence.waited(time.monotonic() - began_at_s, is_answered=bool(frames))
            if silence.is_silent != self._is_silent:
                self._is_silent = silence.is_silent
                self._notify()
            while frames:
                self._take(frames.pop(0))

    def _send_changes(self, channel: Channel, silence: "_Silence") -> None:
        """Send what the keeper does not know yet, as far as it takes it now."""
        while not channel.is_sending:
            state = self._trainer
            if state != self._sent:
                self._sent = state
                channel.send(state)
                continue
            question = self._next_question(silence)
            if question is None:
                return
            channel.send(question)

    def _next_question(self, silence: "_Silence") -> Question | None:
        with self._changed:
            unasked = sorted(self._answers.keys() - self._asked)
        if unasked:
            self._asked.add(unasked[0])
            return Question(number=unasked[0], about="memory", local_rank=self._local_rank)
        if silence.must_ask():
            return Question(about="memory", local_rank=self._local_rank)
        return None

    def _take(self, frame: Frame) -> None:
        """Take a message of the keeper."""
        message = frame.message
        try:
            if isinstance(message, KeeperState) and not message.refusal:
                self._map_all(frame.descriptors)
                self._take_state(message)
            elif isinstance(message, Answer):
                with self._changed:
                    if message.number in self._answers:
                        self._answers[message.number] = message
        finally:
            frame.close()
        self._notify()

    def _take_state(self, state: KeeperState) -> None:
        """Replace the keeper's state, and forget what it answers."""
        if self._mapping_problem and not state.memory_refusal:
            state = structs.replace(state, memory_refusal=self._mapping_problem)
        with self._changed:
            trainer = structs.replace(self._trainer, slots=self._slot_ids())
            self._trainer = without_answered(trainer, self._sent, state)
            self.state = state

    def _map_all(self, descriptors: list[int]) -> None:
        """Map slots. One that cannot be mapped is memory that was refused: nothing else would say why none comes."""
        while descriptors:
            descriptor = descriptors.pop(0)
            try:
                self._slots.map(descriptor, self._trainer.returned)
                self._mapping_problem = ""
            except (FormatError, OSError) as error:
                self._mapping_problem = f"a slot of the keeper cannot be mapped: {error}"


class _Doorbell:
    """Page and eventfd of a keeper. They are closed when no thread uses them any more."""

    def __init__(self, keeper_pid: int, page: NodePage, event: int) -> None:
        self.keeper_pid = keeper_pid
        self._page = page
        self._event = event
        weakref.finalize(self, _close_doorbell, page, event).atexit = False

    @classmethod
    def of(cls, served: Served) -> "_Doorbell":
        """Take page and eventfd out of the first state of a keeper. Raises: KeeperError, if they are not there."""
        for frame in served.frames:
            if frame.message is served.state:
                return cls._taken_from(served.state.pid, frame.descriptors)
        raise AssertionError("the first state is among the messages")

    @classmethod
    def _taken_from(cls, keeper_pid: int, descriptors: list[int]) -> "_Doorbell":
        if len(descriptors) < 2:
            raise KeeperError(f"keeper {keeper_pid} sent no page of its words; end it with `kill {keeper_pid}`")
        page_descriptor = descriptors.pop(0)
        try:
            page = NodePage.attach(page_descriptor)
        except (FormatError, OSError) as error:
            raise KeeperError(f"the page of keeper {keeper_pid} cannot be mapped: {error}") from error
        return cls(keeper_pid, page, descriptors.pop(0))

    def ring(self, step: int) -> None:
        """Wake the keeper if it awaits the capture of ``step``."""
        if self._page.is_awaited(step):
            with contextlib.suppress(BlockingIOError):  # it has not seen many others yet
                os.eventfd_write(self._event, 1)


def _close_doorbell(page: NodePage, event: int) -> None:
    page.close()
    os.close(event)


class _Silence:
    """Finds a keeper that does not answer. It sends nothing while nothing changes, so it is asked now and then."""

    def __init__(self, io_timeout_s: float) -> None:
        self._patience_s = max(_LEAST_SILENCE_S, io_timeout_s)
        self._quiet_s = 0.0
        """Seconds since the last message."""
        self._is_asked = False
        """True if a question was sent since then."""

    @property
    def is_silent(self) -> bool:
        """True if the keeper was asked, and sent nothing for too long."""
        return self._is_asked and self._quiet_s >= self._patience_s

    def must_ask(self) -> bool:
        """Return True, once, if it is time for a question."""
        if self._is_asked or self._quiet_s < self._patience_s / 2:
            return False
        self._is_asked = True
        return True

    def wait_s(self) -> float:
        """Return the seconds after which ``waited`` is to be called."""
        if self._is_asked:
            return _TURN_S
        return self._patience_s / 2 - self._quiet_s

    def waited(self, seconds: float, *, is_answered: bool) -> None:
        """Count the time that passed.

        While an answer is awaited, it is counted in short turns: if this process itself was stopped, its clock says
        nothing of the keeper.
        """
        if is_answered:
            self._quiet_s = 0.0
            self._is_asked = False
        elif self._is_asked:
            self._quiet_s += min(seconds, _TURN_S)
        else:
            self._quiet_s = min(self._quiet_s + seconds, self._patience_s / 2)


def _after_fork_in_child() -> None:
    for client in list(_live_clients):
        client.forget_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
