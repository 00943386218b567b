"""The connection of a trainer to its keeper, which may die and be replaced at any moment.

One daemon thread owns the connection: it starts a keeper where there is none, gives it what it must know
(``TrainerState``), and receives its messages.
"""

import contextlib
import logging
import os
import select
import threading
import time
import weakref
from collections.abc import Callable

from lazysnap.config import SnapshotConfig
from lazysnap.errors import JobBusy, KeeperError
from lazysnap.keeper.attach import attach
from lazysnap.keeper.events import KeeperAnswers, KeeperLost, KeeperReady, KeeperSilent, KeeperUnreachable
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.messages import Connection, Received, Unclaimed
from lazysnap.keeper.protocol import Answer, Leave, Message, Question
from lazysnap.keeper.questions import Questions
from lazysnap.keeper.trainer_state import TrainerState
from lazysnap.topology import Team

logger = logging.getLogger(__name__)

_RECONNECT_S = 0.05
_EARLY_S = 5.0
"""Keepers that die sooner than this after they began are replaced more and more slowly."""
_REPLACE_S = 0.1
_REPLACE_AT_MOST_S = 1.0
_MOST_DOUBLINGS = 10
_MOST_ASKED = 3
"""Keepers that may die over one question."""
_SEND_AGAIN_S = 0.002
_TURN_S = 0.25
_LEAST_SILENCE_S = 3.0
"""A keeper on a busy machine misses a second."""
_REASON_S = 1.0
"""The thread gives up at its deadline, and says why: whoever waits for it waits a moment longer."""
_LAST_WORD_S = 0.5
_JOIN_S = 5.0
"""Wait so long at most for the thread to end, of a keeper that is just being started also."""
_live_links: "weakref.WeakSet[KeeperLink]" = weakref.WeakSet()


