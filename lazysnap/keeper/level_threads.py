"""Threads of a keeper for the tasks of its levels: each task has one of its own, and each level one task at a time.

::

    loop ──Task──> LevelThreads ──thread──> run_level_task ──TaskEnded──> loop

Storage levels come first, redundancy is the level after the last. A thread that hangs at a level cannot be ended. The
loop leaves it alone, and the next task has another one. A task that was cancelled notices that when the level answers,
and commits nothing.
"""

import functools
import threading
from collections.abc import Callable

from lazysnap import faults
from lazysnap.core.actions import Event, Failed, Task, TaskEnded, WriteLevel
from lazysnap.core.messages import JobSettings
from lazysnap.keeper.level_files import LevelFiles
from lazysnap.keeper.slot_table import NodeSlots
from lazysnap.keeper.tasks import TaskControl, run_level_task
from lazysnap.memory.slots import Slot

ParityTask = Callable[[Task, NodeSlots, TaskControl], Callable[[], TaskEnded]]


class LevelThreads:
    """The newest task of each level, on its thread. Used on the loop's thread."""

    def __init__(
        self,
        post: Callable[[Event], None],
        ended: Callable[[TaskControl, TaskEnded], None],
        parity_task: ParityTask,
    ) -> None:
        """Begin without levels.

        Args:
            post: hands an event to the loop, from any thread.
            ended: takes each task whose thread returned, also one that was cancelled. On the thread of the task.
            parity_task: returns the work of a task of the redundancy level.
        """
        self._post = post
        self._ended = ended
        self._parity_task = parity_task
        self._files: list[LevelFiles] = []
        """By storage level. Redundancy, the level after them, has none."""
        self._running: dict[int, TaskControl] = {}
        """The newest task of each level that has not returned."""

    @property
    def is_busy(self) -> bool:
        """True if a task runs that was not cancelled."""
        return any(not control.is_cancelled for control in self._running.values())

    def moved_bytes(self, level: int) -> int:
        """Return the bytes that the task of a level moved so far."""
        control = self._running.get(level)
        if control is None or control.is_cancelled:
            return 0
        return control.moved_bytes

    def begin(self, settings: JobSettings) -> None:
        """Work for these settings from now on. Tasks of earlier ones were cancelled."""
        self._running = {}
        self._files = []
        for index in range(len(settings.levels)):
            self._files.append(LevelFiles(settings, index, tuple(self._files)))

    def start(self, task: Task, slots: NodeSlots) -> None:
        """Begin a task."""
        slots_of_task = _slots_of_task(task, slots)
        if task.level < len(self._files):
            files = self._files[task.level]
            control = TaskControl(task, self._post, files.url)
            work: Callable[[], TaskEnded] = functools.partial(run_level_task, task, files, slots_of_task, control)
        else:
            control = TaskControl(task, self._post)
            work = self._parity_task(task, slots_of_task, control)
        self._running[task.level] = control
        thread = threading.Thread(target=self._run, args=(work, control), name=f"level-{task.level}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the machine has no thread left
            self._ended(control, Failed(task.number, str(error)))

    def forget(self, control: TaskControl) -> None:
        """Note that a task ended."""
        if self._running.get(control.task.level) is control:
            del self._running[control.task.level]

    def cancel(self, level: int, number: int) -> None:
        """Have a task commit nothing any more."""
        control = self._running.get(level)
        if control is not None and control.task.number == number:
            control.is_cancelled = True

    def _run(self, work: Callable[[], TaskEnded], control: TaskControl) -> None:
        """Do a task. On its thread."""
        event = work()
        faults.point("keeper.task_ended")
        self._ended(control, event)


def _slots_of_task(task: Task, slots: NodeSlots) -> NodeSlots:
    """Return the slots that a task reads: a thread that hangs must not keep the memory of others."""
    if not isinstance(task, WriteLevel):
        return {}
    read: dict[int, dict[int, Slot]] = {}
    for rank, slot_id in task.slots:
        slot = slots.get(rank, {}).get(slot_id)
        if slot is not None:
            read.setdefault(rank, {})[slot_id] = slot
    return read
