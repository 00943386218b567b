"""Nodes, trainers, slots, levels and links in simulated time, around the real ``Core`` of each keeper.

Delays and faults are drawn from a seed. ``Broken`` is raised at the moment when a promise is broken: what is reported
complete is on every node; the newest of it is never deleted; a held slot is never written over; what is reported
protected stays in memory on every node; training never waits for a slot.
"""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from lazysnap.core import actions
from lazysnap.core.core import Core
from lazysnap.core.messages import (
    Farewell,
    JobSettings,
    KeeperState,
    LevelSettings,
    MemoryWish,
    NamedStep,
    RedundancySettings,
    StepKey,
    TrainerState,
)
from lazysnap.core.node import key_of
from lazysnap.core.tasks import MAX_HANGING
from lazysnap.memory.slot_choice import SlotPhase, SlotView, choose_slot, is_untouchable, slots_needed

SLOT_BYTES = 1 << 20
TIMEOUT_S = 5.0
LINGER_S = 5.0
ENDLESS_S = 1e9
PATIENCE_S = 400
"""Hangs, pauses between tries and the time for which a keeper waits for others end well before that."""
MAX_EVENTS_AT_ONCE = 20_000


Views = dict[int, tuple[SlotView, ...]]
"""The views of the slots of a node, by rank."""


class Broken(AssertionError):
    """A promise was broken."""


@dataclass(frozen=True)
class Setting:
    """What a world is like."""

    seed: int = 0
    num_nodes: int = 1
    num_ranks: int = 1
    levels: tuple[LevelSettings, ...] = (LevelSettings("level0", every_n_steps=1, timeout_s=TIMEOUT_S),)
    redundancy: RedundancySettings | None = None
    step_s: float = 0.2
    write_steps: float = 2.0
    """Mean time of a write, in steps."""
    loss: float = 0.0
    """Share of messages that are lost, and of those that come twice."""
    failure: float = 0.0
    """Share of tasks that fail."""
    hang: float = 0.0
    """Share of stages of tasks that hang."""

    @property
    def num_kept(self) -> int:
        return 1 if self.num_nodes * self.num_ranks == 1 else 2

    def job(self, node: int) -> JobSettings:
        return JobSettings(
            run="run",
            levels=self.levels,
            redundancy=self.redundancy,
            num_kept=self.num_kept,
            ranks=tuple(range(node * self.num_ranks, (node + 1) * self.num_ranks)),
            world_size=self.num_nodes * self.num_ranks,
            node=node,
            num_nodes=self.num_nodes,
        )


def slot_view(
    slot_id: int, key: StepKey | None, sequence: int, *, is_whole: bool = True, is_held: bool = False
) -> SlotView:
    """Return the view of a slot. ``key``: the capture that it has; None: it is empty."""
    phase = SlotPhase.WHOLE if is_whole else SlotPhase.CAPTURING
    return SlotView(
        slot_id=slot_id,
        meta_capacity_bytes=0,
        image_capacity_bytes=SLOT_BYTES,
        phase=SlotPhase.EMPTY if key is None else phase,
        step=None if key is None else key.step,
        start=0 if key is None else key.start,
        sequence=sequence,
        image_bytes=SLOT_BYTES,
        watermark_bytes=SLOT_BYTES if is_whole else 0,
        copied_ns=0,
        reached_step=None,
        is_held=is_held,
    )


class SimSlot:
    """A slot. Trainers begin, commit and discard; keepers hold, release and void."""

    def __init__(self, node: "SimNode", slot_id: int) -> None:
        self._node = node
        self.view = slot_view(slot_id, None, 0)

    def has(self, key: StepKey) -> bool:
        return self.view.step == key.step and self.view.start == key.start

    def begin(self, key: StepKey, sequence: int) -> None:
        self._set(slot_view(self.view.slot_id, key, sequence, is_whole=False))

    def commit(self) -> None:
        self._change(phase=SlotPhase.WHOLE, watermark_bytes=SLOT_BYTES)

    def discard(self) -> None:
        self._set(slot_view(self.view.slot_id, None, self.view.sequence))

    def hold(self, sequence: int) -> None:
        if self.view.sequence == sequence:
            self._change(is_held=True)

    def release(self) -> None:
        self._change(is_held=False)

    def void(self, sequence: int) -> None:
        if self.view.sequence == sequence and self.view.phase is SlotPhase.CAPTURING:
            self._change(phase=SlotPhase.VOID)

    def _change(self, **words: object) -> None:
        self._set(structs.replace(self.view, **words))

    def _set(self, view: SlotView) -> None:
        self.view = view
        self._node.memory_changed()


