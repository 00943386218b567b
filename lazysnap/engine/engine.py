"""The engine: one pair of calls round every optimizer step, ``boundary`` and ``gate``, and ``restore`` at the start."""

import dataclasses
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Literal

from lazysnap import faults
from lazysnap.arena import Slot, SlotPhase, capacity_fits
from lazysnap.capture.gate import OptimizerGates
from lazysnap.capture.job import CaptureJob, CapturePhase
from lazysnap.capture.plan import CapturePlan, make_plan, optimizer_signature
from lazysnap.config import SnapshotConfig
from lazysnap.engine.captures import Captures
from lazysnap.engine.collector import collector_paused
from lazysnap.engine.estimate import estimate_image_bytes
from lazysnap.engine.events import EventLog
from lazysnap.engine.meta import MetaWriter
from lazysnap.engine.restore import Snapshot, SnapshotReader
from lazysnap.engine.slots import choose_slot, slots_needed
from lazysnap.engine.statistics import Statistics
from lazysnap.errors import ConfigError, KeeperUnavailable, LazySnapError, SnapshotNotFound, UnsupportedState
from lazysnap.keeper.client import KeeperClient
from lazysnap.keeper.identity import JobIdentity
from lazysnap.levels import SnapshotStore, open_store
from lazysnap.policy import is_due
from lazysnap.state.objects import ObjectState
from lazysnap.state.rewalk import StateWalker
from lazysnap.state.source import StateSource
from lazysnap.state.walk import Walk

logger = logging.getLogger(__name__)

