"""Threads of a keeper for slow work, each of which can be abandoned.

::

    loop ──Job──> Worker ──thread──> run_level_job ──JobEnded──> loop

A thread that hangs at a level cannot be ended. The loop leaves it alone and begins another one. Its job finds itself
cancelled when the level answers, and commits nothing.
"""

import logging
import queue
import threading
import time
from collections.abc import Callable

from lazysnap.core.actions import Event, Job, JobMoved
from lazysnap.memory.failures import CaptureAborted
from lazysnap.shard.checksum import Checksums

logger = logging.getLogger(__name__)

BEAT_S = 0.5
"""The least time between two messages of a job that it moves."""

Work = Callable[[], None]


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


class JobControl:
    """Link between a job on the thread of a level and the loop."""

    def __init__(self, job: Job, post: Callable[[Event], None]) -> None:
        """``post`` hands an event to the loop, from any thread."""
        self.is_cancelled = False
        """Set by the loop. Then the job commits nothing more."""
        self.moved_bytes = 0
        """Bytes that the job moved, for people. Counted by the job."""
        self.checksums: dict[tuple[int, int], Checksums] = {}
        """Checksums of captures that a job stored as they are, by slot id and sequence. Set by the job."""
        self._job = job
        self._post = post
        self._beat_at = time.monotonic()

    def beat(self) -> None:
        """Note that the job moves. Raises: CaptureAborted, if it was cancelled."""
        if self.is_cancelled:
            raise CaptureAborted("the job was cancelled")
        now = time.monotonic()
        if now - self._beat_at >= BEAT_S:
            self._beat_at = now
            self._post(JobMoved(self._job.level, self._job.job))
