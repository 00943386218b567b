"""Decides what is stored of one training: its levels, grants and redundancy. Pure.

::

    decide, until nothing changes any more:
        node         which grants are missed?
        tasks        what does each level do next?
        report       to the coordinator: of another node by a message, of this node directly
        coordinator  what is complete, which step is granted next?  ──order──> node
    then, once: which slots are held, which captures are awaited?

A single node is a coordinator whose only node is its own. A node without trainers that reaches no coordinator becomes
its own coordinator, too: it stores what it has (``choose_coordinator``).
"""

import math
from collections.abc import Iterator, Sequence

import xxhash
from msgspec import json, structs

from lazysnap.core.actions import Action, Hold, Release, Send, SetAwaitedStep, Task, TaskEnded, TaskMoved
from lazysnap.core.coordinator import Coordinator
from lazysnap.core.level_grants import LevelGrants
from lazysnap.core.messages import (
    COORDINATOR_NODE,
    GrantProgress,
    JobSettings,
    KeeperAlert,
    LevelSettings,
    LevelState,
    NamedStep,
    Order,
    Report,
    StepKey,
    Wants,
)
from lazysnap.core.node import Node, NodeLevel, RankView, key_of, newest_begun, whole_on_all
from lazysnap.core.ranks import num_spare_slots
from lazysnap.core.tasks import LevelTasks

HEARTBEAT_S = 1.0
"""Seconds after the last message to another node until the state is sent again, in case a message was lost."""
SILENCE_S = 30.0
"""Seconds without a message of other nodes after which a node without trainers stores alone."""
UNREACHED_S = 10.0
"""Seconds of silence of another node after which the user is warned that nothing new is stored."""
UNPROTECTED_S = 60.0
"""Seconds without a protected step, if one was due, after which the user is warned."""
MAX_ROUNDS = 8
"""Maximum rounds of ``decide`` for one event: an order leads to a report, and that to the next order. Usually two or
three. The rest follows after ``CONTINUE_S``.
"""
CONTINUE_S = 0.1


