"""The engine: one pair of calls round every optimizer step, ``boundary`` and ``gate``, and ``restore`` at the start."""

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any, Literal

from lazysnap import faults
from lazysnap.capture.devices import is_capturing_graph
from lazysnap.capture.gate import OptimizerGates
from lazysnap.capture.plan import check_kinds
from lazysnap.config import SnapshotConfig, config_at
from lazysnap.console import say
from lazysnap.data.position import position_in
from lazysnap.engine import report
from lazysnap.engine.durability import Durability, Progress
from lazysnap.engine.events import EventLog
from lazysnap.engine.level_checks import shared_levels
from lazysnap.engine.notice import Held, Notice
from lazysnap.engine.recorder import Recorder
from lazysnap.engine.rollback import Rollback, Rollbacks, line_of
from lazysnap.engine.statistics import Statistics
from lazysnap.errors import ConfigError, JobBusy, KeeperUnavailable, LazySnapError, SnapshotNotFound, UnsupportedState
from lazysnap.keeper.client import KeeperClient
from lazysnap.keeper.client_slots import CaptureState
from lazysnap.keeper.events import MemoryEntry
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.protocol import Protect, Run
from lazysnap.levels.redaction import shown
from lazysnap.ranks.checks import check_places, together
from lazysnap.ranks.meeting import meet_keepers
from lazysnap.ranks.slots import kept_whole
from lazysnap.ranks.world import World
from lazysnap.restore.restart import Restart, fetch, reseed
from lazysnap.restore.snapshot import Absence, Snapshot
from lazysnap.shard.names import check_name
from lazysnap.state.gc_pause import collector_paused
from lazysnap.state.objects import ObjectState
from lazysnap.state.optimizers import check_optimizers
from lazysnap.state.source import StateSource
from lazysnap.topology import Team
from lazysnap.warm.steps import Steps

