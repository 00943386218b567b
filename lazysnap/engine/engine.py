"""The engine: one pair of calls round every optimizer step, ``boundary`` and ``gate``, and ``restore`` at the start."""

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from lazysnap import faults
from lazysnap.arena import SlotPhase
from lazysnap.capture.checks import discard
from lazysnap.capture.gate import OptimizerGates
from lazysnap.capture.plan import check_kinds
from lazysnap.config import SnapshotConfig
from lazysnap.engine.captures import Captures
from lazysnap.engine.collector import collector_paused
from lazysnap.engine.durability import Durability, Progress
from lazysnap.engine.events import EventLog
from lazysnap.engine.names import check_name
from lazysnap.engine.recorder import Recorder
from lazysnap.engine.refusal import together
from lazysnap.engine.restart import Restart, fetch, part_ways
from lazysnap.engine.snapshot import Snapshot
from lazysnap.engine.statistics import Statistics
from lazysnap.engine.world import World
from lazysnap.errors import ConfigError, KeeperUnavailable, UnsupportedState
from lazysnap.keeper.client import KeeperClient
from lazysnap.keeper.identity import JobIdentity
from lazysnap.keeper.team import Team
from lazysnap.levels.redaction import shown
from lazysnap.state.objects import ObjectState
from lazysnap.state.optimizers import check_order
from lazysnap.state.source import StateSource

logger = logging.getLogger(__name__)