@dataclass
class Disk:
    """The files of one node at one level."""

    committed: set[StepKey] = field(default_factory=set)
    leftovers: set[StepKey] = field(default_factory=set)


class SimTask:
    """A task on its thread, in stages. It may fail or hang at each, and dies with its keeper."""

    def __init__(self, keeper: "SimKeeper", task: actions.Task) -> None:
        self.keeper = keeper
        self.world = keeper.world
        self.task = task
        self.disk = keeper.disk(task.level)
        self.is_cancelled = False
        self._moved_at = self.world.now
        self._after(self.world.stage_s(), self._begin)

    def _after(self, delay_s: float, call: Callable[[], None]) -> None:
        hang_s = self.world.hang_s()
        if hang_s > 0.0 and self.keeper.draws_endless_hang(self.task.level):
            hang_s = ENDLESS_S
        self.world.after(delay_s + hang_s, self._run_stage, call)

    def _run_stage(self, call: Callable[[], None]) -> None:
        if self.keeper.is_alive:
            call()

    def _end(self, event: actions.TaskEnded) -> None:
        self.keeper.handle(event)

    def _begin(self) -> None:
        task = self.task
        if self.world.draws_failure():
            self._end(actions.Failed(task.number, "simulated"))
        elif isinstance(task, actions.ListLevel):
            self._list()
        elif isinstance(task, actions.DeleteFiles):
            self._delete(list(task.keys))
        elif isinstance(task, actions.SetNames):
            names = self.world.names[task.level]
            names.update(task.added)
            names.difference_update(task.released)
            self._end(actions.TaskEnded(task.number))
        elif isinstance(task, actions.WriteLevel):
            self.disk.leftovers.add(task.key)
            self._await_source()
        else:
            self._end(actions.TaskEnded(task.number))

    def _list(self) -> None:
        stored = tuple(sorted(self.disk.committed))
        leftovers = tuple(sorted(self.disk.leftovers - self.disk.committed))
        names: tuple[NamedStep, ...] = ()
        if self.keeper.node.number == 0:
            names = tuple(sorted(self.world.names[self.task.level]))
        self._end(actions.Listed(self.task.number, stored, leftovers, names))

    def _delete(self, keys: list[StepKey]) -> None:
        if not keys:
            self._end(actions.TaskEnded(self.task.number))
            return
        self.world.delete(self.keeper, self.task.level, keys[0])
        self._after(self.world.stage_s() / 4, lambda: self._delete(keys[1:]))

    def _await_source(self) -> None:
        """Follow the watermark, then write. Who waits for a trainer does not hang."""
        task = self.task
        if self.is_cancelled:
            self._withdraw(actions.Missed(task.number, "cancelled"))
            return
        if task.source is not None:
            is_there = task.key in self.keeper.disk(task.source).committed
            self.world.check(is_there, f"{task.key} was deleted at level {task.source} while it was copied")
            self._write(self.world.write_s())
            return
        is_whole = True
        for rank, slot_id in task.slots:
            slot = self.keeper.node.slots(rank)[slot_id]
            self.world.check(slot.has(task.key), f"the slot of {task.key} was written over while it was read")
            is_whole = is_whole and slot.view.is_whole
        if is_whole:
            self._write(self.world.write_s())
            return
        if self.world.now >= self._moved_at + 0.5:
            self._moved_at = self.world.now
            self.keeper.handle(actions.TaskMoved(task.number))
        self._after(self.world.setting.step_s / 10, self._await_source)

    def _write(self, seconds_left: float) -> None:
        """Move bytes, and say so now and then. A hang may come at any of these moments."""
        self.keeper.handle(actions.TaskMoved(self.task.number))
        if not self.keeper.is_alive:
            return
        if self.is_cancelled:
            self._withdraw(actions.Missed(self.task.number, "cancelled"))
        elif seconds_left <= 0:
            self._after(self.world.stage_s(), self._commit)
        else:
            piece_s = min(1.0, seconds_left)
            self._after(piece_s, lambda: self._write(seconds_left - piece_s))

    def _withdraw(self, event: actions.TaskEnded, *, is_damaged: bool = False) -> None:
        self.world.delete(self.keeper, self.task.level, self.task.key, is_damaged=is_damaged)
        self._end(event)

    def _commit(self) -> None:
        """Between the decision to commit and the rename the thread may hang: what comes then was abandoned before."""
        self.world.commit(self.keeper, self.task.level, self.task.key)
        self._after(self.world.stage_s(), self._verify)

    def _verify(self) -> None:
        if self.world.draws_failure():
            failed = actions.Failed(self.task.number, "read back other bytes")
            self._withdraw(failed, is_damaged=True)
            return
        self._end(actions.StepStored(self.task.number))