logger = logging.getLogger(__name__)


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

    One engine per process, used on the training thread. With ``torch.distributed`` initialised, every rank makes one
    at the same point; making it, ``fetch``, ``restore``, the first ``boundary`` and ``close`` are collective then.
    ``keep``, ``wait`` and ``flush`` do not wait for other ranks, but all ranks have to call them. Whatever fails in a
    keeper or a level never raises into training: it is logged once, counted in ``statistics()``, and tried again.
    """

    def __init__(
        self,
        config: "SnapshotConfig | str | os.PathLike[str]",
        state: StateSource | Mapping[str, Any],
        *,
        default_url: str | None = None,
    ) -> None:
        self.config = config = config_at(config)
        self._source = _source_of(state)
        self._identity = identity = JobIdentity.from_config(config, default_url)
        self._world = world = World(config.collective_timeout_s, self._source.optimizers())
        team = Team.of(world.places, world.rank)
        self._notice = Notice(config, self._held, self._seal)
        self._client = KeeperClient(identity, config, team, self._notice.listener.ring)
        self._lock = threading.RLock()
        self._statistics = Statistics()
        self._events = EventLog(config, self._statistics)
        self._protection = self._events.protection
        self._events.speaks_for_node = world.place.local_rank == 0
        self._recorder = Recorder(config, self._source, self._client, self._events, world)
        check_places(world, config, identity.job_id)
        self._captures, self._history = self._recorder.captures, self._recorder.history
        self._gates = OptimizerGates(self.gate, self._captures.is_disturbed, self._stepped_beside)
        self._durability = Durability(config, self._client, world, self._history)
        self._meeting = meet_keepers(world, self._client, config, identity.job_id)
        self._recorder.group = self._meeting.group
        self._shared = shared_levels(world, config.levels)
        self._from_step = 0
        """What is captured from now on is of later steps."""
        self._stored: dict[str, list[tuple[str, int]]] = {}
        """By level: start and step of the complete snapshots that training goes on from."""
        self._restart = Restart(
            config, self._source, self._client, identity, world, self._meeting, start=self._recorder.meta.start
        )
        self._rollbacks = Rollbacks(self._restart, self._recorder)
        self._is_past_first = False
        """Whether the first boundary is over."""
        self._is_begun = False
        """Whether it is settled which run this is, so that captures may begin."""
        self._is_training = False
        """Whether the ``with`` block was entered."""
        self._absence: Absence | None = None
        self._resumed: report.Resumed | None = None
        self._steps = Steps()
        self._has_told_start = False
        """Whether the user was told how this training starts."""
        self._closed = False
        self._has_ended_well = False
        """What ``close`` returned."""
        self._is_sealed = False
        """True if nothing is captured any more, though training may go on for a moment."""

    def __enter__(self) -> "SnapshotEngine":
        """Begin training. Memory is made ready in the background, after ``restore`` if that comes later.

        Raises: as ``prepare``.
        """
        self._check_open("with engine")
        self._is_training = True
        if self._has_told_start:
            self.prepare()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """``close(drain=True)``, or ``abandon()`` after an exception. Blocks, and collective, as these are."""
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            self.close(drain=True)
        else:
            self.abandon(error)

    def _check_open(self, call: str) -> None:
        """Raises: ConfigError, after the end."""
        if self._closed:
            raise ConfigError(
                f"{call}: this engine was closed, by close(), abandon() or the end of its with block; make another "
                "SnapshotEngine to go on"
            )

    @property
    def step(self) -> int:
        """The step of the last boundary, or of the snapshot that was restored after it; 0 before the first."""
        return self._recorder.seen_step or 0

    @property
    def stop_requested(self) -> bool:
        """True once a notice says that this process is about to be killed (docs/operations.md): end the training well.

        A program that reads it ends itself, so no boundary raises SystemExit then. With several ranks it becomes true
        on all of them, though not at the same step: agree on one before you leave the loop.
        """
        return self._notice.is_requested()

    @property
    def start(self) -> str:
        """The id of this start, the same on all ranks: what is captured now is of no other one."""
        return self._recorder.meta.start

    # ---------------------------------------------------------------- restart

    def fetch(self, which: int | str = "latest") -> Snapshot | None:
        """Read the freshest snapshot that verifies (or that of one step, name or run), without touching the live
        state. ``which``: see ``restore``.

        Blocks: starts or finds the keeper, lists every level, reads and verifies one snapshot. A level that does not
        answer within its ``timeout_s`` is passed over; where ``"latest"`` is in memory whole, within 3 s, and a warning
        follows if it has a newer one. With several ranks collective: all get the same one, or none.
        Raises: JobBusy, if this job runs already; StateMismatch, if the snapshot is of another model;
        SnapshotNotFound, if a step, name or run was asked for that is not there; ConfigError, for a bad name;
        WaitTimeout, if another rank is missing.
        """
        return self._fetch(which, self._restart)

    def _fetch(self, which: int | str, restart: Restart) -> Snapshot | None:
        self._check_open("fetch")
        found = fetch(which, restart)
        if isinstance(found, Absence):
            self._absence = found
            return None
        return found

    def fetch_stored(self, which: int | str = "latest") -> Snapshot | None:
        """As ``fetch``, from storage alone: also while another process of this job trains. Blocks. Collective, too."""
        return self._fetch(which, replace(self._restart, client=None))

    def fetch_to_read(self, which: int | str = "latest") -> Snapshot:
        """Read as ``fetch``, for an evaluation, which may use another floating dtype. Of a training that runs at this
        moment the memory is its own, and what it stored is read. Blocks. Collective, too. Raises: as ``fetch``, but for
        JobBusy; SnapshotNotFound, if there is none.
        """
        restart = replace(self._restart, casts=True)
        try:
            found = self._fetch(which, restart)
        except JobBusy:
            logger.info("the training runs: reading its newest snapshot on storage")
            found = self._fetch(which, replace(restart, client=None))
        if found is None:
            where = report.places(level.url for level in self.config.levels)
            raise SnapshotNotFound(
                f"{which!r}: there is no whole snapshot {where}; train first, or give the path of a checkpoint"
            )
        return found

    def restore(self, which: int | str = "latest") -> Snapshot | None:
        """``fetch``, then load into the live objects and continue that run. ``None``: nothing there, start fresh.

        ``which``: ``"latest"``, a step, a name that ``keep`` gave, ``"run:1f3a"`` (the newest snapshot of the run whose
        id begins so) or ``"run:1f3a@200"`` (that step of it). If another snapshot than the newest is chosen, a new run
        begins there: what was captured after it stays as it is, and ``"latest"`` means the new run as soon as that has
        a complete snapshot. Blocks; collective with several ranks.
        Raises: as ``fetch``; UnsupportedState, as ``prepare``; what ``load_state_dict`` raises. With several ranks each
        of them, what one of them met; errors that are not of this package as StateError.
        """
        self._check_open("restore")
        self.together("checking the model", lambda: check_kinds(self._source.expected().items()))
        snapshot = self.fetch(which)
        if snapshot is None:
            self.tell_start()
        else:
            self.load(snapshot, position=position_in(snapshot.state))
        if self._is_training:
            self.prepare()
        return snapshot

    def load(self, snapshot: Snapshot, *, position: str = "") -> None:
        """Load what ``fetch`` returned into the live objects, and ``resume`` there. Collective. Blocks.

        Raises: as ``restore``.
        """
        self._check_open("load")
        started = time.perf_counter()
        self.together(
            "checking the optimizers", lambda: check_optimizers(self._source, snapshot.state, snapshot.parameters)
        )
        faults.point("restore.load")
        self.together("loading", lambda: self._source.load(snapshot.state))
        faults.point("restore.loaded")
        if snapshot.world_size != self._world.size:
            position = ""  # it counts batches of as many ranks as there were
            reseed(snapshot, self._world)
        self.resume(snapshot, position=position, seconds=snapshot.seconds + time.perf_counter() - started)

    def together(self, what: str, work: Callable[[], object]) -> None:
        """Do ``work`` on every rank; what one of them raises, all raise, with its number. Collective. Blocks."""
        together(self._world, what, work)

    def resume(self, snapshot: Snapshot, *, position: str = "", seconds: float | None = None) -> None:
        """Continue the run that ``snapshot`` is of, or begin a new one there (see ``restore``), and tell the user; for
        callers of ``fetch`` that loaded the state.

        ``position``: where in the data it goes on, in words; ``seconds``: what fetching and loading took together.
        """
        self._check_open("resume")
        self._go_on(snapshot, (snapshot.new_run or snapshot).run_id)
        if snapshot.world_size > 1 or not self._world.is_alone:
            self._discard_others(snapshot)
        self._begin_run()
        self._has_told_start = False
        self.tell_start(report.resumed(snapshot, time.time_ns(), position=position, seconds=seconds))
        if snapshot.new_run is not None and self._world.rank == 0:
            logger.warning("%s", report.new_run(snapshot, snapshot.new_run))

    def _go_on(self, snapshot: Snapshot, run_id: str) -> None:
        """Captures from here on are of that run, which goes on from ``snapshot``."""
        meta = self._recorder.meta
        self._rollbacks.lineage.go_on(meta.run_id, snapshot.run_id, snapshot.step)
        meta.run_id = run_id
        meta.follow(snapshot.newest_start)
        self._recorder.resume(snapshot.step)
        self._from_step = snapshot.step
        self._stored = {url: [*stored] for url, stored in snapshot.stored.items()}
        self._resumed = report.Resumed.of(snapshot, has_levels=bool(self.config.levels))

    def tell_start(self, line: str | None = None) -> None:
        """Tell the user how this training starts, if that was not told yet: ``line``, or that it starts fresh, and why.

        Called by the first of ``restore``, ``resume``, ``prepare`` and ``boundary``.
        """
        if not self._has_told_start:
            self._has_told_start = True
            line = line or report.fresh(self._absence)
            if self._world.rank == 0:
                say(line)
            else:
                logger.info("rank %d: %s", self._world.rank, line)

    def _discard_others(self, snapshot: Snapshot) -> None:
        """Drop what this memory holds beside ``snapshot``, what other nodes protect, and the newest one where another
        was chosen: not all ranks have it, and it must not outlast what they all have.
        """
        other = snapshot.protected if snapshot.new_run is None else snapshot.new_run.left
        wanted = {(snapshot.run_id, snapshot.step, snapshot.start)}
        if other is not None:
            wanted.add((other.run_id, other.step, other.start))
        self._drop("restore.discard", lambda item: (item.run_id, item.step, item.start) not in wanted)

    def _drop(self, point: str, is_unwanted: Callable[[MemoryEntry], bool]) -> None:
        """Drop captures in memory. Blocks: asks the keeper."""
        try:
            held = self._client.inventory(self.config.io_timeout_s).entries
        except KeeperUnavailable as error:
            logger.info("nothing in memory to go through: %s", error)
            return
        for item in filter(is_unwanted, held):
            faults.point(point)
            item.slot.drop(item.sequence)

    def _begin_run(self) -> None:
        """From now on captures are of this run."""
        self._is_begun = True
        meta, num_kept = (
            self._recorder.meta,
            kept_whole(self.config, self._world.size, runs_ahead=self._world.runs_ahead),
        )
        self._client.adopt_run(
            Run(
                meta.run_id,
                meta.start,
                step=self._from_step,
                floor=0,
                every_n_steps=self.config.every_n_steps,
                num_kept=num_kept,
                stored=self._stored,
                shared=self._shared,
                peers=self._meeting.peers,
                parity=self._meeting.parity,
                is_new=True,
            )
        )

    # ---------------------------------------------------------------- training

    def prepare(self) -> None:
        """Start the keeper and let it make memory ready in the background: the first capture waits less for it.

        Does not block, unless memory is required (``SnapshotConfig.require_memory``): then one rank that is alone waits
        for it, several do at their first boundary or in ``check_memory``. Optional: ``with engine`` does it, or else
        the first ``boundary``.
        Raises: UnsupportedState, for a tensor of the model that no snapshot can hold; as ``check_memory``.
        """
        self._prepare()
        if self._world.is_alone:
            self.check_memory()

    def check_memory(self) -> None:
        """Make sure of memory, where ``SnapshotConfig.require_memory`` is set. Collective then.

        Blocks: until it is there. Raises: KeeperUnavailable, JobBusy or MemoryBoundExceeded, if there is none; with
        several ranks an error on one of them is raised on all.
        """
        if self.config.require_memory:
            self.together("making sure of memory", self._await_memory)

    def _await_memory(self) -> None:
        self._prepare()
        found: list[LazySnapError] = []

        def is_refused() -> bool:
            error = self._client.refusal() or (self._protection.error if self._recorder.is_unprotected() else None)
            found.extend([] if error is None else [error])
            return error is not None

        if not self._await_slots(self.config.io_timeout_s + self.config.collective_timeout_s, is_refused):
            error = found[0] if found else KeeperUnavailable("the keeper did not make its slots ready in time")
            raise type(error)(f"SnapshotConfig(require_memory=True): {error}")

    def _await_slots(self, timeout_s: float, is_refused: Callable[[], bool]) -> bool:
        deadline = time.monotonic() + timeout_s
        while not self._recorder.is_ready():
            self._drain_events()
            self._recorder.return_slots()
            if is_refused() or time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True

    def _prepare(self) -> None:
        self._check_open("prepare")
        check_kinds(self._source.expected().items())
        self.tell_start()
        # Only once: from then on the client counts which steps are durable, and this would make it forget them.
        if not self._is_begun:
            self._begin_run()
        self._recorder.register_slots()  # before slots that an earlier start left are made ready
        self._client.start()
        self._gates.install(self._source.optimizers())
        self._recorder.prepare()
        self.listen()

    def listen(self, exception: type[BaseException] = SystemExit) -> None:
        """Heed a notice of the end from now on; ``prepare`` and the first ``boundary`` do that, too. Idempotent.

        ``exception`` is raised at the last boundary, with the exit code. Does not block.
        """
        self._notice.listen(self._client, self.step, exception)

    @property
    def listens(self) -> bool:
        """True after ``listen``."""
        return self._notice.listens

    def wait_ready(self, timeout_s: float) -> bool:
        """Block until all memory is there, frozen tensors in it; ``False`` after the deadline, or as soon as it is
        known that there is none.

        For tests and benchmarks: in training the first boundary waits for what it needs. After this call the next one
        does, too.
        """
        self.prepare()
        losses = self._protection.losses
        is_there = self._await_slots(timeout_s, lambda: self._protection.losses > losses)
        self._recorder.waits_for_memory = self._recorder.waits_for_memory or is_there
        return is_there

    def boundary(self, step: int | None = None, *, force: bool = False) -> bool:
        """Optimizer step ``step`` and all that follows it is over: capture it. ``True`` if a capture began.

        Large tensors are copied after the call, until the next optimizer step. Whatever changes them before that must
        call ``gate`` first. A write through ``.data`` or NumPy, such as averaged weights that are swapped in for an
        evaluation, goes unseen: without ``gate`` it would be captured as if it were the state of this step.
        ``step``: one more than ``engine.step`` if not given. ``force``: capture it also between the steps that
        ``every_n_steps`` names (the last one, or before an exit).
        Blocks: the first capture, and the first after ``restore``, waits until there is memory for one snapshot, at
        most ``io_timeout_s``, and no longer than until it is known that there is none. Later ones do not block on
        copies, storage or the keeper: one rank skips a capture where storage holds all slots. With several ranks the
        first is collective, the others not; where storage holds all slots, they wait for one, at most ``io_timeout_s``
        altogether: then storage gets fewer snapshots.
        On a device, a boundary waits until the capture before it is whole.
        Raises: UnsupportedState at the first boundary, for a value that cannot be encoded; JobBusy, if the same job
        runs already on this node; ConfigError after the end, or while a graph is being captured; at the first boundary
        also what ``check_memory`` raises; SystemExit, when a notice ends the training here (docs/operations.md).
        Nothing else.
        """
        began = self._boundary(step, force=force or self._notice.cuts)
        self._notice.passed(self.step)
        return began

    def _boundary(self, step: int | None, *, force: bool) -> bool:
        with self._lock:
            self._check_open("boundary")
            self.listen()
            if is_capturing_graph():
                raise ConfigError(
                    "engine.boundary() is being captured into a graph, where it would run once and never again: call "
                    "it behind replay(), and engine.gate() before it"
                )
            step = self.step + 1 if step is None else step
            self.gate()
            started = time.perf_counter()
            self._drain_events()
            refusal = self._client.refusal()
            if refusal is not None:
                raise refusal
            if step < self.step:  # a loop that begins again: these are other snapshots
                if self._world.rank == 0:
                    logger.warning("%s", report.begins_again(step, self.step))
                self._recorder.meta.follow(None)
                self._from_step, self._stored = max(0, step - 1), {}
                self._events.begin(self._from_step)
                self._begin_run()
            if not self._recorder.is_due(step, force=force) or self._is_sealed:
                self._steps.reached(step)
                return False
            self.tell_start()
            if not self._is_begun:
                self._begin_run()
            began = self._capture(step, started)
            if not self._is_past_first:
                self._is_past_first = True
                try:
                    self._say_sizes()
                except (OSError, ValueError) as error:  # the machine does not tell, and training needs no answer
                    logger.info("what the training takes is not known: %s", error)
                self.check_memory()
                if not began and self.config.require_memory:
                    began = self._capture(step, started)
            self._steps.reached(step)
            return began

    def replan(self) -> None:
        """Work out anew, at the next boundary, what each rank captures: what all ranks hold alike has changed.

        Does not block; that boundary is collective with several ranks, so all are to call it before the same one.
        """
        self._check_open("replan")
        with self._lock:
            self._recorder.planner.forget()

    def last_boundary(self, step: int) -> bool:
        """``boundary`` behind the last step of a training, due or not; ``True`` if that step is captured. Not after the
        end of the engine.

        Blocks: until there is a slot, at most ``io_timeout_s``, and until the copies are done: what comes after a
        training may change weights. Raises: as ``boundary``.
        """
        if self._closed:
            return False
        deadline = time.monotonic() + self.config.io_timeout_s
        # A short training may end before all memory is there, and slots may still be read by a slow level.
        while not self.boundary(step, force=True) and self._recorder.last_step != step:
            if time.monotonic() > deadline or not self.wait_ready(max(0.0, deadline - time.monotonic())):
                break  # ``close`` says so
            time.sleep(0.005)
        self._finish_copies()
        return self._recorder.last_step == step

    def _say_sizes(self) -> None:
        sizes = self._recorder.sizes()
        if sizes is None:
            return  # nothing could be planned
        if self._world.rank == 0:
            is_protected = self._protection.cause is None
            say(report.opening(self.config, sizes, self._world.size, is_protected=is_protected))
        if self._events.speaks_for_node:
            snapshot_bytes = sizes.state_bytes + sizes.frozen_bytes
            for shortage in report.shortages(self.config, snapshot_bytes, len(self._world.node_ranks)):
                logger.warning("%s", shortage)

    def _capture(self, step: int, started: float) -> bool:
        self._recorder.resend_to_new_keeper()
        waited_before_s = self._statistics.memory_wait_s
        try:
            self._gates.install(self._source.optimizers())
            with collector_paused():
                began = self._recorder.begin(step)
        except UnsupportedState as error:
            if not self._recorder.encoded_once:
                self._recorder.skip("unsupported state")
                raise
            self._events.note_once("state", "step %d is not captured: %s", step, error)
            began = self._recorder.skip("unsupported state")
        except JobBusy:
            raise
        except Exception as error:  # noqa: BLE001  whatever a capture meets, training goes on
            self._events.note_once("capture", "step %d is not captured: %s: %s", step, type(error).__name__, error)
            began = self._recorder.skip("error")
        seconds = time.perf_counter() - started
        self._statistics.waited_s += seconds
        if began:
            self._statistics.boundary.add(seconds - (self._statistics.memory_wait_s - waited_before_s))
        return began

    def _drain_events(self) -> None:
        """Count and log what happened."""
        self._events.drain(self._client.poll_events())

    def gate(self) -> None:
        """Return when parameters and optimizer state may change again: the last capture's copies are done.

        Blocks: on the copy thread, at most ``io_timeout_s``; then that snapshot is dropped and training goes on. What
        a device copies is waited for by the device; the next gate behind that blocks until it is done.
        Called by hooks on every optimizer; call it yourself before anything else that changes weights: always before
        ``replay()`` of a graph that holds an optimizer step, for hooks do not run then.
        Raises: ConfigError, while a graph is being captured, if a copy is in flight that the graph could not wait for.
        """
        with self._lock:
            if is_capturing_graph():
                self._check_graph()
            if not self._captures.is_copying:
                return
            started = time.perf_counter()
            is_due = self._captures.finish(self.config.io_timeout_s) is not None
            if is_due:
                faults.point("engine.gated")
            self._recorder.settle()
            seconds = time.perf_counter() - started
            self._statistics.waited_s += seconds
            if is_due:
                self._statistics.gate.add(seconds)

    def _check_graph(self) -> None:
        if self._captures.is_copying:
            raise ConfigError(
                "an optimizer step is being captured into a graph while lazysnap copies the weights: the graph cannot "
                'wait for that. Call engine.wait(until="captured", timeout_s=60) right before the capture, and '
                "engine.gate() before every replay()"
            )
        self._events.note_once(
            "graph",
            "an optimizer step is being captured into a graph: hooks do not run when it is replayed, so snapshots are "
            "torn, and nobody notices, unless you call engine.gate() before every replay()",
        )

    def _finish_copies(self) -> None:
        """``gate``, then wait for what devices still copy. Blocks: at most twice ``io_timeout_s``."""
        self.gate()
        self.gate()  # behind the gate only a device can still be copying

    def rollback(self, *, steps: int = 1, reason: str = "") -> Rollback:
        """Go back in place to the newest snapshot at least ``steps`` older than the step in progress, the one after
        the last boundary. Called in place of ``boundary(20)`` it gives step 19, and so does ``steps=2`` after it.

        The state comes from memory (the keeper and this process go on), else from storage; gradients are cleared. Data
        loaders stay where they are: the batches since then are skipped. ``reason``: for the line that the user sees.
        Snapshots with NaN in trained weights or optimizer state are passed over.

        Captures that are newer than the snapshot are dropped, and are not offered to ``"latest"`` any more: a new run
        begins. Until its first capture is whole in memory, at the end of this call, a crash may still resume a newer
        snapshot that storage has already; until storage has it, the loss of trainer and keeper together may. Where
        nothing newer was captured, as ``LossWatch`` calls it, there is no such window.

        Collective. Blocks: for reading and loading. Raises: SnapshotNotFound; ConfigError; what ``load_state_dict``
        raises; WaitTimeout.
        """
        self._check_open("rollback")
        started = time.perf_counter()
        self.gate()
        last, rollbacks = self._recorder.last_step, self._rollbacks
        if last is not None:  # a device may still be copying
            self.wait(last, until="captured", timeout_s=self.config.io_timeout_s)
        from_step, snapshot = rollbacks.from_step, rollbacks.find(steps)
        branch = rollbacks.branch(snapshot)
        faults.point("engine.rollback.found")
        if branch is not None:
            kept = snapshot.run_id, snapshot.step
            self._drop("engine.rollback.drop", lambda item: (item.run_id, item.step) > kept)
        faults.point("engine.rollback.load")
        self.together("rolling back", lambda: rollbacks.load(snapshot))
        faults.point("engine.rollback.loaded")
        if snapshot.world_size != self._world.size:
            reseed(snapshot, self._world)
        if branch is None:
            self._recorder.go_back(snapshot.step)
        else:
            self._go_on(snapshot, branch)
            self._begin_run()
            self._capture_branch(snapshot.step)
        self._statistics.rollbacks += 1
        done = Rollback(snapshot.step, from_step, snapshot.level, time.perf_counter() - started)
        if self._world.rank == 0:
            say(line_of(done, reason))
        return done

    def _capture_branch(self, step: int) -> None:
        """Make the state that was loaded the newest snapshot. Collective. Blocks: until it is whole in memory."""
        self._recorder.stores_next = True
        timeout_s = self.config.io_timeout_s
        faults.point("engine.rollback.capture")
        with self._lock:
            began = self._capture(step, time.perf_counter())
        is_held = began and self.wait(step, until="captured", timeout_s=timeout_s)
        faults.point("engine.rollback.captured")
        if not all(self._world.exchange("capturing after a rollback", is_held)):
            logger.warning(
                "step %d could not be captured after the rollback: until the next capture is whole, "
                '"latest" means the newest snapshot of the run before, which may be a bad one',
                step,
            )

    def _stepped_beside(self) -> None:
        if self._captures.discard("an optimizer stepped without passing the gate"):
            self._events.note_once("gate", "an optimizer stepped beside a running copy; that snapshot is dropped")
            self.gate()

    # ---------------------------------------------------------------- names

    def keep(self, name: str) -> int:
        """Name the newest snapshot, that of the last boundary: every level keeps it until ``release``. Its step.

        Where the last boundary was not captured, the next one will be, due or not; then the step returned is the least
        that it can have. A name is never given to another snapshot than that one: if it is lost before it is stored (a
        torn copy, memory that died), a warning says so, and ``lost_names``.
        Blocks: where storage has not taken the snapshot named before, until it has, at most ``io_timeout_s``; not
        again, once that was in vain. Raises: ConfigError, for a bad name, or without persistent levels.
        """
        self._check_open("keep")
        check_name(name)
        if not self.config.levels:
            raise ConfigError("keep: there is no persistent level that could keep a snapshot")
        with self._lock:
            return self._recorder.keep(name)

    @property
    def lost_names(self) -> Mapping[str, str]:
        """Names that ``keep`` gave whose snapshot the first level will never have, and why, as far as it is known."""
        return self._events.lost_names

    def release(self, name: str) -> None:
        """Take ``name`` from this run's snapshots: retention treats them as any other. Does not block.

        Raises: ConfigError, for a bad name.
        """
        self._check_open("release")
        check_name(name)
        with self._lock:
            self._recorder.names.release(name)

    # ---------------------------------------------------------------- waiting and ending

    def wait(
        self,
        step: int | None = None,
        *,
        until: Literal["captured", "protected", "durable"] = "durable",
        timeout_s: float,
    ) -> bool:
        """Block until the capture of ``step`` (default: the last begun) is whole in memory, or it (or a later one)
        survives the loss of a node, or is durable at the first level; ``False`` after the deadline, or if that capture
        was dropped.

        With several ranks durable and protected on all of them, so all are to wait for it; whole in the memory of this
        one.
        """
        self._check_open("wait")
        if until not in ("captured", "protected", "durable"):
            raise ConfigError(f'wait: until must be "captured", "protected" or "durable", got {until!r}')
        if until == "protected" and self._meeting.parity is None:
            raise ConfigError("wait: nodes do not protect each other: there is only one, or redundancy is None")
        if until == "durable" and not self.config.levels:
            raise ConfigError("wait: there is no persistent level that could make a snapshot durable")
        self._finish_copies()
        step = self._recorder.last_step if step is None else step
        if step is None:
            return False
        if until == "durable":
            is_durable = self._durability.wait_first(step, timeout_s)
            self._drain_events()
            return is_durable
        if until == "protected":
            return self._await_protected(step, timeout_s)
        deadline = time.monotonic() + timeout_s
        # A copy that hangs may still end. A keeper that was lost is being replaced.
        while (state := self._history.state_of(step)) in (CaptureState.COPYING, CaptureState.ALONE):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.001)
        return state is CaptureState.HELD

    def _await_protected(self, step: int, timeout_s: float) -> bool:
        def is_protected() -> bool:
            newest = self.statistics().last_protected_step
            return newest is not None and newest >= step

        deadline = time.monotonic() + timeout_s
        if not is_protected():
            self._client.tell(Protect(step))
        while not is_protected():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True

    def flush(self, timeout_s: float, progress: Progress | None = None) -> bool:
        """Block until the newest capture is durable at every level; ``False`` after the deadline, if it was dropped, or
        if nothing at all was captured of what was due.

        With several ranks durable on all of them, so all are to call it at the same step.
        ``progress`` is called with bytes that levels have, and bytes that all of them together are to have.
        """
        self._check_open("flush")
        self._finish_copies()
        done = self._durability.flush(timeout_s, progress)
        self._drain_events()
        is_captured = self._recorder.last_due is None or self._history.newest_whole() is not None
        return done and is_captured and not self._history.has_lost_last

    def statistics(self) -> Statistics:
        """Counters and timings so far; updated in place."""
        self._drain_events()
        if not self._closed:
            with self._lock:
                self._recorder.settle()
            self._statistics.last_whole_step = self._history.last_held_step()
        return self._statistics

    def close(self, *, drain: bool = True, progress: Progress | None = None) -> bool:
        """End well: make the newest capture durable, send the keeper away, free the memory. Idempotent: called again it
        says the same; ``False`` after ``abandon``.

        Blocks: with several ranks at most ``collective_timeout_s`` for the others; at most ``drain_timeout_s`` for
        storage, then at most ``io_timeout_s`` for the keeper's goodbye.
        ``False`` if something could not be made durable: it stays in memory, as after a crash, and a restart finds it;
        or if the last boundary that was due was not captured. ``True`` if there was none. What memory holds of earlier
        starts stays there if this one captured nothing. With several ranks collective; where one is missing at the
        deadline memory stays likewise, for the restart of all.
        """
        if self._closed:
            return self._has_ended_well
        if self._notice.cuts:  # the training is not over, whatever the program makes of the end
            self.abandon()
            return False
        self._notice.closes()
        durable, over, captured, has_own, unstored = False, False, True, False, list[str]()
        self._events.is_training = False
        try:
            self._finish_copies()
            over = self._world.ends()
            has_own = self._has_own()
            durable = not drain or self._end(progress, is_common=over)
            captured = not drain or self._has_captured_last()
            unstored = [] if durable else self._unstored_names()
            self._protection.sum_up()
        finally:
            self._leave()
            if over:
                self._world.close()
            # What memory holds of an earlier start is not this one's to give up, as long as it captured nothing itself.
            is_last = durable and over and has_own
            if is_last:
                self._client.goodbye(self.config.io_timeout_s)
            else:
                self._client.abandon()
            self._notice.leave()
        self._tell_end(report.Ending.CLOSED if is_last else report.Ending.LINGERING)
        if unstored and self._world.rank == 0:
            message = "the names %s are lost, unless %s takes their snapshots while memory stays (linger_s, %g s)"
            logger.warning(message, unstored, shown(self.config.levels[0].url), self.config.memory.linger_s)
        self._has_ended_well = durable and captured
        return self._has_ended_well

    def _unstored_names(self) -> list[str]:
        """Names that are neither stored nor reported as lost."""
        self._drain_events()
        unstored = self._recorder.names.unstored(self._events.first_level_has)
        return [name for name in unstored if name not in self._events.lost_names]

    def _has_own(self) -> bool:
        """Whether anything is captured since this start, or since the last restore."""
        return self._history.newest_whole() is not None

    def _tell_end(self, ending: report.Ending, error: BaseException | None = None) -> None:
        self._drain_events()
        urls = [level.url for level in self.config.levels]
        config = self.config
        if self._world.rank != 0:
            return
        resumed = self._resumed
        end = report.End(
            ending,
            urls,
            config.memory.linger_s,
            config.drain_timeout_s,
            ranks=self._world.size,
            untrained=resumed if resumed is not None and resumed.step == self._recorder.seen_step else None,
            failure=self._failure(error) if error and self._is_begun else None,
        )
        for line in report.summary(self._statistics, end):
            say(line)
        if warning := report.not_durable(self._statistics, end):
            logger.warning("%s", warning)

    def _failure(self, error: BaseException) -> report.Failure:
        held, resumed = self._statistics.last_whole_step, self._resumed
        if held is None and resumed is not None and resumed.in_memory:
            held = resumed.step
        return report.Failure(error, self.step + 1, self._newest_durable(), held)

    def _newest_durable(self) -> int | None:
        """Return the newest step of this training that a level has, as far as this process knows."""
        stored, resumed = self._statistics.last_durable_step.values(), self._resumed
        of_before = [resumed.step] if resumed is not None and resumed.is_durable else []
        return max([*stored, *of_before], default=None)

    def _has_captured_last(self) -> bool:
        last, newest = self._recorder.last_due, self._history.newest_whole()
        if last is None or last == newest:
            return True
        logger.warning(
            "step %d, the last that was due, is not captured (so far: %s), so it is nowhere; the newest snapshot of "
            "this training is %s. %s",
            last,
            ", ".join(report.missing(self._statistics)) or "none left out, none torn",
            "none" if newest is None else f"of step {newest}",
            self._reason(),
        )
        return False

    def _reason(self) -> str:
        """Why captures are missing, and what helps, as far as it is known."""
        cause = self._protection.cause
        if cause is not None:
            return f"This training is NOT protected in memory: {cause}; {self._protection.what_is_lost()}"
        if self._statistics.skipped["no slots yet"]:
            return "Its memory was not ready in time (io_timeout_s)"
        return "The messages above say why"

    def _end(self, progress: Progress | None, *, is_common: bool) -> bool:
        resumed = self._resumed
        is_there = self._has_own() or resumed is None or not resumed.only_in_memory
        durable = self._durability.end(progress, is_common=is_common) and is_there
        self._drain_events()
        if not durable and is_there and self._history.last_held_step() is None:  # else see ``report.not_durable``
            logger.warning("the last snapshot is not durable at every level. %s", self._reason())
        return durable

    def abandon(self, error: BaseException | None = None) -> None:
        """Leave without goodbye, as a crash would: the keeper persists the newest capture and waits for a restart.

        ``error``: the exception that ends the training, for the line that the user sees.
        """
        if not self._closed:
            self._notice.fails(is_alone=self._world.is_alone)
            self._events.is_training = False
            self._finish_copies()
            self._leave()
            self._client.abandon()
            self._notice.leave()
            if not self._notice.cuts:  # which has told the end
                self._tell_end(report.Ending.ABANDONED, error)

    def discard(self) -> None:
        """Leave, and give up what memory holds: nobody wants anything of this training. Blocks: asks the keeper."""
        if not self._closed:
            self._events.is_training = False
            self.gate()
            self._drop("engine.discard", lambda item: True)
            self._leave()
            self._client.goodbye(self.config.io_timeout_s)
            self._notice.leave()

    def _held(self) -> Held:
        """Return what is captured by now, for the notice of an end. Does not block. Thread-safe."""
        resumed, steps = self._resumed, self._history.held_steps()
        if not steps and resumed is not None and resumed.only_in_memory:
            steps = [resumed.step]
        return Held(tuple(steps), self._newest_durable())

    def _seal(self) -> Held:
        """Capture nothing any more; return what is captured. Thread-safe. Blocks: until the copies are done."""
        with self._lock:
            self._is_sealed = True
            self._finish_copies()
            self._recorder.settle()
            return self._held()

    def _leave(self) -> None:
        self.statistics()  # as they are while the keeper is there
        self._closed = True
        self._gates.remove()
        self._captures.close(self.config.io_timeout_s)
        self._recorder.close()


def _source_of(state: StateSource | Mapping[str, Any]) -> StateSource:
    source = ObjectState(state) if isinstance(state, Mapping) and state else state
    if not isinstance(source, StateSource):
        raise ConfigError(
            'SnapshotEngine: the state must be a dict of names to objects, as in {"model": model, "optimizer": '
            f"optimizer}}, or a StateSource; got {'an empty one' if state == {} else type(state).__qualname__}"
        )
    return source
