"""One training of an integration: its steps and figures, its start, rollback and end; the same for all frameworks."""

import time
from collections.abc import Callable, Sequence
from typing import Any

from lazysnap.config import KeepBest, PersistentLevel
from lazysnap.engine import SnapshotEngine, report
from lazysnap.engine.statistics import Statistics
from lazysnap.errors import ConfigError
from lazysnap.integrations.arguments import Arguments, place_beside
from lazysnap.integrations.progress_bar import Bar, shown_later
from lazysnap.restore.known_run import newest_run
from lazysnap.runs import means_snapshot
from lazysnap.shard.names import new_id
from lazysnap.state.source import StateSource

_MOST_STEPS = 10_000
"""Steps whose times are remembered."""


class Figures:
    """Counters and timings under ``lazysnap/…``, and how far each level lags behind training."""

    def __init__(self) -> None:
        self._passed_s: dict[int, float] = {}
        """When training passed a step, on the monotonic clock."""

    def note(self, step: int) -> None:
        """Training passed ``step`` now."""
        self._passed_s[step] = time.monotonic()
        if len(self._passed_s) > _MOST_STEPS:
            del self._passed_s[next(iter(self._passed_s))]

    def values(self, statistics: Statistics, levels: Sequence[PersistentLevel]) -> dict[str, float]:
        """Return the current figures; none before the first capture.

        ``stall_ms``: the training thread waited at the last capture. ``device_wait_s``: devices stood still at gates so
        far (only on devices). ``copy_gb_per_s``: mean of all. ``skipped``, ``torn``: so far. ``lag_steps/…``,
        ``lag_s/…``: behind the last step, in memory, on other nodes, and at storage level 0, 1, …
        of ``levels``.
        """
        if not statistics.began:
            return {}
        copy_s = statistics.copy.total_s
        values = {
            "stall_ms": 1e3 * (statistics.boundary.last_s + statistics.gate.last_s),
            "skipped": float(statistics.skipped.total()),
            "torn": float(statistics.torn),
        }
        if statistics.device_wait_s:
            values["device_wait_s"] = statistics.device_wait_s
        if copy_s:
            values["copy_gb_per_s"] = statistics.shard_bytes * statistics.copy.count / copy_s / 1e9
        newest = max(self._passed_s, default=0)
        steps = {"memory": statistics.last_whole_step, "other_nodes": statistics.last_protected_step}
        for number, level in enumerate(levels):  # the statistics have them in the order of their first snapshots
            steps[f"storage_{number}"] = statistics.last_durable_step.get(level.url)
        for place, step in steps.items():
            if step is None:
                continue
            values[f"lag_steps/{place}"] = float(newest - step)
            if step in self._passed_s:
                values[f"lag_s/{place}"] = time.monotonic() - self._passed_s[step]
        return {f"lazysnap/{name}": value for name, value in values.items()}


class Session:
    """The calls of ``engine`` in one training. A step is known by its number, and captured once."""

    def __init__(self, engine: SnapshotEngine, step: int = 0) -> None:
        self.engine = engine
        self.step = step
        """The last one that is over and counts."""
        self._steps_back = 0
        """Steps that the program asked to go back; 0: none."""
        self._figures = Figures()

    def start(self, step: int, prepare: Callable[[], None] = lambda: None) -> None:
        """Training begins behind ``step``; ``prepare`` is done before. Collective. Raises: what it raises on any rank;
        as ``SnapshotEngine._prepare``.
        """

        def work() -> None:
            prepare()
            self.step = step
            self.engine._prepare()

        self.engine._together("preparing", work)
        self.engine._boundaries.check_memory()

    def passes(self, step: int) -> bool:
        """True if ``step`` is over and was not captured; else an accumulation of gradients is under way.

        The step then counts in ``figures``, and ``capture`` takes it.
        """
        if step <= self.step:
            return False
        self.step = step
        self._figures.note(step)
        return True

    def capture(self, *, is_last: bool) -> None:
        """Capture the step that passed. ``is_last``: the end of a training, also between the steps of
        ``every_n_steps``; see ``SnapshotEngine._last_boundary``.
        """
        if is_last:
            self.engine._last_boundary(self.step)
        else:
            self.engine.boundary(self.step)

    def figures(self) -> dict[str, float]:
        """Return figures for loggers: see ``Figures.values``."""
        return self._figures.values(self.engine.statistics(), self.engine._config.levels)

    def judge(self, wish: KeepBest, value: Any) -> None:
        """Keep the snapshot of the running step, if its ``value`` is among the best. Collective.

        Raises: as ``SnapshotEngine.keep_best``.
        """
        self.engine.keep_best(wish.monitor, value, mode=wish.mode, count=wish.count)

    @property
    def is_spoilt(self) -> bool:
        """True if the program asked to go back, and training did not yet."""
        return self._steps_back > 0

    def ask_back(self, steps: int) -> None:
        """Let training go back at the end of the running step. Raises: ConfigError."""
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ConfigError(f"rollback: steps must be an integer of at least 1, got {steps!r}")
        self._steps_back = steps

    def go_back(self) -> None:
        """Go back as far as was asked. Collective. Blocks. Raises: as ``SnapshotEngine.rollback``."""
        steps = self._steps_back
        self._steps_back = 0
        self.step = self.engine.rollback(steps=steps).step

    def close(self, bar: Bar | None) -> None:
        """End well: see ``SnapshotEngine.close``. Blocks; ``bar`` shows how far it is, if it takes a second."""
        with shown_later(bar) as show:
            self.engine.close(drain=True, progress=show)

    def tell_fresh(self, asked: Any, how: str, step: int = 0) -> None:
        """Tell the user how training starts, if it resumes no snapshot; ``asked``: the checkpoint asked for."""
        if asked and means_snapshot(asked):
            self.engine._run.tell_start()
        elif asked:
            self.engine._run.tell_start(report.from_checkpoint(str(asked)))
        else:
            self.engine._run.tell_start(report.fresh(None, how=how, step=step))