class SimKeeper:
    """The loop of a keeper: carries actions out."""

    def __init__(self, node: "SimNode") -> None:
        self.node = node
        self.world = node.world
        self.is_alive = True
        self.awaited_step: int | None = 0
        self.core = Core(node.world.random.getrandbits(62), node.world.now)
        self.tasks: dict[int, SimTask] = {}
        self.parity = Disk()
        """Parity lives and dies with the keeper."""
        self._num_endless: dict[int, int] = {}
        self._must_look = False
        self._seen: Views | None = None
        """The slots that the core has seen; None: it must see them again."""
        self._timer_at: float | None = None

    def disk(self, level: int) -> Disk:
        if level == len(self.world.setting.levels):
            return self.parity
        return self.node.disks[level]

    def draws_endless_hang(self, level: int) -> bool:
        """Draw whether one more thread never returns. A level that lost ``MAX_HANGING`` threads is lost by design."""
        count = self._num_endless.get(level, 0)
        if count >= MAX_HANGING - 1 or self.world.random.random() < 0.5:
            return False
        self._num_endless[level] = count + 1
        return True

    def handle(self, event: actions.Event) -> None:
        if not self.is_alive:
            return
        self.look()
        self._step(event)
        if self._must_look:
            self.look()
        self._set_timer()

    def look(self) -> None:
        """Read the slots, and again after each word that was written."""
        self._must_look = True
        while self._must_look and self.is_alive:
            self._must_look = False
            self._show_slots()

    def _show_slots(self) -> None:
        """Show the core the slots, unless it has seen just these and has nothing else to do either."""
        views = self.node.views()
        wake_at = self.core.wake_at
        is_time = wake_at is not None and wake_at <= self.world.now
        if views is not self._seen or is_time:
            self._seen = views
            self._step(actions.SlotsSeen(views))

    def wake(self) -> None:
        if self.is_alive:
            self.look()
            self._set_timer()

    def _step(self, event: actions.Event) -> None:
        for action in self.core.step(event, self.world.now):
            if self.is_alive:
                self._perform(action)

    def _perform(self, action: actions.Action) -> None:
        world = self.world
        match action:
            case actions.SetAwaitedStep():
                self.awaited_step = action.step
                self._must_look = True
            case actions.Hold():
                self._hold(action)
                self._must_look = True
            case actions.Release():
                self.node.slots(action.rank)[action.slot_id].release()
                self._must_look = True
            case actions.AdoptSlots():
                self._seen = None
                self._must_look = True
            case actions.VoidSlot():
                self.node.slots(action.rank)[action.slot_id].void(action.sequence)
                self._must_look = True
            case actions.CancelTask():
                self.tasks[action.number].is_cancelled = True
            case actions.Task():
                self.tasks[action.number] = SimTask(self, action)
            case actions.MakeSlot():
                world.after(0.01, self._add_slot, action.rank)
            case actions.SendToTrainer():
                world.reported(self, action.state)
                if action.state.refusal:
                    world.training.try_again(action.connection)
            case actions.Send():
                world.send(self, action.node, action.message)
            case actions.Finish():
                self.is_alive = False
                self.node.keeper_ended()

    def _hold(self, action: actions.Hold) -> None:
        slots = self.node.slots(action.rank)
        views = [slot.view for slot in slots.values()]
        slot = slots[action.slot_id]
        if is_untouchable(slot.view, views, action.num_kept):
            slot.hold(action.sequence)

    def _add_slot(self, rank: int) -> None:
        if not self.is_alive:
            return
        slot_id = self.world.random.getrandbits(60)
        self.node.slots(rank)[slot_id] = SimSlot(self.node, slot_id)
        self.node.memory_changed()
        self.handle(actions.SlotMade(rank))

    def _set_timer(self) -> None:
        wake_at = self.core.wake_at
        if wake_at is not None and wake_at != self._timer_at:
            self.world.at(wake_at, self._time_passed, wake_at)
        self._timer_at = wake_at

    def _time_passed(self, wake_at: float) -> None:
        if self.is_alive and wake_at == self._timer_at:
            self._timer_at = None
            self.handle(actions.PlainEvent.TIME_PASSED)


