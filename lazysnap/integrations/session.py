"""One training behind a callback: its steps, its figures, and how it starts, the same for every framework."""

from collections.abc import Callable
from typing import Any

from lazysnap.engine import SnapshotEngine, report
from lazysnap.engine.statistics import Statistics
from lazysnap.errors import ConfigError
from lazysnap.integrations.choice import means_snapshot
from lazysnap.integrations.logged import Logged


class Session:
    """The calls of ``engine`` in one training. A step is known by its number, and captured once."""

    def __init__(self, engine: SnapshotEngine) -> None:
        self.engine = engine
        self._step = 0
        self._logged = Logged()

    def start(self, step: int, prepare: Callable[[], None] = lambda: None) -> None:
        """Training begins behind ``step``; ``prepare`` is done before. Collective. Raises: what it raises on any rank;
        as ``SnapshotEngine.prepare``.
        """

        def work() -> None:
            prepare()
            self._step = step
            self.engine.prepare()

        self.engine.together("preparing", work)
        self.engine.check_required()

    def go_to(self, step: int) -> None:
        """Training stands behind ``step`` now: a snapshot was restored."""
        self._step = step

    def has_passed(self, step: int) -> bool:
        """Whether ``step`` is over and was not captured; else an accumulation of gradients is under way."""
        return step > self._step

    def passes(self, step: int) -> bool:
        """``has_passed``; the step then counts in ``figures``, and ``capture`` takes it."""
        if not self.has_passed(step):
            return False
        self._step = step
        self._logged.note(step)
        return True

    def capture(self, *, is_last: bool) -> None:
        """Capture the step that passed. ``is_last``: the end of a training, also between the steps of
        ``every_n_steps``; see ``SnapshotEngine.last_boundary``.
        """
        (self.engine.last_boundary if is_last else self.engine.boundary)(self._step)

    def figures(self) -> dict[str, float]:
        """For loggers: see ``Logged.values``."""
        return self._logged.values(self.engine.statistics(), self.engine.config.levels)

    def tell_fresh(self, asked: Any, how: str, step: int = 0) -> None:
        """Tell the user how training starts, if it resumes no snapshot; ``asked``: the checkpoint asked for."""
        if asked and means_snapshot(asked):
            self.engine.tell_start()
        elif asked:
            self.engine.tell_start(report.from_checkpoint(str(asked)))
        else:
            self.engine.tell_start(report.fresh(None, how=how, step=step))


class WithEngine:
    """What a door offers of its running training, and of the last one."""

    _session: Session | None = None
    _statistics: Statistics | None = None
    """Of the last training."""

    @property
    def engine(self) -> SnapshotEngine | None:
        """The engine of the running training, for ``wait(...)`` and the like; ``None`` outside."""
        return None if self._session is None else self._session.engine

    def statistics(self) -> Statistics | None:
        """Counters and timings of the running training, else of the last one; ``None`` before the first."""
        return self._statistics if self.engine is None else self.engine.statistics()

    def keep(self, name: str) -> int:
        """Keep the newest snapshot of the running training under ``name``; see ``SnapshotEngine.keep``.

        Raises: ConfigError, also when no training runs.
        """
        return self._running().keep(name)

    def release(self, name: str) -> None:
        """Take ``name`` from the snapshots of the running training; see ``SnapshotEngine.release``.

        Raises: ConfigError, also when no training runs.
        """
        self._running().release(name)

    def _running(self) -> SnapshotEngine:
        if self.engine is None:
            raise ConfigError(f"{type(self).__name__}: keep and release work while a training runs")
        return self.engine