class WithEngine:
    """The public view of the running training, and of the last one."""

    _arguments: Arguments
    _session: Session | None = None
    """The session of the running training; ``None`` outside."""
    _statistics: Statistics | None = None
    """The statistics of the last training."""
    _new_run_id = ""
    """The id for the next training if that resumes nothing; empty, if the program did not ask for it."""

    @property
    def engine(self) -> SnapshotEngine | None:
        """The engine of the running training, for ``wait(...)`` and the like; ``None`` outside."""
        if self._session is None:
            return None
        return self._session.engine

    @property
    def run_id(self) -> str | None:
        """The id of the run that trains; before a training, of the run that it will resume or begin.

        It is the same after every restart of the run, so give it to a logger (docs/loggers.md). It holds for a
        training that resumes ``"latest"``: any other one begins a new run, with another id. In a training it is
        ``None`` until it is known which run that resumes; before, where nothing names the place of snapshots yet.
        Blocks before a training: see ``lazysnap.run_id``. Raises: ConfigError, if nothing names the job.
        """
        if self.engine is not None:
            return self.engine.run_id
        default_url = self._default_place()
        config = self._arguments.named_config(default_url)
        if config is None:
            return None
        resumed_id = newest_run(config, default_url)
        if resumed_id is not None:
            return resumed_id
        if not self._new_run_id:
            self._new_run_id = new_id()
        return self._new_run_id

    def _default_place(self) -> str | None:
        """The place of snapshots where the arguments name none; ``None``, if it is not known before a training."""
        return None

    def statistics(self) -> Statistics | None:
        """Counters and timings of the running training, else of the last one; ``None`` before the first."""
        if self.engine is None:
            return self._statistics
        return self.engine.statistics()

    def figures(self) -> dict[str, float]:
        """See ``Session.figures``; nothing outside of a training."""
        if self._session is None:
            return {}
        return self._session.figures()

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

    def _leave(self) -> None:
        """The training is over; its counters stay."""
        if self._session is not None:
            self._statistics = self._session.engine.statistics()
            self._session = None

    def _begin(self, state: StateSource, directory: object, *, only_reads: bool = False) -> Session:
        """A training begins that has this ``state`` and writes to ``directory``. Collective.

        ``only_reads``: it is an evaluation, which may take place within a training of the same directory.
        """
        url = place_beside(directory)
        config = self._arguments.config_for(url)
        engine = SnapshotEngine._of_integration(config, state, default_url=url, takes_over=not only_reads)
        if not only_reads:
            engine._run.rename(self._new_run_id)
            self._new_run_id = ""
        self._session = Session(engine)
        return self._session

    def _running(self) -> SnapshotEngine:
        return self._running_session().engine

    def _running_session(self) -> Session:
        if self._session is None:
            raise ConfigError(f"{type(self).__name__}: keep, release and rollback work while a training runs")
        return self._session