class JobCore:
    """The decisions about what one job stores. See the module's docstring.

    A start with other settings gets a new one.
    """

    def __init__(
        self, settings: JobSettings, numbers: Iterator[int], abandoned: dict[str, dict[int, Task]], now: float
    ) -> None:
        """Create the decisions of a new job.

        Args:
            settings: the settings of all ranks of the node.
            numbers: unique numbers for coordinators and for tasks of levels.
            abandoned: tasks whose threads have not returned, by URL of the level and number. They may belong to an
                earlier job.
            now: seconds of a monotonic clock.
        """
        self.settings = settings
        self._numbers = numbers
        self._abandoned = abandoned
        self.digest = _digest(settings)
        storage = tuple(NodeLevel(level) for level in settings.levels)
        redundancy = None
        if settings.redundancy is not None:
            redundancy = NodeLevel(settings.redundancy.level, is_redundancy=True)
        self.node = Node(storage, redundancy)
        self.level_tasks = []
        for index, level in enumerate(self.node.levels):
            of_level = abandoned.setdefault(level.settings.url, {})
            self.level_tasks.append(LevelTasks(index, self.node, numbers, of_level))
        self.coordinator: Coordinator | None = None
        """The coordinator, on node 0 or if this node stores alone."""
        if settings.node == COORDINATOR_NODE:
            self.coordinator = self._new_coordinator(settings.num_nodes)
        self._awaited_step: int | None = -1
        """The first awaited step, as in the node page; None: none; -1: not known yet."""
        self._sent_report: Report | None = None
        self._repeat_at = now
        """Time of the next repetition of the state for other nodes."""
        self._received_at = now
        """Time of the last message of another node, or of the last time at which a trainer was served."""
        self._node_received_at = dict.fromkeys(_others(settings), now)
        """Time of the last message of each peer node."""
        self._rescued: StepKey | None = None
        """The capture that is required because of a preemption."""
        self._first_begun = StepKey(0, -1)
        """The first step of the current start, or the newest one that it had begun when first seen."""
        self._protected_at = now
        """Time of the last protected step, or of the last time at which none was due."""
        self._is_unfinished = False
        """True if the last ``decide`` ended after ``MAX_ROUNDS``: ``CONTINUE_S`` later it continues."""
        self._actions: list[Action] = []

    # Events

    def peer_up(self, now: float) -> None:
        """Handle a new link: messages sent before may be lost."""
        self._repeat_at = now

    def receive(self, message: Report | Order, now: float) -> bool:
        """Receive the state of another node. Returns: True if it is new, or the node was silent before."""
        node = COORDINATOR_NODE
        if isinstance(message, Report):
            node = message.node
        if message.job != self.digest or node not in self._node_received_at:
            return False  # of a start with other settings
        self._received_at = now
        was_silent = node in self._silent_nodes(now)
        self._node_received_at[node] = now
        is_new = False
        if isinstance(message, Report):
            if self.coordinator is not None:
                is_new = self.coordinator.receive(message)
        elif self.coordinator is None and message != self.node.order:
            self.node.obey(message)
            is_new = True
        return is_new or was_silent

    def task_ended(self, event: TaskEnded, now: float) -> None:
        """Handle the end of a task of a level, perhaps of earlier settings."""
        for level in self.level_tasks:
            level.ended(event, now)
        for abandoned in self._abandoned.values():
            abandoned.pop(event.number, None)

    def task_moved(self, event: TaskMoved, now: float) -> None:
        """Handle the progress of a task."""
        for level in self.level_tasks:
            level.moved(event, now)

    def abandon_all(self) -> list[Action]:
        """Abandon all tasks: another job replaces this one."""
        actions: list[Action] = []
        for level in self.level_tasks:
            actions += level.abandon()
        return actions

    # Times

    def deadlines(self, now: float, *, is_draining: bool) -> list[float]:
        """Return the times at which ``decide`` may have a new result."""
        times = []
        for received_at in self._node_received_at.values():
            if received_at + UNREACHED_S > now:
                times.append(received_at + UNREACHED_S)
        if self.settings.redundancy is not None and self._protected_at + UNPROTECTED_S > now:
            times.append(self._protected_at + UNPROTECTED_S)
        if self._may_become_alone(is_draining=is_draining):
            times.append(self._received_at + SILENCE_S)
        if self._has_peers:
            times.append(self._repeat_at)
        if self._is_unfinished:
            times.append(now + CONTINUE_S)
        for level in self.level_tasks:
            times += level.deadlines()
        if self.coordinator is not None:
            times += self.coordinator.deadlines(now)
        return times

    # The coordinator

    def _new_coordinator(self, num_nodes: int, *, is_alone: bool = False) -> Coordinator:
        return Coordinator(
            next(self._numbers),
            self.digest,
            num_nodes,
            tuple(LevelGrants(level.settings, level.is_redundancy) for level in self.node.levels),
            self.settings.capture_every_n_steps,
            is_alone,
        )

    @property
    def _has_peers(self) -> bool:
        """True if this node exchanges its state with others."""
        return self.settings.num_nodes > 1 and not self._is_alone

    @property
    def _is_alone(self) -> bool:
        return self.coordinator is not None and self.coordinator.is_alone

    def _may_become_alone(self, *, is_draining: bool) -> bool:
        """Return True if a node would store alone after a longer silence."""
        return self._has_peers and is_draining

    def choose_coordinator(self, now: float, *, is_served: bool, is_draining: bool) -> None:
        """Choose between the coordinator of all nodes and one of this node alone.

        A node that drains, and receives nothing from the others, becomes its own coordinator until a trainer connects.

        Args:
            now: seconds of a monotonic clock.
            is_served: True if any trainer of the node is alive.
            is_draining: True if memory no longer waits for a trainer.
        """
        if is_served:
            self._received_at = now
            if self._is_alone:  # the job continues, and with it the other nodes
                self.coordinator = None
                self.node.forget_orders()
                if self.settings.node == COORDINATOR_NODE:
                    self.coordinator = self._new_coordinator(self.settings.num_nodes)
        elif self._may_become_alone(is_draining=is_draining) and now >= self._received_at + SILENCE_S:
            self.coordinator = self._new_coordinator(1, is_alone=True)

    # Decisions

    def decide(self, ranks: Sequence[RankView], wants: Wants, now: float) -> list[Action]:
        """Update node, coordinator and slots until they agree. See the diagram of the module.

        Args:
            ranks: the ranks of the node.
            wants: the wants of their trainers.
            now: seconds of a monotonic clock.
        """
        self._actions = []
        # Before any decision, so that captures that other nodes protect stay held.
        self.node.inherit(ranks)
        self.node.check_spare_slots(ranks)
        self.node.is_restoring = wants.is_restoring
        wants = self._with_newest(wants, ranks)
        self._is_unfinished = True
        for _ in range(MAX_ROUNDS):
            unanswered = self.node.unanswered(wants)
            self.node.give_up_missed(ranks, unanswered)
            for index, level in enumerate(self.level_tasks):
                self._actions += level.decide(ranks, self._names_at(index, wants), wants.released, now)
            order = self._exchange(self._report(ranks, wants), ranks, now)
            if order is None:
                self._is_unfinished = False
                break
            self.node.obey(order)
        if self._has_peers and now >= self._repeat_at:
            self._actions += self._send_state(now)
        unanswered = self.node.unanswered(wants)
        # After all rounds: a slot that one round releases and a later one reads would be read without a hold.
        self._hold_slots(ranks, unanswered)
        awaited_step = self._first_awaited(unanswered, ranks)
        if awaited_step != self._awaited_step:
            self._awaited_step = awaited_step
            self._actions.append(SetAwaitedStep(awaited_step))
        self._note_protection(ranks, now)
        return self._actions

    def _with_newest(self, wants: Wants, ranks: Sequence[RankView]) -> Wants:
        """Return the wants, with the newest whole capture during a preemption.

        That capture stays required until it is stored or lost. Otherwise a newer one at each step would replace it
        first.
        """
        if not (wants.is_preempted or self.node.order.is_preempted):
            self._rescued = None
            return wants
        if self._rescued is None or not self.node.unanswered(Wants(required=frozenset({self._rescued}))):
            self._rescued = self._newest_of_start(ranks)
        if self._rescued is None:
            return wants
        return structs.replace(wants, required=wants.required | {self._rescued})

    def _newest_of_start(self, ranks: Sequence[RankView]) -> StepKey | None:
        """Return the newest capture of the current start that is whole on all ranks of the node."""
        start = newest_begun(ranks).start
        of_start = [key for key in whole_on_all(ranks) if key.start == start]
        return max(of_start, default=None)

    def _report(self, ranks: Sequence[RankView], wants: Wants) -> Report:
        """Return the whole state of this node for the coordinator."""
        node = self.settings.node
        if self._is_alone:
            node = 0  # the only node that its coordinator knows
        captures_left = None
        if not any(rank.is_capturing for rank in ranks):
            captures_left = tuple(sorted(whole_on_all(ranks)))
        return Report(
            node=node,
            job=self.digest,
            coordinator=self.node.order.coordinator,
            levels=tuple(level.report() for level in self.node.levels),
            wants=wants,
            captures_left=captures_left,
            knows_drained=self.node.order.is_drained,
        )

    def _exchange(self, report: Report, ranks: Sequence[RankView], now: float) -> Order | None:
        """Send changes to the other nodes. Returns: the new order for this node, if any."""
        if self.coordinator is None:
            if report != self._sent_report:
                self._sent_report = report
                self._actions += self._send_state(now)
            return None
        self.coordinator.receive(report)
        order = self.coordinator.decide(ranks, now)
        if order is not None and not self.coordinator.is_alone:
            self._actions += self._send_state(now)
        return order

    def _send_state(self, now: float) -> list[Action]:
        """Send the state of this node to the coordinator, or the order of the coordinator to the nodes."""
        self._repeat_at = now + HEARTBEAT_S
        actions: list[Action] = []
        if self.coordinator is not None and self.coordinator.last_order is not None:
            for node in range(1, self.settings.num_nodes):
                actions.append(Send(node, self.coordinator.last_order))
        elif self.coordinator is None and self._sent_report is not None:
            actions.append(Send(COORDINATOR_NODE, self._sent_report))
        return actions

    def _hold_slots(self, ranks: Sequence[RankView], unanswered: list[StepKey]) -> None:
        """Hold exactly the captures that levels read or must read."""
        keys = self.node.keys_to_hold(unanswered, num_spare_slots(ranks))
        for rank in ranks:
            for slot in rank.slots:
                if slot.is_held and key_of(slot) not in keys:
                    self._actions.append(Release(rank.rank, slot.slot_id))
            for key in keys:
                slot_of_key = rank.capture_of(key)
                if slot_of_key is not None and not slot_of_key.is_held and rank.keeps(slot_of_key):
                    num_kept = len(rank.slots)
                    if rank.is_capturing:
                        num_kept = rank.num_kept
                    self._actions.append(Hold(rank.rank, slot_of_key.slot_id, slot_of_key.sequence, num_kept))

    def _names_at(self, index: int, wants: Wants) -> set[NamedStep]:
        """Return the names for a level: the first level gets those of trainers, slower levels those of faster ones.

        Only node 0 gives names, so that no two nodes write the same file. Other nodes neither give nor remove names.
        """
        if self.settings.node != COORDINATOR_NODE or self.node.levels[index].is_redundancy:
            return set()
        names = set(wants.names)
        for faster in self.node.levels[:index]:
            names |= faster.names
        return names

    def _first_awaited(self, unanswered: list[StepKey], ranks: Sequence[RankView]) -> int | None:
        """Return the first step whose capture the keeper awaits, if any.

        It always awaits the first one of a start, to report when training began.
        """
        steps = []
        for key in unanswered:
            steps.append(key.step)
        for level in self.node.levels:
            order = level.order
            if level.progress is GrantProgress.WAITING and order.grant is not None and order.source is None:
                steps.append(order.grant.step)
        if self.node.order.is_preempted or any(rank.awaits_first for rank in ranks):
            steps.append(0)
        return min(steps, default=None)

    def is_idle(self, wants: Wants) -> bool:
        """Return True if no level has work left."""
        for index, level in enumerate(self.level_tasks):
            if not level.is_idle(self._names_at(index, wants), wants.released):
                return False
        return True

    # State for trainers

    def level_states(self) -> tuple[LevelState, ...]:
        """Return the state of each storage level."""
        states = []
        for level, tasks in zip(self.node.storage, self.level_tasks, strict=False):
            states.append(
                LevelState(
                    complete=level.order.complete,
                    given_up=level.order.given_up,
                    is_listed=level.progress is not GrantProgress.LISTING,
                    is_failing=bool(level.failure) or level.order.is_failing,
                    failure=level.failure,
                    failed_step=tasks.failed_step,
                    num_failures=tasks.num_failures,
                )
            )
        return tuple(states)

    @property
    def protected(self) -> StepKey | None:
        """Return the newest capture that survives the loss of a node."""
        redundancy = self.node.redundancy
        if redundancy is None:
            return None
        return max(redundancy.order.complete, default=None)

    def given_names(self) -> tuple[NamedStep, ...]:
        """Return the given names, without those that a faster level must still give to its own copy.

        A trainer stops asking for a given name. So a name that a slower level got first does not count yet: the copy at
        the faster level could be deleted.
        """
        names: set[NamedStep] = set()
        for index, level in enumerate(self.node.storage):
            for named in level.names:
                if not any(self._is_to_name(faster, named) for faster in range(index)):
                    names.add(named)
        return tuple(sorted(names))

    def unanswered(self, wants: Wants) -> Wants:
        """Return the required steps that a level may still store, and the names that may still be given."""
        if wants == Wants() or not self.node.storage:
            return Wants()
        required = self.node.unanswered(Wants(required=wants.required))
        given_names = self.given_names()
        names = set()
        for named in wants.names:
            is_stored = self.node.storage[0].is_done_with(named.key)
            is_of_other_node = self.settings.node != COORDINATOR_NODE  # only node 0 gives names
            is_answered = named in given_names or named.key in self.node.order.lost or (is_stored and is_of_other_node)
            if not is_answered:
                names.add(named)
        return Wants(required=frozenset(required), names=frozenset(names))

    def _is_to_name(self, index: int, named: NamedStep) -> bool:
        """Return True if a level works, may have a step, and will give it that name."""
        level = self.node.levels[index]
        if not level.is_ready or named in level.names:
            return False
        return level.progress is GrantProgress.LISTING or named.key in level.stored

    def _note_protection(self, ranks: Sequence[RankView], now: float) -> None:
        """Record whether a due step is not protected yet."""
        redundancy = self.settings.redundancy
        if redundancy is None:
            return
        begun = newest_begun(ranks)
        if begun.start != self._first_begun.start:
            self._first_begun = begun
        protected_step = max(0, self._first_begun.step)
        if self.protected is not None and self.protected.start == begun.start:
            protected_step = self.protected.step
        every = math.lcm(redundancy.every_n_steps, self.settings.capture_every_n_steps)
        is_due = begun.step // every > protected_step // every
        if begun.start == 0 or not is_due:
            self._protected_at = now

    def _silent_nodes(self, now: float) -> list[int]:
        return [node for node, received_at in self._node_received_at.items() if now >= received_at + UNREACHED_S]

    def alerts(self, now: float, address: str) -> list[KeeperAlert]:
        """Return the lasting problems.

        Args:
            now: seconds of a monotonic clock.
            address: the address at which the keepers of all nodes connect, for the message.
        """
        alerts = []
        silent = self._silent_nodes(now)
        if silent and not self._is_alone:
            alerts.append(KeeperAlert("links", _unreached(self.settings.node, silent, address)))
        if self.settings.redundancy is not None and now >= self._protected_at + UNPROTECTED_S:
            reason = self.node.levels[-1].failure or "a node of its group, or of another one, has no parity yet"
            if not self.node.levels[-1].has_slots:
                reason = "a rank of this node has no slot for it"
            if silent:
                reason = f"no link to the keeper of node {min(silent)}"
            alerts.append(KeeperAlert("protection", f"nothing was protected for {UNPROTECTED_S:.0f} s: {reason}"))
        return alerts


