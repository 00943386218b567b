"""Threads of a keeper for the work of its levels, one for each.

::

    loop ──Job──> LevelThreads ──Worker──> run_level_job ──JobEnded──> loop

Storage levels come first, redundancy is the level after the last. A thread that hangs at a level cannot be ended. The
loop leaves it alone and begins another one. Its job finds itself cancelled when the level answers, and commits nothing.
"""

import functools
import logging
import queue
import threading
from collections.abc import Callable

from lazysnap import faults
from lazysnap.core.actions import Event, Job, JobEnded, WriteLevel
from lazysnap.core.messages import JobSettings
from lazysnap.keeper.jobs import JobControl, NodeSlots, run_level_job
from lazysnap.keeper.level_files import LevelFiles
from lazysnap.memory.slots import Slot

logger = logging.getLogger(__name__)

Work = Callable[[], None]
ParityJob = Callable[[Job, NodeSlots, JobControl], Callable[[], JobEnded]]


class Worker:
    """A thread that runs one piece of work after the other."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, work: Work) -> None:
        """Run this when the work that was submitted before has ended."""
        self._work.put(work)

    def leave(self) -> None:
        """End the thread when its work has ended, whenever that is."""
        self._work.put(None)

    def _run(self) -> None:
        while True:
            work = self._work.get()
            if work is None:
                return
            try:
                work()
            except Exception:  # work handles what it expects; nothing else may end the thread
                logger.exception("the work of thread %s ended", self._thread.name)
            # While the thread waits, memory that only this piece of work used is to be free.
            del work


class LevelThreads:
    """The threads of all levels, and the job that runs on each. Used on the loop's thread."""

    def __init__(
        self,
        post: Callable[[Event], None],
        ended: Callable[[JobControl, JobEnded], None],
        parity_job: ParityJob,
    ) -> None:
        """Begin without levels.

        Args:
            post: hands an event to the loop, from any thread.
            ended: takes each job whose thread returned, also one that was abandoned. On the thread of its level.
            parity_job: returns the work of a job of the redundancy level.
        """
        self._post = post
        self._ended = ended
        self._parity_job = parity_job
        self._files: list[LevelFiles] = []
        """By storage level. Redundancy, the level behind them, has none."""
        self._workers: dict[int, Worker] = {}
        self._running: dict[int, JobControl] = {}
        """The job of each level that runs, and was not abandoned."""

    @property
    def is_busy(self) -> bool:
        """True if a job runs that was not abandoned."""
        return bool(self._running)

    def moved_bytes(self, level: int) -> int:
        """Return the bytes that the job of a level moved so far."""
        if level not in self._running:
            return 0
        return self._running[level].moved_bytes

    def begin(self, settings: JobSettings) -> None:
        """Work for these settings from now on. Jobs of earlier ones are abandoned."""
        for level in list(self._workers):
            self._abandon(level)
        self._files = []
        for index in range(len(settings.levels)):
            self._files.append(LevelFiles(settings, index, tuple(self._files)))

    def start(self, job: Job, slots: NodeSlots) -> None:
        """Begin a job on the thread of its level."""
        if job.level not in self._workers:
            self._workers[job.level] = Worker(f"level-{job.level}")
        slots_of_job = _slots_of_job(job, slots)
        if job.level < len(self._files):
            files = self._files[job.level]
            control = JobControl(job, self._post, files.url)
            work: Callable[[], JobEnded] = functools.partial(run_level_job, job, files, slots_of_job, control)
        else:
            control = JobControl(job, self._post)
            work = self._parity_job(job, slots_of_job, control)
        self._running[job.level] = control
        self._workers[job.level].submit(functools.partial(self._run, work, control))

    def forget(self, control: JobControl) -> None:
        """Note that a job ended."""
        if self._running.get(control.job.level) is control:
            del self._running[control.job.level]

    def cancel(self, level: int, number: int) -> None:
        """Have a job end soon, without a commit."""
        control = self._running.get(level)
        if control is not None and control.job.number == number:
            control.is_cancelled = True

    def abandon(self, level: int, number: int) -> None:
        """Leave the thread of a level alone; the next job gets another one."""
        control = self._running.get(level)
        if control is not None and control.job.number == number:
            self._abandon(level)

    def _abandon(self, level: int) -> None:
        control = self._running.pop(level, None)
        if control is not None:
            control.is_cancelled = True
        self._workers.pop(level).leave()

    def _run(self, work: Callable[[], JobEnded], control: JobControl) -> None:
        """Do a job. On the thread of its level."""
        event = work()
        faults.point("keeper.job_ended")
        self._ended(control, event)


def _slots_of_job(job: Job, slots: NodeSlots) -> NodeSlots:
    """Return the slots that a job reads: a thread that hangs must not keep the memory of others."""
    if not isinstance(job, WriteLevel):
        return {}
    read: dict[int, dict[int, Slot]] = {}
    for rank, slot_id in job.slots:
        slot = slots.get(rank, {}).get(slot_id)
        if slot is not None:
            read.setdefault(rank, {})[slot_id] = slot
    return read
