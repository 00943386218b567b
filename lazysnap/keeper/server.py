"""The keeper's main loop: one process per job and node serves all ranks there. It ends with the last of them."""

import contextlib
import functools
import logging
import os
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from lazysnap import faults
from lazysnap.errors import KeeperError, LazySnapError
from lazysnap.events import Alert
from lazysnap.keeper import protocol
from lazysnap.keeper.event_log import EventLog
from lazysnap.keeper.frozen import FrozenPool
from lazysnap.keeper.lifecycle import START_GRACE_S, Event, Phase
from lazysnap.keeper.local_rank import LocalRank, Node
from lazysnap.keeper.messages import Connection, OtherVersion
from lazysnap.keeper.node_state import node_state
from lazysnap.keeper.node_storage import NodeStorage, StorageContext
from lazysnap.keeper.parity import ParityStore
from lazysnap.keeper.peer_reads import PeerReads
from lazysnap.keeper.runtime import KeeperLock
from lazysnap.keeper.status import StatusBoard
from lazysnap.keeper.trouble import Trouble
from lazysnap.topology import Team

logger = logging.getLogger(__name__)

_TICK_S = 0.1
_FAILING_S = 60.0
"""A main loop that fails for so long ends: its trainers start another keeper and hand their memory over."""
_TROUBLES = 8
"""Errors that wait for a trainer; older ones are in the log alone."""
IDLE_LIMIT_S = 300.0
"""Seconds for which the keeper of a finished job gives names and deletes old snapshots."""


def run_keeper(
    listener: socket.socket, lock: KeeperLock, trainer: socket.socket | None = None, trouble: Trouble | None = None
) -> None:
    """Serve one job on this node until it is over.

    ``listener`` is bound to the job's path, and ``lock`` is held; ``trainer`` is a connection to the trainer that
    started this process. ``trouble`` has the errors that are reported to trainers.
    """
    server = Server(listener, lock, trouble)
    if trainer is not None:
        server.serve(trainer)
    signal.signal(signal.SIGTERM, lambda *_: server.terminate())
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Slurm sends it to all processes of a step; it is for trainers
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM, signal.SIGUSR1])
    server.run()


