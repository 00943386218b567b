"""Runs the tasks of the levels: each task has its own thread, and each level one task at a time.

::

    loop ──Task──> LevelThreads ──thread──> run_level_task, or run_parity_task ──TaskEnded──> loop

Storage levels come first; redundancy is the last level. A thread that hangs at a level cannot be ended. The loop
abandons it, and the next task gets another thread. A cancelled task notices that when the level answers, and commits
nothing.
"""

import functools
import threading
from collections.abc import Callable

from lazysnap import faults
from lazysnap.core.actions import Event, Failed, Task, TaskEnded, WriteLevel
from lazysnap.core.messages import JobSettings, PeerSettings
from lazysnap.keeper.level_files import LevelFiles
from lazysnap.keeper.parity import ParityContext, ParityStore, run_parity_task
from lazysnap.keeper.slot_table import NodeSlots
from lazysnap.keeper.tasks import TaskControl, run_level_task
from lazysnap.levels.watched import RateLimiter
from lazysnap.memory.slots import Slot


class LevelThreads:
    """The newest task of each level, on its thread. Used on the loop's thread."""

    def __init__(
        self, post: Callable[[Event], None], ended: Callable[[TaskControl, TaskEnded], None], parity: ParityStore
    ) -> None:
        """Begin without levels.

        Args:
            post: passes an event to the loop, from any thread.
            ended: called for each task whose thread returned, also for a cancelled one, on its thread.
            parity: the files of the redundancy level.
        """
        self._post = post
        self._ended = ended
        self._parity = parity
        self._settings: JobSettings | None = None
        self._peers: PeerSettings | None = None
        self._files: list[LevelFiles] = []
        """The files of each storage level."""
        self._parity_context: ParityContext | None = None
        """The data for tasks of redundancy; None: it is made with the next task."""
        self._running: dict[int, TaskControl] = {}
        """Tasks whose threads have not returned, by number, also abandoned ones."""

    @property
    def is_busy(self) -> bool:
        """True if a task is running and not cancelled."""
        return any(not control.is_cancelled for control in self._running.values())

    def begin(self, settings: JobSettings) -> None:
        """Use these settings from now on. Tasks of earlier settings were cancelled."""
        self._settings = settings
        self._parity_context = None
        self._files = []
        for index in range(len(settings.levels)):
            self._files.append(LevelFiles(settings, index, tuple(self._files)))

    def set_peers(self, peers: PeerSettings) -> None:
        """Read the captures of these nodes from now on, to protect them."""
        self._peers = peers
        self._parity_context = None

    def start(self, task: Task, slots: NodeSlots) -> None:
        """Begin a task."""
        slots_of_task = _slots_of_task(task, slots)
        if task.level < len(self._files):
            files = self._files[task.level]
            control = TaskControl(task, self._post, files.url)
            work: Callable[[], TaskEnded] = functools.partial(run_level_task, task, files, slots_of_task, control)
        else:
            control = TaskControl(task, self._post)
            work = functools.partial(run_parity_task, task, self._context_of_parity(), slots_of_task, control)
        self._running[task.number] = control
        thread = threading.Thread(target=self._run, args=(work, control), name=f"level-{task.level}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no thread can be started
            self._ended(control, Failed(task.number, str(error)))

    def _context_of_parity(self) -> ParityContext:
        if self._parity_context is None:
            assert self._settings is not None
            assert self._settings.redundancy is not None
            pace = RateLimiter(self._settings.redundancy.max_bytes_per_s)
            self._parity_context = ParityContext(self._settings, self._peers, self._parity, pace)
        return self._parity_context

    def forget(self, control: TaskControl) -> None:
        """Record that a task ended."""
        del self._running[control.task.number]

    def cancel(self, number: int) -> None:
        """Cancel a task: it commits nothing more."""
        control = self._running.get(number)
        if control is not None:  # otherwise it ended meanwhile
            control.is_cancelled = True

    def _run(self, work: Callable[[], TaskEnded], control: TaskControl) -> None:
        """Do a task. On its thread."""
        event = work()
        faults.point("keeper.task_ended")
        self._ended(control, event)


def _slots_of_task(task: Task, slots: NodeSlots) -> NodeSlots:
    """Return only the slots that a task reads: a hanging thread must not keep the memory of others."""
    if not isinstance(task, WriteLevel):
        return {}
    read: dict[int, dict[int, Slot]] = {}
    for rank, slot_id in task.slots:
        slot = slots.get(rank, {}).get(slot_id)
        if slot is not None:
            read.setdefault(rank, {})[slot_id] = slot
    return read
