"""The engine: one pair of calls round every optimizer step, ``boundary`` and ``gate``, and ``restore`` at the start."""

import functools
import os
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Literal, ParamSpec, TypeVar

from lazysnap.capture.plan import check_kinds
from lazysnap.config import KeepBest, SnapshotConfig, config_at
from lazysnap.engine.best import BestSnapshots
from lazysnap.engine.boundaries import Boundaries
from lazysnap.engine.level_checks import shared_levels
from lazysnap.engine.messages import Messages
from lazysnap.engine.preemption import Preemption
from lazysnap.engine.recorder import Recorder
from lazysnap.engine.rollback import Rollback, roll_back
from lazysnap.engine.run import Run
from lazysnap.engine.shutdown import Shutdown
from lazysnap.engine.statistics import Statistics
from lazysnap.engine.stored import ShowStored, wait_durable, wait_protected
from lazysnap.errors import ConfigError, JobBusy
from lazysnap.keeper.client import KeeperClient
from lazysnap.keeper.identity import JobIdentity
from lazysnap.ranks.checks import check_places, together
from lazysnap.ranks.discovery import discover_keepers
from lazysnap.ranks.world import World
from lazysnap.restore.restart import Restart
from lazysnap.restore.snapshot import Snapshot
from lazysnap.shard.names import check_name
from lazysnap.state.objects import ObjectState
from lazysnap.state.source import StateSource

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _refused_shortly(method: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Make ``method`` raise JobBusy without the calls within: every rank prints it, and its text says all."""

    @functools.wraps(method)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            return method(*args, **kwargs)
        except JobBusy as error:
            raise error.with_traceback(None) from None

    return call


class SnapshotEngine:
    """Captures the training state lazily at optimizer-step boundaries, and restores it::

        engine = SnapshotEngine("runs/a", {"model": model, "optimizer": optimizer})
        engine.restore("latest")
        with engine:
            while engine.step < steps:
                ...
                optimizer.step()
                engine.boundary()

    The end of the ``with`` block closes the engine (``close``). After an exception, ``KeyboardInterrupt`` or a
    ``SystemExit`` with an exit status it is left as after a crash (``abandon``): the next start resumes from memory.
    After its end it takes no calls but ``statistics``, ``gate``, ``close`` and ``abandon``: others raise ConfigError.

    One engine per process and job, on the training thread. A later one takes the place of the one before, which is
    left as after a crash: a cell of a notebook may be run again.

    With ``torch.distributed`` every rank makes an engine at the same point. Making it, ``restore``, the first
    ``boundary``, ``keep_best``, ``rollback`` and ``close`` are collective. ``keep``, ``release`` and ``wait`` wait for
    no other rank, but all ranks call them. A failing keeper or level never raises into training: that is logged once,
    counted in ``statistics()``, and tried again.
    """

    def __init__(
        self, config: "SnapshotConfig | str | os.PathLike[str]", state: StateSource | Mapping[str, Any]
    ) -> None:
        """Collective. Blocks: for other ranks.

        Args:
            config: a ``SnapshotConfig``, or a path or URL: the one place for snapshots, with default settings.
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
            default_url: the place of snapshots where the config names none.
            takes_over: an earlier engine of this process and job that was not ended is left as after a crash. Its
                keeper would refuse this one.

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
        if takes_over:
            _end_earlier(identity)
        self._identity = identity
        self._source = _source_of(state)
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
        """The process that made it: in a forked child it is of no use."""
        _engines.add(self)

    def _new_run(self) -> Run:
        """Agree with the other ranks on how they reach each other, and make the run. Collective. Blocks.

        Raises: ConfigError; WaitTimeout.
        """
        check_places(self._world, self._config, self._identity.job_id)
        discovery = discover_keepers(self._world, self._client, self._config, self._identity.job_id)
        self._recorder.memory.group = discovery.group
        shared = shared_levels(self._world, self._config.levels)
        restart = Restart(
            self._config,
            self._source,
            self._client,
            self._identity,
            self._world,
            discovery,
            start=self._recorder.meta.start,
        )
        return Run(restart, self._recorder, shared)

    def _seal(self, timeout_s: float) -> None:
        self._boundaries.seal(timeout_s)

    def _check_open(self, call: str) -> None:
        """Raises: ConfigError, after the end."""
        if self._shutdown.is_replaced:
            raise ConfigError(
                f"{call}: another SnapshotEngine of this process was made later for the same snapshots, and took the "
                "place of this one; use the later one, or give each a directory of its own"
            )
        if self._shutdown.is_closed:
            raise ConfigError(
                f"{call}: this engine was closed, by close(), abandon() or the end of its with block; make another "
                "SnapshotEngine to go on"
            )

    @_refused_shortly
    def __enter__(self) -> "SnapshotEngine":
        """Begin training. Memory is made ready in the background, after ``restore`` if that comes later.

        Raises: StateError, for a tensor of the model that no snapshot can hold; KeeperError, where memory is required
        and cannot be had.
        """
        self._check_open("with engine")
        self._is_training = True
        if self._run.start_reported:
            self._prepare()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do ``close()``, or ``abandon()`` after an exception. Collective and blocks, as these."""
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

        ``None`` before ``restore`` or the first boundary decides which run it is. A rollback, and the choice of an
        older snapshot, begin a new run with an id of its own.
        """
        return self._run.run_id

    @_refused_shortly
    def all_steps(self) -> list[int]:
        """Return the steps that a restart could resume, in ascending order::

            print(engine.all_steps())  # [800, 900, 960]

        They are those of this run; before ``restore`` or the first boundary, of the newest run. A step counts if this
        rank's memory has its capture, or a level all its files. Nothing is read or verified.
        Blocks: starts or finds the keeper, and lists all levels at once, each at most ``timeout_s`` without progress.
        A level that does not answer is left out. Not collective.

        Raises: JobBusy, if this job runs already.
        """
        self._check_open("all_steps")
        return self._run.steps()

    # ---------------------------------------------------------------- restart

    @_refused_shortly
    def _fetch(self, which: int | str = "latest") -> Snapshot | None:
        """Read the freshest snapshot that verifies, or that of one step, name or run. The live state stays as it is.

        ``which``: see ``restore``.
        Blocks: starts or finds the keeper, lists every level, reads and verifies one snapshot. A level that does not
        answer within its ``timeout_s`` is passed over. Where memory has the whole of ``"latest"``, a level has 3 s; if
        it answers later and has a newer one, a warning says so. With several ranks collective: all get the same one,
        or none.
        Raises: JobBusy, if this job runs already; StateError, if the snapshot is of another model;
        SnapshotNotFound, if a step, name or run was asked for that is not there; ConfigError, for a bad name;
        WaitTimeout, if another rank is missing.
        """
        self._check_open("fetch")
        return self._run.fetch(which)

    @_refused_shortly
    def restore(self, which: int | str = "latest") -> Snapshot | None:
        """Resume the freshest snapshot that survived, or the one that is asked for::

            snapshot = engine.restore("latest")  # None in a first start

        If another snapshot than the newest is chosen, a new run begins there, and what was captured after it stays.
        ``"latest"`` means the new run as soon as that has a complete snapshot.

        Collective: all ranks get the same snapshot, or none. Blocks: starts or finds the keeper, lists every level,
        reads and verifies one snapshot, and loads it. A level that does not answer within its ``timeout_s`` is passed
        over. Where memory has the whole of ``"latest"``, levels have 3 s; a warning names what a late one has.

        Args:
            which: ``"latest"``, a step, a name that ``keep`` gave, ``"best"`` (see ``keep_best``), ``"run:1f3a"`` (the
                newest snapshot of the run whose id begins so) or ``"run:1f3a@200"`` (step 200 of it).

        Returns: the snapshot, whose state is loaded; ``None`` if there is none to resume.

        Raises: SnapshotNotFound, if ``which`` names a snapshot that is not there; StateError, if it is of another
            model, or the model has a tensor that no snapshot can hold; JobBusy, if this job runs already; ConfigError,
            for a bad name; WaitTimeout, if another rank is missing; what ``load_state_dict`` raises. An error on one
            rank is raised on all; one that is not of this package as StateError.
        """
        self._check_open("restore")
        self._together("checking the model", self._check_model)
        # Before the first step: from here on it is known which gradients a step has used.
        self._boundaries.gates.install(self._source.optimizers())
        snapshot = self._run.restore(which)
        if self._is_training:
            self._prepare()
        return snapshot

    def _fetch_to_read(self, which: int | str = "latest") -> Snapshot:
        """Read as ``_fetch``, for an evaluation, which may use another floating dtype.

        Of a training that runs at this moment the memory is its own, and what it stored is read.
        Blocks. Collective, too. Raises: as ``_fetch``, but for JobBusy; SnapshotNotFound, if there is none.
        """
        self._check_open("fetch")
        return self._run.fetch_to_read(which)

    def _load(self, snapshot: Snapshot, *, position: str = "") -> None:
        """Load what ``_fetch`` returned into the live objects, and go on there, as ``restore``. Collective. Blocks.

        ``position``: where in the data it goes on, in words. Raises: as ``restore``.
        """
        self._check_open("load")
        self._run.load(snapshot, position=position)

    def _check_model(self) -> None:
        check_kinds(self._source.expected().items())

    def _together(self, purpose: str, work: Callable[[], object]) -> None:
        """Do ``work`` on every rank; what one of them raises, all raise, with its number. Collective. Blocks."""
        together(self._world, purpose, work)

    # ---------------------------------------------------------------- training

    @_refused_shortly
    def _prepare(self) -> None:
        """Start the keeper and let it make memory ready in the background: the first capture waits less for it.

        Does not block, unless memory is required (``SnapshotConfig.require_memory``): then one rank that is alone waits
        for it, several do at their first boundary or in ``Boundaries.check_memory``. Optional: ``with engine`` does it,
        or else the first ``boundary``.
        Raises: StateError, for a tensor of the model that no snapshot can hold; as ``Boundaries.check_memory``.
        """
        self._check_open("prepare")
        self._boundaries.prepare()
        if self._world.is_alone:
            self._boundaries.check_memory()

    def _wait_ready(self, timeout_s: float) -> bool:
        """Block until all memory is there; ``False`` after the deadline, or as soon as the keeper refuses it.

        For tests and benchmarks: in training the first boundary waits for what it needs. After this call the next one
        does, too.
        """
        self._prepare()
        return self._boundaries.wait_ready(timeout_s)

    @_refused_shortly
    def boundary(self, step: int | None = None, *, force: bool = False) -> bool:
        """Capture the state: optimizer step ``step`` and all that follows it is over::

            optimizer.step()
            scheduler.step()
            engine.boundary()

        Large tensors are copied after the call, until the next optimizer step. Whatever changes them before that calls
        ``gate`` first. A write through ``.data`` or NumPy goes unseen, such as averaged weights that are swapped in for
        an evaluation: without ``gate`` it would be captured as if it were the state of this step.

        Collective: the first one. Blocks: the first capture, and the first after ``restore``, waits for memory for one
        snapshot, at most ``io_timeout_s``. Later ones do not wait for copies, storage or the keeper: where storage
        holds all slots, the capture is skipped. On a device, a boundary waits until the capture before it is whole.

        Args:
            step: number of the step; default: one more than ``engine.step``.
            force: capture it also between the steps of ``every_n_steps``.

        Returns: True if a capture began.

        Raises: at the first boundary StateError, for a value that cannot be encoded, and KeeperError, where memory is
            required and cannot be had; JobBusy, if the same job runs already on this node; ConfigError after the end,
            or while a graph is being captured; SystemExit, when the training is preempted (docs/preemption.md); what
            code of the program raises in it, such as ``state_dict``; WaitTimeout at the first boundary, if memory is
            required and another rank is missing.
        """
        self._check_open("boundary")
        if step is None:
            step = self.step + 1
        return self._boundaries.boundary(step, force=force)

    def _last_boundary(self, step: int) -> bool:
        """``boundary`` behind the last step of a training, due or not; ``True`` if that step is captured. Not after the
        end of the engine.

        Blocks: until there is a slot, at most ``io_timeout_s``, and until the copies are done: what comes after a
        training may change weights. Raises: as ``boundary``.
        """
        return not self._shutdown.is_closed and self._boundaries.last_boundary(step)

    def _replan(self) -> None:
        """Work out anew, at the next boundary, what each rank captures: ranks hold less alike than before.

        Does not block, and needs no other rank: where the state that they shared agreed, a part of it does. All are to
        call it before the same boundary.
        """
        self._check_open("replan")
        with self._boundaries.lock:
            self._recorder.forget_plan()

    def gate(self) -> None:
        """Wait until parameters and optimizer state may change again: the last capture's copies are done::

            engine.gate()
            swap_in_averaged_weights(model)

        Hooks on every optimizer call it. Call it before anything else that changes weights, and always before
        ``replay()`` of a graph that holds an optimizer step, where no hook runs.
        Blocks: on the copy thread, at most ``io_timeout_s``; then that snapshot is dropped and training goes on. What
        a device copies is waited for by the device; the next gate behind that blocks until it is done.

        Raises: ConfigError, while a graph is being captured, if a copy is in flight that the graph could not wait for.
        """
        self._boundaries.gate()

    def rollback(self, *, steps: int = 1, reason: str = "") -> Rollback:
        """Go back in place to the newest snapshot at least ``steps`` older than the step in progress::

            if not math.isfinite(loss):
                engine.rollback(reason="the loss is not finite")

        The step in progress is the one after the last boundary: called in place of ``boundary(20)``, this gives step
        19. The state comes from memory, else from storage; gradients are cleared. Data loaders stay where they are: the
        batches since then are skipped. Snapshots with NaN in trained weights or optimizer state are passed over.

        Captures that are newer than the snapshot are dropped: a new run begins, and its first capture is whole in
        memory at the end of this call. A crash before that, or the loss of trainer and keeper together before storage
        has it, may resume a newer snapshot that storage has already. Called in place of ``boundary``, where nothing
        newer was captured, it has no such window.

        Collective. Blocks: for reading and loading.

        Args:
            steps: how far to go back at least.
            reason: for the line that the user sees.

        Returns: the step at which training stands again, and how long it took.

        Raises: SnapshotNotFound; ConfigError; what ``load_state_dict`` raises; WaitTimeout.
        """
        self._check_open("rollback")
        return roll_back(self._run, self._boundaries, steps, reason)

    # ---------------------------------------------------------------- names

    def keep(self, name: str) -> int:
        """Give the newest snapshot, that of the last boundary, a name::

            engine.keep("before-anneal")

        It must be stored, due or not, and each level that has it keeps it until ``release``. Where the last boundary
        was not captured, or an optimizer stepped since (as in a validation of Lightning), the next one is captured and
        named. A name is never given to another snapshot than that one. It is safe once the snapshot is stored: if the
        first level cannot store it before its slot is gone, a warning says so (docs/levels.md).
        Does not block. All ranks call it.

        Args:
            name: 1 to 64 letters, digits, points, dashes or underscores.

        Returns: the step; of a boundary that is still to come, the least that it can have.

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

        ``restore("best")`` resumes the best of all that are there, and so do ``load_weights`` and ``export``.
        Collective: the value of rank 0 counts. Blocks: for other ranks; the first call also until the first level is
        listed, at most ``io_timeout_s``.

        Args:
            monitor: name of the metric.
            value: its value in the state of the present step. NaN and infinity are never among the best.
            mode: ``"min"`` or ``"max"``: which values are better. Of equal values the earlier one is.
            count: snapshots to keep. One more stays until the next call.

        Returns: the step, as ``keep``; ``None`` if the snapshot is not among the best.

        Raises: ConfigError, also without persistent levels; WaitTimeout, if another rank is missing.
        """
        self._check_open("keep_best")
        self._check_levels("keep_best")
        return self._best.keep(KeepBest(monitor, mode=mode, count=count), float(value))

    def _check_levels(self, call: str) -> None:
        """Raises: ConfigError, if nothing could be kept."""
        if not self._config.levels:
            raise ConfigError(f"{call}: there is no persistent level that could keep a snapshot")

    def _lost_names(self) -> Mapping[str, str]:
        """Return the names that ``keep`` gave whose snapshot the first level will never have, and why.

        As the keeper knows now: between two boundaries, too.
        """
        if not self._shutdown.is_closed:
            with self._boundaries.lock:
                self._recorder.memory.follow_keeper()
        return self._recorder.memory.events.lost_names

    def release(self, name: str) -> None:
        """Take a name from this run's snapshots: retention treats them as any other::

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

        ``"protected"`` and ``"durable"`` are for all ranks: all wait for the same step, and all must have captured it.

        Args:
            step: the step, or a later one; default: the last capture that began, else the step that was resumed.
            until: ``"captured"``: whole in the memory of this rank. ``"protected"``: survives the loss of a node.
                ``"durable"``: complete at the first level.
            timeout_s: seconds to wait at most.

        Returns: False after the deadline, or if that capture was dropped.

        Raises: ConfigError, if nothing could make it so.
        """
        self._check_open("wait")
        if until not in ("captured", "protected", "durable"):
            raise ConfigError(f'wait: until must be "captured", "protected" or "durable", got {until!r}')
        if until == "protected" and self._run.restart.discovery.redundancy is None:
            raise ConfigError("wait: nodes do not protect each other: there is only one, or redundancy is None")
        if until == "durable" and not self._config.levels:
            raise ConfigError("wait: there is no persistent level that could make a snapshot durable")
        self._boundaries.finish_copies()
        if step is None:
            step = self._recorder.last_step
        if step is None:
            return False
        if until == "captured":
            return self._boundaries.wait_captured(step, timeout_s)
        if until == "protected":
            return wait_protected(self._run, step, timeout_s)
        return wait_durable(self._run, step, timeout_s)

    def _flush(self, timeout_s: float, progress: ShowStored | None = None) -> bool:
        """Block until the newest capture is durable at every level.

        ``False`` after the deadline, if it was dropped, or if nothing at all was captured of what was due. With several
        ranks durable on all of them, so all are to call it at the same step.
        ``progress`` is called with bytes that levels have, and bytes that all of them together are to have.
        """
        self._check_open("flush")
        return self._shutdown.flush(timeout_s, progress)

    def statistics(self) -> Statistics:
        """Return counters and timings so far.

        They are a copy, which later boundaries do not change::

            print(engine.statistics().waited_s)
        """
        return self._shutdown.statistics()

    def close(self, *, drain: bool = True, progress: ShowStored | None = None) -> bool:
        """End well: capture the last step, make it durable, end the keeper, free the memory. Idempotent::

            engine.close()  # the end of ``with engine`` does it

        The last step is captured also between the steps of ``every_n_steps``, unless weights changed after its
        boundary. Memory is freed once the newest capture is stored at every level. Else it stays as after a crash, and
        a restart finds it; memory of earlier starts stays also where this start captured nothing.

        Collective. Blocks: at most ``collective_timeout_s`` for other ranks, ``drain_timeout_s`` for storage, and a few
        times ``io_timeout_s`` for copies, names and the keeper.

        Args:
            drain: False captures nothing, and waits for no storage: the keeper goes on storing.
            progress: called with the bytes that levels have, and the bytes that all of them are to have.

        Returns: False if the last step that was due was not captured, or not stored at every level, if another rank is
            missing, and after ``abandon``.

        Raises: SystemExit, if the training is preempted.
        """
        return self._shutdown.close(drain=drain, progress=progress)

    def abandon(self, error: BaseException | None = None) -> None:
        """Leave without goodbye, as a crash would: the keeper stores the newest capture and waits for a restart::

            except RuntimeError as error:
                engine.abandon(error)
                raise

        Args:
            error: the exception that ends the training, for the line that the user sees.

        Raises: SystemExit, if the training is preempted and there is no ``error``.
        """
        self._shutdown.abandon(error)


def _source_of(state: StateSource | Mapping[str, Any]) -> StateSource:
    """Return the state as a source. Raises: ConfigError, if it is none."""
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
"""All engines of this process. One that is connected to a keeper stays here: the thread of its connection needs it."""


def _end_earlier(identity: JobIdentity) -> None:
    """Leave all engines of this process and this job, as after a crash: a cell of a notebook is run again."""
    for engine in list(_engines):
        if engine._identity == identity and engine._pid == os.getpid():
            engine._shutdown.give_way()
