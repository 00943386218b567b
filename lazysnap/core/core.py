"""What does a keeper do next? Pure: an event and the time in, actions out; no clock, socket, thread or file.

::

    event ──> ranks, node, jobs, coordinator take it ──> _decide ──> lifecycle ──> states for trainers ──> actions

    _decide, until nothing changes any more:
        node         which grants are missed, which slots are to be held?
        jobs         what does each level do next?
        report       to the coordinator: of another node by a message, the own one at once
        coordinator  what is complete, which step is granted next?  ──order──> node

One rank alone on one node is the case of a coordinator whose only node is its own. A node whose trainers are gone, and
that reaches no coordinator, is its own coordinator, too: it stores what it has (``_find_coordinator``).
"""

from msgspec import structs

from lazysnap.core.actions import (
    Action,
    CloseConnection,
    ConnectionLost,
    Event,
    Finish,
    Hold,
    JobEnded,
    JobMoved,
    MemoryRefused,
    PeerUp,
    ProcessDied,
    Received,
    Release,
    Send,
    SendToTrainer,
    SetGrant,
    SlotMade,
    SlotsSeen,
    Terminated,
    TimePassed,
    TrainerReported,
)
from lazysnap.core.coordinator import Coordinator, LevelGrants
from lazysnap.core.jobs import LevelJobs, Wishes
from lazysnap.core.lifecycle import Lifecycle, Phase
from lazysnap.core.messages import JobSettings, KeeperState, Order, Progress, Report, StepKey
from lazysnap.core.node import Node, NodeLevel, RankView, key_of
from lazysnap.core.ranks import Presence, Rank, Ranks
from lazysnap.core.retention import Retention

HEARTBEAT_S = 1.0
"""Nodes repeat their state so often: a message that was lost costs a second, and needs no other care."""
SILENCE_S = 30.0
"""A node whose trainers are gone stores alone when it heard nothing of the others for so long."""
MAX_ROUNDS = 8
COORDINATOR_NODE = 0
WAKE_NEVER = (1 << 63) - 1
"""The word GRANT while no capture is waited for."""