def _others(settings: JobSettings) -> list[int]:
    """Return the nodes with which this one exchanges messages."""
    if settings.num_nodes == 1:
        return []
    if settings.node == COORDINATOR_NODE:
        return list(range(1, settings.num_nodes))
    return [COORDINATOR_NODE]


def _unreached(node: int, silent: list[int], address: str) -> str:
    silent_nodes = f"node {min(silent)}"
    if COORDINATOR_NODE in silent:
        silent_nodes = "rank 0's node"
    if len(silent) > 1:
        silent_nodes += ", …"
    return (
        f"node {node}: no link to the keeper of {silent_nodes} for more than {UNREACHED_S:.0f} s (all keepers meet at "
        f"{address}); look whether that keeper is stopped or its machine overloaded, and whether nodes reach each "
        "other there; the address is that of MASTER_ADDR"
    )


def text_of_difference(settings: JobSettings, other: JobSettings) -> str:
    """Return a message about two ranks of a node with different settings. It contains no values: they may be secrets.

    Args:
        settings: those of the first rank, which the keeper uses.
        other: those of another rank.
    """
    names = []
    for field in structs.fields(JobSettings):
        if field.name != "levels" and getattr(settings, field.name) != getattr(other, field.name):
            names.append(field.name)
    if len(settings.levels) != len(other.levels):
        names.append("levels")
    for level, other_level in zip(settings.levels, other.levels, strict=False):
        for field in structs.fields(LevelSettings):
            if getattr(level, field.name) != getattr(other_level, field.name):
                names.append(f"{field.name} of {level.url}")
    return (
        f"ranks of node {settings.node} have different settings: {', '.join(names)}. They share one keeper, which uses "
        "those of the rank that it knew first; give all ranks of a node the same SnapshotConfig"
    )


def _digest(settings: JobSettings) -> int:
    """Return a hash of the settings that all nodes of a job share. Those that a node has of its own do not count."""
    levels = []
    for level in settings.levels:
        levels.append(structs.replace(level, url="", storage_options=None, max_bytes_per_s=None, timeout_s=0.0))
    redundancy = settings.redundancy
    if redundancy is not None:
        redundancy = structs.replace(redundancy, members=(), max_bytes_per_s=None)
    agreed = structs.replace(settings, levels=tuple(levels), redundancy=redundancy, ranks=(), node=0)
    # A message has signed integers of 64 bits.
    return xxhash.xxh3_64_intdigest(json.encode(agreed)) >> 1