class SimNode:
    """A machine: disks, memory, and the keeper that runs there."""

    def __init__(self, world: "World", number: int) -> None:
        self.world = world
        self.number = number
        self.disks = [Disk() for _ in world.setting.levels]
        self.memory: dict[int, dict[int, SimSlot]] = {}
        self.keeper: SimKeeper | None = None
        self.has_trainers = False
        self._views: Views | None = None
        """The views of all slots, until one of them changes."""

    def slots(self, rank: int) -> dict[int, SimSlot]:
        if rank not in self.memory:
            self.memory[rank] = {}
            self.memory_changed()
        return self.memory[rank]

    def views(self) -> Views:
        if self._views is None:
            self._views = {}
            for rank, slots in self.memory.items():
                self._views[rank] = tuple(slot.view for slot in slots.values())
        return self._views

    def memory_changed(self) -> None:
        self._views = None
        self.world.must_check_protected = True

    def lose_memory(self) -> None:
        self.memory = {}
        self.memory_changed()

    def has_whole(self, key: StepKey) -> bool:
        """True if all ranks have the capture whole."""
        for rank in range(self.world.setting.num_ranks):
            for slot in self.slots(rank).values():
                if slot.has(key) and slot.view.is_whole:
                    break
            else:
                return False
        return True

    def keeper_ended(self) -> None:
        """The keeper is gone; memory stays if a trainer has it."""
        self.keeper = None
        self.world.must_check_protected = True
        if not self.has_trainers:
            self.lose_memory()

    def kill_keeper(self) -> None:
        if self.keeper is not None:
            self.keeper.is_alive = False
            self.keeper_ended()
            self.world.protected = None  # its parity is gone

    def start_keeper(self) -> SimKeeper:
        """Return the keeper; a trainer starts one if there is none."""
        if self.keeper is None:
            self.keeper = SimKeeper(self)
            for other in self.world.nodes:
                if other.keeper is not None and other is not self:
                    self.world.after(self.world.delay_s(), self._link, other)
        return self.keeper

    def _link(self, other: "SimNode") -> None:
        for node, peer in ((self, other), (other, self)):
            if node.keeper is not None and peer.keeper is not None:
                node.keeper.handle(actions.PlainEvent.PEER_UP)