class Core:
    """The decisions of one keeper. See the module's docstring."""

    def __init__(self, settings: JobSettings, coordinator_number: int, now: float) -> None:
        """Begin with nothing; the first event is ``TrainerReported``.

        Args:
            settings: those of the first trainer.
            coordinator_number: random; used where this keeper is a coordinator.
            now: seconds of a monotonic clock.
        """
        self.settings = settings
        self.now = now
        self.ranks = Ranks(settings)
        self.node = Node(settings.node, _node_levels(settings))
        self.jobs = [LevelJobs(index, self.node) for index in range(len(self.node.levels))]
        self.lifecycle = Lifecycle(now, settings.linger_s)
        self.coordinator: Coordinator | None = None
        """On node 0, or where a node stores alone."""
        self._coordinator_number = coordinator_number
        if settings.node == COORDINATOR_NODE:
            self.coordinator = self._new_coordinator(settings.num_nodes)
        self._grant_word = -1
        self._sent_report: Report | None = None
        self._heartbeat_at = now
        self._heard_at = now
        """Time of the last message of another node, or of the last moment at which a trainer was served."""
        self._actions: list[Action] = []

    @property
    def phase(self) -> Phase:
        """The phase of the keeper's life."""
        return self.lifecycle.phase

    def step(self, event: Event, now: float) -> list[Action]:
        """Take an event and decide.

        Returns: actions, to be carried out in order. ``Hold`` and ``SetGrant`` want a ``SlotsSeen`` afterwards.
        """
        self.now = now
        self._actions = []
        self._apply(event)
        self._find_coordinator()
        self._decide()
        self._update_trainers()
        self._live()
        return self._actions

    def wake_at(self) -> float | None:
        """Return the time at which ``TimePassed`` is wanted; None if only other events matter."""
        times = self.lifecycle.deadlines()
        if self.settings.num_nodes > 1:
            times.append(self._heartbeat_at)
        if self._may_become_alone():
            times.append(self._heard_at + SILENCE_S)
        for rank in self.ranks.all:
            if rank.memory_refusal:
                times.append(rank.memory_retry_at)
        for jobs in self.jobs:
            times += jobs.deadlines()
        if self.coordinator is not None:
            times += self.coordinator.deadlines(self.now)
        return min(times, default=None)

    # Events

    def _apply(self, event: Event) -> None:
        match event:
            case TrainerReported():
                self._accept_trainer_state(event)
            case SlotsSeen():
                for number, slots in event.slots.items():
                    self.ranks.all[number].slots = slots
                self.node.inherit(self.ranks.views())
            case ConnectionLost():
                self._actions += self.ranks.lose_connection(event.connection)
            case ProcessDied():
                self._actions += self.ranks.lose_process(event.pid)
            case SlotMade():
                self.ranks.all[event.rank].slot_made()
            case MemoryRefused():
                self.ranks.all[event.rank].memory_refused(event.text, self.now)
            case JobMoved():
                self.jobs[event.level].moved(event.job, self.now)
            case JobEnded():
                self.jobs[event.level].ended(event, self.now)
            case PeerUp():
                self._heartbeat_at = self.now
            case Received():
                self._receive(event.message)
            case Terminated():
                self.lifecycle.is_terminated = True
            case TimePassed():
                pass

    def _accept_trainer_state(self, event: TrainerReported) -> None:
        refusal = self.ranks.refusal(event)
        if refusal:
            state = KeeperState(refusal=refusal)
            self._actions.append(SendToTrainer(event.connection, event.state.settings.rank, state))
            self._actions.append(CloseConnection(event.connection))
        else:
            self._actions += self.ranks.accept(event)

    def _receive(self, message: Report | Order) -> None:
        if len(message.levels) != len(self.node.levels):
            return  # of a job with other settings
        self._heard_at = self.now
        if isinstance(message, Report):
            if self.settings.node == COORDINATOR_NODE and self.coordinator is not None:
                self.coordinator.receive(message)
        elif self.coordinator is None:
            self.node.obey(message)

    # The coordinator

    def _new_coordinator(self, num_nodes: int, *, is_alone: bool = False) -> Coordinator:
        levels = [LevelGrants.of_level(level) for level in self.settings.levels]
        if self.settings.redundancy is not None:
            levels.append(LevelGrants.of_redundancy(self.settings.redundancy))
        return Coordinator(
            self._coordinator_number, num_nodes, tuple(levels), self.settings.capture_every_n_steps, is_alone
        )

    def _may_become_alone(self) -> bool:
        """Return True if only silence is missing for a node to store what it has alone."""
        is_alone = self.coordinator is not None and self.coordinator.is_alone
        return self.settings.num_nodes > 1 and self.phase is Phase.DRAINING and not is_alone

    def _find_coordinator(self) -> None:
        """A node that drains, and hears nothing of the others, becomes its own coordinator, for good."""
        if self.ranks.is_served:
            self._heard_at = self.now
            is_alone = self.coordinator is not None and self.coordinator.is_alone
            if is_alone:  # a trainer came: the job goes on, and with it the other nodes
                self.coordinator = None
                self.node.forget_orders()
                if self.settings.node == COORDINATOR_NODE:
                    self.coordinator = self._new_coordinator(self.settings.num_nodes)
        elif self._may_become_alone() and self.now >= self._heard_at + SILENCE_S:
            self.coordinator = self._new_coordinator(1, is_alone=True)

    # Decisions

    def _decide(self) -> None:
        """Bring node, coordinator and slots in line with each other. See the module's drawing."""
        ranks = self.ranks.views()
        required = self.ranks.required()
        names = self.ranks.names()
        for _ in range(MAX_ROUNDS):
            unanswered = self.node.unanswered(required, names)
            self.node.find_missed(ranks, unanswered)
            self._hold_slots(ranks, unanswered)
            for index, jobs in enumerate(self.jobs):
                self._actions += jobs.decide(ranks, self._wishes(index), self.now)
            order = self._exchange(self.node.report(ranks, required, names), ranks)
            if order is None:
                break
            self.node.obey(order)
        self._set_grant_word(self.node.unanswered(required, names))
        for rank in self.ranks.all:
            make_slot = rank.slot_to_make(self.now)
            if make_slot is not None:
                self._actions.append(make_slot)

    def _exchange(self, report: Report, ranks: list[RankView]) -> Order | None:
        """Send what is new to the other nodes. Returns: the order that this node is to obey, if there is a new one."""
        is_heartbeat = self.settings.num_nodes > 1 and self.now >= self._heartbeat_at
        if is_heartbeat:
            self._heartbeat_at = self.now + HEARTBEAT_S
        if self.coordinator is None:
            if is_heartbeat or report != self._sent_report:
                self._sent_report = report
                self._actions.append(Send(COORDINATOR_NODE, report))
            return None
        if self.coordinator.is_alone:
            report = _as_only_node(report)
        self.coordinator.receive(report)
        order = self.coordinator.decide(ranks, self.now)
        if not self.coordinator.is_alone and (order is not None or is_heartbeat):
            for number in range(1, self.settings.num_nodes):
                self._actions.append(Send(number, order or self.coordinator.order()))
        return order

    def _hold_slots(self, ranks: list[RankView], unanswered: list[StepKey]) -> None:
        """Hold the captures that levels read or must read, and no others."""
        keys = self.node.keys_to_hold(unanswered, self.ranks.num_spare_slots())
        for rank in ranks:
            for slot in rank.slots:
                if slot.is_held and key_of(slot) not in keys:
                    self._actions.append(Release(rank.rank, slot.slot_id))
            for key in keys:
                slot_of_key = rank.capture_of(key)
                if slot_of_key is not None and not slot_of_key.is_held and rank.keeps(slot_of_key):
                    self._actions.append(Hold(rank.rank, slot_of_key.slot_id, slot_of_key.sequence))

    def _wishes(self, index: int) -> Wishes:
        """Return the names that a level is to have: the first those of trainers, slower ones those of faster ones.

        Node 0 alone gives names, so that no two nodes write the same file.
        """
        if self.settings.node != COORDINATOR_NODE or self.node.levels[index].is_memory:
            return Wishes()
        given = set(self.ranks.names())
        for faster in self.node.levels[:index]:
            given |= faster.names
        return Wishes(frozenset(given), self.ranks.released())

    def _set_grant_word(self, unanswered: list[StepKey]) -> None:
        """Tell trainers from which step on the keeper wants to see captures begin."""
        word = WAKE_NEVER
        for key in unanswered:
            word = min(word, key.step + 1)
        for level in self.node.levels:
            if level.progress is Progress.WAITING and level.grant is not None and level.source is None:
                word = min(word, level.grant.step + 1)
        if word != self._grant_word:
            self._grant_word = word
            self._actions.append(SetGrant(word))

    # Trainers, and the end

    def _update_trainers(self) -> None:
        for rank in self.ranks.all:
            if rank.presence is not Presence.ATTACHED:
                continue
            state = self._keeper_state(rank)
            if state != rank.last_sent:
                rank.last_sent = state
                self._actions.append(SendToTrainer(rank.connection, rank.number, state))

    def _keeper_state(self, rank: Rank) -> KeeperState:
        alerts = []
        if rank.memory_refusal:
            alerts.append(f"no memory for captures: {rank.memory_refusal}")
        redundancy = self.node.redundancy
        protected = None
        if redundancy is not None:
            protected = max(redundancy.complete, default=None)
        return KeeperState(
            slots=tuple(slot.slot_id for slot in rank.slots),
            complete=tuple(level.complete for level in self.node.storage),
            protected=protected,
            names=tuple(sorted(self.node.levels[0].names)),
            lost=tuple(sorted(self.node.lost)),
            failures=tuple(jobs.failure for jobs in self.jobs),
            alerts=tuple(alerts),
        )

    def _live(self) -> None:
        """Go on to the next phase, or end."""
        was_over = self.phase is Phase.OVER
        self.lifecycle.advance(
            self.now, is_served=self.ranks.is_served, is_restart_expected=self.ranks.is_restart_expected()
        )
        is_idle = all(jobs.is_idle(self._wishes(index)) for index, jobs in enumerate(self.jobs))
        self.lifecycle.drained(
            self.now,
            is_drained=self.node.is_drained and is_idle,
            do_all_know=self.coordinator is None or self.coordinator.is_finished(),
        )
        if self.phase is Phase.OVER and not was_over:
            self._actions.append(Finish())


def _node_levels(settings: JobSettings) -> tuple[NodeLevel, ...]:
    levels = []
    for level in settings.levels:
        levels.append(NodeLevel(level.path, Retention.of_level(level), level.io_timeout_s))
    redundancy = settings.redundancy
    if redundancy is not None:
        levels.append(NodeLevel("redundancy", Retention(keep_last=1), redundancy.timeout_s, is_memory=True))
    return tuple(levels)


def _as_only_node(report: Report) -> Report:
    """Return the report of the only node that its coordinator knows."""
    return structs.replace(report, node=0)
