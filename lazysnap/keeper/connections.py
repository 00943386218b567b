"""Connections of a keeper: to its trainers, and to other processes of the user that ask a question.

Nothing here blocks. A process that does not read delays nobody: only its newest unsent state waits.
"""

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Sequence

from msgspec import structs

from lazysnap.core.actions import ConnectionLost, Event, ProcessDied
from lazysnap.core.messages import KeeperState
from lazysnap.keeper.questions import Answer
from lazysnap.keeper.wire import Channel, Frame, OtherVersion, WireError

logger = logging.getLogger(__name__)

_ACCEPT_AGAIN_S = 1.0
"""Seconds to wait after a connection could not be accepted, for lack of descriptors."""
_MAX_ANSWERS = 16
"""Maximum answers that wait for a process. A process that asks more without reading is disconnected."""


class TrainerConnection:
    """The keeper's end of one connection."""

    def __init__(self, number: int, channel: Channel) -> None:
        self.number = number
        self.channel = channel
        # A process of another container has no process id here.
        self.pid = channel.peer_pid or -number
        self.unsent_state: tuple[int, KeeperState] | None = None
        """Rank and newest unsent state."""
        self.unsent_answers: deque[tuple[Answer, list[int]]] = deque()
        """Unsent answers with their descriptors, which are closed after sending."""
        self.has_node_page = False
        self.sent_slots: set[int] = set()
        """Ids of the slots whose descriptors were sent."""
        self.is_closing = False
        """True if it is closed after everything is sent."""

    @property
    def has_unsent(self) -> bool:
        """True if something waits for the socket."""
        return self.channel.is_sending or self.unsent_state is not None or bool(self.unsent_answers)


