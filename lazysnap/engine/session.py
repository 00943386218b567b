"""The calls of an engine for integrations of this package, beside its public ones."""

import os
import time
import weakref
from collections.abc import Callable

from lazysnap.config import SnapshotConfig
from lazysnap.core.messages import StepKey
from lazysnap.engine.boundaries import Boundaries
from lazysnap.engine.parts import Parts
from lazysnap.engine.preemption import Preemption, RankCaptures
from lazysnap.engine.run import Run
from lazysnap.engine.shutdown import Shutdown
from lazysnap.errors import ConfigError
from lazysnap.keeper.identity import JobIdentity
from lazysnap.ranks.checks import together
from lazysnap.restore.snapshot import Snapshot
from lazysnap.state.source import StateSource

_sessions: "weakref.WeakSet[Session]" = weakref.WeakSet()
"""All engines of this process. One that is connected to a keeper stays here: the thread of its connection needs it."""


class Session:
    """The parts of one engine, and the calls of integrations that need several. Not public: it may change with any
    release."""

    def __init__(
        self, config: SnapshotConfig, source: StateSource, default_url: str | None, *, takes_over: bool = True
    ) -> None:
        """Collective. Blocks: for other ranks.

        ``takes_over``: an earlier engine of this process, of the same job, that was not ended is left as after a
        crash. Its keeper would refuse this one.
        """
        identity = JobIdentity.from_config(config, default_url)
        if takes_over:
            _end_earlier(identity)
        self.preemption = Preemption(config, self._captures, self._seal)
        parts = Parts.of(config, source, identity)
        self.parts = parts
        self.run = Run(parts)
        self.boundaries = Boundaries(parts, self.run, self.preemption)
        self.shutdown = Shutdown(parts, self.run, self.boundaries, self.preemption)
        self.pid = os.getpid()
        """The process that made it: in a forked child it is of no use."""
        _sessions.add(self)

    def _captures(self) -> RankCaptures:
        return self.shutdown.captures()

    def _seal(self, timeout_s: float) -> None:
        self.boundaries.seal(timeout_s)

    def check_open(self, call: str) -> None:
        """Raises: ConfigError, after the end."""
        if self.shutdown.is_replaced:
            raise ConfigError(
                f"{call}: another SnapshotEngine of this process was made later for the same snapshots, and took the "
                "place of this one; use the later one, or give each a directory of its own"
            )
        if self.shutdown.is_closed:
            raise ConfigError(
                f"{call}: this engine was closed, by close(), abandon() or the end of its with block; make another "
                "SnapshotEngine to go on"
            )

    def together(self, what: str, work: Callable[[], object]) -> None:
        """Do ``work`` on every rank; what one of them raises, all raise, with its number. Collective. Blocks."""
        together(self.parts.world, what, work)

    def fetch_to_read(self, which: int | str = "latest") -> Snapshot:
        """Read as ``fetch``, for an evaluation, which may use another floating dtype. Of a training that runs at this
        moment the memory is its own, and what it stored is read. Blocks. Collective, too. Raises: as ``fetch``, but for
        JobBusy; SnapshotNotFound, if there is none.
        """
        self.check_open("fetch")
        return self.run.fetch_to_read(which)

    def load(self, snapshot: Snapshot, *, position: str = "") -> None:
        """Load what ``fetch`` returned into the live objects, and ``resume`` there. Collective. Blocks.

        ``position``: where in the data it goes on, in words. Raises: as ``restore``.
        """
        self.check_open("load")
        self.run.load(snapshot, position=position)

    def is_to_be_stored(self, step: int, timeout_s: float) -> bool:
        """Block until the first level has ``step``, or memory keeps it for that level, which has got a name for it.

        ``False`` after the deadline: the level is busy with another step, and this one may be written over.
        """
        key = StepKey(self.run.meta.start_number, step)
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            levels = self.parts.client.state.levels
            is_stored = bool(levels) and key in levels[0].complete
            if is_stored or self.parts.recorder.history.is_kept(step):
                return True
            time.sleep(0.001)
        return False

    def replan(self) -> None:
        """Work out anew, at the next boundary, what each rank captures: what all ranks hold alike has changed.

        Does not block; that boundary is collective with several ranks, so all are to call it before the same one.
        """
        self.check_open("replan")
        with self.boundaries.lock:
            self.parts.recorder.planner.forget()

    def last_boundary(self, step: int) -> bool:
        """``boundary`` behind the last step of a training, due or not; ``True`` if that step is captured. Not after the
        end of the engine.

        Blocks: until there is a slot, at most ``io_timeout_s``, and until the copies are done: what comes after a
        training may change weights. Raises: as ``boundary``.
        """
        return not self.shutdown.is_closed and self.boundaries.last_boundary(step)


def _end_earlier(identity: JobIdentity) -> None:
    """Leave all engines of this process and this job, as after a crash: a cell of a notebook is run again."""
    for session in list(_sessions):
        if session.parts.identity == identity and session.pid == os.getpid():
            session.shutdown.give_way()
