"""The interface of a trainer to its keeper. Only ``connect``, ``wait``, ``memory`` and ``leave`` block.

The training thread writes words and bytes of slots, and replaces ``TrainerState``; it sends no message, and holds a
lock only for an assignment. The thread of ``TrainerLink`` owns the connection.
"""

from collections.abc import Callable

from msgspec import structs

from lazysnap.core.messages import (
    Farewell,
    JobSettings,
    KeeperState,
    MemoryWish,
    NamedStep,
    PeerSettings,
    TrainerState,
    is_removed,
)
from lazysnap.errors import JobBusy, KeeperError
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.memory_inventory import MemoryInventory
from lazysnap.keeper.trainer_link import TrainerLink
from lazysnap.keeper.trainer_requests import (
    are_names_answered,
    lost_names,
    with_name,
    with_protected,
    with_required,
    with_returned,
    without_name,
    without_names,
)
from lazysnap.memory.slots import TrainerSlot
from lazysnap.peers.listener import ReservedPort

_REASON_S = 1.0
"""Seconds added to the deadline of a caller, so that the search can report why it failed."""
_LAST_WORD_S = 0.5
"""Seconds for the farewell of a trainer whose training is not over."""


class KeeperClient:
    """All requests of a trainer to its keeper, which may die and be replaced at any time. Thread-safe.

    Example::

        client = KeeperClient(identity, local_rank=0, linger_s=1800.0, io_timeout_s=60.0)
        client.connect(timeout_s=60.0)
        client.ask_memory(MemoryWish(num_slots=3, meta_bytes=4096, image_bytes=1 << 30))
        client.begin_start(job, start=time.time_ns(), step=-1)
        client.leave(Farewell.OVER, timeout_s=30.0)
    """

    def __init__(self, identity: JobIdentity, local_rank: int, *, linger_s: float, io_timeout_s: float) -> None:
        """Do nothing before ``start``.

        Args:
            identity: identity of the job, by which its keeper is found.
            local_rank: number of this rank on its node.
            linger_s: seconds for which memory waits for a restart after this trainer died.
            io_timeout_s: seconds after which a keeper that does not answer counts as silent.
        """
        self._identity = identity
        self._link = TrainerLink(identity, TrainerState(local_rank, linger_s=linger_s), io_timeout_s)
        self._newest_given = 0
        """The greatest sequence number that ``next_sequence`` returned."""
        self._port: ReservedPort | None = None

    # The connection

    def start(self) -> None:
        """Connect in the background, starting a keeper if necessary. Never raises; does not block.

        Call it again after the client gave up.
        """
        self._link.start()

    def connect(self, timeout_s: float) -> None:
        """Connect, starting a keeper if necessary. Blocks: at most ``timeout_s`` plus a second.

        Raises: JobBusy, if another trainer of this job is attached; KeeperError.
        """
        self._link.start()
        if self._link.wait(self._has_keeper, timeout_s + _REASON_S):
            return
        error = self.error
        if error is not None:
            raise error
        if self._link.is_leaving:
            raise KeeperError("this connection was closed: make another client")
        raise KeeperError(f"the keeper of job {self._identity.job_id!r} did not answer within {timeout_s:g} s")

    def _has_keeper(self, _: KeeperState) -> bool:
        return self.is_connected

    @property
    def is_connected(self) -> bool:
        """True if a keeper is connected."""
        return self._link.node_page is not None

    @property
    def was_connected(self) -> bool:
        """True once a keeper served this trainer."""
        return self._link.was_connected

    @property
    def keeper_pid(self) -> int | None:
        """The process of the connected keeper."""
        if not self.is_connected:
            return None
        return self.state.pid

    @property
    def is_silent(self) -> bool:
        """True if the connected keeper did not answer for ``io_timeout_s``: it is stopped, or its machine is busy."""
        return self._link.is_silent

    def refusal(self) -> JobBusy | None:
        """Return the error if another process is the job's trainer; None otherwise."""
        error = self.error
        if isinstance(error, JobBusy) and not self.was_connected:
            return error
        return None

    @property
    def error(self) -> KeeperError | JobBusy | None:
        """The reason why the search for a keeper ended; None if it did not."""
        return self._link.error

    # States

    @property
    def state(self) -> KeeperState:
        """The last state of the keeper."""
        return self._link.state

    def wait(self, is_true: Callable[[KeeperState], bool], timeout_s: float) -> bool:
        """Block until ``is_true`` of the keeper's state, at most ``timeout_s``.

        ``is_true`` is called with each new state, and when a slot becomes ready, or the keeper is found, lost or
        silent.
        Returns: False after the deadline, or if the client gave up.
        """
        return self._link.wait(is_true, timeout_s)

    # Memory

    def ask_memory(self, wish: MemoryWish | None) -> None:
        """Request slots, or none. Does not block: see ``slots`` and ``memory_refusal``."""
        if wish is not None:
            self._link.slots.want()
        self._link.update(structs.replace, memory=wish)

    @property
    def memory_refusal(self) -> str:
        """Return the reason if there is no memory for the next slot, or a slot is unusable; empty otherwise. Hot."""
        return self._link.state.memory_refusal or self._link.slots.problem

    def make_ready(self, work: Callable[[TrainerSlot], None]) -> None:
        """Call ``work`` in the background for every slot, after ``populate`` and before ``slots`` shows it."""
        self._link.slots.make_ready = work

    def slots(self) -> tuple[TrainerSlot, ...]:
        """Return the populated slots of a live keeper, unordered. Hot.

        Empty before this start was sent: if this process died, the keeper could not store a capture.
        """
        if not self.is_connected or not self._link.is_start_sent:
            return ()
        kept = self._link.state.slots
        return tuple(slot for slot in self._link.slots.ready if slot.slot_id in kept)

    def mapped(self) -> tuple[TrainerSlot, ...]:
        """Return all slots, of any size, populated or not, also without a live keeper."""
        return self._link.slots.all

    def return_slot(self, slot: TrainerSlot) -> None:
        """Let the keeper free a slot. Its contents are not needed, and this process no longer writes into it.

        Does not block.
        """
        if self._link.slots.remove(slot):
            self._link.update(with_returned, slot.slot_id)

    def next_sequence(self) -> int:
        """Return a number greater than that of every capture in memory, and than all earlier results. Hot.

        Only the thread that begins captures may call it.
        """
        newest = max(self._newest_given, self._link.slots.newest_sequence, self._link.state.newest_sequence)
        self._newest_given = newest + 1
        return self._newest_given

    def wake(self, step: int) -> None:
        """Wake the keeper if it awaits the capture of ``step``, whose words were stored before this call. Hot."""
        node_page = self._link.node_page
        if node_page is not None:
            node_page.wake(step)

    # State of the trainer for the keeper. Nothing here blocks.

    def note_waited(self, seconds: float) -> None:
        """Record how long training has waited in all, for reports. It is sent with the next message. Hot."""
        self._link.waited_s = seconds

    def begin_start(self, job: JobSettings, start: int, step: int, source: str = "") -> None:
        """Begin a start: later captures belong to it. Required steps of the previous start no longer count.

        Args:
            job: settings, the same on all ranks of the node.
            start: id of the start.
            step: step from which it continues; -1 before the first.
            source: the source from which that step was restored, for reports.
        """
        self._link.update(
            structs.replace,
            job=job,
            start=start,
            step=step,
            source=source,
            required=(),
            protect=(),
            names=(),
            released=(),
        )

    def set_peers(self, peers: PeerSettings) -> None:
        """Let the keeper serve and connect to the keepers of other nodes."""
        self._link.update(structs.replace, peers=peers)

    def reserve_port(self, host: str) -> int:
        """Reserve a port of this address for the keepers of this node, until this process ends or leaves.

        The next keeper uses the same port, so other nodes need it only once. Raises: OSError, if there is none.
        """
        self._release_port()
        self._port = ReservedPort(host)
        return self._port.number

    def _release_port(self) -> None:
        if self._port is not None:
            self._port.release()
            self._port = None

    def require(self, step: int) -> None:
        """Require that every level stores a step of this start, due or not."""
        self._link.update(with_required, step)

    def protect(self, step: int) -> None:
        """Require that other nodes protect a step of this start, due or not."""
        self._link.update(with_protected, step)

    def keep(self, name: str, step: int) -> None:
        """Name a step of this start. Earlier snapshots keep that name, too, unless ``release`` removed it."""
        self._link.update(with_name, name, step)

    def release(self, name: str) -> None:
        """Remove a name from all snapshots so far, at every level."""
        self._link.update(without_name, name)

    def names(self, first_start: int) -> set[str]:
        """Return the names that snapshots of this start and earlier ones, from ``first_start`` on, have or will get."""
        trainer = self._link.trainer
        names = {named.name for named in trainer.names}
        for named in self.state.names:
            if named.key.start >= first_start and not is_removed(named, trainer.released):
                names.add(named.name)
        return names

    def wait_names(self, timeout_s: float) -> None:
        """Block until the first level has all names and lacks the released ones, except where it never will."""

        def are_answered(state: KeeperState) -> bool:
            return are_names_answered(self._link.trainer, state)

        self._link.wait(are_answered, timeout_s)

    def take_lost_names(self) -> tuple[NamedStep, ...]:
        """Return the names whose snapshots will never be stored, each once. Hot."""
        lost = lost_names(self._link.trainer, self.state)
        if lost:
            self._link.update(without_names, lost)
        return lost

    def preempt(self) -> None:
        """Report that this process is preempted: the newest capture is stored now."""
        self._link.update(structs.replace, is_preempted=True)

    def when_preempted(self, work: Callable[[], None]) -> None:
        """Call ``work`` with each state in which some rank is preempted. It must not block.

        It is called at once if a rank is preempted now, and later on the thread of the connection.
        """
        self._link.when_preempted = work
        if self.state.is_preempted:
            work()

    def seal(self) -> None:
        """Report that this process has stopped capturing."""
        self._link.update(structs.replace, is_sealed=True)

    # Answers

    def is_complete(self, step: int, level: int) -> bool:
        """True if that step of this start, or a later one, is complete at a level."""
        return self.newest_complete(level) >= step

    def newest_complete(self, level: int) -> int:
        """Return the newest step of this start that is complete at a level; -1 if there is none."""
        levels = self._link.state.levels
        if level >= len(levels):
            return -1
        start = self._link.trainer.start
        steps = [key.step for key in levels[level].complete if key.start == start]
        return max(steps, default=-1)

    def memory(self, timeout_s: float) -> MemoryInventory:
        """Return the memory that the keeper holds for this rank, of this trainer or of a dead one. Blocks.

        Raises: KeeperError, if there is no answer in time.
        """
        answer = self._link.ask(timeout_s)
        if answer is None or answer.memory is None:
            error = self.error
            if error is not None:
                raise KeeperError(str(error))
            raise KeeperError(f"keeper {self.keeper_pid} did not report its memory within {timeout_s:g} s")
        return MemoryInventory.of(answer.memory, {slot.slot_id: slot for slot in self.mapped()})

    # The end

    def leave(self, farewell: Farewell, timeout_s: float) -> None:
        """Disconnect from the keeper, and unmap all slots. The client cannot be used afterwards.

        Blocks: with ``OVER`` until the keeper has received it, at most ``timeout_s``, and has ended, at most some
        seconds; otherwise only until the thread ends.
        """
        patience_s = _LAST_WORD_S
        if farewell is Farewell.OVER:
            patience_s = timeout_s
        self._link.leave(farewell, patience_s)
        self._release_port()