class TrainerConnections:
    """All connections of a keeper. Used on the loop's thread."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        handle: Callable[[Event], None],
        received: Callable[[TrainerConnection, Frame], None],
        first_descriptors: tuple[int, int],
        slot_descriptor: Callable[[int, int], int | None],
    ) -> None:
        """Begin without connections.

        Args:
            loop: the loop of the keeper.
            handle: receives ``ConnectionLost``, and ``ProcessDied`` for each process that was connected. If a
                process cannot be watched, the end of its connection counts as its death.
            received: receives a message. Its descriptors belong to the frame.
            first_descriptors: node page and eventfd, which each trainer gets.
            slot_descriptor: returns the descriptor of a slot by rank and id; None if it was freed.
        """
        self._loop = loop
        self._handle = handle
        self._received = received
        self._first_descriptors = first_descriptors
        self._slot_descriptor = slot_descriptor
        self._listener: socket.socket | None = None
        self._connections: dict[int, TrainerConnection] = {}
        self._last_number = 0
        self._pidfds: dict[int, int] = {}
        """The pidfd of each process that connected and is alive, by process."""

    # New ones

    def listen(self, listener: socket.socket) -> None:
        """Accept connections from now on."""
        self._listener = listener
        listener.setblocking(False)
        self._loop.add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError as error:  # out of descriptors: must never end the keeper
            logger.warning("accept: %s", error)
            self._loop.remove_reader(listener)
            self._loop.call_later(_ACCEPT_AGAIN_S, self.listen, listener)
            return
        self.add(sock)

    def add(self, sock: socket.socket) -> None:
        """Serve a connected socket, if the process there is of the same user."""
        try:
            channel = Channel(sock)
        except WireError as error:
            logger.warning("refused a connection: %s", error)
            return
        self._last_number += 1
        connection = TrainerConnection(self._last_number, channel)
        self._connections[connection.number] = connection
        self._loop.add_reader(channel, self._read, connection)
        self._watch_process(connection.pid)

    def _watch_process(self, pid: int) -> None:
        """Watch for the death of a process, also if a forked child of it still holds its connection."""
        if pid in self._pidfds:
            return
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return  # it is dead already, or in another container: the end of its connection counts
        self._pidfds[pid] = pidfd
        self._loop.add_reader(pidfd, self._process_exited, pid)

    # Reading

    def _read(self, connection: TrainerConnection) -> None:
        if connection.number not in self._connections or connection.is_closing:
            return
        frames = self._receive(connection)
        if frames is None:
            self._lose(connection)
            return
        for frame in frames:
            try:
                if connection.number in self._connections:
                    self._received(connection, frame)
            finally:
                frame.close()

    def _receive(self, connection: TrainerConnection) -> list[Frame] | None:
        """Return the received messages; None if the connection is unusable."""
        try:
            return connection.channel.receive()
        except OtherVersion as error:
            logger.warning("process %d: %s", connection.pid, error)
            # The contents do not matter: its header has our version.
            self.send_state(connection.number, 0, KeeperState(refusal=str(error)))
        except (WireError, OSError) as error:
            logger.warning("closing the connection to process %d: %s", connection.pid, error)
        return None

    def _lose(self, connection: TrainerConnection) -> None:
        self._close_now(connection)
        self._handle(ConnectionLost(connection.number))
        if connection.pid not in self._pidfds:
            self._handle(ProcessDied(connection.pid))

    def _process_exited(self, pid: int) -> None:
        """Receive the last messages of a process that ended: it may have reported its end."""
        pidfd = self._pidfds.pop(pid)
        self._loop.remove_reader(pidfd)
        os.close(pidfd)
        of_process = [connection for connection in self._connections.values() if connection.pid == pid]
        for connection in of_process:
            self._read(connection)
        self._handle(ProcessDied(pid))
        for connection in of_process:
            self._close_now(connection)

    def is_open(self, connection: TrainerConnection) -> bool:
        """True while the other end is connected."""
        return connection.number in self._connections

    # Sending

    def send_state(self, number: int, rank: int, state: KeeperState) -> None:
        """Send a state of the keeper, now or when the socket is writable. It replaces an unsent state."""
        connection = self._connections.get(number)
        if connection is None:
            return
        connection.unsent_state = (rank, state)
        self._send(connection)

    def answer(self, connection: TrainerConnection, answer: Answer, descriptors: Sequence[int] = ()) -> None:
        """Send an answer. The connection owns the descriptors from now on."""
        if connection.number not in self._connections:
            _close_all(descriptors)
            return
        connection.unsent_answers.append((answer, list(descriptors)))
        if len(connection.unsent_answers) > _MAX_ANSWERS:
            logger.warning("process %d asks, and reads no answers: it is disconnected", connection.pid)
            self._lose(connection)
            return
        self._send(connection)

    def _send(self, connection: TrainerConnection) -> None:
        """Send all waiting messages, as far as the socket accepts them."""
        try:
            connection.channel.flush()
            while connection.has_unsent and not connection.channel.is_sending:
                self._send_next(connection)
        except WireError:
            logger.exception("a message to process %d", connection.pid)
            self._drop_unsent(connection)
        except OSError as error:  # reading will notice that its process ended
            logger.info("process %d is gone: %s", connection.pid, error)
            self._drop_unsent(connection)
        if connection.has_unsent:
            self._loop.add_writer(connection.channel, self._send, connection)
            return
        self._loop.remove_writer(connection.channel)
        if connection.is_closing:
            self._close_now(connection)

    def _send_next(self, connection: TrainerConnection) -> None:
        if connection.unsent_answers:
            answer, descriptors = connection.unsent_answers.popleft()
            try:
                connection.channel.send(answer, descriptors)
            finally:
                _close_all(descriptors)
            return
        assert connection.unsent_state is not None
        rank, state = connection.unsent_state
        connection.unsent_state = None
        self._send_state_now(connection, rank, state)

    def _send_state_now(self, connection: TrainerConnection, rank: int, state: KeeperState) -> None:
        """Send a state with the descriptors that this trainer lacks: at first node page and eventfd."""
        descriptors: list[int] = []
        slots: list[int] = []
        if not state.refusal and not connection.has_node_page:
            connection.has_node_page = True
            descriptors += self._first_descriptors
        for slot_id in state.slots:
            descriptor = self._slot_descriptor(rank, slot_id)
            if descriptor is None:
                continue  # freed after the core saw it
            slots.append(slot_id)
            if slot_id not in connection.sent_slots:
                connection.sent_slots.add(slot_id)
                descriptors.append(descriptor)
        connection.channel.send(structs.replace(state, slots=tuple(slots)), descriptors)

    def _drop_unsent(self, connection: TrainerConnection) -> None:
        """Drop an unsendable message, and all later ones: half a message blocks the stream."""
        connection.unsent_state = None
        for _, descriptors in connection.unsent_answers:
            _close_all(descriptors)
        connection.unsent_answers.clear()
        connection.channel.shut_down()

    # The end

    def close(self, number: int) -> None:
        """Close a connection after sending its pending messages."""
        connection = self._connections.get(number)
        if connection is None:
            return
        connection.is_closing = True
        self._loop.remove_reader(connection.channel)
        if not connection.has_unsent:
            self._close_now(connection)

    def close_all(self) -> None:
        """Close all connections and the listener, without waiting."""
        for connection in list(self._connections.values()):
            self._close_now(connection)
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()

    def _close_now(self, connection: TrainerConnection) -> None:
        if self._connections.pop(connection.number, None) is None:
            return
        self._loop.remove_reader(connection.channel)
        self._loop.remove_writer(connection.channel)
        for _, descriptors in connection.unsent_answers:
            _close_all(descriptors)
        connection.channel.close()


def _close_all(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
