"""One training of an integration: its steps and figures, its start, rollback and end; the same for all frameworks."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lazysnap.config import KeepBest, PersistentLevel
from lazysnap.engine import SnapshotEngine, report
from lazysnap.engine.rollback import check_steps
from lazysnap.engine.statistics import Statistics
from lazysnap.errors import ConfigError
from lazysnap.integrations.arguments import Arguments
from lazysnap.resolver import means_snapshot
from lazysnap.restore.known_run import newest_run
from lazysnap.shard.names import new_id
from lazysnap.state.source import StateSource

_MAX_STEPS = 10_000
"""Maximum steps whose times are kept."""


def logged_figures(
    statistics: Statistics, levels: Sequence[PersistentLevel], finished_s: Mapping[int, float]
) -> dict[str, float]:
    """Return figures for loggers under ``lazysnap/…``; none before the first capture.

    * ``stall_ms``: the time that the training thread waited at the last capture.
    * ``device_wait_s``: the time that devices waited at gates so far (only on devices).
    * ``copy_gb_per_s``: the mean of all copies.
    * ``skipped``, ``torn``: number of captures so far.
    * ``lag_steps/…``, ``lag_s/…``: the lag behind the last step, in memory, on other nodes, and at storage level 0, 1,
    … of ``levels``.

    ``finished_s``: the times at which training finished steps, on the monotonic clock.
    """
    if not statistics.began:
        return {}
    copy_s = statistics.copy.total_s
    figures = {
        "stall_ms": 1e3 * (statistics.boundary.last_s + statistics.gate.last_s),
        "skipped": float(statistics.skipped.total()),
        "torn": float(statistics.torn),
    }
    if statistics.device_wait_s:
        figures["device_wait_s"] = statistics.device_wait_s
    if copy_s:
        figures["copy_gb_per_s"] = statistics.shard_bytes * statistics.copy.count / copy_s / 1e9
    newest = max(finished_s, default=0)
    steps = {"memory": statistics.last_whole_step, "other_nodes": statistics.last_protected_step}
    for number, level in enumerate(levels):  # the statistics have them in the order of their first snapshots
        steps[f"storage_{number}"] = statistics.last_durable_step.get(level.url)
    for place, step in steps.items():
        if step is None:
            continue
        figures[f"lag_steps/{place}"] = float(newest - step)
        if step in finished_s:
            figures[f"lag_s/{place}"] = time.monotonic() - finished_s[step]
    return {f"lazysnap/{name}": value for name, value in figures.items()}


class Session:
    """Calls the engine in one training. A step is identified by its number, and captured once."""

    def __init__(self, engine: SnapshotEngine) -> None:
        self.engine = engine
        self.step = 0
        """The last step that is finished."""
        self._rollback_steps = 0
        """The number of steps of a rollback that the program requested; 0: no rollback."""
        self._finished_s: dict[int, float] = {}
        """The times at which training finished steps, on the monotonic clock."""

    def start(self, step: int, prepare: Callable[[], None] | None = None) -> None:
        """Begin a training after ``step``; call ``prepare`` before.

        Collective. Raises: as ``prepare`` on any rank; as ``SnapshotEngine._prepare``.
        """

        def work() -> None:
            if prepare is not None:
                prepare()
            self.step = step
            self.engine._prepare()

        self.engine._together("preparing", work)
        self.engine._boundaries.check_memory()

    def finish_step(self, step: int) -> bool:
        """Record that ``step`` is finished. ``False`` if it was recorded before: gradients are being accumulated."""
        if step <= self.step:
            return False
        self.step = step
        self._finished_s[step] = time.monotonic()
        if len(self._finished_s) > _MAX_STEPS:
            first = next(iter(self._finished_s))
            del self._finished_s[first]
        return True

    def capture(self, *, is_last: bool) -> None:
        """Capture the last step that is finished.

        ``is_last``: at the end of a training, also between the steps of ``every_n_steps``; see
        ``SnapshotEngine._last_boundary``.
        """
        if is_last:
            self.engine._last_boundary(self.step)
        else:
            self.engine.boundary(self.step)

    def figures(self) -> dict[str, float]:
        """Return figures for loggers: see ``logged_figures``."""
        return logged_figures(self.engine.statistics(), self.engine._config.levels, self._finished_s)

    def keep_best(self, setting: KeepBest, value: Any) -> None:
        """Keep the snapshot of the running step, if its ``value`` is among the best. Collective.

        Raises: as ``SnapshotEngine.keep_best``.
        """
        self.engine.keep_best(setting.monitor, value, mode=setting.mode, count=setting.count)

    @property
    def rollback_requested(self) -> bool:
        """True if a requested rollback did not take place yet."""
        return self._rollback_steps > 0

    def request_rollback(self, steps: int) -> None:
        """Request a rollback at the end of the current step. Raises: ConfigError."""
        check_steps(steps)
        self._rollback_steps = steps

    def roll_back(self) -> None:
        """Do the requested rollback. Collective. Blocks. Raises: as ``SnapshotEngine.rollback``."""
        steps = self._rollback_steps
        self._rollback_steps = 0
        self.step = self.engine.rollback(steps=steps).step
        # Undone steps are no longer finished: metrics count from the newest finished step.
        self._finished_s = {step: time_s for step, time_s in self._finished_s.items() if step <= self.step}

    def report_start(self, checkpoint: Any, how: str, step: int = 0) -> None:
        """Report the start of a training that resumes no snapshot.

        Args:
            checkpoint: the checkpoint that the program named, if any.
            how: the call that resumes the newest snapshot.
            step: the step after which training begins.
        """
        if checkpoint and means_snapshot(checkpoint):
            self.engine._run.tell_start()
        elif checkpoint:
            self.engine._run.tell_start(report.from_checkpoint(str(checkpoint)))
        else:
            self.engine._run.tell_start(report.fresh(None, how=how, step=step))


class WithEngine:
    """The public interface to the current and the last training."""

    _arguments: Arguments
    _session: Session | None = None
    """The session of the running training; ``None`` outside."""
    _statistics: Statistics | None = None
    """The statistics of the last training."""
    _new_run_id = ""
    """The id for the next training if that resumes nothing; empty if the program did not read it."""

    @property
    def engine(self) -> SnapshotEngine | None:
        """The engine of the current training, for ``wait(...)`` and other calls; ``None`` outside."""
        if self._session is None:
            return None
        return self._session.engine

    @property
    def run_id(self) -> str | None:
        """The id of the current run; before a training, of the run that it will resume or begin.

        It is the same after every restart of the run, so give it to a logger (docs/loggers.md). It is valid for a
        training that resumes ``"latest"``: any other one begins a new run with another id. It is ``None`` in a training
        until its run is known, and before a training if the place of snapshots is not known yet. Blocks before a
        training: see ``lazysnap.run_id``. Raises: ConfigError, if nothing names the job.
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
        """Return the default place of snapshots; ``None`` if only a training has one."""
        return None

    def statistics(self) -> Statistics | None:
        """Return counters and timings of the current training, else of the last one; ``None`` before the first."""
        if self.engine is None:
            return self._statistics
        return self.engine.statistics()

    def figures(self) -> dict[str, float]:
        """See ``Session.figures``; empty outside of a training."""
        if self._session is None:
            return {}
        return self._session.figures()

    def keep(self, name: str) -> int:
        """Keep the newest snapshot of the current training under ``name``; see ``SnapshotEngine.keep``.

        Raises: ConfigError, also outside of a training.
        """
        return self._running_session().engine.keep(name)

    def release(self, name: str) -> None:
        """Remove ``name`` from the snapshots of the current training; see ``SnapshotEngine.release``.

        Raises: ConfigError, also outside of a training.
        """
        self._running_session().engine.release(name)

    def _gate(self) -> None:
        """Wait until weights may change, within a training. See ``SnapshotEngine.gate``."""
        if self._session is not None:
            self._session.engine.gate()

    def _leave(self) -> None:
        """End the training; keep its counters."""
        if self._session is not None:
            self._statistics = self._session.engine.statistics()
            self._session = None

    def _begin(self, state: StateSource, default_url: str, *, only_reads: bool = False) -> Session:
        """Begin a training that has this ``state``. Collective.

        Args:
            state: the state of the training.
            default_url: the default place of snapshots.
            only_reads: True for an evaluation, which may run during a training of the same directory.
        """
        config = self._arguments.config_for(default_url)
        engine = SnapshotEngine._of_integration(config, state, default_url=default_url, takes_over=not only_reads)
        if not only_reads:
            engine._run.rename(self._new_run_id)
            self._new_run_id = ""
        self._session = Session(engine)
        return self._session

    def _running_session(self) -> Session:
        if self._session is None:
            raise ConfigError(f"{type(self).__name__}: keep, release and rollback work while a training runs")
        return self._session
