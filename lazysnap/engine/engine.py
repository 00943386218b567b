"""The engine: one pair of calls round every optimizer step, ``boundary`` and ``gate``, and ``restore`` at the start."""

import functools
import os
import time
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Literal, ParamSpec, TypeVar

from lazysnap.capture.plan import check_kinds
from lazysnap.config import SnapshotConfig, config_at
from lazysnap.core.messages import StepKey
from lazysnap.engine.boundaries import Boundaries
from lazysnap.engine.level_checks import shared_levels
from lazysnap.engine.messages import Messages
from lazysnap.engine.preemption import Preemption, RankCaptures
from lazysnap.engine.recorder import Recorder
from lazysnap.engine.rollback import Rollback, roll_back
from lazysnap.engine.run import Run
from lazysnap.engine.shutdown import Progress, Shutdown
from lazysnap.engine.statistics import Statistics
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
    """Captures the training state lazily at optimizer-step boundaries, and restores it.

    ``state`` is a ``StateSource``, or a mapping of names to objects with ``state_dict`` and ``load_state_dict``.
    ``config`` is a ``SnapshotConfig``, or a path or URL: the one place for snapshots, with default settings::

        engine = SnapshotEngine("runs/a", {"model": model, "optimizer": optimizer})
        engine.restore("latest")
        with engine:
            while engine.step < steps:
                ...
                optimizer.step()
                engine.boundary()

    At the end of the ``with`` block the engine is closed (``close``). After an exception, ``KeyboardInterrupt`` or a
    ``SystemExit`` with an exit status it is left as after a crash (``abandon``): the next start resumes from memory.

    After its end it takes no calls but ``statistics``, ``gate``, ``close`` and ``abandon``: others raise ConfigError.

    Methods with an underscore are for integrations of this package.

    One engine per process and job, used on the training thread: a later one takes the place of the one before, which is
    left as after a crash (``abandon``). So a cell of a notebook that makes the engine may be run again.

    With ``torch.distributed`` initialised, every rank makes one at the same point; making it, ``restore``, the first
    ``boundary`` and ``close`` are collective then. ``keep`` and ``wait`` do not wait for other ranks, but all ranks
    have to call them. Whatever fails in a keeper or a level never raises into training: it is logged once, counted in
    ``statistics()``, and tried again.
    """

    def __init__(
        self,
        config: "SnapshotConfig | str | os.PathLike[str]",
        state: StateSource | Mapping[str, Any],
        *,
        default_url: str | None = None,
        takes_over: bool = True,
    ) -> None:
        """Collective. Blocks: for other ranks.

        Args:
            config: see above.
            state: see above.
            default_url: for integrations: the place of snapshots where the config names none.
            takes_over: for integrations: an earlier engine of this process and job that was not ended is left as after
                a crash. Its keeper would refuse this one.
        """
        self.config = config_at(config)
        identity = JobIdentity.from_config(self.config, default_url)
        if takes_over:
            _end_earlier(identity)
        self._identity = identity
        self._source = _source_of(state)
        self._world = World(self.config.collective_timeout_s, self._source.optimizers())
        place = self._world.place
        self._client = KeeperClient(
            identity,
            place.local_rank,
            linger_s=self.config.memory.linger_s,
            io_timeout_s=self.config.io_timeout_s,
        )
        messages = Messages(Statistics(), is_first=self._world.rank == 0, speaks_for_node=place.local_rank == 0)
        self._recorder = Recorder(self.config, self._source, self._client, messages, self._world)
        self._run = self._new_run()
        self._preemption = Preemption(self.config, self._client, self._captures, self._seal)
        self._boundaries = Boundaries(self.config, self._source, self._world, self._run, self._preemption)
        self._shutdown = Shutdown(self.config, self._world, self._run, self._boundaries, self._preemption)
        self._is_training = False
        """True if the ``with`` block was entered."""
        self._pid = os.getpid()
        """The process that made it: in a forked child it is of no use."""
        _engines.add(self)

    def _new_run(self) -> Run:
        """Agree with the other ranks on how they reach each other, and make the run. Collective. Blocks.

        Raises: ConfigError; WaitTimeout.
        """
        check_places(self._world, self.config, self._identity.job_id)
        discovery = discover_keepers(self._world, self._client, self.config, self._identity.job_id)
        self._recorder.memory.group = discovery.group
        shared = shared_levels(self._world, self.config.levels)
        restart = Restart(
            self.config,
            self._source,
            self._client,
            self._identity,
            self._world,
            discovery,
            start=self._recorder.meta.start,
        )
        return Run(restart, self._recorder, shared)

    def _captures(self) -> RankCaptures:
        return self._shutdown.captures()

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
        if self._run.has_told_start:
            self._prepare()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """``close(drain=True)``, or ``abandon()`` after an exception. Blocks, and collective, as these are."""
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            self.close(drain=True)
        else:
            self.abandon(error)

    @property
    def step(self) -> int:
        """The step of the last boundary, or of the snapshot that was restored after it; 0 before the first."""
        return self._recorder.seen_step or 0

    @property
    def run_id(self) -> str | None:
        """The id of the run that this engine trains: 16 hexadecimal digits, the same on all ranks and after every
        restart of the run. ``None`` before ``restore`` or the first boundary decides which run it is.

        A rollback, and the choice of an older snapshot, begin a new run with an id of its own.
        """
        return self._run.run_id

    @_refused_shortly
    def all_steps(self) -> list[int]:
        """Return the steps that a restart could go on from, in ascending order: those of which this rank's memory has
        its capture, or a level all files. Of this run; before ``restore`` or the first boundary, of the newest one.

        By their names: nothing is read or verified. Blocks: starts or finds the keeper, and lists all levels at once,
        each at most ``timeout_s`` without progress; what does not answer is left out. Not collective.
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
        """Resume the freshest snapshot that verifies, or that of one step, name or run.

        ``None``: there is nothing, start fresh.

        ``which``: ``"latest"``, a step, a name that ``keep`` gave, ``"run:1f3a"`` (the newest snapshot of the run whose
        id begins so) or ``"run:1f3a@200"`` (that step of it). If another snapshot than the newest is chosen, a new run
        begins there. What was captured after it stays. ``"latest"`` means the new run as soon as that has a complete
        snapshot.
        Blocks: starts or finds the keeper, lists every level, reads and verifies one snapshot, and loads it into the
        live objects. A level that does not answer within its ``timeout_s`` is passed over. Where memory has the whole
        of ``"latest"``, a level has 3 s; if it answers later and has a newer one, a warning says so. With several ranks
        collective: all get the same one, or none.
        Raises: JobBusy, if this job runs already; StateError, if the snapshot is of another model, or the model has a
        tensor that no snapshot can hold; SnapshotNotFound, if a step, name or run was asked for that is not there;
        ConfigError, for a bad name; WaitTimeout, if another rank is missing; what ``load_state_dict`` raises. With
        several ranks, an error on one of them is raised on all; one that is not of this package as StateError.
        """
        self._check_open("restore")
        self._together("checking the model", lambda: check_kinds(self._source.expected().items()))
        # Before the first step: from here on it is known which gradients a step has used.
        self._boundaries.gates.install(self._source.optimizers())
        snapshot = self._run.restore(which)
        if self._is_training:
            self._prepare()
        return snapshot

    def _resume(self, snapshot: Snapshot, *, position: str = "", seconds: float | None = None) -> None:
        """Continue the run that ``snapshot`` is of, or begin a new one there (see ``restore``), and print that; for
        callers of ``fetch`` that loaded the state.

        ``position``: where in the data it goes on, in words; ``seconds``: what fetching and loading took together.
        """
        self._check_open("resume")
        self._run.resume(snapshot, position=position, seconds=seconds)

    def _fetch_to_read(self, which: int | str = "latest") -> Snapshot:
        """Read as ``_fetch``, for an evaluation, which may use another floating dtype.

        Of a training that runs at this moment the memory is its own, and what it stored is read.
        Blocks. Collective, too. Raises: as ``_fetch``, but for JobBusy; SnapshotNotFound, if there is none.
        """
        self._check_open("fetch")
        return self._run.fetch_to_read(which)

    def _load(self, snapshot: Snapshot, *, position: str = "") -> None:
        """Load what ``_fetch`` returned into the live objects, and ``_resume`` there. Collective. Blocks.

        ``position``: where in the data it goes on, in words. Raises: as ``restore``.
        """
        self._check_open("load")
        self._run.load(snapshot, position=position)

    def _together(self, what: str, work: Callable[[], object]) -> None:
        """Do ``work`` on every rank; what one of them raises, all raise, with its number. Collective. Blocks."""
        together(self._world, what, work)

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
        """Capture the state: optimizer step ``step`` and all that follows it is over. ``True`` if a capture began.

        Large tensors are copied after the call, until the next optimizer step. Whatever changes them before that must
        call ``gate`` first. A write through ``.data`` or NumPy goes unseen, such as averaged weights that are swapped
        in for an evaluation: without ``gate`` it would be captured as if it were the state of this step.
        ``step``: one more than ``engine.step`` if not given. ``force``: capture it also between the steps that
        ``every_n_steps`` names (the last one, or before an exit).
        Blocks: the first capture, and the first after ``restore``, waits for memory for one snapshot, at most
        ``io_timeout_s``; not, once it is known that there is none. Later ones do not block on copies, storage or the
        keeper: where storage holds all slots, the capture is skipped. On a device, a boundary waits until the capture
        before it is whole.
        With several ranks the first is collective, the others not.
        Raises: StateError at the first boundary, for a value that cannot be encoded; JobBusy, if the same job
        runs already on this node; ConfigError after the end, or while a graph is being captured; at the first boundary
        also KeeperError, where memory is required and
        cannot be had; SystemExit, when the training is preempted (docs/preemption.md).
        Also what code of the program raises in it, such as its signal handlers and ``state_dict``. Nothing else.
        """
        self._check_open("boundary")
        return self._boundaries.boundary(self.step + 1 if step is None else step, force=force)

    def _last_boundary(self, step: int) -> bool:
        """``boundary`` behind the last step of a training, due or not; ``True`` if that step is captured. Not after the
        end of the engine.

        Blocks: until there is a slot, at most ``io_timeout_s``, and until the copies are done: what comes after a
        training may change weights. Raises: as ``boundary``.
        """
        return not self._shutdown.is_closed and self._boundaries.last_boundary(step)

    def _replan(self) -> None:
        """Work out anew, at the next boundary, what each rank captures: what all ranks hold alike has changed.

        Does not block; that boundary is collective with several ranks, so all are to call it before the same one.
        """
        self._check_open("replan")
        with self._boundaries.lock:
            self._recorder.forget_plan()

    def gate(self) -> None:
        """Return when parameters and optimizer state may change again: the last capture's copies are done.

        Blocks: on the copy thread, at most ``io_timeout_s``; then that snapshot is dropped and training goes on. What
        a device copies is waited for by the device; the next gate behind that blocks until it is done.
        Called by hooks on every optimizer; call it yourself before anything else that changes weights: always before
        ``replay()`` of a graph that holds an optimizer step, for hooks do not run then.
        Raises: ConfigError, while a graph is being captured, if a copy is in flight that the graph could not wait for.
        """
        self._boundaries.gate()

    def rollback(self, *, steps: int = 1, reason: str = "") -> Rollback:
        """Go back in place to the newest snapshot at least ``steps`` older than the step in progress.

        That step is the one after the last boundary: called in place of ``boundary(20)``, this gives step 19, and so
        does ``steps=2`` after it.

        The state comes from memory (the keeper and this process go on), else from storage; gradients are cleared. Data
        loaders stay where they are: the batches since then are skipped. ``reason``: for the line that the user sees.
        Snapshots with NaN in trained weights or optimizer state are passed over.

        Captures that are newer than the snapshot are dropped, and are not offered to ``"latest"`` any more: a new run
        begins. Its first capture is whole in memory at the end of this call. Until then, a crash may resume a newer
        snapshot that storage has already. Until storage has the first capture, the loss of trainer and keeper together
        may do that. Called in place of ``boundary``, where nothing newer was captured,
        it has no such window.

        Collective. Blocks: for reading and loading. Raises: SnapshotNotFound; ConfigError; what ``load_state_dict``
        raises; WaitTimeout.
        """
        self._check_open("rollback")
        return roll_back(self._run, self._boundaries, steps, reason)

    # ---------------------------------------------------------------- names

    def keep(self, name: str) -> int:
        """Name the newest snapshot, that of the last boundary; return its step. It must be stored, due or not, and each
        level that has it keeps it until ``release``.

        Where the last boundary was not captured, or an optimizer stepped since (as in a validation of Lightning), the
        next one is named, and captured, due or not. Then the step returned is the least that it can have. A name is
        never given to another snapshot than that one. If its slot is gone before the first level has it (a torn copy,
        storage that is away for long), a warning says so. A name whose snapshot is not stored ends with the training
        process, or with the keeper's memory.
        Does not block. Raises: ConfigError, for a bad name, or without persistent levels.
        """
        self._check_open("keep")
        check_name(name)
        if not self.config.levels:
            raise ConfigError("keep: there is no persistent level that could keep a snapshot")
        with self._boundaries.lock:
            return self._recorder.keep(name, is_over=not self._boundaries.has_stepped)

    @property
    def _lost_names(self) -> Mapping[str, str]:
        """Names that ``keep`` gave whose snapshot the first level will never have, and why, if that is known."""
        return self._recorder.memory.events.lost_names

    def release(self, name: str) -> None:
        """Take ``name`` from this run's snapshots: retention treats them as any other. Does not block.

        Raises: ConfigError, for a bad name.
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
        """Block until the capture of ``step`` is safe. ``False`` after the deadline, or if that capture was dropped.

        ``step``: default: the last begun. ``until``: ``"captured"``: it is whole in the memory of this rank.
        ``"protected"``: it, or a later one, survives the loss of a node. ``"durable"``: it, or a later one, is complete
        at the first level. The latter two are for all ranks, so all are to wait for it, and all must have captured it:
        a step that one rank left out for want of a slot is ``False`` on the others.
        Raises: ConfigError, if nothing could make it so.
        """
        self._check_open("wait")
        if until not in ("captured", "protected", "durable"):
            raise ConfigError(f'wait: until must be "captured", "protected" or "durable", got {until!r}')
        if until == "protected" and self._run.restart.discovery.redundancy is None:
            raise ConfigError("wait: nodes do not protect each other: there is only one, or redundancy is None")
        if until == "durable" and not self.config.levels:
            raise ConfigError("wait: there is no persistent level that could make a snapshot durable")
        self._boundaries.finish_copies()
        step = self._recorder.last_step if step is None else step
        if step is None:
            return False
        if until == "captured":
            return self._boundaries.wait_captured(step, timeout_s)
        if until == "protected":
            return self._shutdown.wait_protected(step, timeout_s)
        return self._shutdown.wait_durable(step, timeout_s)

    def _is_to_be_stored(self, step: int, timeout_s: float) -> bool:
        """Block until the first level has ``step``, or memory keeps it for that level, which has got a name for it.

        ``False`` after the deadline: the level is busy with another step, and this one may be written over.
        """
        key = StepKey(self._run.meta.start_number, step)
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            levels = self._client.state.levels
            is_stored = bool(levels) and key in levels[0].complete
            if is_stored or self._recorder.captures.is_held(step):
                return True
            time.sleep(0.001)
        return False

    def _flush(self, timeout_s: float, progress: Progress | None = None) -> bool:
        """Block until the newest capture is durable at every level.

        ``False`` after the deadline, if it was dropped, or if nothing at all was captured of what was due. With several
        ranks durable on all of them, so all are to call it at the same step.
        ``progress`` is called with bytes that levels have, and bytes that all of them together are to have.
        """
        self._check_open("flush")
        return self._shutdown.flush(timeout_s, progress)

    def statistics(self) -> Statistics:
        """Counters and timings so far. A copy: later boundaries do not change it."""
        return self._shutdown.statistics()

    def close(self, *, drain: bool = True, progress: Progress | None = None) -> bool:
        """End well: capture the last step, make it durable, end the keeper, free the memory. Idempotent: called again
        it returns the same; ``False`` after ``abandon``.

        The last step is captured also between the steps of ``every_n_steps``, unless weights changed after its
        boundary. ``drain=False`` captures nothing and waits for no storage.
        Blocks: with several ranks at most ``collective_timeout_s`` for the others; at most ``drain_timeout_s`` for
        storage, then at most ``io_timeout_s`` for the keeper's goodbye.
        Returns ``False`` if the last step that was due was not captured, or not stored at every level. Memory then
        stays, as after a crash, and a restart finds it. ``True`` if there was no step. Memory of earlier starts stays
        if this one captured nothing. With several ranks collective; where one is missing at the deadline memory stays
        likewise, for the restart of all.
        Raises: SystemExit, if the training is preempted.
        """
        return self._shutdown.close(drain=drain, progress=progress)

    def abandon(self, error: BaseException | None = None) -> None:
        """Leave without goodbye, as a crash would: the keeper persists the newest capture and waits for a restart.

        ``error``: the exception that ends the training, for the line that the user sees.
        Raises: SystemExit, if the training is preempted and there is no ``error``.
        """
        self._shutdown.abandon(error)


def _source_of(state: StateSource | Mapping[str, Any]) -> StateSource:
    """Return the state as a source. Raises: ConfigError, if it is none."""
    source = ObjectState(state) if isinstance(state, Mapping) and state else state
    if not isinstance(source, StateSource):
        raise ConfigError(
            'SnapshotEngine: the state must be a dict of names to objects, as in {"model": model, "optimizer": '
            f"optimizer}}, or a StateSource; got {'an empty one' if state == {} else type(state).__qualname__}"
        )
    return source


_engines: "weakref.WeakSet[SnapshotEngine]" = weakref.WeakSet()
"""All engines of this process. One that is connected to a keeper stays here: the thread of its connection needs it."""


def _end_earlier(identity: JobIdentity) -> None:
    """Leave all engines of this process and this job, as after a crash: a cell of a notebook is run again."""
    for engine in list(_engines):
        if engine._identity == identity and engine._pid == os.getpid():
            engine._shutdown.give_way()
