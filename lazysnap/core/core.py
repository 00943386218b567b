"""The next actions of a keeper. Pure: an event and the time in, actions out; no clock, socket, thread or file.

::

    event ──> ranks, job update ──> job.decide ──> states for trainers ──> lifecycle ──> actions

The keeper has memory (``ranks``) before it knows what to store (``job``), because trainers restore first.
"""

import itertools

from msgspec import structs

from lazysnap.core.actions import (
    Action,
    BeginJob,
    CloseConnection,
    ConnectionLost,
    Event,
    Finish,
    FreeParity,
    KeeperTrouble,
    MemoryRefused,
    PlainEvent,
    ProcessDied,
    Release,
    SendToTrainer,
    SetPeers,
    SlotMade,
    SlotsSeen,
    Task,
    TaskEnded,
    TaskMoved,
    TrainerReported,
)
from lazysnap.core.job import JobCore, text_of_difference
from lazysnap.core.lifecycle import Lifecycle, Phase
from lazysnap.core.messages import JobSettings, KeeperAlert, KeeperState, Order, PeerAddress, PeerSettings, Report
from lazysnap.core.ranks import Presence, Rank, Ranks

MAX_TROUBLES = 8
"""Maximum errors of the keeper that trainers get; older ones are only in its log."""


class Core:
    """The decisions of one keeper. See the module's docstring."""

    def __init__(self, first_number: int, now: float, pid: int = 0) -> None:
        """Create the decisions of a new keeper.

        Args:
            first_number: a random number, the first one for coordinators and tasks of levels.
            now: seconds of a monotonic clock.
            pid: process id of the keeper, for messages.
        """
        self.now = now
        self.ranks = Ranks()
        self.job: JobCore | None = None
        """The job that is stored; None until a trainer began a start."""
        self.lifecycle = Lifecycle(now)
        self.job_start = 0
        """The newest start whose trainer has connected."""
        self._numbers = itertools.count(first_number)
        self._abandoned: dict[str, dict[int, Task]] = {}
        """Tasks whose threads have not returned, by URL of the level and number. They may belong to an earlier job."""
        self._may_hold_parity = False
        """True from the first job with redundancy until ``FreeParity``."""
        self._pid = pid
        self._peers: PeerSettings | None = None
        self._serves_at: PeerAddress | None = None
        self._troubles: list[str] = []
        self._difference = ""
        """The settings in which a rank of this start differs from the first one that reported; empty if none does."""
        self.wake_at: float | None = min(self.lifecycle.deadlines())
        """Time at which ``PlainEvent.TIME_PASSED`` is needed; None if only other events matter."""
        self._actions: list[Action] = []

    @property
    def phase(self) -> Phase:
        """The phase of the keeper."""
        return self.lifecycle.phase

    @property
    def is_served(self) -> bool:
        """True if any trainer is alive."""
        return self.ranks.is_served

    def step(self, event: Event, now: float) -> list[Action]:
        """Handle an event and decide.

        Returns: actions, to be carried out in order. After ``Hold``, ``Release``, ``VoidSlot``, ``FreeSlot``,
            ``AdoptSlots`` and ``SetAwaitedStep`` the next event must be a ``SlotsSeen``.
        """
        self.now = now
        self._actions = []
        if self._apply(event):
            self._decide()
            self._update_trainers()
            self._advance_life()
            self.wake_at = min(self._deadlines(), default=None)
        return self._actions

    def _deadlines(self) -> list[float]:
        """Return the times at which a decision is necessary without an event."""
        times = self.lifecycle.deadlines()
        for rank in self.ranks.all:
            if rank.memory_retry_at is not None and rank.presence is Presence.ATTACHED:
                times.append(rank.memory_retry_at)
        if self.job is not None:
            times += self.job.deadlines(self.now, is_draining=self.phase is Phase.DRAINING)
        return times

    # Events

    def _apply(self, event: Event) -> bool:
        """Handle an event. Returns: False if nothing changed."""
        match event:
            case TrainerReported():
                self._accept_trainer_state(event)
            case SlotsSeen():
                if self._shows_nothing_new(event):
                    return False
                for number, slots in event.slots.items():
                    self.ranks.rank(number).slots = slots
                for rank in self.ranks.all:
                    rank.is_adopting = False
            case ConnectionLost():
                self._actions += self.ranks.lose_connection(event.connection, self.now)
            case ProcessDied():
                self._actions += self.ranks.lose_process(event.pid)
            case SlotMade():
                self.ranks.rank(event.rank).slot_made()
            case MemoryRefused():
                self.ranks.rank(event.rank).memory_refused(event.text, self.now)
            case TaskMoved():
                if self.job is not None:
                    self.job.task_moved(event, self.now)
            case TaskEnded():
                if self.job is not None:
                    self.job.task_ended(event, self.now)
            case PlainEvent.PEER_UP:
                if self.job is not None:
                    self.job.peer_up(self.now)
            case Report() | Order():
                return self.job is not None and self.job.receive(event, self.now)
            case PlainEvent.PEERS_LISTENING:
                assert self._peers is not None
                self._serves_at = self._peers.addresses[self._peers.node]
            case KeeperTrouble():
                self._troubles = [*self._troubles, event.text][-MAX_TROUBLES:]
            case PlainEvent.TERMINATED:
                self.lifecycle.is_terminated = True
            case PlainEvent.TIME_PASSED:
                return self.wake_at is not None and self.now >= self.wake_at
        return True

    def _shows_nothing_new(self, event: SlotsSeen) -> bool:
        """Return True if no slot changed."""
        if any(rank.is_adopting for rank in self.ranks.all):
            return False
        for number, slots in event.slots.items():
            if number >= len(self.ranks.all) or self.ranks.all[number].slots != slots:
                return False
        return True

    def _accept_trainer_state(self, event: TrainerReported) -> None:
        state = event.state
        refusal = self.ranks.refusal(event, self.now)
        if refusal:
            self._actions.append(SendToTrainer(event.connection, state.local_rank, KeeperState(refusal=refusal)))
            self._actions.append(CloseConnection(event.connection))
            return
        if not self.is_served:
            self.lifecycle.is_terminated = False  # its memory serves this training
        self._actions += self.ranks.accept(event)
        self.lifecycle.linger_s = state.linger_s
        if state.peers is not None and state.peers != self._peers:
            self._set_peers(state.peers)
        if state.job is not None:
            self._begin_job(state.job, state.start)

    def _set_peers(self, peers: PeerSettings) -> None:
        """Connect to the other nodes of this start."""
        self._peers = peers
        self._serves_at = None
        self._actions.append(SetPeers(peers))

    def _begin_job(self, settings: JobSettings, start: int) -> None:
        """Serve a start with these settings. Keeps the job if they are the same.

        Within one start the settings of the first rank stay: ranks that differ would replace each other's job.
        """
        if self.job is not None and start == self.job_start:
            if settings != self.job.settings:
                self._difference = text_of_difference(self.job.settings, settings)
            return
        if start < self.job_start:
            return  # a rank that has not begun the newest start yet
        self.job_start = start
        self._difference = ""
        if self.job is not None and self.job.settings == settings:
            return
        if self.job is not None:
            self._actions += self.job.abandon_all()
        self.job = JobCore(settings, self._numbers, self._abandoned, self.now)
        if settings.redundancy is not None:
            self._may_hold_parity = True
        self._actions.append(BeginJob(settings))

    # Decisions

    def _decide(self) -> None:
        for rank in self.ranks.all:
            self._actions += rank.slots_to_void()
            self._actions += rank.slots_to_free()
        if self.job is not None:
            is_draining = self.phase is Phase.DRAINING
            self.job.choose_coordinator(self.now, is_served=self.is_served, is_draining=is_draining)
            self._actions += self.job.decide(self.ranks.views(self.job.settings), self.ranks.wants, self.now)
            self.ranks.forget_answered(self.job.unanswered)
            self._release_former(self.job)
        for rank in self.ranks.all:
            make_slot = rank.slot_to_make(self.now)
            if make_slot is not None:
                self._actions.append(make_slot)

    def _release_former(self, job: JobCore) -> None:
        """Free what earlier starts left and the current one does not use, once the current one has its own snapshot.

        This is parity, if the current start has no redundancy, and the slots of ranks that it does not have. Holds of
        these slots are released at once.
        """
        has_slots = False
        for rank in self.ranks.all[job.settings.num_ranks :]:
            for slot in rank.slots:
                has_slots = True
                if slot.is_held:
                    self._actions.append(Release(rank.number, slot.slot_id))
        has_parity = self._may_hold_parity and job.node.redundancy is None
        if not (has_slots or has_parity) or not self._has_own_snapshot(job):
            return
        self._actions += self.ranks.former_slots(job.settings.num_ranks)
        if has_parity:
            self._may_hold_parity = False
            self._actions.append(FreeParity())

    def _has_own_snapshot(self, job: JobCore) -> bool:
        """Return True if the current start needs no snapshot of an earlier one.

        It has a complete one at the first level; without levels, the first rank has no older capture.
        """
        if job.node.storage:
            return any(key.start == self.job_start for key in job.node.storage[0].order.complete)
        starts = {slot.start for slot in self.ranks.rank(0).slots if slot.is_whole}
        return starts == {self.job_start}

    # Trainers, and the end

    def _update_trainers(self) -> None:
        attached = [rank for rank in self.ranks.all if rank.presence is Presence.ATTACHED]
        if not attached:
            return
        common = self.common_state()
        for rank in attached:
            state = self._keeper_state(rank, common)
            if state != rank.last_sent:
                rank.last_sent = state
                self._actions.append(SendToTrainer(rank.connection, rank.number, state))

    def common_state(self) -> KeeperState:
        """Return the state that all trainers of the node get."""
        alerts = [KeeperAlert("keeper", text) for text in self._troubles]
        if self._difference:
            alerts.append(KeeperAlert("keeper", self._difference))
        if self.job is None:
            return KeeperState(pid=self._pid, alerts=tuple(alerts), serves_at=self._serves_at)
        job = self.job
        alerts += job.alerts(self.now, self._meeting_address())
        return KeeperState(
            pid=self._pid,
            levels=job.level_states(),
            protected=job.protected,
            names=job.given_names(),
            lost=job.node.order.lost,
            alerts=tuple(alerts),
            is_preempted=job.node.order.is_preempted or self.ranks.wants.is_preempted,
            serves_at=self._serves_at,
        )

    def _keeper_state(self, rank: Rank, common: KeeperState) -> KeeperState:
        return structs.replace(
            common,
            slots=tuple(slot.slot_id for slot in rank.slots),
            newest_sequence=rank.newest_sequence,
            memory_refusal=rank.memory_refusal,
        )

    def _meeting_address(self) -> str:
        if self._peers is None or not self._peers.addresses:
            return "no address"
        address = self._peers.addresses[0]
        return f"{address.host}:{address.port}"

    def _advance_life(self) -> None:
        """Change the phase, or end."""
        was_over = self.phase is Phase.OVER
        self.lifecycle.advance(
            self.now,
            is_served=self.is_served,
            is_restart_expected=self.ranks.is_restart_expected(),
            is_training_over=self.ranks.is_training_over(),
        )
        if self.phase is Phase.DRAINING:
            self._drain()
        if self.phase is Phase.OVER and not was_over:
            self._actions.append(Finish())

    def _drain(self) -> None:
        is_drained = True
        do_all_know = True
        if self.job is not None:
            is_drained = self.job.node.order.is_drained and self.job.is_idle(self.ranks.wants)
            do_all_know = self.job.coordinator is None or self.job.coordinator.is_finished()
        self.lifecycle.drained(self.now, is_drained=is_drained, do_all_know=do_all_know)
