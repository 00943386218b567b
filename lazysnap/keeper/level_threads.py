"""Threads of a keeper for the jobs of its levels: each job has one of its own, and each level one job at a time.

::

    loop ──Job──> LevelThreads ──thread──> run_level_job ──JobEnded──> loop

Storage levels come first, redundancy is the level after the last. A thread that hangs at a level cannot be ended. The
loop leaves it alone, and the next job has another one. A job that was cancelled notices that when the level answers,
and commits nothing.
"""

import functools
import threading
from collections.abc import Callable

from lazysnap import faults
from lazysnap.core.actions import Event, Failed, Job, JobEnded, WriteLevel
from lazysnap.core.messages import JobSettings
from lazysnap.keeper.jobs import JobControl, run_level_job
from lazysnap.keeper.level_files import LevelFiles
from lazysnap.keeper.slot_table import NodeSlots
from lazysnap.memory.slots import Slot

ParityJob = Callable[[Job, NodeSlots, JobControl], Callable[[], JobEnded]]


class LevelThreads:
    """The newest job of each level, on its thread. Used on the loop's thread."""

    def __init__(
        self,
        post: Callable[[Event], None],
        ended: Callable[[JobControl, JobEnded], None],
        parity_job: ParityJob,
    ) -> None:
        """Begin without levels.

        Args:
            post: hands an event to the loop, from any thread.
            ended: takes each job whose thread returned, also one that was cancelled. On the thread of the job.
            parity_job: returns the work of a job of the redundancy level.
        """
        self._post = post
        self._ended = ended
        self._parity_job = parity_job
        self._files: list[LevelFiles] = []
        """By storage level. Redundancy, the level behind them, has none."""
        self._running: dict[int, JobControl] = {}
        """The newest job of each level that has not returned."""

    @property
    def is_busy(self) -> bool:
        """True if a job runs that was not cancelled."""
        return any(not control.is_cancelled for control in self._running.values())

    def moved_bytes(self, level: int) -> int:
        """Return the bytes that the job of a level moved so far."""
        control = self._running.get(level)
        if control is None or control.is_cancelled:
            return 0
        return control.moved_bytes

    def begin(self, settings: JobSettings) -> None:
        """Work for these settings from now on. Jobs of earlier ones were cancelled."""
        self._running = {}
        self._files = []
        for index in range(len(settings.levels)):
            self._files.append(LevelFiles(settings, index, tuple(self._files)))

    def start(self, job: Job, slots: NodeSlots) -> None:
        """Begin a job."""
        slots_of_job = _slots_of_job(job, slots)
        if job.level < len(self._files):
            files = self._files[job.level]
            control = JobControl(job, self._post, files.url)
            work: Callable[[], JobEnded] = functools.partial(run_level_job, job, files, slots_of_job, control)
        else:
            control = JobControl(job, self._post)
            work = self._parity_job(job, slots_of_job, control)
        self._running[job.level] = control
        thread = threading.Thread(target=self._run, args=(work, control), name=f"level-{job.level}", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # the machine has no thread left
            self._ended(control, Failed(job.number, str(error)))

    def forget(self, control: JobControl) -> None:
        """Note that a job ended."""
        if self._running.get(control.job.level) is control:
            del self._running[control.job.level]

    def cancel(self, level: int, number: int) -> None:
        """Have a job commit nothing any more."""
        control = self._running.get(level)
        if control is not None and control.job.number == number:
            control.is_cancelled = True

    def _run(self, work: Callable[[], JobEnded], control: JobControl) -> None:
        """Do a job. On its thread."""
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