class Server:
    """One job's keeper. ``run`` returns when the job is over and nothing is left to do.

    It is large because all connections, ranks and the storage meet in this one loop. What a message means for a rank
    stands in ``LocalRank``.
    """

    def __init__(self, listener: socket.socket, lock: KeeperLock, trouble: Trouble | None = None) -> None:
        self._lock = lock
        self._selector = selectors.DefaultSelector()
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._trouble = trouble
        self._events = EventLog()
        self._woken = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        """Wakes the main loop from any thread."""
        self._selector.register(self._woken, selectors.EVENT_READ, lambda: os.eventfd_read(self._woken))
        board = StatusBoard(self._events.note, lambda: os.eventfd_write(self._woken, 1))
        self._node = Node(FrozenPool(self._frozen_dropped), board)
        self._untold: deque[str] = deque(maxlen=_TROUBLES)
        self._failing_since: float | None = None
        self._ranks: dict[int, LocalRank] = {}
        self._first_until = time.monotonic() + START_GRACE_S
        """When it leaves, if no trainer came."""
        self._has_served = False
        self._is_terminated = False
        self._ends = False
        """True once it is to leave when the last trainer has."""
        self._is_leaving = False
        """True if it was asked to leave, and no trainer came since."""
        self._asked_to_stop: Connection | None = None
        self._idle_until: float | None = None
        """When it ends whatever the levels still do."""
        self._num_ranks = 1
        """The number of ranks of the node."""
        self._parity = ParityStore()
        self._reads = PeerReads(self._all_ranks, self._parity, self._node.frozen)

    # ---------------------------------------------------------------- main loop

    def run(self) -> None:
        """Block until the job is over."""
        try:
            while not self._is_over():
                works = [key.data for key, _ in self._selector.select(_TICK_S)]
                self._do([*works, self._tick])
                self._tell_trouble()
        finally:
            self._tell_trouble()
            self._send_status()
        self._events.close()
        if self._node.storage is not None:
            self._node.storage.close()
        for rank in self._ranks.values():
            rank.close()
        self._reads.close()
        self._node.frozen.close()
        self._listener.close()

    def _do(self, works: Sequence[Callable[[], None]]) -> None:
        """Do each of them. Raises: what one raised, if some failed for ``_FAILING_S``."""
        has_failed = False
        for work in works:
            try:
                work()
            except Exception:
                has_failed = True
                self._failing_since = self._failing_since or time.monotonic()
                if time.monotonic() - self._failing_since > _FAILING_S:
                    raise
                logger.exception("main loop")
        if has_failed:
            time.sleep(_TICK_S)  # what failed may be there again at once
        else:
            self._failing_since = None

    def _tell_trouble(self) -> None:
        """Send errors to trainers; without any trainer, the next one gets them."""
        if self._trouble is not None:
            while not self._trouble.texts.empty():
                self._untold.append(self._trouble.texts.get())
        if any(rank.trainer is not None for rank in self._ranks.values()):
            while self._untold:
                self._node.board.add(Alert(t=time.time(), about="keeper", text=self._untold.popleft()))

    def _send_status(self) -> None:
        """Send each trainer the newest status, if it lacks it."""
        for rank in list(self._ranks.values()):
            rank.send_status()

    def _is_over(self) -> bool:
        if self._has_served or self._is_leaving:
            if any(rank.phase is not Phase.GONE for rank in self._ranks.values()):
                self._idle_until = None
                return False
            return self._is_idle()
        return time.monotonic() > self._first_until

    def _is_idle(self) -> bool:
        """True if names are given and old snapshots are gone, or that takes too long."""
        self._idle_until = self._idle_until or time.monotonic() + IDLE_LIMIT_S
        return self._node.storage is None or self._node.storage.is_idle() or time.monotonic() > self._idle_until

    def terminate(self) -> None:
        """SIGTERM: persist the newest captures, then leave; while a trainer lives, not before its end."""
        self._is_terminated = True

    def _tick(self) -> None:
        self._send_status()
        if self._is_terminated:
            self._end()
        if self._ends and not any(rank.is_used for rank in self._ranks.values()):
            self._ends = False
            self._leave()
        if self._node.storage is not None and self._node.storage.is_abandoned():
            self._go_back()
        self._lock.refresh()
        self._release_former()
        is_used = any(rank.is_used for rank in self._ranks.values())
        for rank in self._ranks.values():
            if is_used:
                rank.stay()
            rank.tick()
        self._events.look(self._ranks)
        for number, rank in list(self._ranks.items()):
            if rank.phase is Phase.GONE and not self._is_leaving:
                del self._ranks[number]
                rank.close()
        self._node.frozen.sweep([slot for rank in self._ranks.values() for slot in rank.slots()])
        if self._asked_to_stop is not None and all(rank.is_drained() for rank in self._ranks.values()):
            self._answer_stop(self._asked_to_stop)

    def _release_former(self) -> None:
        """Release memory of ranks that the present start does not have, once that has a snapshot of its own: complete
        at the first level; without levels, when memory of the first rank holds nothing older.
        """
        first, storage = self._ranks.get(0), self._node.storage
        if first is None or first.starts.newest is None or storage is None:
            return
        run, team = first.starts.newest
        former = [rank for number, rank in self._ranks.items() if number >= len(team.node_ranks)]
        if former and storage.run.start == run.start:
            is_replaced = storage.has_complete() if storage.levels else first.holds_only(run.start)
            for rank in former if is_replaced else ():
                rank.go(Event.SUPERSEDED)

    # ---------------------------------------------------------------- what is stored

    def _begin_run(self, rank: LocalRank, run: protocol.Run) -> None:
        rank.begin_run(run)
        self._events.begin(rank, run)
        storage = self._node.storage
        if storage is not None and storage.run.start == run.start:
            storage.slots_changed()
        elif storage is None or run.is_new or run.start > storage.run.start:
            self._store(rank, run, rank.team)

    def _store(self, rank: LocalRank, run: protocol.Run, team: Team) -> None:
        """Store captures of this start from now on, and of no other."""
        self._num_ranks = len(team.node_ranks)
        if run.peers is not None and run.peers.own[1]:  # a keeper before this one may have served them
            self._reads.serve(run.peers.own, run.peers.secret)
        self._node.board.begin(run.start)
        context = StorageContext(
            self._ranks_here, self._node.frozen.get, self._node.board, self._reads.admit, self._parity
        )
        self._node.storage = NodeStorage(rank.levels, run, team, context, self._node.storage)

    def _go_back(self) -> None:
        """Nothing was captured since the last start, and its trainers are gone: what was before still counts."""
        assert self._node.storage is not None
        for rank in self._ranks.values():
            rank.starts.forget(self._node.storage.run.start)
        starts = [(rank, rank.starts.newest) for rank in self._ranks.values()]
        left = [(rank, *newest) for rank, newest in starts if newest is not None]
        if left:
            # With the team of then: the ranks may be on other nodes since.
            rank, run, team = max(left, key=lambda found: found[1].start)
            self._store(rank, msgspec.structs.replace(run, is_new=False), team)

    def _ranks_here(self) -> list[LocalRank | None]:
        return [self._ranks.get(number) for number in range(self._num_ranks)]

    def _all_ranks(self) -> list[LocalRank | None]:
        """Also those that this start does not have."""
        ranks = dict(self._ranks)
        return [ranks.get(number) for number in range(max(ranks, default=-1) + 1)]

    def _frozen_dropped(self, digest: str) -> None:
        for rank in list(self._ranks.values()):
            rank.emit(protocol.Return(digest))

    def _end(self) -> None:
        """SIGTERM came. Trainers may have got it, too (Slurm, systemd), and need this keeper to their end."""
        self._is_terminated, self._ends = False, True
        if self._node.storage is not None:
            self._node.storage.store_newest()

    def _leave(self) -> None:
        self._is_leaving = True
        for rank in self._ranks.values():
            rank.go(Event.TERMINATE)

    # ---------------------------------------------------------------- connections

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError as error:  # out of descriptors, or gone again: never the end of the keeper
            logger.warning("accept: %s", error)
            return
        self.serve(sock)

    def serve(self, sock: socket.socket) -> None:
        """Read what comes there from now on, if it is of the same user."""
        try:
            connection = Connection(sock)
        except KeeperError as error:
            logger.warning("refused a connection: %s", error)
            return
        self._selector.register(sock, selectors.EVENT_READ, lambda: self._read(connection))

    def _read(self, connection: Connection, *, wait: bool = True) -> None:
        if connection.is_closed:  # closed by an event in the same round
            return
        try:
            messages = connection.receive(wait=wait)
        except OtherVersion as error:
            logger.warning("%s", error)
            with contextlib.suppress(OSError):
                connection.send(protocol.Done())  # what it says does not matter: it comes with our version
            messages = None
        except (KeeperError, OSError) as error:
            logger.warning("closing a connection: %s", error)
            messages = None
        if messages is None:
            self._close(connection)
            return
        for message, fds in messages:
            is_slot = isinstance(message, protocol.HandOver) and not isinstance(message.slot, int) and len(fds) == 1
            is_taken = is_slot and self._rank_of(connection) is not None
            try:
                self._handle(connection, message, fds)
            except (KeyError, TypeError, ValueError, OSError, LazySnapError) as error:
                logger.warning("%s: %s", type(message).__name__, error)
            except Exception:
                logger.exception("%s", type(message).__name__)
            finally:
                for fd in () if is_taken else fds:  # nothing else comes with descriptors
                    os.close(fd)

    def _rank_of(self, connection: Connection) -> LocalRank | None:
        """The rank whose trainer is at the other end."""
        return next((rank for rank in self._ranks.values() if rank.trainer is connection), None)

    def _close(self, connection: Connection) -> None:
        if connection.is_closed:
            return
        rank = self._rank_of(connection)
        self._selector.unregister(connection.sock)
        connection.close()
        if connection is self._asked_to_stop:
            self._asked_to_stop = None
        if rank is not None:
            rank.lost_connection()

    def _handle(self, connection: Connection, message: protocol.Message, fds: tuple[int, ...]) -> None:
        rank = self._rank_of(connection)
        if isinstance(message, protocol.Hello):
            self._hello(connection, message)
        elif isinstance(message, protocol.AskInventory):
            self._show(connection, message)
        elif isinstance(message, protocol.Stop):
            self._stop(connection, is_forced=message.force)
        elif rank is None:
            logger.info("%s: it comes from no trainer", type(message).__name__)  # of one that was refused just now
        elif isinstance(message, protocol.Run):
            self._begin_run(rank, message)
        elif isinstance(message, protocol.ServePeers):
            self._reads.serve((message.host, message.port), message.secret)
            connection.send(protocol.Done(id=message.id))
        else:
            rank.handle(message, fds)

    def _hello(self, connection: Connection, hello: protocol.Hello) -> None:
        number = hello.team.local_rank
        rank = self._ranks.get(number)
        if rank is not None and rank.refuses(connection):
            connection.send(protocol.Done(ok=False, text=self._trainers_text()))
            return
        # What it still holds serves a trainer better than no memory for up to an hour.
        self._ends = self._is_leaving = False
        if rank is not None and rank.phase is Phase.GONE:
            rank.close()
            rank = None
        if rank is None:
            last_words = functools.partial(self._read, wait=False)
            rank = self._ranks[number] = LocalRank(self._selector, self._close, last_words, self._node)
        if not any(other.trainer is not None for other in self._ranks.values()):
            self._node.board.forget_troubles()
        self._has_served = True
        faults.set_peer(connection.peer_pid)
        rank.attach(connection, hello)
        if self._asked_to_stop is not None:
            with contextlib.suppress(OSError):  # nobody waits for it any more
                self._asked_to_stop.send(_stays_for(rank))
            self._asked_to_stop = None

    def _trainers_text(self) -> str:
        """Return the processes that train, since when, and how to end them, for people."""
        used = [rank for rank in self._ranks.values() if rank.is_used]
        pids = [str(pid) for pid in sorted(rank.trainer_pid for rank in used)]
        since = time.localtime(min(rank.trainer_since for rank in used))
        noun = "process" if len(pids) == 1 else "processes"
        who = f"{noun} {', '.join(pids)}, since {time.strftime('%Y-%m-%d %H:%M:%S', since)}"
        return f"{who}; `kill {' '.join(pids)}` ends {'it' if len(pids) == 1 else 'them'}"

    def _show(self, connection: Connection, asked: protocol.AskInventory) -> None:
        """Tell what is held for a rank, or by the node. Raises: OSError, if whoever asked is gone again."""
        rank, local_ranks = self._ranks.get(asked.local_rank), sorted(self._ranks)
        nothing = protocol.Inventory(id=asked.id, entries=[], frozen=[], end=None, local_ranks=local_ranks)
        if asked.in_words:
            ranks, storage = [self._ranks[number] for number in local_ranks], self._node.storage
            state = None if storage is None else node_state(ranks, storage, self._parity, self._node.board.status)
            # A process that was stopped while it asked must not hold up the keeper.
            connection.post(msgspec.structs.replace(nothing, state=state))
            return
        if rank is None:
            connection.send(nothing)
            return
        is_own = rank.trainer is connection
        if not is_own:
            rank.inventory.send_slots(connection)
        parity = self._parity.inventory() if is_own and asked.local_rank == 0 else ()
        connection.send(rank.inventory.message(local_ranks, asked.id, parity))

    # ---------------------------------------------------------------- stopping

    def _stop(self, connection: Connection, *, is_forced: bool) -> None:
        """A person wants this keeper to leave: when its newest captures are stored, or at once if ``is_forced``."""
        ranks = self._ranks.values()
        used = next((rank for rank in ranks if rank.is_used), None)
        if used is not None:
            connection.send(_stays_for(used))
        elif is_forced or not any(rank.phase is Phase.LINGERING and rank.levels for rank in ranks):
            self._agree_to_leave(connection)
        else:
            for rank in ranks:
                rank.await_newest()
            self._asked_to_stop = connection

    def _answer_stop(self, connection: Connection) -> None:
        self._asked_to_stop = None
        lost = [rank.newest_step() for rank in self._ranks.values() if not rank.is_durable()]
        try:
            if lost:
                text = (
                    f"its newest capture, step {lost[0]}, could not be stored at every level; mend the level and try "
                    "again (--force ends it all the same and loses that capture)"
                )
                connection.send(protocol.Done(ok=False, text=text))
            else:
                self._agree_to_leave(connection)
        except OSError as error:  # nobody waits for it any more
            logger.info("asked to stop: %s", error)

    def _agree_to_leave(self, connection: Connection) -> None:
        connection.send(protocol.Done())
        self._leave()


def _stays_for(rank: LocalRank) -> protocol.Done:
    """Return the answer to a person who wants to stop the keeper of a training that runs."""
    return protocol.Done(ok=False, text=f"its training runs, process {rank.trainer_pid}; end that first")