class SimRank:
    """The trainer of one rank, in one start."""

    def __init__(self, training: "Training", node: SimNode, number: int) -> None:
        self.training = training
        self.world = training.world
        self.node = node
        self.number = number
        self.pid = self.world.next_number()
        self.keeper: SimKeeper | None = None
        self.connection = 0
        self.taken = -1
        """Newest step that was taken, captured or not."""
        self.is_copying = False
        self.required: tuple[int, ...] = ()
        self.names: tuple[NamedStep, ...] = ()
        self.released: tuple[NamedStep, ...] = ()
        self.protect: tuple[int, ...] = ()
        self.is_preempted = False
        self.is_sealed = False
        self.farewell = Farewell.NONE

    def report(self) -> None:
        """Send the whole state, to a new keeper if the old one is gone."""
        keeper = self.node.start_keeper()
        if keeper is not self.keeper:
            self.keeper = keeper
            self.connection = self.world.next_number()
        setting = self.world.setting
        num_slots = slots_needed(setting.num_kept, is_read=True)
        state = TrainerState(
            local_rank=self.number,
            start=self.training.start if self.training.is_begun else 0,
            step=self.training.first_step,
            job=setting.job(self.node.number) if self.training.is_begun else None,
            linger_s=LINGER_S,
            memory=MemoryWish(num_slots, 0, SLOT_BYTES),
            slots=tuple(self.node.slots(self.number)),
            required=self.required,
            protect=self.protect,
            names=self.names,
            released=self.released,
            is_preempted=self.is_preempted,
            is_sealed=self.is_sealed,
            farewell=self.farewell,
        )
        keeper.handle(actions.TrainerReported(self.connection, self.pid, state))

    def has_memory(self) -> bool:
        return len(self.node.slots(self.number)) >= slots_needed(self.world.setting.num_kept, is_read=True)

    def take_step(self, step: int) -> None:
        """Choose a slot, then begin: the keeper may look in between. Without a slot the capture is left out; the end of
        a training waits for one.
        """
        if not self.training.is_alive:
            return
        slots = self.node.slots(self.number)
        chosen = choose_slot(
            [slot.view for slot in slots.values()], self.world.setting.num_kept, image_bytes=SLOT_BYTES, meta_bytes=0
        )
        if chosen is None and step == self.training.last_step:
            self.world.after(0.05, self.take_step, step)
            return
        self.taken = step
        if chosen is not None:
            self.is_copying = True
            self.world.after(self.world.stall_s(), self._begin, step, slots[chosen.slot_id])
            return
        self.world.check(self.world.setting.redundancy is not None, f"node {self.node.number} has no slot for {step}")
        self.world.num_left_out += 1
        self.training.advance()

    def _begin(self, step: int, slot: SimSlot) -> None:
        if not self.training.is_alive:
            return
        self.world.check(not slot.view.is_held, f"the held slot of step {slot.view.step} is written over")
        slot.begin(StepKey(self.training.start, step), self.world.next_number())
        keeper = self.node.keeper
        if keeper is not None and keeper.awaited_step is not None and step >= keeper.awaited_step:
            self.world.after(self.world.stall_s(), keeper.wake)
        self.world.after(self.world.copy_s(), self._commit, slot)

    def _commit(self, slot: SimSlot) -> None:
        if not self.training.is_alive:
            return
        slot.commit()
        self.is_copying = False
        self.training.advance()