META_BYTES = 1 << 20
"""Least room for the small state in a slot."""


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

    One engine per process, used on the training thread. Whatever fails in a keeper or a level never raises into
    training: it is logged once, counted in ``statistics()``, and tried again.
    """

    def __init__(
        self, config: SnapshotConfig, state: StateSource | Mapping[str, Any], *, default_url: str | None = None
    ) -> None:
        self.config = config
        self._source: StateSource = ObjectState(state) if isinstance(state, Mapping) else state
        identity = JobIdentity.from_config(config, default_url)
        self._client = KeeperClient(identity, config)
        self._captures = Captures()
        self._gates = OptimizerGates(self.gate, self._captures.is_disturbed, self._stepped_beside)
        self._lock = threading.RLock()
        self._statistics = Statistics()
        self._events = EventLog(self._statistics)
        self._plan: CapturePlan | None = None
        self._walker = StateWalker()
        self._meta_capacity = META_BYTES
        self._meta = MetaWriter(secrets.token_hex(8), time.time_ns())
        self._sequence = 0
        self._last_step: int | None = None
        self._last_pinned: int | None = None
        self._reserved: tuple[int, int] | None = None
        self._encoded_once = False
        self._prepared = False
        self._closed = False

    # ---------------------------------------------------------------- restart

    def fetch(self, which: Literal["latest"] | int = "latest") -> Snapshot | None:
        """Read the freshest snapshot that verifies (or that of one step), without touching the live state.

        Blocks: starts or finds the keeper, lists every level, reads and verifies one snapshot.
        Raises: JobBusy, if this job runs already; StateMismatch, if the snapshot is of another model;
        SnapshotNotFound, if a step was asked for that is not there.
        """
        started = time.perf_counter()
        memory = []
        try:
            self._client.connect(self.config.keeper_timeout_s)
            memory = self._client.inventory(self.config.keeper_timeout_s)
        except KeeperUnavailable as error:
            self._events.note_once("keeper", "no snapshot in memory can be used: %s", error)
        reader = SnapshotReader(self._stores(), memory)
        step = None if which == "latest" else which
        snapshot = reader.read(step, self._source.expected())
        for problem in reader.problems:
            logger.warning("%s", problem)
        if snapshot is None and step is not None:
            held = sorted({plan.step for plan in SnapshotReader(self._stores(), memory).plans(None)})
            raise SnapshotNotFound(f"no whole snapshot of step {step}; there are {held or 'none'}")
        return snapshot and dataclasses.replace(snapshot, seconds=time.perf_counter() - started)

    def restore(self, which: Literal["latest"] | int = "latest") -> Snapshot | None:
        """``fetch``, then load into the live objects and continue that run. ``None``: nothing there, start fresh.

        Blocks. Raises: as ``fetch``; what ``load_state_dict`` raises.
        """
        snapshot = self.fetch(which)
        if snapshot is None:
            logger.info("no snapshot found: starting fresh")
            return None
        self._source.load(snapshot.state)
        self.resume(snapshot)
        return snapshot

    def resume(self, snapshot: Snapshot) -> None:
        """Continue the run that ``snapshot`` is of; for callers of ``fetch`` that load the state themselves."""
        self._meta.run_id, self._meta.run_started_ns = snapshot.run_id, snapshot.run_started_ns
        self._last_step = snapshot.step
        self._client.adopt_run(snapshot.run_id, snapshot.run_started_ns)
        logger.info("resumed step %d from %s in %.2f s", snapshot.step, snapshot.level, snapshot.seconds)

    def _stores(self) -> dict[str, SnapshotStore]:
        stores = {}
        for index, level in enumerate(self.config.levels):
            try:
                stores[level.url] = open_store(level.url, speed=index + 1)
            except LazySnapError as error:
                self._events.note_once(level.url, "%s", error)
        return stores

    # ---------------------------------------------------------------- training

    def prepare(self) -> None:
        """Start the keeper and let it make room in the background, so that the first capture does not stall.

        Does not block. Optional: the first ``boundary`` does it otherwise, and captures begin some steps later.
        """
        if not self._prepared:
            # Only once: from then on the client counts which steps are durable, and this would make it forget them.
            self._prepared = True
            self._client.adopt_run(self._meta.run_id, self._meta.run_started_ns)
        self._client.start()
        self._gates.install(self._source.optimizers())
        if self._reserved is None:
            self._reserve(estimate_image_bytes(self._source))

    def wait_ready(self, timeout_s: float) -> bool:
        """Block until every slot is there, so that captures can begin; ``False`` after the deadline."""
        self.prepare()
        deadline = time.monotonic() + timeout_s
        while len(self._client.slots()) < slots_needed(self.config):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True

    def boundary(self, step: int, *, force: bool = False) -> bool:
        """Tell that optimizer step ``step`` and all that follows it is over. ``True`` if a capture began.

        ``force``: capture it also between the steps that ``every_n_steps`` names (the last one, or before an exit).
        Does not block on copies, storage or the keeper. Collective: no.
        Raises: UnsupportedState at the first boundary, for a value that cannot be encoded; JobBusy, if the same job
        runs already on this node. Nothing else.
        """
        started = time.perf_counter()
        with self._lock:
            self.gate()
            self._events.drain(self._client.poll_events())
            refusal = self._client.refusal()
            if refusal is not None:
                raise refusal
            if self._closed or not (self._is_due(step) or (force and step != self._last_step)):
                return False
            try:
                with collector_paused():
                    began = self._begin(step)
            except UnsupportedState as error:
                if not self._encoded_once:
                    raise
                self._events.note_once("state", "step %d is not captured: %s", step, error)
                began = self._skip("unsupported state")
            except Exception as error:  # noqa: BLE001  whatever a capture meets, training goes on
                self._events.note_once("capture", "step %d is not captured: %s: %s", step, type(error).__name__, error)
                began = self._skip("error")
            if began:
                self._statistics.boundary.add(time.perf_counter() - started)
            return began

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
            self._account(job)
            self._statistics.gate.add(time.perf_counter() - started)

    def _stepped_beside(self) -> None:
        if self._captures.discard("an optimizer stepped without passing the gate"):
            self._events.note_once("gate", "an optimizer stepped beside a running copy; that snapshot is dropped")
            self.gate()

    def _account(self, job: CaptureJob) -> None:
        statistics = self._statistics
        if job.phase is CapturePhase.WHOLE:
            statistics.whole += 1
            statistics.last_whole_step = job.step
            statistics.bytes_captured += job.plan.layout.size_bytes
            statistics.copy.add(job.copy_s)
            return
        if job.phase is CapturePhase.TORN:
            statistics.torn += 1
        else:
            statistics.failed += 1
        self._events.note_once("dropped", "the snapshot of step %d is dropped: %s", job.step, job.reason)

    def _is_due(self, step: int) -> bool:
        last = self._last_step
        return last is None or step < last or step - last >= self.config.every_n_steps

    def _skip(self, reason: str) -> bool:
        self._statistics.skipped[reason] += 1
        return False

    def _begin(self, step: int) -> bool:
        self._gates.install(self._source.optimizers())
        if self._captures.is_stuck():
            return self._skip("an earlier copy hangs")
        if self._plan is not None and not self._client.slots():
            self._client.start()
            return self._skip("no slots yet")
        walked = self._walker.walk(self._source.collect())
        self._encoded_once = True
        plan = self._planned(walked)
        meta = self._meta.write(step, plan, walked)
        slots = self._usable(plan, len(meta))
        if not slots:
            return self._skip("no slots yet")
        slot = self._free(slots)
        if slot is None:
            return self._skip("all slots are in use")
        job = CaptureJob(plan, slot, step, walked.tensors)
        self._sequence = max(self._sequence, self._client.newest_sequence()) + 1
        pin = self._wants_persistence(step, slots)
        faults.point("engine.begin")
        slot.begin(step, sequence=self._sequence, image_bytes=plan.layout.size_bytes, meta=meta, pin=pin)
        if pin:
            self._client.begun(slot, step)
        self._captures.begin(job)
        faults.point("engine.begun")
        self._last_step = step
        self._last_pinned = step if pin else self._last_pinned
        self._statistics.began += 1
        self._statistics.shard_bytes = plan.layout.size_bytes
        return True

    def _planned(self, walked: Walk) -> CapturePlan:
        if self._plan is not None:
            cause = self._plan.mismatch(walked, optimizer_signature(self._source))
            if cause is None:
                return self._plan
            self._statistics.replans += 1
            self._events.note_once(f"plan: {cause}", "the capture plan is made anew: %s", cause)
        self._plan = make_plan(walked, self._source)
        return self._plan

    def _usable(self, plan: CapturePlan, meta_bytes: int) -> list[Slot]:
        """Slots that the capture fits; asks for others where it does not."""
        if meta_bytes > self._meta_capacity:
            self._meta_capacity = 2 * meta_bytes
        needed = plan.layout.size_bytes
        slots = [
            slot
            for slot in self._client.slots()
            if capacity_fits(slot.image_capacity, needed) and slot.meta_capacity >= meta_bytes
        ]
        if not slots:
            self._reserve(needed)
        plan.forget(slots)
        return slots

    def _reserve(self, image_bytes: int) -> None:
        wanted = (self._meta_capacity, image_bytes)
        if self._reserved is None or self._reserved != wanted:
            self._reserved = wanted
            self._client.reserve(self._meta_capacity, image_bytes, slots_needed(self.config))

    def _free(self, slots: list[Slot]) -> Slot | None:
        deadline = time.monotonic() + (self.config.gate_timeout_s if self.config.on_busy == "wait" else 0.0)
        while True:
            # A device that still writes its last capture would write into the next one's bytes and watermark.
            idle = [not self._captures.is_writing(slot) for slot in slots]
            index = choose_slot([slot.status() for slot in slots], idle)
            if index is not None:
                return slots[index]
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.001)

    def _wants_persistence(self, step: int, slots: list[Slot]) -> bool:
        if any(slot.status().pinned for slot in slots):
            return False
        return any(is_due(level, step, self._last_pinned) for level in self.config.levels)

    # ---------------------------------------------------------------- waiting and ending

    def wait(
        self, step: int | None = None, *, until: Literal["captured", "durable"] = "durable", timeout_s: float
    ) -> bool:
        """Block until the capture of ``step`` (default: the last begun) is whole in memory, or it (or a later one) is
        durable at the first level; ``False`` after the deadline, or if that capture was dropped.
        """
        if until not in ("captured", "durable"):
            raise ConfigError(f'wait: until must be "captured" or "durable", got {until!r}')
        if until == "durable" and not self.config.levels:
            raise ConfigError("wait: there is no persistent level that could make a snapshot durable")
        self.gate()
        step = self._last_step if step is None else step
        if step is None:
            return False
        if until == "durable":
            # A level takes captures as it comes to them: ask for the newest, this one or a later one.
            self._client.drain(timeout_s)
            self._events.drain(self._client.poll_events())
            return self._client.wait_durable(step, 0.0)
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

    def flush(self, timeout_s: float, progress: Callable[[int, int], None] | None = None) -> bool:
        """Block until the newest capture is durable at every level; ``False`` after the deadline.

        ``progress`` is called with bytes done and bytes to do.
        """
        self.gate()
        done = self._client.drain(timeout_s, progress)
        self._events.drain(self._client.poll_events())
        return done

    def statistics(self) -> Statistics:
        """Counters and timings so far; updated in place."""
        self._events.drain(self._client.poll_events())
        return self._statistics

    def close(self, *, drain: bool = True, progress: Callable[[int, int], None] | None = None) -> bool:
        """End well: make the newest capture durable, send the keeper away, free the memory. Idempotent.

        Blocks: at most ``drain_timeout_s`` for storage. ``False`` if something could not be made durable.
        """
        if self._closed:
            return True
        durable = True
        try:
            if drain:
                durable = self.flush(self.config.drain_timeout_s, progress)
                if not durable:
                    logger.warning(
                        "the last snapshot is not durable at every level after %g s; see the messages above",
                        self.config.drain_timeout_s,
                    )
        finally:
            self._leave()
            self._client.goodbye(self.config.keeper_timeout_s)
        return durable

    def abandon(self) -> None:
        """Leave without goodbye, as a crash would: the keeper persists the newest capture and waits for a restart."""
        if not self._closed:
            self.gate()
            self._leave()
            self._client.abandon()

    def _leave(self) -> None:
        self._closed = True
        self._gates.remove()
        self._captures.close(self.config.gate_timeout_s)
        self._plan = None
