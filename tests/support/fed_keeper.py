"""A keeper without a process: a core that is fed by hand, with real slots, an event log, and levels that are values."""

import os
import time
from collections import deque

from lazysnap.core.actions import (
    Action,
    BeginJob,
    DeleteFiles,
    Event,
    Failed,
    FreeSlot,
    Hold,
    Listed,
    ListLevel,
    MakeSlot,
    ProcessDied,
    Release,
    SlotMade,
    SlotsSeen,
    StepStored,
    Task,
    TaskEnded,
    TrainerReported,
    VoidSlot,
    WriteLevel,
)
from lazysnap.core.core import Core
from lazysnap.core.messages import JobSettings, MemoryWish, StepKey, TrainerState
from lazysnap.keeper.event_log import EventLog
from lazysnap.keeper.node_state import node_state
from lazysnap.keeper.questions import NodeState
from lazysnap.memory.slots import KeeperSlot, TrainerSlot, make_slot
from lazysnap.shard.manifest import CaptureMeta

META_BYTES = 4096
IMAGE_BYTES = 1 << 16


class FedKeeper:
    """One keeper of one node. What the core wants is done at once, except writes while ``is_writing_held`` is True."""

    def __init__(self) -> None:
        self.core = Core(1, time.monotonic(), pid=os.getpid())
        self.log = EventLog()
        self.slots: dict[int, dict[int, KeeperSlot]] = {}
        self.trainer_slots: list[TrainerSlot] = []
        self.is_writing_held = False
        self.held_writes: list[WriteLevel] = []
        self.failing: dict[int, str] = {}
        """Why levels fail that do, by index."""
        self.listed: tuple[tuple[int, int], ...] = ()
        """Start and step of the snapshots that levels have already."""
        self.settings: JobSettings | None = None
        self._sequence = 0
        self._events: deque[Event] = deque()
        self._is_busy = False

    # What happens

    def report(self, state: TrainerState, pid: int = 0) -> None:
        """A trainer reports its state on its connection."""
        self.feed(TrainerReported(state.local_rank + 1, pid or os.getpid(), state))

    def capture(self, state: TrainerState, step: int, *, is_whole: bool = True) -> None:
        """The trainer captures a step, in the slot that the oldest capture is in."""
        of_rank = [slot for slot in self.trainer_slots if slot.slot_id in self.slots[state.local_rank]]
        slot = min(of_rank, key=lambda slot: slot.view().sequence)
        self._sequence += 1
        assert state.job is not None
        rank = state.job.ranks[state.local_rank]
        meta = CaptureMeta(
            state.job.run, f"{state.start:016x}", step, rank, state.job.world_size, captured_ns=time.time_ns()
        )
        slot.begin(state.start, step, sequence=self._sequence, image_bytes=IMAGE_BYTES, meta=meta.to_bytes())
        if is_whole:
            slot.commit(copied_ns=1_000_000)
        self.see()

    def die(self, pid: int = 0) -> None:
        """A process dies."""
        self.feed(ProcessDied(pid or os.getpid()))

    def see(self) -> None:
        """The keeper reads the words of all slots."""
        seen = {}
        for rank, slots in self.slots.items():
            seen[rank] = tuple(slot.view() for slot in slots.values())
        self.feed(SlotsSeen(seen))

    def state(self) -> NodeState | None:
        """What people get to know."""
        return node_state(self.core, self.slots, 0, self.log)

    def close(self) -> None:
        """End it."""
        self.log.close()
        for slot in self.trainer_slots:
            slot.close()
        for slots in self.slots.values():
            for kept in slots.values():
                kept.close()

    # What the core wants

    def feed(self, event: Event) -> None:
        """Give the core an event, and do what it wants."""
        self._events.append(event)
        while self._events and not self._is_busy:
            self._is_busy = True
            for action in self.core.step(self._events.popleft(), time.monotonic()):
                self._carry_out(action)
            self.log.note(self.core, self.slots)
            self._is_busy = False

    def _carry_out(self, action: Action) -> None:
        match action:
            case BeginJob():
                self.settings = action.settings
                self.log.job_began(action.settings)
            case MakeSlot():
                self._make_slot(action)
            case Hold():
                rank_slots = list(self.slots[action.rank].values())
                self.slots[action.rank][action.slot_id].hold(action.sequence, rank_slots, 1)
                self.see()
            case Release():
                self.slots[action.rank][action.slot_id].release()
                self.see()
            case VoidSlot():
                self.slots[action.rank][action.slot_id].void(action.sequence)
                self.see()
            case FreeSlot():
                self.slots[action.rank].pop(action.slot_id).close()
                self.see()
            case Task():
                self._do(action)

    def _make_slot(self, action: MakeSlot) -> None:
        slot = make_slot(action.wish.meta_bytes, action.wish.image_bytes)
        self.slots.setdefault(action.rank, {})[slot.slot_id] = slot
        self.trainer_slots.append(TrainerSlot.attach(os.dup(slot.descriptor)))
        self.see()
        self.feed(SlotMade(action.rank))

    def _do(self, task: Task) -> None:
        if isinstance(task, WriteLevel) and self.is_writing_held:
            self.held_writes.append(task)
        else:
            self.finish(task)

    def finish(self, task: Task) -> None:
        """The task ends."""
        assert self.settings is not None
        ended = TaskEnded(task.number)
        key = None
        if task.level in self.failing:
            ended = Failed(task.number, self.failing[task.level])
        elif isinstance(task, ListLevel):
            ended = Listed(task.number, tuple(StepKey(start, step) for start, step in self.listed))
        elif isinstance(task, WriteLevel):
            ended = StepStored(task.number, IMAGE_BYTES, seconds=0.5)
        if isinstance(task, WriteLevel):
            key = task.key
        assert not isinstance(task, DeleteFiles) or task.keys
        self.log.task_ended(self.settings.levels[task.level].url, ended, key)
        self.feed(ended)


def trainer_state(job: JobSettings, start: int, step: int = 0, local_rank: int = 0) -> TrainerState:
    """Return the state of a trainer that wants three slots."""
    wish = MemoryWish(3, META_BYTES, IMAGE_BYTES)
    return TrainerState(local_rank, start=start, step=step, job=job, memory=wish, linger_s=60.0, waited_s=0.25)