class Training:
    """One start of the job: ranks in step with each other, as gradients keep them."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self.start = world.next_number()
        self.first_step = -1
        self.last_step: int | None = None
        self.is_alive = True
        self.is_begun = False
        self.ranks = []
        for node in world.nodes:
            node.has_trainers = True
            for number in range(world.setting.num_ranks):
                self.ranks.append(SimRank(self, node, number))
        self._scheduled: set[tuple[int, int]] = set()
        self.attach()

    @property
    def step(self) -> int:
        """The newest step that all ranks took."""
        return min(rank.taken for rank in self.ranks)

    def try_again(self, connection: int) -> None:
        """A rank was refused: the keeper may not know yet that the trainer before it is dead."""
        for rank in self.ranks:
            if rank.connection == connection:
                self.world.after(0.2, self._report_again, rank)

    def _report_again(self, rank: SimRank) -> None:
        if self.is_alive:
            rank.report()

    def is_over(self) -> bool:
        """True if the last step was taken, and its captures are whole."""
        return self.step == self.last_step and not any(rank.is_copying for rank in self.ranks)

    def attach(self) -> None:
        """Connect all ranks, and begin once all have memory."""
        if not self.is_alive or self.is_begun:
            return
        for rank in self.ranks:
            rank.report()
        if not all(rank.has_memory() for rank in self.ranks):
            self.world.after(0.2, self.attach)
            return
        self.first_step = self.world.restore(self)
        self.is_begun = True
        for rank in self.ranks:
            rank.taken = self.first_step
            rank.report()
        self.advance()

    def advance(self) -> None:
        """Let every rank take its next step that may."""
        slowest = self.step
        for index, rank in enumerate(self.ranks):
            step = rank.taken + 1
            if rank.is_copying or (index, step) in self._scheduled:
                continue
            if self.last_step is not None and step > self.last_step:
                continue
            if slowest >= step - 1:
                self._scheduled.add((index, step))
                self.world.after(self.world.compute_s(), rank.take_step, step)

    def require(self, step: int) -> None:
        """Have a step stored: every rank asks, as the user calls it on all."""
        for rank in self.ranks:
            rank.required = (*rank.required, step)
            rank.report()

    def protect(self, step: int) -> None:
        """Have a step protected by other nodes."""
        for rank in self.ranks:
            rank.protect = (*rank.protect, step)
            rank.report()

    def preempt(self, number: int) -> None:
        """A rank is about to be killed."""
        rank = self.ranks[number % len(self.ranks)]
        rank.is_preempted = True
        rank.report()

    def keep(self, name: str, step: int) -> None:
        """Give a name to a step."""
        for rank in self.ranks:
            named = NamedStep(name, StepKey(self.start, step))
            rank.names = (*rank.names, named)
            rank.released = tuple(min(named, other) if other.name == name else other for other in rank.released)
            rank.report()

    def release(self, name: str) -> None:
        """Take a name away."""
        for rank in self.ranks:
            rank.names = tuple(named for named in rank.names if named.name != name)
            rank.released = (
                *(other for other in rank.released if other.name != name),
                NamedStep(name, StepKey(self.start + 1, 0)),
            )
            rank.report()

    def leave(self, farewell: Farewell) -> None:
        """All trainers take leave, one after the other."""
        for rank in self.ranks:
            rank.is_sealed = True
            rank.farewell = farewell
            rank.report()
        self.is_alive = False
        for node in self.world.nodes:
            node.has_trainers = False
            if node.keeper is None:
                node.lose_memory()

    def die(self) -> None:
        """All trainers end, as a launcher ends them all. Keepers notice a moment later."""
        self.is_alive = False
        for node in self.world.nodes:
            node.has_trainers = False
            if node.keeper is None:
                node.lose_memory()
        for rank in self.ranks:
            self.world.after(self.world.delay_s(), self._notice_death, rank)

    def _notice_death(self, rank: SimRank) -> None:
        keeper = rank.node.keeper
        if keeper is not None and keeper is rank.keeper:
            keeper.handle(actions.ConnectionLost(rank.connection))
            keeper.handle(actions.ProcessDied(rank.pid))

    def end(self) -> None:
        """All ranks capture nothing more, wait, and leave."""
        for rank in self.ranks:
            rank.is_sealed = True
            rank.report()


class World:
    """Time, nodes, and what was promised so far."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.random = random.Random(setting.seed)
        self.now = 0.0
        self.is_calm = False
        """True once no more faults are drawn."""
        self.parted: set[int] = set()
        """Nodes that no message reaches or leaves."""
        self.was_complete: list[set[StepKey]] = [set() for _ in setting.levels]
        self.newest_reported: list[StepKey | None] = [None for _ in setting.levels]
        self.protected: StepKey | None = None
        """What was reported as protected, and no keeper died since."""
        self.must_check_protected = False
        """True if memory, parity or keepers changed since it was checked."""
        self.names: list[set[NamedStep]] = [set() for _ in range(len(setting.levels) + 1)]
        self.num_left_out = 0
        self.num_protected = 0
        self.restored_from: list[str] = []
        self._events: list[tuple[float, int, Callable[..., None], tuple[object, ...]]] = []
        self._count = 0
        self._arrives_at: dict[tuple[int, int], float] = {}
        self.nodes = [SimNode(self, number) for number in range(setting.num_nodes)]
        self.training = Training(self)

    # Time and chance

    def after(self, delay_s: float, call: Callable[..., None], *arguments: object) -> None:
        self.at(self.now + delay_s, call, *arguments)

    def at(self, time_s: float, call: Callable[..., None], *arguments: object) -> None:
        self._count += 1
        heapq.heappush(self._events, (max(time_s, self.now), self._count, call, arguments))

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        num_at_once = 0
        while self._events and self._events[0][0] <= until:
            time_s, _, call, arguments = heapq.heappop(self._events)
            num_at_once = num_at_once + 1 if time_s == self.now else 0
            self.check(num_at_once < MAX_EVENTS_AT_ONCE, "time stands still: a deadline is not acted upon")
            self.now = time_s
            call(*arguments)
            self._check_protected()
        self.now = until

    def run_until(self, is_reached: Callable[[], bool], failure: str, patience_s: int = PATIENCE_S) -> None:
        """Go on until something is the case; it must come within the time of all retries and deadlines."""
        pause_s = self.setting.step_s / 2
        until = self.now + patience_s
        while self.now < until:
            if is_reached():
                return
            self.run(pause_s)
        self.check(is_reached(), failure)

    def next_number(self) -> int:
        self._count += 1
        return self._count

    def stall_s(self) -> float:
        return self.random.choice((1e-5, 1e-5, 1e-4, 0.3 * self.setting.step_s * self.random.random()))

    def compute_s(self) -> float:
        return self.setting.step_s * (0.5 + 0.5 * self.random.random())

    def copy_s(self) -> float:
        return self.setting.step_s * self.random.choice((0.01, 0.3, 0.9))

    def delay_s(self) -> float:
        return self.random.choice((0.001, 0.005, 0.05))

    def stage_s(self) -> float:
        return self.random.choice((0.001, 0.01, 0.1 * self.setting.step_s))

    def write_s(self) -> float:
        return self.setting.step_s * self.setting.write_steps * self.random.uniform(0.5, 1.5)

    def hang_s(self) -> float:
        is_hanging = not self.is_calm and self.random.random() < self.setting.hang
        return self.random.uniform(1.0, 30.0) if is_hanging else 0.0

    def draws_failure(self) -> bool:
        return not self.is_calm and self.random.random() < self.setting.failure

    def draws_loss(self) -> bool:
        return not self.is_calm and self.random.random() < self.setting.loss

    def calm(self) -> None:
        """No more faults from now on."""
        self.is_calm = True
        self.parted = set()

    # The network

    def send(self, keeper: SimKeeper, node: int, message: object) -> None:
        """Deliver a message in order, late, twice, or not at all. What was sent by or to a dead keeper is gone."""
        target = self.nodes[node].keeper
        if target is None or {keeper.node.number, node} & self.parted or self.draws_loss():
            return
        link = (keeper.node.number, node)
        self._arrives_at[link] = max(self._arrives_at.get(link, 0.0), self.now + self.delay_s())
        copies = 2 if self.draws_loss() else 1
        for _ in range(copies):
            self.at(self._arrives_at[link], self._deliver, keeper, target, message)

    def _deliver(self, sender: SimKeeper, target: SimKeeper, message: object) -> None:
        if target.is_alive and self.nodes[sender.node.number].keeper in (sender, None):
            target.handle(message)

    # Promises

    def check(self, is_kept: bool, text: str) -> None:
        if not is_kept:
            raise Broken(f"at {self.now:.3f} s: {text}")

    def _stored_by_all(self, level: int) -> set[StepKey]:
        return set.intersection(*(node.disks[level].committed for node in self.nodes))

    def commit(self, keeper: SimKeeper, level: int, key: StepKey) -> None:
        keeper.disk(level).committed.add(key)
        keeper.disk(level).leftovers.discard(key)
        if level < len(self.setting.levels) and key in self._stored_by_all(level):
            self.was_complete[level].add(key)

    def delete(self, keeper: SimKeeper, level: int, key: StepKey, *, is_damaged: bool = False) -> None:
        """``is_damaged``: what was committed just now does not read back. It counts nowhere yet, whatever its name."""
        disk = keeper.disk(level)
        if level < len(self.setting.levels):
            if key == self.newest_reported[level]:
                newer = [other for other in self._stored_by_all(level) & self.was_complete[level] if other > key]
                self.check(
                    bool(newer), f"node {keeper.node.number} deletes {key}, the newest complete of level {level}"
                )
                self.newest_reported[level] = max(newer)
            is_named = not is_damaged and any(named.key == key for named in self.names[level])
            self.check(not is_named or key not in self._stored_by_all(level), f"{key} has a name and is deleted")
        disk.committed.discard(key)
        disk.leftovers.discard(key)
        self.must_check_protected = True

    def reported(self, keeper: SimKeeper, state: KeeperState) -> None:
        """A trainer receives what is complete and protected."""
        for level, level_state in enumerate(state.levels):
            never_complete = set(level_state.complete) - self.was_complete[level]
            self.check(not never_complete, f"{never_complete} were never complete at level {level}")
            self._note_newest(level, level_state.complete)
        if state.protected is not None and not self.parted:
            newest = max(state.protected, self.protected or state.protected)
            is_everywhere = all(self._protects(node, newest) for node in self.nodes)
            if is_everywhere and newest != self.protected:
                self.protected = newest
                self.must_check_protected = True
                self.num_protected += 1

    def _note_newest(self, level: int, keys: Sequence[StepKey]) -> None:
        newest = max(keys, default=None)
        known = self.newest_reported[level]
        if newest is None or (known is not None and newest <= known):
            return
        self.newest_reported[level] = newest
        for node in self.nodes:
            is_on_disk = newest in node.disks[level].committed
            self.check(is_on_disk, f"{newest} is reported complete at level {level}, and node {node.number} lacks it")

    def _protects(self, node: SimNode, key: StepKey) -> bool:
        return node.keeper is not None and key in node.keeper.parity.committed and node.has_whole(key)

    def _check_protected(self) -> None:
        """What was reported as protected stays on every node until something newer is there on every node."""
        if self.protected is None or not self.must_check_protected:
            return
        self.must_check_protected = False
        if all(self._protects(node, self.protected) for node in self.nodes):
            return
        newer: set[StepKey] = set()
        keepers = [node.keeper for node in self.nodes]
        if all(keeper is not None for keeper in keepers):
            newer = set.intersection(*(keeper.parity.committed for keeper in keepers if keeper is not None))
        replaced = [key for key in newer if key > self.protected and all(node.has_whole(key) for node in self.nodes)]
        is_over = not self.training.is_alive or self.training.ranks[0].is_sealed or not self.training.is_begun
        self.check(bool(replaced) or is_over, f"{self.protected} was protected, and is so no more")
        self.protected = max(replaced, default=None)

    def restore(self, training: Training) -> int:
        """Find the step from which all ranks can go on, as a restart does."""
        whole = []
        for rank in training.ranks:
            slots = rank.node.slots(rank.number).values()
            whole.append({key_of(slot.view) for slot in slots if slot.view.is_whole})
        in_memory = max(set.intersection(*whole), default=None)
        on_disk = self.newest_on_disk()
        key = max((key for key in (in_memory, on_disk) if key is not None), default=None)
        if key is None:
            return -1
        self.restored_from.append("memory" if key == in_memory else "storage")
        for rank in training.ranks:
            for slot in rank.node.slots(rank.number).values():
                if slot.view.is_whole and key_of(slot.view) > key:
                    slot.discard()
        return key.step

    def newest_on_disk(self) -> StepKey | None:
        """Return the newest complete snapshot; what was reported so must still be there."""
        keys: set[StepKey] = set()
        for level in range(len(self.setting.levels)):
            common = self._stored_by_all(level)
            keys |= common
            newest = self.newest_reported[level]
            self.check(newest is None or newest in common, f"{newest} was complete at level {level}, and is gone")
        return max(keys, default=None)

    def are_keepers_over(self) -> bool:
        return all(node.keeper is None for node in self.nodes)
