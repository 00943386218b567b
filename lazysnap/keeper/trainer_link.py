"""The exchange of states between a trainer and its keeper, which may die and be replaced at any time.

One daemon thread owns the connection::

    no keeper ──search: one that listens, else start one; slots along──> connected
        ^                                                                    │
        └───────────────────────end of the connection───────────────────────┘

Both sides exchange only a ``TrainerState`` and a ``KeeperState``. Other threads replace the first, and read the second.
"""

import contextlib
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Concatenate, ParamSpec

from msgspec import structs

from lazysnap.core.messages import Farewell, KeeperState, TrainerState
from lazysnap.errors import FormatError, JobBusy, KeeperError
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.mapped_slots import MappedSlots
from lazysnap.keeper.questions import Answer, Question
from lazysnap.keeper.search import KeeperSearch, ServingKeeper, drain
from lazysnap.keeper.trainer_requests import without_answered
from lazysnap.keeper.wire import MAX_DESCRIPTORS, Channel, Frame, WireError
from lazysnap.memory.slots import TrainerSlot
from lazysnap.memory.words import NodePage

logger = logging.getLogger(__name__)

P = ParamSpec("P")

_EARLY_S = 5.0
"""Minimum life of a keeper in seconds. Keepers that die sooner are replaced with growing delays."""
_REPLACE_S = 0.1
_REPLACE_AT_MOST_S = 1.0
_MOST_DOUBLINGS = 10
_JOIN_S = 5.0
_END_S = 5.0
"""Seconds that a finished training waits for its keeper to end."""
_TURN_S = 0.25
_NUM_PAGE_DESCRIPTORS = 2
_LEAST_S = 3.0
"""Tolerance in seconds for a keeper on a busy machine."""
_live_links: "weakref.WeakSet[TrainerLink]" = weakref.WeakSet()


class Silence:
    """Measures the silence of a keeper, which sends only changes and is asked now and then. Pure."""

    def __init__(self, io_timeout_s: float) -> None:
        self._patience_s = max(_LEAST_S, io_timeout_s)
        self._quiet_s = 0.0
        """Seconds since the last message."""
        self._is_answer_due = False

    @property
    def is_silent(self) -> bool:
        """True if an answer is overdue."""
        return self._is_answer_due and self._quiet_s >= self._patience_s

    @property
    def is_question_due(self) -> bool:
        """True if nothing was received for half of that time, and nothing was asked since."""
        return not self._is_answer_due and self._quiet_s >= self._patience_s / 2

    def expect_answer(self) -> None:
        """Record that the keeper was asked, or must read a message."""
        self._is_answer_due = True

    def wait_s(self) -> float:
        """Return the seconds after which ``waited`` is to be called."""
        if self._is_answer_due:
            return _TURN_S
        return self._patience_s / 2 - self._quiet_s

    def waited(self, seconds: float, *, is_answered: bool) -> None:
        """Count the elapsed time.

        An overdue answer is counted in short intervals: if this process or the whole machine was stopped, the clock
        says nothing about the keeper.
        """
        if is_answered:
            self._quiet_s = 0.0
            self._is_answer_due = False
        elif self._is_answer_due:
            self._quiet_s += min(seconds, _TURN_S)
        else:
            self._quiet_s = min(self._quiet_s + seconds, self._patience_s / 2)


