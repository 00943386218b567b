"""The trainers of this node, and the slots that they have. Pure.

::

    ABSENT, DEAD or ENDED ──a trainer──────────────────────> ATTACHED
    ATTACHED ──connection lost─────────────────────────────> AWAY
    AWAY ──it connects again, or another replaces it───> ATTACHED
    ATTACHED or AWAY ──process died────────────────────────> DEAD
    ATTACHED ──left────────────────────────────────────────> DEAD
    ATTACHED ──the training is over────────────────────────> ENDED
"""

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lazysnap.core.actions import Action, AdoptSlots, CloseConnection, FreeSlot, MakeSlot, TrainerReported, VoidSlot
from lazysnap.core.messages import Farewell, JobSettings, KeeperState, StepKey, TrainerState, Wants, is_removed
from lazysnap.core.node import RankView
from lazysnap.memory.slot_choice import SlotPhase, SlotView, is_fitting

MEMORY_RETRY_S = 5.0
MEMORY_WAIT_S = 0.5
"""Seconds to wait if only slots of another size are in the way: their trainer will return them soon."""
AWAY_GRACE_S = 1.5
"""Seconds for a live trainer to reconnect. Before that no other process replaces it."""


class Presence(enum.Enum):
    """The states of a trainer. See the diagram of the module."""

    ABSENT = "absent"
    ATTACHED = "attached"
    AWAY = "away"
    DEAD = "dead"
    ENDED = "ended"


@dataclass
class Rank:
    """The keeper's state of one rank."""

    number: int
    """Number of the rank on its node."""
    presence: Presence = Presence.ABSENT
    connection: int = -1
    pid: int = -1
    state: TrainerState | None = None
    """The last state of a trainer of this rank. It outlives the trainer: required steps stay required."""
    inherited: Wants = field(default_factory=Wants)
    """Steps and names that earlier trainers of this rank required, and that the levels have not answered yet."""
    slots: tuple[SlotView, ...] = ()
    newest_sequence: int = 0
    """The greatest sequence number in the slots when the trainer connected."""
    last_sent: KeeperState | None = None
    """The last state that was sent on this connection."""
    is_making_slot: bool = False
    is_adopting: bool = False
    """True from ``AdoptSlots`` until the slots of the trainer were seen: before, no slot counts as missing."""
    memory_refusal: str = ""
    """The reason if there was no memory for the last slot."""
    memory_retry_at: float | None = None
    """The time before which no slot is made, if any."""
    away_since: float = 0.0

    @property
    def is_served(self) -> bool:
        """True if its trainer is alive and did not leave."""
        return self.presence in (Presence.ATTACHED, Presence.AWAY)

    @property
    def wants(self) -> Wants:
        """Return the wants of its last trainer, which may be dead, and what earlier ones left."""
        state = self.state
        if state is None:
            return Wants()
        wants = Wants(
            required=frozenset(StepKey(state.start, step) for step in state.required),
            protect=frozenset(StepKey(state.start, step) for step in state.protect),
            names=frozenset(state.names),
            released=frozenset(state.released),
            is_preempted=self.is_served and state.is_preempted,
            is_restoring=self.is_served and state.start == 0,
        )
        return wants.union(self.inherited)

    def replace_trainer(self, event: TrainerReported) -> None:
        """Serve another process, or another connection of the same one."""
        if self.pid != event.pid:
            # The trainer that required them is dead: nobody would require them again.
            self.inherited = Wants(required=self.wants.required, names=self.wants.names)
        self.connection = event.connection
        self.pid = event.pid
        self.last_sent = None
        self.newest_sequence = max((slot.sequence for slot in self.slots), default=0)
        self.memory_refusal = ""
        self.memory_retry_at = None

    def forget_removed_names(self) -> None:
        """Forget the names of earlier trainers that this one removes."""
        assert self.state is not None
        names = {named for named in self.inherited.names if not is_removed(named, self.state.released)}
        self.inherited = Wants(required=self.inherited.required, names=frozenset(names))

    def view(self, num_kept: int, *, may_still_come: bool) -> RankView:
        """Return the view of this rank for grants.

        Args:
            num_kept: K; see ``memory.slot_choice``.
            may_still_come: True if an absent rank may still connect.
        """
        if self.state is None:
            return RankView(self.number, 0, -1, is_capturing=may_still_come, num_kept=1, slots=self.slots)
        start = self.state.start
        begun = self.state.step
        for slot in self.slots:
            if slot.start == start and slot.step is not None:
                begun = max(begun, slot.step)
        is_capturing = self.is_served and not self.state.is_sealed
        if self.is_adopting:
            is_capturing = True  # the slots are not known yet
        memory = self.state.memory
        has_spare = start == 0 or memory is None or memory.num_slots > num_kept + 1
        return RankView(self.number, start, begun, is_capturing, num_kept, self.slots, has_spare)

    # Memory

    def slot_to_make(self, now: float) -> MakeSlot | None:
        """Return the next allocation; one at a time."""
        if self.state is None or self.state.memory is None:
            return None
        if self.presence is not Presence.ATTACHED or self.is_making_slot or self.is_adopting:
            return None
        if self.memory_retry_at is not None and now < self.memory_retry_at:
            return None
        wish = self.state.memory
        num_fitting = 0
        for slot in self.slots:
            if slot.slot_id not in self.state.returned and is_fitting(slot, wish.meta_bytes, wish.image_bytes):
                num_fitting += 1
        self.memory_retry_at = None  # the result may set it again
        if num_fitting >= wish.num_slots:
            return None
        self.is_making_slot = True
        return MakeSlot(self.number, wish)

    def slot_made(self) -> None:
        """Handle an allocated slot."""
        self.is_making_slot = False
        self.memory_refusal = ""
        self.memory_retry_at = None

    def memory_refused(self, text: str, now: float) -> None:
        """Handle a refused allocation. It is retried: other processes may end.

        Args:
            text: the reason; empty if only slots that will be returned soon are in the way.
            now: seconds of a monotonic clock.
        """
        self.is_making_slot = False
        self.memory_refusal = text
        pause_s = MEMORY_WAIT_S
        if text:
            pause_s = MEMORY_RETRY_S
        self.memory_retry_at = now + pause_s

    def slots_to_free(self) -> list[Action]:
        """Return the actions that free returned slots which nobody reads."""
        actions: list[Action] = []
        if self.state is not None:
            for slot in self.slots:
                if slot.slot_id in self.state.returned and not slot.is_held:
                    actions.append(FreeSlot(self.number, slot.slot_id))
        if actions:
            self.memory_retry_at = None
        return actions

    def slots_to_void(self) -> list[Action]:
        """Return the actions that void incomplete captures of dead trainers."""
        actions: list[Action] = []
        if not self.is_served:
            for slot in self.slots:
                if slot.phase is SlotPhase.CAPTURING:
                    actions.append(VoidSlot(self.number, slot.slot_id, slot.sequence))
        return actions


