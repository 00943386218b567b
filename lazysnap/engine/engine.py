"""The engine: ``restore`` at the start, then ``boundary`` and ``gate`` at every optimizer step."""

import functools
import os
import time
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Literal, ParamSpec, TypeVar

from lazysnap.capture.plan import check_kinds
from lazysnap.config import KeepBest, SnapshotConfig, config_at
from lazysnap.engine.best import BestSnapshots
from lazysnap.engine.boundaries import Boundaries
from lazysnap.engine.messages import Messages
from lazysnap.engine.preemption import Preemption
from lazysnap.engine.recorder import Recorder
from lazysnap.engine.rollback import Rollback, roll_back
from lazysnap.engine.run import Run
from lazysnap.engine.shutdown import Shutdown
from lazysnap.engine.statistics import Statistics
from lazysnap.engine.stored import wait_durable, wait_protected
from lazysnap.errors import ConfigError, JobBusy
from lazysnap.keeper.client import KeeperClient
from lazysnap.keeper.identity import JobIdentity
from lazysnap.ranks.checks import check_places, together
from lazysnap.ranks.discovery import discover_keepers
from lazysnap.ranks.world import World
from lazysnap.restore.search import Restart
from lazysnap.restore.snapshot import Snapshot
from lazysnap.shard.names import check_name
from lazysnap.state.objects import ObjectState
from lazysnap.state.source import StateSource

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _refused_shortly(method: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Make ``method`` raise JobBusy without a traceback: every rank prints it, and its message is complete."""

    @functools.wraps(method)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            return method(*args, **kwargs)
        except JobBusy as error:
            raise error.with_traceback(None) from None

    return call


class SnapshotEngine:
    """Captures the training state at optimizer-step boundaries, and restores it::

        engine = SnapshotEngine("runs/a", {"model": model, "optimizer": optimizer})
        engine.restore("latest")
        with engine:
            while engine.step < steps:
                ...
                optimizer.step()
                engine.boundary()

    The end of the ``with`` block closes the engine (``close``). After an exception, ``KeyboardInterrupt`` or a
    ``SystemExit`` with an exit status the engine is abandoned (``abandon``), as after a crash: the next start resumes
    from memory. A closed engine only allows ``statistics``, ``gate``, ``close`` and ``abandon``; other calls raise
    ConfigError.

    Use one engine per process and job, on the training thread. A later engine replaces the earlier one, which is
    abandoned. So a cell of a notebook may be run again.

    With ``torch.distributed`` every rank makes an engine at the same point. Making it, ``restore``, the first
    ``boundary``, ``keep_best``, ``rollback`` and ``close`` are collective. All ranks call ``keep``, ``release`` and
    ``wait``, too, but these wait for no other rank. A failing keeper or level never raises into training: the failure
    is logged once, counted in ``statistics()``, and retried.
    """

    def __init__(
        self, config: "SnapshotConfig | str | os.PathLike[str]", state: StateSource | Mapping[str, Any]
    ) -> None:
        """Collective. Blocks: for other ranks.

        Args:
            config: a ``SnapshotConfig``, or a path or URL of a single level, with default settings.
            state: a mapping of names to objects with ``state_dict`` and ``load_state_dict``.

        Raises: ConfigError; WaitTimeout, if another rank is missing.
        """
        self._set_up(config_at(config), state, default_url=None, takes_over=True)

    @classmethod
    def _of_integration(
        cls, config: SnapshotConfig, state: StateSource, *, default_url: str | None, takes_over: bool = True
    ) -> "SnapshotEngine":
        """Make an engine. Collective. Blocks: for other ranks.

        Args:
            config: settings.
            state: the state of the training.
            default_url: the URL of the level if the config has none.
            takes_over: abandon an open engine of the same job in this process. Otherwise its keeper refuses this one.

        Raises: as the constructor.
        """
        engine = cls.__new__(cls)
        engine._set_up(config, state, default_url=default_url, takes_over=takes_over)
        return engine

    def _set_up(
        self,
        config: SnapshotConfig,
        state: StateSource | Mapping[str, Any],
        *,
        default_url: str | None,
        takes_over: bool,
    ) -> None:
        self._config = config
        identity = JobIdentity.from_config(self._config, default_url)
        self._source = _source_of(state)
        if takes_over:
            _end_earlier(identity)
        self._identity = identity
        self._world = World(self._config.collective_timeout_s, self._source.optimizers())
        place = self._world.place
        self._client = KeeperClient(
            identity,
            place.local_rank,
            linger_s=self._config.memory.linger_s,
            io_timeout_s=self._config.io_timeout_s,
        )
        messages = Messages(Statistics(), is_first=self._world.rank == 0, speaks_for_node=place.local_rank == 0)
        self._recorder = Recorder(self._config, self._source, self._client, messages, self._world)
        self._run = self._new_run()
        self._preemption = Preemption(self._config, self._client, self._run.captures, self._seal)
        self._boundaries = Boundaries(self._run, self._preemption)
        self._best = BestSnapshots(self._run, self._boundaries)
        self._shutdown = Shutdown(self._run, self._boundaries, self._preemption, self._best)
        self._is_training = False
        """True if the ``with`` block was entered."""
        self._pid = os.getpid()
        """The process that made it. The engine does not work in a forked child."""
        _engines.add(self)

    def _new_run(self) -> Run:
        """Exchange the addresses of all keepers, and make the run. Collective. Blocks.

        Raises: ConfigError; WaitTimeout.
        """
        check_places(self._world, self._config, self._identity.job_id)
        discovery = discover_keepers(self._world, self._client, self._config, self._identity.job_id)
        self._recorder.memory.group = discovery.group
        restart = Restart(
            self._config,
            self._source,
            self._client,
            self._identity,
            self._world,
            discovery,
            start=self._recorder.meta.start,
        )
        return Run(restart, self._recorder)

    def _seal(self, timeout_s: float) -> None:
        self._boundaries.seal(timeout_s)

    def _check_open(self, call: str) -> None:
        """Raises: ConfigError, if the engine is closed."""
        if self._shutdown.is_replaced:
            raise ConfigError(
                f"{call}: another SnapshotEngine of this process was made later for the same snapshots, and replaced "
                "this one; use the later one, or give each its own directory"
            )
        if self._shutdown.is_closed:
            raise ConfigError(
                f"{call}: this engine was closed, by close(), abandon() or the end of its with block; make another "
                "SnapshotEngine to continue"
            )

    @_refused_shortly
    def __enter__(self) -> "SnapshotEngine":
        """Begin training. Memory is prepared in the background, but not before ``restore``.

        Raises: StateError, for a tensor of the model that no snapshot can hold; KeeperError, if memory is required and
        not available.
        """
        self._check_open("with engine")
        self._is_training = True
        if self._run.start_reported:
            self._prepare()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Call ``close()``, or ``abandon()`` after an exception. Collective. Blocks."""
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            self.close(drain=True)
        else:
            self.abandon(error)

    @property
    def step(self) -> int:
        """The step of the last boundary, or of the snapshot that was restored after it; 0 before the first::

        while engine.step < steps:
        """
        return self._recorder.seen_step or 0

    @property
    def run_id(self) -> str | None:
        """The id of the run that this engine trains: 16 hexadecimal digits, the same on all ranks and after restarts::

            wandb.init(id=engine.run_id, resume="allow")

        ``None`` before ``restore`` or the first boundary. A rollback, and the restore of an older snapshot, begin a new
        run with a new id.
        """
        return self._run.run_id

    @_refused_shortly
    def all_steps(self) -> list[int]:
        """Return the steps that a restart could resume, in ascending order::

            print(engine.all_steps())  # [800, 900, 960]

        The steps are those of this run; before ``restore`` or the first boundary, of the newest run. A step counts if
        this rank's memory has its capture, or a level has all its files. No shard is read or verified. Blocks: starts
        or finds the keeper, and lists all levels at once, each at most ``timeout_s`` without progress. Skips a level
        that does not answer. Not collective.

        Raises: JobBusy, if this job runs already.
        """
        self._check_open("all_steps")
        return self._run.steps()

    # ---------------------------------------------------------------- restart

    @_refused_shortly
    def _fetch(self, which: int | str = "latest") -> Snapshot | None:
        """Read the newest valid snapshot, or that of a step, name or run, without loading it.

        ``which``: see ``restore``.
        Blocks: starts or finds the keeper, lists every level, reads and verifies one snapshot. Skips a level that does
        not answer within its ``timeout_s``, or within 3 s if memory has a whole snapshot. If such a level answers later
        and has a newer snapshot, a warning says so. Collective: all ranks get the same snapshot, or none.
        Raises: JobBusy, if this job runs already; StateError, if the snapshot is of another model; SnapshotNotFound, if
        the given step, name or run does not exist; ConfigError, for a bad name; WaitTimeout, if another rank is
        missing.
        """
        self._check_open("fetch")
        return self._run.fetch(which)

    @_refused_shortly
    def restore(self, which: int | str = "latest") -> Snapshot | None:
        """Resume the newest snapshot that survived, or the given one::

            snapshot = engine.restore("latest")  # None in a first start

        Restoring an older snapshot begins a new run. Newer snapshots of the old run stay, but ``"latest"`` means the
        new run as soon as it has a complete snapshot.

        Collective: all ranks get the same snapshot, or none. Blocks: starts or finds the keeper, lists every level,
        reads and verifies one snapshot, and loads it. Skips a level that does not answer within its ``timeout_s``, or
        within 3 s if memory has a whole snapshot. If such a level answers later and has a newer snapshot, a warning
        says so.

        Args:
            which: ``"latest"``, a step, a name that ``keep`` gave, ``"best"`` (see ``keep_best``), ``"run:1f3a"`` (the
                newest snapshot of the run whose id begins so) or ``"run:1f3a@200"`` (step 200 of it).

        Returns: the snapshot, whose state is loaded; ``None`` if there is nothing to resume.

        Raises: SnapshotNotFound, if ``which`` does not exist; StateError, if it is of another model, or the model has a
        tensor that no snapshot can hold; JobBusy, if this job runs already; ConfigError, for a bad name; WaitTimeout,
        if another rank is missing; what ``load_state_dict`` raises. An error on one rank is raised on all ranks; errors
        of other packages become StateError.
        """
        self._check_open("restore")
        self._together("checking the model", self._check_model)
        # Before the first step, so that the hooks see which gradients each step has used.
        self._boundaries.gates.install(self._source.optimizers())
        self._boundaries.finish_copies()  # of the state that is replaced now
        snapshot = self._run.restore(which)
        if self._is_training:
            self._prepare()
        return snapshot

    def _fetch_to_read(self, which: int | str = "latest") -> Snapshot:
        """Read a snapshot as ``_fetch``, for an evaluation, which may use another floating dtype.

        If the training is running, its memory is not accessible, and the newest stored snapshot is read. Collective.
        Blocks.
        Raises: as ``_fetch``, except JobBusy; SnapshotNotFound, if there is none.
        """
        self._check_open("fetch")
        return self._run.fetch_to_read(which)

    def _load(self, snapshot: Snapshot, *, position: str = "") -> None:
        """Load the result of ``_fetch`` into the live objects, and resume from it, as ``restore``. Collective. Blocks.

        ``position``: the position in the data, in words. Raises: as ``restore``.
        """
        self._check_open("load")
        self._boundaries.finish_copies()
        self._run.load(snapshot, position=position)

    def _check_model(self) -> None:
        check_kinds(self._source.expected().items())

    def _together(self, purpose: str, work: Callable[[], object]) -> None:
        """Call ``work`` on every rank. An error of one rank is raised on all, with its rank. Collective. Blocks."""
        together(self._world, purpose, work)

    # ---------------------------------------------------------------- training

    @_refused_shortly
    def _prepare(self) -> None:
        """Start the keeper, and prepare memory in the background, so that the first capture waits less.

        Does not block, unless memory is required (``SnapshotConfig.require_memory``): then a single rank waits for it,
        and several ranks wait at their first boundary or in ``Boundaries.check_memory``. Optional: ``with engine`` or
        the first ``boundary`` does it, too.
        Raises: StateError, for a tensor of the model that no snapshot can hold; as ``Boundaries.check_memory``.
        """
        self._check_open("prepare")
        self._boundaries.prepare()
        if self._world.is_alone:
            self._boundaries.check_memory()

    def _wait_ready(self, timeout_s: float) -> bool:
        """Block until all slots exist. ``False`` after the deadline, or as soon as the keeper refuses memory.

        For tests and benchmarks: in training the first boundary waits for the memory that it needs. After this call the
        next boundary waits, too.
        """
        self._prepare()
        return self._boundaries.wait_ready(timeout_s)

    @_refused_shortly
    def boundary(self, step: int | None = None, *, force: bool = False) -> bool:
        """Capture the state. Call it after optimizer step ``step`` and everything that belongs to it::

            optimizer.step()
            scheduler.step()
            engine.boundary()

        Large tensors are copied after the call, until the next optimizer step. Call ``gate`` before other code changes
        them. A write through ``.data`` or NumPy is not detected, such as averaged weights that are swapped in for an
        evaluation: without ``gate`` the snapshot of this step would contain it.

        Collective: the first one. Blocks: the first capture, and the first after ``restore``, waits for memory for one
        snapshot, at most ``io_timeout_s``. Later ones do not wait for copies, storage or the keeper: if storage holds
        all slots, the capture is skipped. On a device, a boundary waits until the previous capture is whole.

        Args:
            step: number of the step; by default ``engine.step + 1``.
            force: capture it also between the steps of ``every_n_steps``.

        Returns: True if a capture began.

        Raises: at the first boundary StateError, for a value that cannot be encoded, and KeeperError, where memory is
            required and is not available; JobBusy, if the same job runs already on this node; ConfigError after the
            end, or while a graph is being captured; SystemExit, when the training is preempted (docs/preemption.md);
            errors of the program's own code, such as ``state_dict``; WaitTimeout at the first boundary, if memory is
            required and another rank is missing.
        """
        self._check_open("boundary")
        if step is None:
            step = self.step + 1
        return self._boundaries.boundary(step, force=force)

    def _last_boundary(self, step: int) -> bool:
        """Call ``boundary`` after the last step of a training, due or not. Not after ``close``.

        Blocks: until there is a slot, at most ``io_timeout_s``, and until the copies are done: code after a training
        may change weights. Returns: True if that step is captured. Raises: as ``boundary``.
        """
        return not self._shutdown.is_closed and self._boundaries.last_boundary(step)

    def _replan(self) -> None:
        """Compute the partition again at the next boundary: ranks now share less of the state.

        Does not block. All ranks call it before the same boundary.
        """
        self._check_open("replan")
        with self._boundaries.lock:
            self._recorder.state.forget_plan()

    def gate(self) -> None:
        """Wait until parameters and optimizer state may change again: the last capture's copies are done::

            engine.gate()
            swap_in_averaged_weights(model)

        Hooks on every optimizer call it. Call it before anything else that changes weights, and always before
        ``replay()`` of a graph that holds an optimizer step, where no hook runs.
        Blocks: until the copy thread is done, at most ``io_timeout_s``; then that snapshot is dropped and training
        continues. For copies from a device, the device waits; the next gate blocks until they are done.

        Raises: ConfigError, while a graph is being captured, if a copy is in progress, because the graph could not wait
        for it.
        """
        self._boundaries.gate()

    def rollback(self, *, steps: int = 1, reason: str = "") -> Rollback:
        """Restore, in this process, the newest snapshot at least ``steps`` older than the step in progress::

            if not math.isfinite(loss):
                engine.rollback(reason="the loss is not finite")

        The step in progress is the one after the last boundary: called instead of ``boundary(20)``, this gives step
        19. The state comes from memory, else from storage; gradients are cleared. Data loaders keep their position, so
        the batches since then are skipped. Snapshots with NaN in trained weights or optimizer state are not used.

        Captures that are newer than the snapshot are dropped: a new run begins, and its first capture is whole in
        memory at the end of this call. After a crash before that, or if trainer and keeper are lost before storage has
        that capture, ``"latest"`` may resume a newer snapshot from storage. This cannot happen if the call replaces
        ``boundary``: then no newer snapshot exists.

        Collective. Blocks: for reading and loading.

        Args:
            steps: the least number of steps to go back.
            reason: text for the message to the user.

        Returns: the restored step, and the duration.

        Raises: SnapshotNotFound; ConfigError; what ``load_state_dict`` raises; WaitTimeout.
        """
        self._check_open("rollback")
        return roll_back(self._run, self._boundaries, steps, reason)

    # ---------------------------------------------------------------- names

    def keep(self, name: str) -> int:
        """Name the newest snapshot, that of the last boundary::

            engine.keep("before-anneal")

        Every level stores the snapshot, due or not, and keeps it until ``release``. If the last boundary was not
        captured, or an optimizer stepped since (as in a validation of Lightning), the next boundary is captured and
        named. The name is safe once the snapshot is stored: if the first level cannot store it before its slot is
        overwritten, a warning says so (docs/levels.md). Does not block. All ranks call it.

        Args:
            name: 1 to 64 letters, digits, points, dashes or underscores.

        Returns: the step; for a future boundary the smallest possible step.

        Raises: ConfigError, for a bad name, or without persistent levels.
        """
        self._check_open("keep")
        check_name(name)
        self._check_levels("keep")
        with self._boundaries.lock:
            return self._recorder.keep(name, is_over=not self._boundaries.has_stepped)

    def keep_best(
        self, monitor: str, value: float, *, mode: Literal["min", "max"] = "min", count: int = 1
    ) -> int | None:
        """Keep the newest snapshot, as ``keep`` does, if it is among the ``count`` best of this run by a metric::

            engine.keep_best("val_loss", evaluate(model), mode="min", count=3)

        ``restore("best")``, ``load_weights`` and ``export`` use the best of all existing snapshots.
        Collective: the value of rank 0 counts. Blocks: for other ranks; the first call also until the first level is
        listed, at most ``io_timeout_s``.

        Args:
            monitor: name of the metric.
            value: its value at the current step. NaN and infinity are never among the best.
            mode: ``"min"`` or ``"max"``: which values are better. Of equal values the earlier one is better.
            count: snapshots to keep. One more stays until the next call.

        Returns: the step, as ``keep``; ``None`` if the snapshot is not among the best.

        Raises: ConfigError, also without persistent levels; WaitTimeout, if another rank is missing.
        """
        self._check_open("keep_best")
        self._check_levels("keep_best")
        return self._best.keep(KeepBest(monitor, mode=mode, count=count), float(value))

    def _check_levels(self, call: str) -> None:
        """Raises: ConfigError, without persistent levels."""
        if not self._config.levels:
            raise ConfigError(f"{call}: there is no persistent level that could keep a snapshot")

    def _lost_names(self) -> Mapping[str, str]:
        """Return the names of ``keep`` whose snapshot the first level will never have, with the reason.

        The result is up to date also between two boundaries.
        """
        if not self._shutdown.is_closed:
            with self._boundaries.lock:
                self._recorder.memory.follow_keeper()
        return self._recorder.memory.events.lost_names

    def release(self, name: str) -> None:
        """Remove a name from this run's snapshots, so that retention may delete them::

            engine.release("before-anneal")

        Does not block. All ranks call it. Raises: ConfigError, for a bad name.
        """
        self._check_open("release")
        check_name(name)
        with self._boundaries.lock:
            self._recorder.release(name)

    # ---------------------------------------------------------------- waiting and ending

    def wait(
        self,
        step: int | None = None,
        *,
        until: Literal["captured", "protected", "durable"] = "durable",
        timeout_s: float,
    ) -> bool:
        """Block until the capture of a step is safe::

            engine.wait(until="durable", timeout_s=60)

        ``"protected"`` and ``"durable"`` hold for all ranks: all wait for the same step, and all must have captured it.

        Args:
            step: the step, or a later one; default: the last capture that began, else the step that was resumed.
            until: ``"captured"``: whole in the memory of this rank. ``"protected"``: survives the loss of a node.
                ``"durable"``: complete at the first level.
            timeout_s: seconds to wait at most.

        Returns: False after the deadline, or if that capture was dropped or given up. A copy that is still running
        then continues.

        Raises: ConfigError, if the configuration makes that impossible.
        """
        self._check_open("wait")
        if until not in ("captured", "protected", "durable"):
            raise ConfigError(f'wait: until must be "captured", "protected" or "durable", got {until!r}')
        if until == "protected" and self._run.restart.discovery.redundancy is None:
            raise ConfigError("wait: nodes do not protect each other: there is only one, or redundancy is None")
        if until == "durable" and not self._config.levels:
            raise ConfigError("wait: there is no persistent level that could make a snapshot durable")
        deadline_s = time.monotonic() + timeout_s
        if not self._boundaries.wait_copied(timeout_s):
            return False
        timeout_s = max(0.0, deadline_s - time.monotonic())
        if step is None:
            step = self._recorder.last_step
        if step is None:
            return False
        if until == "captured":
            return self._boundaries.wait_captured(step, timeout_s)
        if until == "protected":
            return wait_protected(self._run, step, timeout_s)
        return wait_durable(self._run, step, timeout_s)

    def statistics(self) -> Statistics:
        """Return counters and timings so far.

        The result is a copy, which later boundaries do not change::

            print(engine.statistics().waited_s)
        """
        return self._shutdown.statistics()

    def close(self, *, drain: bool = True) -> bool:
        """Capture the last step, make it durable, end the keeper and free the memory. Idempotent::

            engine.close()  # the end of ``with engine`` does it

        The last step is captured also between the steps of ``every_n_steps``, unless weights changed after its
        boundary. Memory is freed once the newest capture is stored at every level. Otherwise it stays for a restart, as
        after a crash. If this start captured nothing, memory of earlier starts stays, too.

        Collective. Blocks: at most ``collective_timeout_s`` for other ranks, ``drain_timeout_s`` for storage, and a few
        times ``io_timeout_s`` for copies, names and the keeper.

        Args:
            drain: False captures nothing and does not wait for storage. The keeper keeps storing.

        Returns: False if the last due step was not captured or not stored at every level, if another rank is missing,
        and after ``abandon``.

        Raises: SystemExit, if the training is preempted.
        """
        return self._shutdown.close(drain=drain)

    def abandon(self, error: BaseException | None = None) -> None:
        """End as after a crash: the keeper stores the newest capture and waits for a restart::

            except RuntimeError as error:
                engine.abandon(error)
                raise

        Args:
            error: the exception that ends the training, for the message to the user.

        Raises: SystemExit, if the training is preempted and there is no ``error``.
        """
        self._shutdown.abandon(error)


def _source_of(state: StateSource | Mapping[str, Any]) -> StateSource:
    """Return the state as a StateSource. Raises: ConfigError, if it is neither a mapping nor a StateSource."""
    if isinstance(state, StateSource):
        return state
    kind = type(state).__qualname__
    if isinstance(state, Mapping):
        if state:
            return ObjectState(state)
        kind = "an empty one"
    raise ConfigError(
        'SnapshotEngine: the state must be a dict of names to objects, as in {"model": model, "optimizer": '
        f"optimizer}}, or a StateSource; got {kind}"
    )


_engines: "weakref.WeakSet[SnapshotEngine]" = weakref.WeakSet()
"""All engines of this process. The thread of a keeper connection needs its engine."""


def _end_earlier(identity: JobIdentity) -> None:
    """Abandon all open engines of this process and this job: a cell of a notebook is run again."""
    for engine in list(_engines):
        if engine._identity == identity and engine._pid == os.getpid():
            engine._shutdown.give_way()