class TrainerLink:
    """The connection of one trainer to its current keeper. Thread-safe.

    Example::

        link = TrainerLink(identity, TrainerState(local_rank=0), io_timeout_s=60.0)
        link.start()
        link.update(with_required, step=7)
        link.wait(has_step_7, timeout_s=10.0)
        link.leave(Farewell.LEFT, patience_s=0.5)
    """

    def __init__(self, identity: JobIdentity, trainer: TrainerState, io_timeout_s: float) -> None:
        """Do nothing before ``start``."""
        self.identity = identity
        self.trainer = trainer
        """The state for the keeper. ``update`` replaces it as a whole."""
        self.state = KeeperState()
        """The last state of the keeper. Replaced as a whole."""
        self.slots = MappedSlots(self._notify)
        self.node_page: NodePage | None = None
        """None while no keeper is connected."""
        self.when_preempted: Callable[[], None] | None = None
        """Called with each state in which some rank is preempted. It must not block."""
        self.error: KeeperError | JobBusy | None = None
        """The reason why the thread gave up."""
        self.was_connected = False
        self.is_silent = False
        self.waited_s = 0.0
        """Seconds that training has waited so far. Sent with the next message."""
        self._io_timeout_s = io_timeout_s
        self._changed = threading.Condition()
        """Protects the fields above."""
        self._num_changes = 0
        self._leave_by_s: float | None = None
        """Time at which the thread ends in any case; None while this trainer stays."""
        self._last_number = 0
        self._answers: dict[int, Answer | None] = {}
        """Pending questions, by number; None: not answered yet."""
        self._thread: threading.Thread | None = None
        self._wake_descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        weakref.finalize(self, os.close, self._wake_descriptor).atexit = False
        # Only the thread uses the following fields, which belong to one connection.
        self._channel: Channel | None = None
        self._sent = trainer
        """The state that was sent last."""
        self._asked: set[int] = set()
        """Numbers of the questions that were sent."""
        _live_links.add(self)

    # Any thread

    @property
    def is_leaving(self) -> bool:
        """True once this trainer leaves or has left."""
        return self._leave_by_s is not None

    @property
    def is_start_sent(self) -> bool:
        """True if the current start was sent on this connection. Undefined while no keeper is connected."""
        return self._sent.start == self.trainer.start

    def start(self) -> None:
        """Connect in the background; again after the thread gave up. Never raises; does not block."""
        with self._changed:
            is_running = self._thread is not None and self._thread.is_alive()
            is_trying = is_running and self.error is None
            if is_trying or self.is_leaving:
                return
            self.error = None
            thread = threading.Thread(target=self._run, name="lazysnap-keeper", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # no thread can be started
                self._give_up(KeeperError(f"no keeper can be connected: {error}"))
                return
            self._thread = thread

    def update(
        self, change: Callable[Concatenate[TrainerState, P], TrainerState], *arguments: P.args, **fields: P.kwargs
    ) -> None:
        """Replace the trainer's state by ``change(state, ...)``, and send it. Does not block."""
        with self._changed:
            self.trainer = change(self.trainer, *arguments, **fields)
        self._wake()

    def wait(self, is_true: Callable[[KeeperState], bool], timeout_s: float) -> bool:
        """Block until ``is_true`` of the keeper's state, at most ``timeout_s``.

        ``is_true`` is called with each new state, and when a slot becomes ready, or the keeper is found, lost or
        silent.
        Returns: False after the deadline, or if the thread gave up.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            with self._changed:
                num_seen = self._num_changes
                is_hopeless = self.error is not None or self.is_leaving
            if is_true(self.state):
                return True
            with self._changed:
                remaining_s = deadline_s - time.monotonic()
                if is_hopeless or remaining_s <= 0:
                    return False
                if self._num_changes == num_seen:
                    self._changed.wait(remaining_s)

    def ask(self, timeout_s: float) -> Answer | None:
        """Ask the keeper for the memory of this rank. A later keeper is asked again.

        Blocks: at most ``timeout_s``. Returns: None if there is no answer in time.
        """
        with self._changed:
            self._last_number += 1
            number = self._last_number
            self._answers[number] = None
        self._wake()

        def is_answered(_: KeeperState) -> bool:
            return self._answers[number] is not None

        self.wait(is_answered, timeout_s)
        with self._changed:
            return self._answers.pop(number)

    def leave(self, farewell: Farewell, patience_s: float) -> None:
        """Disconnect from the keeper, and unmap all slots.

        Blocks: until the keeper has received it, at most ``patience_s``, and until the thread ends. With ``OVER`` also
        until the keeper has ended, at most ``_END_S``: the program may delete its directory afterwards.
        """
        with self._changed:
            self.trainer = structs.replace(self.trainer, farewell=farewell, waited_s=self.waited_s)
            self._leave_by_s = time.monotonic() + patience_s
            thread = self._thread
        self._notify()
        self._wake()
        if thread is not None:
            thread.join(patience_s + _END_S + _JOIN_S)
        self.slots.close()

    def forget_in_child(self) -> None:
        """Drop everything in a forked child: connection and slots are the parent's."""
        self._changed = threading.Condition()  # another thread of the parent may have it
        self._thread = None
        self._leave_by_s = 0.0
        self.node_page = None
        self._slots_of_parent = self.slots  # the child must not unregister them from a device
        self.slots = MappedSlots(self._notify)
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _wake(self) -> None:
        """Wake the thread."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_write(self._wake_descriptor, 1)

    def _notify(self) -> None:
        """Wake all threads that wait for a change."""
        with self._changed:
            self._num_changes += 1
            self._changed.notify_all()

    # The thread

    def _run(self) -> None:
        try:
            self._keep_connected()
        except (KeeperError, JobBusy) as error:
            self._give_up(error)
        except Exception as error:  # noqa: BLE001  the last handler of the thread: training goes on without memory
            self._give_up(KeeperError(f"the keeper's client failed: {type(error).__name__}: {error}"))

    def _give_up(self, error: KeeperError | JobBusy) -> None:
        with self._changed:
            self.error = error
        self._notify()

    def _keep_connected(self) -> None:
        """Search a keeper, exchange states until it is lost, and search the next one, until this trainer leaves."""
        num_early = 0
        while not self._must_end():
            if num_early > 1:  # the first successor is started at once, to save the memory
                pause_s = min(_REPLACE_S * 2 ** min(num_early, _MOST_DOUBLINGS), _REPLACE_AT_MOST_S)
                with self._changed:
                    self._changed.wait_for(self._must_end, pause_s)
            search = KeeperSearch(
                self.identity, self._io_timeout_s, self._hand_over, self._must_end, self._wake_descriptor
            )
            served = search.run()
            if served is None:
                return
            began_at_s = time.monotonic()
            is_over = self._serve(served)
            if is_over:
                return
            if time.monotonic() - began_at_s < _EARLY_S:
                num_early += 1
            else:
                num_early = 0

    def _must_end(self) -> bool:
        """True if no keeper is needed any more. A finished training still searches one to report its end."""
        leave_by_s = self._leave_by_s
        if leave_by_s is None:
            return False
        return self.trainer.farewell is not Farewell.OVER or time.monotonic() > leave_by_s

    def _hand_over(self) -> tuple[TrainerState, tuple[TrainerSlot, ...]]:
        """Return the state and its slots: all that a new keeper needs."""
        slots = self.slots.all[:MAX_DESCRIPTORS]
        slot_ids = tuple(slot.slot_id for slot in slots)
        with self._changed:
            return structs.replace(self.trainer, slots=slot_ids), slots

    def _serve(self, served: ServingKeeper) -> bool:
        """Exchange states until the connection ends. Returns: True if this trainer left."""
        try:
            self._become_connected(served)
            return self._exchange(served.channel)
        except (OSError, WireError) as error:
            logger.info("the connection to the keeper failed: %s", error)
            return False
        finally:
            self._become_disconnected()

    def _become_connected(self, served: ServingKeeper) -> None:
        """Handle the first messages of a keeper. Raises: KeeperError, if they are of another version."""
        self._channel = served.channel
        self._sent = served.sent
        self._asked = set()
        self.slots.begin_connection()
        frames = list(served.frames)
        try:
            first = next(frame for frame in frames if frame.message is served.state)
            node_page = _node_page_of(served.state.pid, first.descriptors)
            while frames:
                self._receive(frames.pop(0))
        finally:
            for frame in frames:
                frame.close()
        with self._changed:
            self.node_page = node_page
            self.was_connected = True
        self._notify()

    def _become_disconnected(self) -> None:
        """Handle the loss of the keeper. Its memory stays: the next keeper gets the slots."""
        with self._changed:
            self.node_page = None
            self.is_silent = False
        channel = self._channel
        self._channel = None
        if channel is not None:
            channel.close()
        self._notify()

    def _exchange(self, channel: Channel) -> bool:
        """Send changes, and receive messages. Returns: see ``_serve``. Raises: OSError; WireError."""
        silence = Silence(self._io_timeout_s)
        while True:
            self._send_changes(channel, silence)
            wait_s = silence.wait_s()
            leave_by_s = self._leave_by_s
            if leave_by_s is not None:
                is_received = self._sent.farewell is not Farewell.NONE and not channel.is_sending
                remaining_s = leave_by_s - time.monotonic()
                if is_received and self._sent.farewell is Farewell.OVER:
                    self._wait_for_end(channel)
                if is_received or remaining_s <= 0:
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
            if silence.is_silent != self.is_silent:
                self.is_silent = silence.is_silent
                self._notify()
            while frames:
                self._receive(frames.pop(0))

    def _wait_for_end(self, channel: Channel) -> None:
        """Block until the keeper closes the connection, at most ``_END_S``. The last event is written then."""
        end_by_s = time.monotonic() + _END_S
        frames: list[Frame] | None = []
        while frames is not None and time.monotonic() < end_by_s:
            channel.wait(end_by_s - time.monotonic())
            frames = channel.receive()
            for frame in frames or ():
                frame.close()

    def _send_changes(self, channel: Channel, silence: Silence) -> None:
        """Send the changes that the keeper lacks, as far as the socket accepts them."""
        while not channel.is_sending:
            trainer = self.trainer
            if trainer != self._sent:
                self._sent = trainer
                channel.send(trainer)
                continue
            question = self._next_question(silence)
            if question is None:
                return
            channel.send(question)
        silence.expect_answer()  # the keeper must read earlier messages first

    def _next_question(self, silence: Silence) -> Question | None:
        """Return a question that was not sent on this connection yet."""
        local_rank = self.trainer.local_rank
        with self._changed:
            unasked = sorted(self._answers.keys() - self._asked)
        if unasked:
            self._asked.add(unasked[0])
            return Question(number=unasked[0], about="memory", local_rank=local_rank)
        if silence.is_question_due:
            silence.expect_answer()
            self.update(_with_waited, self.waited_s)
            return Question(about="memory", local_rank=local_rank)
        return None

    def _receive(self, frame: Frame) -> None:
        """Handle a message of the keeper. After a refusal the keeper closes the connection."""
        message = frame.message
        if isinstance(message, KeeperState) and not message.refusal:
            while frame.descriptors:
                self.slots.map(frame.descriptors.pop(0), self.trainer.returned)
            self._replace_state(message)
        elif isinstance(message, Answer):
            with self._changed:
                if message.number in self._answers:
                    self._answers[message.number] = message
        frame.close()
        self._notify()

    def _replace_state(self, state: KeeperState) -> None:
        """Replace the keeper's state, and drop answered requests from the trainer's state."""
        slot_ids = tuple(slot.slot_id for slot in self.slots.all)
        with self._changed:
            trainer = structs.replace(self.trainer, slots=slot_ids, waited_s=self.waited_s)
            self.trainer = without_answered(trainer, self._sent, state)
            self.state = state
        if state.is_preempted and self.when_preempted is not None:
            self.when_preempted()


def _node_page_of(keeper_pid: int, descriptors: list[int]) -> NodePage:
    """Take page and eventfd: the first descriptors of a keeper. Raises: KeeperError, if they are missing."""
    if len(descriptors) < _NUM_PAGE_DESCRIPTORS:
        raise KeeperError(f"keeper {keeper_pid} sent no page of its words; end it with `kill {keeper_pid}`")
    try:
        return NodePage.attach(descriptors.pop(0), descriptors.pop(0))
    except (FormatError, OSError) as error:
        raise KeeperError(
            f"the page of keeper {keeper_pid} cannot be mapped: {error}; end it with `kill {keeper_pid}`"
        ) from error


def _with_waited(trainer: TrainerState, waited_s: float) -> TrainerState:
    return structs.replace(trainer, waited_s=waited_s)


def _after_fork_in_child() -> None:
    for link in list(_live_links):
        link.forget_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