@dataclass
class Ranks:
    """All ranks of the node, of this start and of earlier ones."""

    all: list[Rank] = field(default_factory=list)
    """Ranks by their number on the node."""
    wants: Wants = field(default_factory=Wants)
    """The wants of all trainers, also of dead ones. Each transition updates it."""
    is_served: bool = False
    """True if any trainer is alive. Each transition updates it."""

    def rank(self, number: int) -> Rank:
        """Return a rank, created if necessary."""
        while len(self.all) <= number:
            self.all.append(Rank(len(self.all)))
        return self.all[number]

    def is_restart_expected(self) -> bool:
        """Return True if memory may be needed again: a trainer died, and left a whole capture.

        Trainers whose captures were released do not count: the current start does not have their rank.
        """
        dead = [rank for rank in self.all if rank.presence is Presence.DEAD]
        return any(slot.is_whole for rank in dead for slot in rank.slots)

    def growth_bytes(self) -> int:
        """Return the memory that the trainers themselves will still take. Thread-safe."""
        total_bytes = 0
        for rank in self.all:
            state = rank.state
            if rank.is_served and state is not None and state.memory is not None:
                total_bytes += state.memory.growth_bytes
        return total_bytes

    def is_training_over(self) -> bool:
        """Return True if each trainer of the node reported its end."""
        return bool(self.all) and all(rank.presence is Presence.ENDED for rank in self.all)

    def views(self, job: JobSettings) -> list[RankView]:
        """Return the view of each rank of a job for grants."""
        views = []
        for number in range(job.num_ranks):
            views.append(self.rank(number).view(job.num_kept, may_still_come=self.is_served))
        return views

    # Transitions

    def refusal(self, event: TrainerReported, now: float) -> str:
        """Return the reason not to serve a trainer; empty if it is served."""
        rank = self.rank(event.state.local_rank)
        if not rank.is_served or rank.pid == event.pid:
            return ""
        if rank.presence is Presence.AWAY and now >= rank.away_since + AWAY_GRACE_S:
            is_writing = any(slot.phase is SlotPhase.CAPTURING for slot in rank.slots)
            if not is_writing:
                return ""
        return self._text_of_trainers()

    def _text_of_trainers(self) -> str:
        """Return a text with the training processes, and the command that ends them."""
        pids = [str(rank.pid) for rank in self.all if rank.is_served]
        if len(pids) == 1:
            return f"process {pids[0]}; `kill {pids[0]}` ends it"
        return f"processes {', '.join(pids)}; `kill {' '.join(pids)}` ends them"

    def accept(self, event: TrainerReported) -> list[Action]:
        """Update the state of an accepted trainer."""
        actions: list[Action] = []
        rank = self.rank(event.state.local_rank)
        is_new_connection = rank.connection != event.connection
        if is_new_connection:
            if rank.presence is Presence.ATTACHED:
                actions.append(CloseConnection(rank.connection))
            rank.replace_trainer(event)
        rank.presence = Presence.ATTACHED
        if rank.state is None or rank.state.memory != event.state.memory:
            rank.memory_retry_at = None
        rank.state = event.state
        rank.forget_removed_names()
        if is_new_connection and event.state.slots:  # their descriptors arrive with the first state
            rank.is_adopting = True
            actions.append(AdoptSlots(rank.number))
        if event.state.farewell is not Farewell.NONE:
            actions += self._trainer_leaves(rank)
        self._gather()
        return actions

    def _trainer_leaves(self, rank: Rank) -> list[Action]:
        """Handle a trainer that leaves. The last one of a finished training sees the end of the keeper as the
        answer.
        """
        is_over = rank.state is not None and rank.state.farewell is Farewell.OVER
        if is_over:
            rank.presence = Presence.ENDED
        else:
            rank.presence = Presence.DEAD
        if is_over and not any(other.is_served for other in self.all):
            return []
        connection = rank.connection
        rank.connection = -1
        return [CloseConnection(connection)]

    def lose_connection(self, connection: int, now: float) -> list[Action]:
        """Handle a lost connection. Its process may still be alive and reconnect."""
        actions: list[Action] = []
        for rank in self.all:
            if rank.connection != connection:
                continue
            actions.append(CloseConnection(connection))
            rank.connection = -1
            if rank.presence is Presence.ATTACHED:
                rank.presence = Presence.AWAY
                rank.away_since = now
        self._gather()
        return actions

    def lose_process(self, pid: int) -> list[Action]:
        """Handle the death of a process: it writes nothing more."""
        actions: list[Action] = []
        for rank in self.all:
            if not rank.is_served or rank.pid != pid:
                continue
            if rank.presence is Presence.ATTACHED:
                actions.append(CloseConnection(rank.connection))
            rank.connection = -1
            rank.presence = Presence.DEAD
        self._gather()
        return actions

    def forget_answered(self, unanswered: Callable[[Wants], Wants]) -> None:
        """Forget what levels have answered of the wants of earlier trainers. ``unanswered``: returns the rest."""
        for rank in self.all:
            rest = unanswered(rank.inherited)
            if rest != rank.inherited:
                rank.inherited = rest
                self._gather()

    def _gather(self) -> None:
        """Update the fields that depend on the states of all trainers."""
        self.is_served = any(rank.is_served for rank in self.all)
        self.wants = Wants()
        for rank in self.all:
            self.wants = self.wants.union(rank.wants)

    def former_slots(self, num_ranks: int) -> list[Action]:
        """Return the actions that free all slots of ranks that the current start does not have."""
        actions: list[Action] = []
        for rank in self.all[num_ranks:]:
            if not rank.is_served:
                for slot in rank.slots:
                    actions.append(FreeSlot(rank.number, slot.slot_id))
        return actions


def num_spare_slots(ranks: Sequence[RankView]) -> int:
    """Return the number of slots beyond K + 1 of the rank with the fewest."""
    return min(len(rank.slots) - rank.num_kept - 1 for rank in ranks)