class SnapshotEngine:
    """Captures the training state lazily at optimizer-step boundaries, and restores it.

    ``state`` is a ``StateSource``, or a mapping of names to objects with ``state_dict`` and ``load_state_dict``::

        engine = SnapshotEngine(config, {"model": model, "optimizer": optimizer})
        snapshot = engine.restore("latest")
        for step in range(snapshot.step if snapshot else 0, steps):
            ...
            optimizer.step()
            engine.boundary(step + 1)
        engine.close()

    One engine per process, used on the training thread. With ``torch.distributed`` initialised, every rank makes one
    at the same point; making it, ``fetch``, ``restore``, the first ``boundary`` and ``close`` are collective then;
    others are not, but ``keep``, ``wait`` and ``flush`` are for all ranks alike. Whatever fails in a keeper or a level
    never raises into training: it is logged once, counted in ``statistics()``, and tried again.
    """

    def __init__(
        self, config: SnapshotConfig, state: StateSource | Mapping[str, Any], *, default_url: str | None = None
    ) -> None:
        self.config = config
        self._source: StateSource = ObjectState(state) if isinstance(state, Mapping) else state
        identity = JobIdentity.from_config(config, default_url)
        self._world = World(config.collective_timeout_s)
        if not self._world.is_alone:
            identity = dataclasses.replace(identity, local_rank=self._world.place.local_rank)
        self._identity = identity
        team = None if self._world.is_alone else Team.of(self._world.places, self._world.rank, identity)
        self._client = KeeperClient(identity, config, team)
        self._captures = Captures()
        self._gates = OptimizerGates(self.gate, self._captures.is_disturbed, self._stepped_beside)
        self._lock = threading.RLock()
        self._statistics = Statistics()
        self._events = EventLog(self._statistics, is_alone=self._world.is_alone)
        self._recorder = Recorder(config, self._source, self._client, self._captures, self._events)
        if not self._world.is_alone:
            self._recorder.join(self._world)
        self._durability = Durability(config, self._client, self._world, self._recorder.meta.generation)
        self._prepared = False
        self._last_due: int | None = None
        self._closed = False

    # ---------------------------------------------------------------- restart

    def fetch(self, which: int | str = "latest") -> Snapshot | None:
        """Read the freshest snapshot that verifies (or that of one step, or of one name), without touching the live
        state.

        Blocks: starts or finds the keeper, lists every level, reads and verifies one snapshot. A level that does not
        answer within its ``timeout_s`` is passed over. With several ranks collective: all get the same one, or none.
        Raises: JobBusy, if this job runs already; StateMismatch, if the snapshot is of another model;
        SnapshotNotFound, if a step or name was asked for that is not there; ConfigError, for a bad name; WaitTimeout,
        if another rank is missing.
        """
        return self._fetch(which, self._client)

    def _fetch(self, which: int | str, client: KeeperClient | None) -> Snapshot | None:
        return fetch(which, Restart(self.config, self._source, client, self._identity, self._world))

    def fetch_stored(self) -> Snapshot | None:
        """As ``fetch``, from storage alone: also while another process of this job trains. Blocks. Collective, too."""
        return self._fetch("latest", None)

    def restore(self, which: int | str = "latest") -> Snapshot | None:
        """``fetch``, then load into the live objects and continue that run. ``None``: nothing there, start fresh.

        ``which``: ``"latest"``, a step, or a name that ``keep`` gave. Blocks; collective with several ranks.
        Raises: as ``fetch``; UnsupportedState, as ``prepare``; what ``load_state_dict`` raises. With several ranks each
        of them, what one of them met; errors that are not of this package as StateError.
        """
        self.together("checking the model", lambda: check_kinds(self._source.expected().items()))
        snapshot = self.fetch(which)
        if snapshot is None:
            logger.info("no snapshot found: starting fresh")
            return None
        self.together("checking the optimizers", lambda: check_order(self._source, snapshot.parameters))
        faults.point("engine.restart.load")
        self.together("loading", lambda: self._source.load(snapshot.state))
        faults.point("engine.restart.loaded")
        if snapshot.world_size != self._world.size:
            self.part_ways(snapshot)
        self.resume(snapshot)
        return snapshot

    def together(self, what: str, work: Callable[[], None]) -> None:
        """Do ``work`` on every rank; what one of them raises, all raise, with its number. Collective. Blocks."""
        together(self._world, what, work)

    def part_ways(self, snapshot: Snapshot) -> None:
        """Give every rank random numbers of its own, after a restart with another number of ranks. Not collective."""
        part_ways(snapshot, self._world)

    def resume(self, snapshot: Snapshot) -> None:
        """Continue the run that ``snapshot`` is of; for callers of ``fetch`` that load the state themselves."""
        meta = self._recorder.meta
        meta.run_id, meta.run_started_ns = snapshot.run_id, snapshot.run_started_ns
        meta.follow(snapshot.newest_generation)
        self._recorder.resume(snapshot.step)
        self._last_due = None
        self._durability.begin(meta.generation, snapshot.stored)
        if snapshot.world_size > 1 or not self._world.is_alone:
            self._discard_others(snapshot)
        self._client.adopt_run(snapshot.run_id, snapshot.run_started_ns)
        logger.info("resumed step %d from %s in %.2f s", snapshot.step, shown(snapshot.level), snapshot.seconds)

    def _discard_others(self, snapshot: Snapshot) -> None:
        """Drop what this memory holds beside ``snapshot``: not all ranks have it, and it must not outlast that."""
        wanted = (snapshot.run_id, snapshot.step, snapshot.generation)
        try:
            held = self._client.inventory(self.config.keeper_timeout_s).entries
        except KeeperUnavailable as error:
            logger.info("nothing in memory to go through: %s", error)
            return
        for item in held:
            if (item.run_id, item.step, item.generation) != wanted:
                faults.point("engine.restart.discard")
                discard(item.slot, item.sequence)

    # ---------------------------------------------------------------- training

    def prepare(self) -> None:
        """Start the keeper and let it make room in the background, so that the first capture does not stall.

        Does not block. Optional: the first ``boundary`` does it otherwise, and captures begin some steps later.
        Raises: UnsupportedState, for a tensor of the model that no snapshot can hold.
        """
        if not self._prepared:
            check_kinds(self._source.expected().items())
            # Only once: from then on the client counts which steps are durable, and this would make it forget them.
            self._prepared = True
            self._client.adopt_run(self._recorder.meta.run_id, self._recorder.meta.run_started_ns)
        self._client.start()
        self._gates.install(self._source.optimizers())
        self._recorder.prepare()

    def wait_ready(self, timeout_s: float) -> bool:
        """Block until all memory is there, immutable tensors in it, so that captures can begin; ``False`` after the
        deadline. The next boundary is captured then; where the memory was estimated too small, it waits for more.
        """
        self.prepare()
        deadline = time.monotonic() + timeout_s
        while not self._recorder.is_ready():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        self._recorder.is_promised = True
        return True

    def boundary(self, step: int, *, force: bool = False) -> bool:
        """Tell that optimizer step ``step`` and all that follows it is over. ``True`` if a capture began.

        ``force``: capture it also between the steps that ``every_n_steps`` names (the last one, or before an exit).
        Does not block on copies, storage or the keeper, but for the first after ``wait_ready``: where the memory was
        estimated too small it waits at most ``gate_timeout_s`` for more. With several ranks the first is collective,
        the others not; where storage holds all slots, it waits at most ``gate_timeout_s`` for one: no rank leaves a
        step out alone.
        Raises: UnsupportedState at the first boundary, for a value that cannot be encoded; JobBusy, if the same job
        runs already on this node. Nothing else.
        """
        started = time.perf_counter()
        with self._lock:
            self.gate()
            self._hear()
            refusal = self._client.refusal()
            if refusal is not None:
                raise refusal
            if self._closed or not self._recorder.is_due(step, force=force):
                return False
            self._last_due = step
            self._recorder.tell_new_keeper()
            try:
                self._gates.install(self._source.optimizers())
                with collector_paused():
                    began = self._recorder.begin(step)
            except UnsupportedState as error:
                if not self._recorder.encoded_once:
                    raise
                self._events.note_once("state", "step %d is not captured: %s", step, error)
                began = self._recorder.skip("unsupported state")
            except Exception as error:  # noqa: BLE001  whatever a capture meets, training goes on
                self._events.note_once("capture", "step %d is not captured: %s: %s", step, type(error).__name__, error)
                began = self._recorder.skip("error")
            self._recorder.passed(step)
            if began:
                self._statistics.boundary.add(time.perf_counter() - started)
            return began

    def _hear(self) -> None:
        """Count and log what happened."""
        self._events.drain(self._durability.events())

    def gate(self) -> None:
        """Return when parameters and optimizer state may change again: the last capture's copies are done.

        Blocks: on the copy thread, at most ``gate_timeout_s``; then that snapshot is dropped and training goes on.
        Called by hooks on every optimizer; call it yourself before anything else that changes weights.
        """
        started = time.perf_counter()
        with self._lock:
            job = self._captures.finish(self.config.gate_timeout_s)
            if job is None:
                return
            faults.point("engine.gated")
            self._recorder.account(job)
            self._statistics.gate.add(time.perf_counter() - started)

    def _stepped_beside(self) -> None:
        if self._captures.discard("an optimizer stepped without passing the gate"):
            self._events.note_once("gate", "an optimizer stepped beside a running copy; that snapshot is dropped")
            self.gate()

    # ---------------------------------------------------------------- names

    def keep(self, name: str) -> int:
        """Name the newest snapshot, that of the last boundary: every level keeps it until ``release``.

        Where the last boundary was not captured, the next one will be, due or not; then the step returned is the least
        that it can have. Does not block. Raises: ConfigError, for a bad name, or without persistent levels.
        """
        check_name(name)
        if not self.config.levels:
            raise ConfigError("keep: there is no persistent level that could keep a snapshot")
        with self._lock:
            return self._recorder.keep(name)

    def release(self, name: str) -> None:
        """Take ``name`` from this run's snapshots: retention treats them as any other. Does not block.

        Raises: ConfigError, for a bad name.
        """
        check_name(name)
        with self._lock:
            self._recorder.names.release(name, self._recorder.meta.run_id)

    # ---------------------------------------------------------------- waiting and ending

    def wait(
        self, step: int | None = None, *, until: Literal["captured", "durable"] = "durable", timeout_s: float
    ) -> bool:
        """Block until the capture of ``step`` (default: the last begun) is whole in memory, or it (or a later one) is
        durable at the first level; ``False`` after the deadline, or if that capture was dropped.

        With several ranks durable on all of them, so all are to wait for it; whole in the memory of this one.
        """
        if until not in ("captured", "durable"):
            raise ConfigError(f'wait: until must be "captured" or "durable", got {until!r}')
        if until == "durable" and not self.config.levels:
            raise ConfigError("wait: there is no persistent level that could make a snapshot durable")
        self.gate()
        step = self._recorder.last_step if step is None else step
        if step is None:
            return False
        if until == "durable":
            # A level takes captures as it comes to them: ask for the newest. Several ranks all do, or none.
            if not (self._world.is_alone and self._durability.has(step)):
                self.flush(timeout_s)
            return self._durability.has(step)
        deadline = time.monotonic() + timeout_s
        while True:
            statuses = [slot.status() for slot in self._client.slots()]
            phases = {status.phase for status in statuses if status.step == step}
            if SlotPhase.WHOLE in phases:
                return True
            # Behind the gate only a device can still be at it; what is neither in flight nor whole was dropped.
            if SlotPhase.CAPTURING not in phases or time.monotonic() > deadline:
                return False
            time.sleep(0.001)

    def flush(self, timeout_s: float, progress: Progress | None = None) -> bool:
        """Block until the newest capture is durable at every level; ``False`` after the deadline, or if it was dropped.

        With several ranks durable on all of them, so all are to call it at the same step.
        ``progress`` is called with the number of levels done and of all levels.
        """
        self.gate()
        self._verify()
        done = self._durability.flush(self._statistics.last_whole_step, timeout_s, progress)
        self._hear()
        return done and not self._recorder.has_lost_last

    def _verify(self) -> None:
        with self._lock:
            self._recorder.frozen.verify()

    def statistics(self) -> Statistics:
        """Counters and timings so far; updated in place."""
        self._hear()
        return self._statistics

    def close(self, *, drain: bool = True, progress: Progress | None = None) -> bool:
        """End well: make the newest capture durable, send the keeper away, free the memory. Idempotent.

        Blocks: with several ranks at most ``collective_timeout_s`` for the others; at most ``drain_timeout_s`` for
        storage, then at most ``keeper_timeout_s`` for the keeper's goodbye.
        ``False`` if something could not be made durable: it stays in memory, as after a crash, and a restart finds it;
        or if the last boundary that was due was not captured. ``True`` if there was none. With several ranks
        collective; where one is missing at the deadline memory stays likewise, for the restart of all.
        """
        if self._closed:
            return True
        durable, over, captured = False, False, True
        try:
            self.gate()
            self._verify()
            over = self._world.is_alone or self._world.ends()
            durable = not drain or self._end(progress, is_common=over)
            captured = not drain or self._has_captured_last()
        finally:
            self._leave()
            if over:
                self._world.close()
            if durable and over:
                self._client.goodbye(self.config.keeper_timeout_s)
            else:
                self._client.abandon()
        return durable and captured

    def _has_captured_last(self) -> bool:
        last, newest = self._last_due, self._statistics.last_whole_step
        if last is None or last == newest:
            return True
        logger.warning(
            "step %d, the last that was due, is not captured (left out so far: %s), so it is nowhere; the newest "
            "snapshot of this training is %s. Call wait_ready before the first step, where that is the reason",
            last,
            dict(self._statistics.skipped) or "none",
            "none" if newest is None else f"of step {newest}",
        )
        return False

    def _end(self, progress: Progress | None, *, is_common: bool) -> bool:
        if self._world.is_alone and not (self._statistics.began or self._client.was_attached):
            return True
        started = time.monotonic()
        durable = self._durability.end(self._statistics.last_whole_step, progress, is_common=is_common)
        self._hear()
        if not durable:
            logger.warning(
                "the last snapshot is not durable at every level (waited %.1f s of at most %g, drain_timeout_s); see "
                "the messages above, if any, and the level that does not answer. Memory keeps it for %g s (linger_s) "
                'for a restart of the same job with "latest"; then the keeper tries once more',
                time.monotonic() - started,
                self.config.drain_timeout_s,
                self.config.memory.linger_s,
            )
        return durable

    def abandon(self) -> None:
        """Leave without goodbye, as a crash would: the keeper persists the newest capture and waits for a restart."""
        if not self._closed:
            self.gate()
            self._leave()
            self._client.abandon()

    def _leave(self) -> None:
        self._closed = True
        self._durability.close()
        self._gates.remove()
        self._captures.close(self.config.gate_timeout_s)
        self._recorder.close()
