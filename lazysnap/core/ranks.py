"""Who are the trainers of this node, and what do they have? Pure.

::

    ABSENT ──> ATTACHED <──connection lost, process alive──> AWAY
                   │  ▲                                        │
                   │  └──────────the next trainer──────────┐   │
                   │                                       │   │
                   ├──process died────────────────────────DEAD<┤
                   └──said that it ends───────────────────ENDED<
"""

import enum
from dataclasses import dataclass, field

from lazysnap.core.actions import Action, AdoptSlots, CloseConnection, MakeSlot, TrainerReported
from lazysnap.core.messages import PROTOCOL, JobSettings, KeeperState, NamedStep, StepKey, TrainerState
from lazysnap.core.node import RankView
from lazysnap.memory.slot_choice import SlotView

MEMORY_RETRY_S = 5.0


class Presence(enum.Enum):
    """See the module's drawing."""

    ABSENT = "absent"
    ATTACHED = "attached"
    AWAY = "away"
    DEAD = "dead"
    ENDED = "ended"


@dataclass
class Rank:
    """The keeper's state of one rank."""

    number: int
    presence: Presence = Presence.ABSENT
    connection: int = -1
    pid: int = -1
    state: TrainerState | None = None
    """The last state that a trainer of this rank sent. It outlives the trainer: what was required still is."""
    slots: tuple[SlotView, ...] = ()
    last_sent: KeeperState | None = None
    """The last state that was sent on this connection."""
    is_making_slot: bool = False
    memory_refusal: str = ""
    """Why there was no memory for the last slot; empty if there was."""
    memory_retry_at: float = 0.0

    @property
    def is_served(self) -> bool:
        """True if its trainer is alive, and did not leave."""
        return self.presence in (Presence.ATTACHED, Presence.AWAY)

    def view(self, *, may_still_come: bool) -> RankView:
        """Return what the grants need to know. ``may_still_come``: True if an absent rank is to be waited for."""
        if self.state is None:
            return RankView(self.number, 0, -1, is_capturing=may_still_come, num_kept=1, slots=self.slots)
        start = self.state.start
        begun = self.state.step
        for slot in self.slots:
            if slot.start == start and slot.step is not None:
                begun = max(begun, slot.step)
        is_capturing = self.is_served and not self.state.is_ending
        return RankView(self.number, start, begun, is_capturing, self.state.settings.num_kept, self.slots)

    def slot_to_make(self, now: float) -> MakeSlot | None:
        """Return the allocation that is due; one at a time."""
        if self.state is None or self.presence is not Presence.ATTACHED or self.is_making_slot:
            return None
        if self.memory_refusal and now < self.memory_retry_at:
            return None
        capacity_bytes = self.state.settings.slot_bytes
        num_fitting = sum(1 for slot in self.slots if slot.image_capacity_bytes >= capacity_bytes)
        if num_fitting >= self.state.num_slots:
            return None
        self.is_making_slot = True
        return MakeSlot(self.number, capacity_bytes)

    def slot_made(self) -> None:
        """A slot was allocated."""
        self.is_making_slot = False
        self.memory_refusal = ""

    def memory_refused(self, text: str, now: float) -> None:
        """There was no memory. It is tried again: other processes may end."""
        self.is_making_slot = False
        self.memory_refusal = text
        self.memory_retry_at = now + MEMORY_RETRY_S


@dataclass
class Ranks:
    """All ranks of the node."""

    settings: JobSettings
    """Those of the first trainer. All have the same, but for the number of the rank."""
    all: list[Rank] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.all = [Rank(number) for number in range(self.settings.num_ranks)]

    @property
    def is_served(self) -> bool:
        """True if any trainer is alive."""
        return any(rank.is_served for rank in self.all)

    def is_restart_expected(self) -> bool:
        """Return True if memory may be wanted again: a trainer died, and left a whole capture."""
        is_anybody_dead = any(rank.presence is Presence.DEAD for rank in self.all)
        return is_anybody_dead and any(slot.is_whole for rank in self.all for slot in rank.slots)

    def views(self) -> list[RankView]:
        """Return what the grants need to know of each rank."""
        return [rank.view(may_still_come=self.is_served) for rank in self.all]

    def required(self) -> list[StepKey]:
        """Return the steps that trainers, or those before them, want stored."""
        keys: set[StepKey] = set()
        for rank in self.all:
            if rank.state is not None:
                keys.update(StepKey(rank.state.start, step) for step in rank.state.required)
        return sorted(keys)

    def names(self) -> list[NamedStep]:
        """Return the names that trainers want to be given."""
        names: set[NamedStep] = set()
        for rank in self.all:
            if rank.state is not None:
                names.update(rank.state.names)
        return sorted(names)

    def released(self) -> frozenset[str]:
        """Return the names that trainers want to be taken away."""
        names: set[str] = set()
        for rank in self.all:
            if rank.state is not None:
                names.update(rank.state.released)
        return frozenset(names)

    def num_spare_slots(self) -> int:
        """Return the slots beyond the K + 1 that captures need, of the rank that has the fewest."""
        fewest = min(len(rank.slots) for rank in self.all)
        return fewest - self.settings.num_kept - 1

    def refusal(self, event: TrainerReported) -> str:
        """Return why a trainer is not served; empty if it is."""
        settings = event.state.settings
        if event.state.protocol != PROTOCOL:
            return f"the keeper speaks version {PROTOCOL}, this trainer version {event.state.protocol}"
        if _shared_settings(settings) != _shared_settings(self.settings):
            return "a keeper of this job runs with other settings; it ends when its memory is stored"
        rank = self.all[settings.rank]
        if rank.is_served and rank.pid != event.pid:
            return f"process {rank.pid} is the trainer of rank {settings.rank}"
        return ""

    def accept(self, event: TrainerReported) -> list[Action]:
        """Take the state of a trainer that is not refused."""
        actions: list[Action] = []
        rank = self.all[event.state.settings.rank]
        if rank.connection != event.connection:
            if rank.presence is Presence.ATTACHED:
                actions.append(CloseConnection(rank.connection))
            rank.connection = event.connection
            rank.pid = event.pid
            rank.last_sent = None
        rank.presence = Presence.ATTACHED
        rank.state = event.state
        if event.state.slots:
            actions.append(AdoptSlots(event.connection, rank.number))
        return actions

    def lose_connection(self, connection: int) -> list[Action]:
        """A connection ended. Its process may live on and connect again."""
        actions: list[Action] = []
        for rank in self.all:
            if rank.presence is Presence.ATTACHED and rank.connection == connection:
                actions += self._lose(rank, Presence.AWAY)
        return actions

    def lose_process(self, pid: int) -> list[Action]:
        """A process died: it writes nothing any more."""
        actions: list[Action] = []
        for rank in self.all:
            if rank.is_served and rank.pid == pid:
                actions += self._lose(rank, Presence.DEAD)
        return actions

    def _lose(self, rank: Rank, presence: Presence) -> list[Action]:
        actions: list[Action] = []
        if rank.presence is Presence.ATTACHED:
            actions.append(CloseConnection(rank.connection))
        rank.connection = -1
        rank.presence = presence
        if rank.state is not None and rank.state.is_ending:
            rank.presence = Presence.ENDED
        return actions


def _shared_settings(settings: JobSettings) -> tuple[object, ...]:
    """Return what all ranks of a node must agree on."""
    return (
        settings.run,
        settings.levels,
        settings.redundancy,
        settings.num_kept,
        settings.num_ranks,
        settings.node,
        settings.num_nodes,
    )
