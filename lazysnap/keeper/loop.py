"""The keeper: one asyncio loop around the core. Nothing on it blocks, and nothing polls.

::

    sockets, pidfds, eventfd, timer ──> _handle(event) ──> core.step ──> actions ──> words, messages, tasks
                                            ▲                                            │
                                            └───────── call_soon_threadsafe ─────────────┘ threads of levels, of memory

An unexpected error ends the process. Its trainers then start another keeper, and hand their memory over.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import socket
from typing import Any

from msgspec import structs

from lazysnap import faults
from lazysnap.core.actions import (
    Action,
    AdoptSlots,
    BeginJob,
    CancelTask,
    CloseConnection,
    Event,
    Finish,
    FreeParity,
    FreeSlot,
    Hold,
    KeeperTrouble,
    MakeSlot,
    PlainEvent,
    Release,
    Send,
    SendToTrainer,
    SetAwaitedStep,
    SetPeers,
    SlotMade,
    SlotsSeen,
    Task,
    TaskEnded,
    TrainerReported,
    VoidSlot,
    WriteLevel,
)
from lazysnap.core.core import Core
from lazysnap.core.lifecycle import Phase
from lazysnap.core.messages import KeeperAlert, TrainerState
from lazysnap.keeper.answers import Answers
from lazysnap.keeper.connections import TrainerConnection, TrainerConnections
from lazysnap.keeper.event_log import EventLog
from lazysnap.keeper.level_threads import LevelThreads
from lazysnap.keeper.memory_work import MemoryWork
from lazysnap.keeper.parity import ParityStore
from lazysnap.keeper.peer_sources import KeeperSources
from lazysnap.keeper.questions import Answer, Question
from lazysnap.keeper.runtime import REFRESH_S, KeeperLock
from lazysnap.keeper.slot_table import SlotTable
from lazysnap.keeper.tasks import TaskControl
from lazysnap.keeper.trouble import Trouble
from lazysnap.keeper.wire import Frame
from lazysnap.memory.budget import NODE
from lazysnap.memory.slots import KeeperSlot
from lazysnap.memory.words import NodePage
from lazysnap.peers.server import Peers

logger = logging.getLogger(__name__)

_MAX_ROUNDS = 16
"""Maximum times that the words are read again for one event. The next event continues."""


class Keeper:
    """Carries out the decisions of the core. Everything runs on the loop's thread, unless documented otherwise.

    One part of the keeper handles each action of the core.
    """

    def __init__(self, lock: KeeperLock, trouble: Trouble) -> None:
        """Begin without connections.

        Args:
            lock: the lock of the job, which this process holds.
            trouble: the errors that are reported to trainers.
        """
        self._lock = lock
        self._trouble = trouble
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._on_loop_error)
        self._core = Core(secrets.randbits(62), self._loop.time(), os.getpid())
        NODE.expect(self._core.ranks.growth_bytes)
        self._timer: asyncio.TimerHandle | None = None
        self._must_observe = False
        """True if words or slots changed since the core saw them."""
        self._exit_status = 0
        self._is_ending = False
        self._node_page = NodePage.create()
        self._slots = SlotTable()
        self._connections = TrainerConnections(
            self._loop,
            self._handle,
            self._received,
            self._node_page.descriptors,
            self._slot_descriptor,
        )
        self._handed_over: list[int] = []
        """Descriptors of the current message, until ``AdoptSlots`` takes them."""
        self._parity = ParityStore()
        self._sources = KeeperSources(self._slots.snapshot, self._num_ranks, self._parity)
        self._peers = Peers(self._loop, self._handle, self._sources)
        self._levels = LevelThreads(self._post, self._task_returned, self._parity)
        self._memory = MemoryWork(self._slots, self._loop.call_soon_threadsafe, self._post, self._add_slot)
        self._events = EventLog()
        self._answers = Answers(self._core, self._slots, self._connections, self._parity, self._events)

    def run(self, listener: socket.socket, trainer: socket.socket | None = None) -> int:
        """Serve the job until it is over.

        Args:
            listener: a socket that listens at the job's path.
            trainer: connection to the trainer that started this process.

        Returns: the exit status: 0 once the job is over, 1 after an error. After an error the trainers hand their
            memory to the next keeper.
        """
        self._connections.listen(listener)
        if trainer is not None:
            self._connections.add(trainer)
        self._loop.add_reader(self._node_page.event_descriptor, self._woken)
        self._loop.add_signal_handler(signal.SIGTERM, self._handle, PlainEvent.TERMINATED)
        # Slurm sends SIGTERM to all processes of a step; it is meant for trainers
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM, signal.SIGUSR1])
        self._loop.call_later(REFRESH_S, self._refresh_lock)
        self._trouble.notify = self._trouble_came
        self._loop.call_soon(self._report_trouble)
        self._loop.call_soon(self._set_timer)
        faults.point("keeper.started")
        self._loop.run_forever()
        if self._exit_status == 0:
            # Before the trainers see the end, after which a launcher may kill the rest of the job.
            self._events.close()
        self._connections.close_all()
        self._peers.close()
        return self._exit_status

    def _refresh_lock(self) -> None:
        self._lock.refresh()
        self._loop.call_later(REFRESH_S, self._refresh_lock)

    # Events

    def _handle(self, event: Event) -> None:
        """Handle an event, and carry out the resulting actions."""
        if self._is_ending:
            return
        self._observe()
        self._step(event)
        if self._must_observe:
            self._observe()
        self._follow_up()

    def _observe(self) -> None:
        """Pass the words of all slots to the core, again whenever it changed some, until it returns no actions."""
        for _ in range(_MAX_ROUNDS):
            self._must_observe = False
            self._step(SlotsSeen(self._slots.views()))
            if not self._must_observe:
                return

    def _step(self, event: Event) -> None:
        phase = self._core.phase
        actions = self._core.step(event, self._loop.time())
        if self._core.phase is not phase:
            logger.info("%s -> %s", phase.value, self._core.phase.value)
            faults.point(f"keeper.{self._core.phase.value}")
        for action in actions:
            self._perform(action)

    def _follow_up(self) -> None:
        """Do what follows every event."""
        self._events.note(self._core, self._slots.by_rank)
        self._answer_stop()
        self._compute_checksums_at_rest()
        self._set_timer()

    def _woken(self) -> None:
        """Handle the begin of a capture that some level waits for."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._node_page.event_descriptor)
        if not self._is_ending:
            self._observe()
            self._follow_up()

    def _post(self, event: Event) -> None:
        """Handle an event from any thread."""
        self._loop.call_soon_threadsafe(self._handle, event)

    def _set_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        wake_at = self._core.wake_at
        if wake_at is not None and not self._is_ending:
            self._timer = self._loop.call_at(wake_at, self._handle, PlainEvent.TIME_PASSED)

    def _trouble_came(self) -> None:
        """Handle a logged error. Called on any thread."""
        self._loop.call_soon_threadsafe(self._report_trouble)

    def _report_trouble(self) -> None:
        while not self._trouble.texts.empty():
            self._handle(KeeperTrouble(self._trouble.texts.get()))

    def _on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """End the process after an error: its state is undefined."""
        self._exit_status = 1
        self._is_ending = True
        loop.stop()
        logger.error("the keeper ends: %s", context.get("message"), exc_info=context.get("exception"))
        alerts = []
        while not self._trouble.texts.empty():
            alerts.append(KeeperAlert("keeper", self._trouble.texts.get()))
        for rank in self._core.ranks.all:
            if rank.last_sent is not None:
                state = structs.replace(rank.last_sent, alerts=(*rank.last_sent.alerts, *alerts))
                self._connections.send_state(rank.connection, rank.number, state)

    # Actions

    def _perform(self, action: Action) -> None:
        match action:
            case SendToTrainer():
                self._connections.send_state(action.connection, action.rank, action.state)
            case CloseConnection():
                self._connections.close(action.connection)
            case AdoptSlots():
                self._slots.adopt(action.rank, self._handed_over)
                self._handed_over = []
                self._must_observe = True
            case MakeSlot():
                self._memory.make_slot(action)
            case FreeSlot():
                self._slots.free(action.rank, action.slot_id)
                self._sources.clear()
                self._must_observe = True
            case FreeParity():
                self._parity.clear()
            case VoidSlot() | Hold() | Release():
                self._set_word(action)
            case SetAwaitedStep():
                self._set_awaited_step(action.step)
            case BeginJob():
                self._levels.begin(action.settings)
                self._events.job_began(action.settings)
            case SetPeers():
                self._levels.set_peers(action.peers)
                self._peers.begin(action.peers)
            case Task():
                self._levels.start(action, self._slots.by_rank)
            case CancelTask():
                self._levels.cancel(action.number)
            case Send():
                self._peers.send(action.node, action.message)
            case Finish():
                self._finish()

    def _finish(self) -> None:
        self._answers.finish()
        self._is_ending = True
        self._loop.stop()

    def _set_awaited_step(self, step: int | None) -> None:
        self._node_page.set_awaited_step(step)
        self._must_observe = True  # the step may have begun just before

    def _set_word(self, action: VoidSlot | Hold | Release) -> None:
        slot = self._slots.find(action.rank, action.slot_id)
        if slot is None:
            return  # freed after the core saw it
        self._must_observe = True
        match action:
            case VoidSlot():
                slot.void(action.sequence)
            case Hold():
                slot.hold(action.sequence, self._slots.of_rank(action.rank), action.num_kept)
                faults.point("keeper.slot_held")
            case Release():
                slot.release()

    # Levels

    def _num_ranks(self, start: int) -> int:
        """Return the number of ranks of the node in the current start; 0 for another start."""
        if self._core.job is None or start != self._core.job_start:
            return 0
        return self._core.job.settings.num_ranks

    def _task_returned(self, control: TaskControl, event: TaskEnded) -> None:
        """Handle the end of a task. Called on its thread."""
        self._loop.call_soon_threadsafe(self._task_ended, control, event)

    def _task_ended(self, control: TaskControl, event: TaskEnded) -> None:
        task = control.task
        self._levels.forget(control)
        self._slots.note_checksums(control.checksums)
        key = task.key if isinstance(task, WriteLevel) else None
        self._events.task_ended(control.level_url, event, key)
        self._handle(event)

    # Memory

    def _slot_descriptor(self, rank: int, slot_id: int) -> int | None:
        slot = self._slots.find(rank, slot_id)
        return None if slot is None else slot.descriptor

    def _add_slot(self, rank: int, slot: KeeperSlot) -> None:
        self._slots.add(rank, slot)
        self._handle(SlotMade(rank))

    def _compute_checksums_at_rest(self) -> None:
        """Compute checksums while memory waits for a restart, and no level works."""
        is_waiting = self._core.phase is Phase.LINGERING and not self._core.is_served
        self._memory.rest(is_resting=is_waiting and not self._levels.is_busy)

    # Connections

    def _received(self, connection: TrainerConnection, frame: Frame) -> None:
        message = frame.message
        if isinstance(message, TrainerState):
            self._trainer_reported(connection, message, frame)
        elif isinstance(message, Question):
            self._answer(connection, message)
        else:
            logger.warning("process %d sent a %s", connection.pid, type(message).__name__)

    def _trainer_reported(self, connection: TrainerConnection, state: TrainerState, frame: Frame) -> None:
        faults.set_peer(connection.pid)
        self._handed_over = frame.descriptors
        frame.descriptors = []
        try:
            self._handle(TrainerReported(connection.number, connection.pid, state))
        finally:
            # From a trainer that is refused, or that handed over nothing usable.
            frame.descriptors = self._handed_over
            self._handed_over = []

    # Questions

    def _answer(self, connection: TrainerConnection, question: Question) -> None:
        self._handle(PlainEvent.TIME_PASSED)  # captures may have begun without waking the keeper
        if question.about == "stop":
            self._answers.stop_asked(connection, question)
            if question.is_forced and not self._core.is_served:
                self._finish()
            else:
                self._answer_stop()
            return
        descriptors: list[int] = []
        try:
            if question.about == "memory":
                answer, descriptors = self._answers.memory(connection, question)
            else:
                answer = self._answers.status(question)
        except Exception as error:  # collecting an answer changes nothing: it must not end the keeper
            logger.exception("a question about %s", question.about)
            answer = Answer(number=question.number, text=f"{type(error).__name__}: {error}")
        self._connections.answer(connection, answer, descriptors)

    def _answer_stop(self) -> None:
        """Answer the question whether the keeper can end, once that is known, and end it in that case."""
        if self._answers.decide_stop():
            self._loop.call_soon(self._handle, PlainEvent.TERMINATED)