class KeeperLink:
    """Keeps a connection to the job's keeper from ``connect`` until it takes leave. Thread-safe."""

    def __init__(self, identity: JobIdentity, config: SnapshotConfig, team: Team, state: TrainerState) -> None:
        self._identity, self._config, self._team = identity, config, team
        self._state = state
        self._connection: Connection | None = None
        self._thread: threading.Thread | None = None
        self._goodbye: Leave | None = None
        """The message that this trainer leaves with; ``None`` while it stays."""
        self._fatal: Exception | None = None
        self._questions = Questions(state.lock, lambda: self._connection)
        self.is_silent = False
        """True if a keeper is attached that sent nothing for ``io_timeout_s``: it is stopped, or its machine is
        overloaded. Written by the thread."""
        self.was_attached = False
        """True once a keeper was reached."""
        _live_links.add(self)

    # ---------------------------------------------------------------- how it is

    @property
    def keeper_pid(self) -> int | None:
        """The process of the attached keeper."""
        connection = self._connection
        return None if connection is None else connection.peer_pid

    def refusal(self) -> JobBusy | None:
        """Why this process is not the job's trainer: another one is attached. ``None`` as long as nothing says so."""
        return self._fatal if isinstance(self._fatal, JobBusy) and not self.was_attached else None

    # ---------------------------------------------------------------- connecting

    def _begin(self) -> None:
        """Connect in the background, starting a keeper if there is none. Never raises; does not block."""
        with self._state.lock:
            if self._is_leaving() or self._is_running():
                return
            self._fatal = None
            self._thread = threading.Thread(target=self._serve, name="lazysnap-keeper", daemon=True)
            self._thread.start()

    def connect(self, timeout_s: float) -> None:
        """Connect, starting a keeper if there is none. Blocks: at most ``timeout_s``, and a second.

        Raises: JobBusy, if another trainer of this job is attached; KeeperError.
        """
        self._begin()
        deadline = time.monotonic() + timeout_s + _REASON_S
        with self._state.lock:
            while self._connection is None:
                if self._is_leaving() or self._fatal is not None:
                    raise self._fatal or KeeperError("this connection was closed: make another client")
                is_woken = self._state.lock.wait(max(0.0, deadline - time.monotonic()))
                if not is_woken:
                    raise KeeperError(
                        f"the keeper of job {self._identity.job_id!r} did not answer within {timeout_s:g} s"
                    )

    def _is_running(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def _is_leaving(self) -> bool:
        return self._goodbye is not None

    def _serve(self) -> None:
        died_early = 0
        try:
            while not self._is_leaving():
                if died_early > 1:  # the first successor comes at once, for memory's sake
                    with self._state.lock:
                        pause_s = min(_REPLACE_S * 2 ** min(died_early, _MOST_DOUBLINGS), _REPLACE_AT_MOST_S)
                        self._state.lock.wait_for(self._is_leaving, pause_s)
                        if self._is_leaving():
                            return
                connection, received = attach(self._identity, self._config, self._team, self._state.hand_over)
                try:
                    self._take_all(received)
                except BaseException:
                    connection.close()
                    raise
                with self._state.lock:
                    goodbye = self._goodbye  # said while the keeper was starting
                    if goodbye is None:
                        connection.waiting.extend(self._state.for_new_keeper())
                        self._connection = connection
                        self.was_attached = True
                        self._state.say(KeeperReady())
                if goodbye is not None:
                    self._leave_late(connection, goodbye)
                    return
                self._send_waiting()
                attached_at = time.monotonic()
                self._listen(connection)
                died_early = died_early + 1 if time.monotonic() - attached_at < _EARLY_S else 0
        except (KeeperError, JobBusy) as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001  the last handler of the thread: training goes on without a memory level
            self._fail(KeeperError(f"the keeper's client failed: {type(error).__name__}: {error}"))

    def _leave_late(self, connection: Connection, goodbye: Leave) -> None:
        """Leave a keeper that was reached too late: nobody uses its slots."""
        try:
            for message in (*self._state.names, goodbye):
                connection.send(message)
        finally:
            connection.close()
            self._state.release()

    def _fail(self, error: Exception) -> None:
        with self._state.lock:
            self._fatal = error
            if not self._is_leaving():
                self._state.say(KeeperUnreachable(str(error), is_refusal=self.refusal() is not None))
            self._state.lock.notify_all()

    # ---------------------------------------------------------------- receiving

    def _listen(self, connection: Connection) -> None:
        try:
            while True:
                self._await_message(connection)
                try:
                    received = connection.receive()
                except (OSError, KeeperError):
                    received = None
                if received is None:
                    break
                if self.is_silent:
                    self.is_silent = False
                    self._state.say(KeeperAnswers(connection.peer_pid))
                self._take_all(received)
        finally:
            with self._state.lock:
                self._connection = None
                self.is_silent = False
                self._state.slots.orphan_all()
                connection.close()
                if not self._is_leaving():
                    self._state.say(KeeperLost())
                self._state.lock.notify_all()

    def _await_message(self, connection: Connection) -> None:
        """Block until there is something to receive; say so if that takes ``io_timeout_s``: a keeper sends its status
        every second.
        """
        poll = select.poll()
        poll.register(connection.sock, select.POLLIN)
        waited_s = 0.0
        # In short turns: after this process itself was stopped, its clock says nothing of the keeper.
        while not poll.poll(1000 * _TURN_S):
            waited_s += _TURN_S
            if waited_s >= max(_LEAST_SILENCE_S, self._config.io_timeout_s) and not self.is_silent:
                self.is_silent = True
                self._say_silent(connection)

    def _say_silent(self, connection: Connection) -> None:
        keeper = f"the keeper of this node (process {connection.peer_pid} on {self._identity.node})"
        self._state.say(
            KeeperSilent(
                f"{keeper} does not answer: training and captures into memory go on, but nothing of rank "
                f"{self._team.rank} is stored until it answers. Look whether the process is stopped or its machine "
                "overloaded; if you kill it, another one is started and takes over its memory"
            )
        )

    def _take_all(self, received: Received) -> None:
        with Unclaimed(received) as messages:
            for message, fds in messages:
                with self._state.lock:
                    self._state.take(message, fds)
                    self._questions.receive(message)
                    self._state.lock.notify_all()

    # ---------------------------------------------------------------- sending

    def tell(self, message: Message) -> None:
        """Send a message that has no answer, now or as soon as the keeper takes it: one that is stopped for a moment
        keeps its trainer. Without a keeper it is dropped. Does not block.
        """
        with self._state.lock:  # what waits goes with the connection: the next keeper gets the facts anew
            if self._connection is None:
                return
            self._connection.waiting.append(message)
        self._send_waiting()

    def _send_waiting(self) -> None:
        """Send what the keeper did not take yet. Does not block. Hot."""
        connection = self._connection
        if connection is not None and connection.waiting:
            connection.send_waiting()

    def _ask_any_keeper(self, question: Question, deadline: float, meanwhile: Callable[[], bool]) -> Answer | None:
        """See ``Questions.ask``. Ask behind all that was said before; if the keeper is lost, ask the next one."""
        asked: set[int] = set()
        while (remaining := deadline - time.monotonic()) > 0:
            if len(asked) > _MOST_ASKED:
                return None  # each died over it: the next one would, too
            self._send_waiting()
            connection = self._connection
            if connection is not None and connection.waiting:
                time.sleep(_SEND_AGAIN_S)
                continue
            reply = self._questions.ask(question, remaining, meanwhile)
            if reply is not None or meanwhile():
                return reply
            if connection is not None:
                asked.add(connection.peer_pid)
            with self._state.lock:
                if self._is_leaving() or not self._is_running():
                    return None
                # Until the thread has noticed the end of this connection, and until there is another one.
                self._state.lock.wait(min(_RECONNECT_S, max(0.0, deadline - time.monotonic())))
        return None

    # ---------------------------------------------------------------- ending

    def _leave(self, goodbye: Leave, timeout_s: float = _LAST_WORD_S) -> None:
        """Say ``goodbye``, and end. Blocks: if the training is over, at most ``timeout_s`` until the keeper has left;
        and for a moment.
        """
        with self._state.lock:
            self._goodbye = goodbye
            self._state.lock.notify_all()
            connection = self._connection
        if connection is not None:
            try:
                connection.send(goodbye, timeout_s=max(0.05, min(timeout_s, 5.0)))
            except OSError as error:
                logger.debug("no goodbye: %s", error)
        if goodbye.how == "over":
            self._join(timeout_s)
        if connection is not None:
            cut(connection)
        self._join(_LAST_WORD_S if goodbye.how == "over" else _JOIN_S)
        self._state.release()

    def _join(self, timeout_s: float) -> None:
        if self._thread is not None:
            self._thread.join(timeout_s)

    def forget_in_child(self) -> None:
        """Forget all in a forked child: the connection and the slots are the parent's."""
        self._goodbye = Leave("left")
        if self._connection is not None:
            os.close(self._connection.sock.detach())
            self._connection = None


def cut(connection: Connection) -> None:
    """End a connection from any thread."""
    with contextlib.suppress(OSError):
        connection.sock.shutdown(2)


def _after_fork_in_child() -> None:
    for link in list(_live_links):
        link.forget_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)
