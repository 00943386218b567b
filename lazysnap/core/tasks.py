"""The next task of a level. Pure.

A level does one task at a time::

                 ┌──────────── a small write works ────────────┐
                 ▼                                             │
    list ──> write, delete, write, ... ──a task fails──> pause, probe ──fails: pause twice as long──> probe
                                        or hangs

A task that moves no byte for ``timeout_s`` hangs: it is abandoned with its thread, and counts as failed. At most
``MAX_HANGING`` tasks of a level are abandoned at a time.

Invariant: no two threads work on the same step of a level, also if a restart changes settings between them. An
abandoned task may wake up in the middle of a rename or an unlink. Until it has returned, its step is not deleted, and a
grant of it ends as MISSED.
"""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field

from lazysnap.core.actions import (
    Action,
    CancelTask,
    DeleteFiles,
    Failed,
    Listed,
    ListLevel,
    Missed,
    ProbeLevel,
    SetNames,
    StepStored,
    Task,
    TaskEnded,
    TaskMoved,
    WriteLevel,
)
from lazysnap.core.messages import GrantProgress, NamedStep, StepKey, is_removed
from lazysnap.core.node import Node, NodeLevel, RankView, is_in_memory

MAX_HANGING = 3
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 30.0


@dataclass
class LevelTasks:
    """The tasks of one level."""

    index: int
    node: Node
    numbers: Iterator[int]
    """Unique numbers of tasks."""
    abandoned: dict[int, Task]
    """Tasks of this level whose threads have not returned, by number; also those of earlier settings."""
    level: NodeLevel = field(init=False)
    """The node's state of the level."""
    former_numbers: frozenset[int] = field(init=False)
    """Numbers of the tasks in ``abandoned`` that belong to an earlier job."""
    task: Task | None = None
    """The running task."""
    moved_bytes: int = 0
    """Bytes that it has moved, as it last reported."""
    failed_step: int | None = None
    """The step that the last failed task did not store; None: another task."""
    num_failures: int = 0
    """Steps that were not stored because the level failed."""
    written_bytes: int = 0
    """Bytes that were written for the last stored step, as in ``StepStored``."""
    written_s: float = 0.0
    """Seconds that the write took."""
    _moved_at: float = 0.0
    _is_cancelled: bool = False
    _retry_at: float = 0.0
    _pause_s: float = FIRST_PAUSE_S

    def __post_init__(self) -> None:
        self.level = self.node.levels[self.index]
        self.former_numbers = frozenset(self.abandoned)
        if len(self.abandoned) >= MAX_HANGING:
            self.level.become_failed(_hang_text(self.level))

    def deadlines(self) -> list[float]:
        """Return the times at which ``decide`` may have a new result."""
        if self.task is not None:
            return [self._moved_at + self.level.settings.timeout_s]
        if not self.level.is_ready and len(self.abandoned) < MAX_HANGING:
            return [self._retry_at]
        return []

    def is_idle(self, names: Set[NamedStep], released: Set[NamedStep]) -> bool:
        """Return True if nothing remains to be done, or the level fails.

        Steps of hanging threads do not count: waiting for them could keep the process forever.

        Args:
            names: see ``decide``.
            released: see ``decide``.
        """
        if not self.level.is_ready:
            return True
        return self.task is None and not self._keys_to_delete() and self._names_to_set(names, released) is None

    @property
    def writing(self) -> StepKey | None:
        """Return the step that is being stored."""
        if isinstance(self.task, WriteLevel):
            return self.task.key
        return None

    def abandon(self) -> list[Action]:
        """Abandon the running task: the keeper begins a training with other settings."""
        if self.task is None:
            return []
        return [self._abandon(self.task)]

    def _abandon(self, task: Task) -> CancelTask:
        self.task = None
        self.abandoned[task.number] = task
        return CancelTask(task.number)

    def moved(self, event: TaskMoved, now: float) -> None:
        """Handle the progress of a task."""
        if self.task is not None and self.task.number == event.number:
            self._moved_at = now
            self.moved_bytes = event.moved_bytes

    def ended(self, event: TaskEnded, now: float) -> None:
        """Handle the end of a task of any level. The number tells the level."""
        abandoned = self.abandoned.pop(event.number, None)
        if abandoned is not None:
            self._abandoned_ended(abandoned, event)
        if self.task is None or self.task.number != event.number:
            return
        task = self.task
        self.task = None
        if isinstance(event, Failed):
            self._fail(task, event.text, now)
        elif isinstance(event, Missed) and isinstance(task, WriteLevel):
            # The step of a cancelled write may have been granted again: that grant waits for its own write.
            if self.level.progress is GrantProgress.WRITING:
                self.level.become_missed(task.key)
            self._leave_behind(task)
        else:
            self._succeed(task, event)

    def _abandoned_ended(self, task: Task, event: TaskEnded) -> None:
        """Handle the end of an abandoned task, which has already counted as failed.

        A file that it stored after all counts, but not in another job: it may be of other ranks.
        """
        if not isinstance(task, WriteLevel) or not isinstance(event, StepStored):
            self._leave_behind(task)
        elif task.number in self.former_numbers:
            self.level.become_unusable(task.key)
        else:
            self.level.become_stored(task.key)

    def _succeed(self, task: Task, event: TaskEnded) -> None:
        if isinstance(task, ProbeLevel):
            self.level.become_ready()
            return  # a successful small write does not prove that a real task succeeds
        self.level.failure = ""
        self._pause_s = FIRST_PAUSE_S
        if isinstance(event, Listed):
            self.level.become_listed(event)
        elif isinstance(event, StepStored) and isinstance(task, WriteLevel):
            self.level.become_stored(task.key)
            self.written_bytes = event.written_bytes
            self.written_s = event.seconds
        elif isinstance(task, SetNames):
            self.level.names.update(task.added)
            self.level.names.difference_update(task.released)

    def _fail(self, task: Task, text: str, now: float) -> None:
        """Handle a failed task. Its partial files are deleted once the level works again."""
        self._leave_behind(task)
        self.failed_step = None
        if isinstance(task, WriteLevel):
            self.failed_step = task.key.step
            self.num_failures += 1
        self._retry_at = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)
        self.level.become_failed(text)

    def _leave_behind(self, task: Task) -> None:
        """Treat the steps of the task as leftovers: their files may exist, and do not count."""
        self.level.leftovers.update(_keys_of(task))
        self.level.leftovers -= self.level.stored

    def decide(
        self, ranks: Sequence[RankView], names: Set[NamedStep], released: Set[NamedStep], now: float
    ) -> list[Action]:
        """Return the actions for the running task, or the next task.

        Args:
            ranks: the ranks of the node.
            names: names for snapshots that the level has or gets.
            released: names to remove.
            now: seconds of a monotonic clock.
        """
        if self.task is not None:
            return self._watch(self.task, ranks, now)
        if len(self.abandoned) >= MAX_HANGING:
            return []
        task = self._next_task(ranks, names, released, now)
        if task is None:
            return []
        self.task = task
        self.moved_bytes = 0
        self._moved_at = now
        self._is_cancelled = False
        return [task]

    def _next_task(
        self, ranks: Sequence[RankView], names: Set[NamedStep], released: Set[NamedStep], now: float
    ) -> Task | None:
        if not self.level.is_ready:
            if now < self._retry_at:
                return None
            return ProbeLevel(self.index, next(self.numbers))
        if self.level.progress is GrantProgress.LISTING:
            return ListLevel(self.index, next(self.numbers))
        write = self._write(ranks)
        if write is not None:
            return write
        names_to_set = self._names_to_set(names, released)
        if names_to_set is not None:
            added, taken_away = names_to_set
            return SetNames(self.index, next(self.numbers), added, taken_away)
        expired = self._keys_to_delete()
        if expired:
            self.level.forget(expired)
            return DeleteFiles(self.index, next(self.numbers), expired)
        return None

    def _write(self, ranks: Sequence[RankView]) -> WriteLevel | None:
        """Return the task that stores the granted step, if its source is available."""
        level = self.level
        key = level.wanted_key
        if key is None:
            return None
        if key in self._keys_of_hanging_threads():
            level.become_missed(key)
            return None
        slots: tuple[tuple[int, int], ...] = ()
        if level.order.source is None:
            slots = _held_slots(key, ranks)
            if len(slots) < len(ranks):
                return None
        level.become_writing()
        return WriteLevel(self.index, next(self.numbers), key, slots, level.order.source)

    def _names_to_set(
        self, names: Set[NamedStep], released: Set[NamedStep]
    ) -> tuple[tuple[NamedStep, ...], tuple[NamedStep, ...]] | None:
        """Return the names to give and to remove; None if there are none."""
        level = self.level
        added = []
        for named in sorted(names - level.names):
            if not is_removed(named, released) and named.key in level.stored:
                added.append(named)
        taken_away = []
        for named in sorted(level.names):
            if is_removed(named, released):
                taken_away.append(named)
        if not added and not taken_away:
            return None
        return tuple(added), tuple(taken_away)

    def _keys_to_delete(self) -> tuple[StepKey, ...]:
        hanging = self._keys_of_hanging_threads()
        return tuple(key for key in self.node.expired(self.index) if key not in hanging)

    def _keys_of_hanging_threads(self) -> set[StepKey]:
        keys: set[StepKey] = set()
        for task in self.abandoned.values():
            keys.update(_keys_of(task))
        return keys

    def _watch(self, task: Task, ranks: Sequence[RankView], now: float) -> list[Action]:
        """Cancel a write that is no longer needed, and abandon a task that hangs."""
        if now >= self._moved_at + self.level.settings.timeout_s:
            self._fail(task, _hang_text(self.level), now)
            return [self._abandon(task)]
        if isinstance(task, WriteLevel) and not self._is_cancelled and not self._is_wanted(task, ranks):
            self._is_cancelled = True
            return [CancelTask(task.number)]
        return []

    def _is_wanted(self, task: WriteLevel, ranks: Sequence[RankView]) -> bool:
        """Return False if the grant is over, or a rank died while it captured the step."""
        if self.level.grant != task.key or self.level.progress is not GrantProgress.WRITING:
            return False
        if task.source is not None:
            return True
        return is_in_memory(task.key, ranks)


def _hang_text(level: NodeLevel) -> str:
    text = f"{level.settings.url} did not move for {level.settings.timeout_s:g} s"
    if level.is_redundancy:
        return text
    return f"{text}; check the mount or endpoint, or raise PersistentLevel(timeout_s=...)"


def _held_slots(key: StepKey, ranks: Sequence[RankView]) -> tuple[tuple[int, int], ...]:
    """Return rank and slot of all held captures of a step."""
    slots = []
    for rank in ranks:
        slot = rank.capture_of(key)
        if slot is not None and slot.is_held:
            slots.append((rank.rank, slot.slot_id))
    return tuple(slots)


def _keys_of(task: Task) -> tuple[StepKey, ...]:
    """Return the steps whose files a task changes."""
    if isinstance(task, WriteLevel):
        return (task.key,)
    if isinstance(task, DeleteFiles):
        return task.keys
    return ()
