"""The capture at a boundary: collect the state, plan, choose a slot, begin the copies."""

from collections import Counter

from lazysnap import faults
from lazysnap.capture.capture import Capture, CapturePhase
from lazysnap.config import SnapshotConfig
from lazysnap.engine.local_state import LocalState
from lazysnap.engine.memory import Memory
from lazysnap.engine.messages import MessageKind, Messages
from lazysnap.engine.meta import MetaWriter
from lazysnap.engine.statistics import ALL_IN_USE, NO_MEMORY, NO_SLOTS
from lazysnap.keeper.client import KeeperClient
from lazysnap.ranks.world import World
from lazysnap.restore.snapshot import Snapshot
from lazysnap.state.source import StateSource


class Recorder:
    """Begins captures. Used on the training thread, under the engine's lock.

    A capture needs a plan, metadata and a slot, in this order. ``LocalState``, ``MetaWriter`` and ``Memory`` make them.
    This class keeps the captured and skipped steps, and the requests for the next capture.
    """

    def __init__(
        self,
        config: SnapshotConfig,
        source: StateSource,
        client: KeeperClient,
        messages: Messages,
        world: World,
    ) -> None:
        """Collective."""
        self._config = config
        self._client = client
        self._world = world
        self.messages = messages
        self._statistics = messages.statistics
        self.memory = Memory(config, source, client, world, messages)
        self.captures = self.memory.captures
        self.check = self.memory.check
        self._forbids_repeats = False
        """True if no later restart of this run is to repeat a step as a check: one has proved the run."""
        self.meta = MetaWriter.agreed(world, config)
        self.state = LocalState(source, world, messages)
        self._resumed_step: int | None = None
        self.seen_step: int | None = None
        """The step of the last boundary, or of the snapshot that was resumed."""
        self._skipped: tuple[int | None, str] | None = None
        """The step that was skipped since the newest capture, and the reason."""
        self.encoded_once = False
        """True after the first successful capture. Later errors only drop a snapshot."""
        self.is_sealed = False
        """True if captures have stopped, though training may continue for a moment. Set by other threads."""
        self.stores_next = False
        """True if every level must store the next capture, due or not."""
        self._names_for_next: dict[str, int | None] = {}
        """Names for the capture of the next boundary, and the step of that boundary once it is known."""

    # Steps

    def resume(self, snapshot: Snapshot) -> None:
        """Continue from ``snapshot``, whose state was loaded."""
        step = snapshot.step
        self.check.cancel()
        self._forbids_repeats = snapshot.forbids_repeats
        if snapshot.repeats is not None:
            self._forbids_repeats = True
            self.check.begin(snapshot.repeats)
        self.seen_step = step
        self._leave_past(step, "went back")

    def begin_again(self) -> None:
        """Begin another start: the loop continues at an earlier step."""
        self.check.cancel()
        self._leave_past(None, "began again")

    def _leave_past(self, resumed_step: int | None, did: str) -> None:
        """Forget all captures so far. ``did``: see ``_lose_names_for_next``."""
        self._resumed_step = resumed_step
        self._skipped = None
        self._lose_names_for_next(did)
        self.captures.leave_past()
        self.memory.is_awaited = True

    def go_back(self, step: int) -> None:
        """Continue from ``step``, the newest captured one, which was loaded in place."""
        self.check.cancel()
        self.seen_step = step
        self._skipped = None

    @property
    def last_step(self) -> int | None:
        """The step of the last capture, or of the resumed snapshot."""
        newest = self.captures.newest
        if newest is None:
            return self._resumed_step
        return newest.step

    @property
    def last_due(self) -> int | None:
        """The step of the last due boundary since the last resume, captured or not."""
        if self._skipped is not None:
            step, _ = self._skipped
            return step
        newest = self.captures.newest
        if newest is None:
            return None
        return newest.step

    @property
    def may_retry(self) -> bool:
        """True if the last due boundary was skipped because memory is not ready yet."""
        if self._skipped is None or self.memory.unprotected is not None:
            return False
        _, reason = self._skipped
        return reason in (NO_SLOTS, ALL_IN_USE)

    # At a boundary

    def pass_boundary(self, step: int) -> None:
        """Record that training passed ``step``, here and in memory, so that the keeper knows how many steps a crash
        lost.

        A name of an earlier boundary that was not captured is lost: no other snapshot gets it.
        """
        self.seen_step = step
        newest = self.captures.newest
        if newest is not None and newest.is_in_memory:
            newest.slot.reach(step)
        for name, step_of_name in list(self._names_for_next.items()):
            if step_of_name is None:
                self._names_for_next[name] = step
            elif step_of_name != step:
                del self._names_for_next[name]
                self.memory.events.lose_name(name, f"step {step_of_name} was not captured")

    def is_due(self, step: int, *, force: bool) -> bool:
        """True if the boundary after ``step`` is to be captured."""
        if step == self.last_step:
            return False
        # This depends only on the step and on calls that all ranks make (``force``, ``keep``), so all ranks agree, also
        # if one of them could not capture. The first boundary shows whether the state can be captured at all.
        is_first = self.last_due is None and self._resumed_step is None
        return is_first or step % self._config.every_n_steps == 0 or force or bool(self._names_for_next)

    def begin(self, step: int) -> bool:
        """Begin a capture. Returns: False, after counting the reason, if that is impossible.

        Blocks: the first one until it has a slot, at most ``io_timeout_s``. Raises: StateError; JobBusy; errors of the
        program's own code.
        """
        try:
            reason = self._begin(step)
        finally:
            self.memory.is_awaited = False  # after a failed wait no capture waits
        if reason:
            self.skip(reason)
        return not reason

    def _begin(self, step: int) -> str:
        """Begin a capture. Returns: the reason why it is impossible; empty if it began."""
        is_free = self.captures.wait_released(self._config.io_timeout_s)
        if is_free:
            self.count_ended()
            reason = self._reconnect()
        else:
            reason = "an earlier copy hung"
        # The first boundary must raise for values that no snapshot can hold. Several ranks collect their state at the
        # same steps, also one that has no memory: a ``state_dict`` of the program, or the partition, may need them all.
        if reason and self.encoded_once and self._world.is_alone:
            return reason
        everything = self.state.collect()
        part = self.state.part_of(everything)
        plan = self.state.plan_for(part, everything)
        self.encoded_once = True
        if not is_free:
            return reason
        meta = self.meta.write(step, plan, part)
        slot = self.memory.slot_for(plan.layout.size_bytes, len(meta))
        if slot is None:
            return self.memory.why_no_slot()
        if self.is_sealed:  # may change while the state is collected
            return "training was ending"
        self._start(Capture(plan, slot, step, part.tensors, sequence=self._client.next_sequence()), meta)
        return ""

    def _reconnect(self) -> str:
        """Start a keeper, or request memory again, if necessary. Does not block.

        Returns: the reason why there is no memory now; empty if there is some, or the next capture waits for it.
        """
        if self.memory.is_missing:
            self.memory.retry()
            self.memory.remind()
            return NO_MEMORY
        if self.memory.is_awaited:
            self.memory.start()
        elif self.state.plan is not None and not self._client.slots():
            self._client.start()
            return NO_SLOTS
        return ""

    def _start(self, capture: Capture, meta: bytes) -> None:
        """Begin the capture in its slot, then begin the copies."""
        image_bytes = capture.plan.layout.size_bytes
        faults.point("engine.begin")
        capture.slot.begin(
            self.meta.start_number, capture.step, sequence=capture.sequence, image_bytes=image_bytes, meta=meta
        )
        if not self._forbids_repeats or self._config.verify_restart == "always":
            capture.slot.allow_repeat(is_repeatable=True)
        self._client.wake(capture.step)
        self._client.note_waited(self._statistics.waited_s)
        self.captures.begin(capture)
        self.check.compare(capture)
        self.memory.become_protected(capture.slot)
        faults.point("engine.begun")
        self._count_begun(capture.step)
        self._statistics.shard_bytes = image_bytes
        self._require_begun(capture.step)

    def _count_begun(self, step: int) -> None:
        self._statistics.began += 1
        if self._skipped is not None:
            skipped_step, reason = self._skipped
            if skipped_step == step:  # the retry succeeded
                self._statistics.skipped -= Counter([reason])
        self._skipped = None

    def _require_begun(self, step: int) -> None:
        """Request storage for this capture, and the names that wait for it."""
        if self.stores_next:
            self.stores_next = False
            self._client.require(step)
        for name in self._names_for_next:
            self._give_name(name, step)
        self._names_for_next = {}

    def forbid_repeat(self) -> None:
        """Make a restart resume exactly the newest capture: it was requested, or training ends with it."""
        newest = self.captures.newest
        if newest is not None and newest.is_in_memory:
            newest.slot.allow_repeat(is_repeatable=False)

    def skip(self, reason: str) -> None:
        """Count a boundary that began no capture, once, even if it is retried."""
        if self._skipped is None or self._skipped[0] != self.seen_step:
            self._skipped = (self.seen_step, reason)
            self._statistics.skipped[reason] += 1

    # Ended captures

    def count_ended(self) -> None:
        """Count captures that ended, and how long devices waited at gates."""
        for capture in self.captures.take_ended():
            self._count_ended(capture)
        self.check.report()
        self._statistics.device_wait_s += self.captures.take_device_wait_s()

    def _count_ended(self, capture: Capture) -> None:
        """Count a finished capture, and report it if it was dropped."""
        statistics = self._statistics
        if capture.phase is CapturePhase.WHOLE:
            statistics.whole += 1
            statistics.copy.add(capture.copy_s)
            return
        event = MessageKind.FAILED
        if capture.phase is CapturePhase.TORN:
            event = MessageKind.TORN
        self.messages.tell(event, step=capture.step, text=capture.reason)

    # Names

    def keep(self, name: str, *, is_over: bool) -> int:
        """Name the capture of the last boundary, or else of the next one. Returns: its step, or the smallest possible
        one.

        ``is_over``: the step of the last boundary is the current one.
        """
        step = self.step_to_name(is_over=is_over)
        if step == self.seen_step:
            self._give_name(name, step)
        else:
            self._names_for_next[name] = None
        return step

    def step_to_name(self, *, is_over: bool) -> int:
        """Return the step that ``keep`` would name now, the same on all ranks."""
        step = self.seen_step
        if step is None or not is_over:
            return (step or 0) + 1
        if self._world.is_alone:
            newest = self.captures.newest
            has_captured = newest is not None and newest.step == step and newest.is_in_memory
        else:
            # A rank that could not capture it does not choose another step alone. Then no snapshot gets the name.
            has_captured = self.last_due == step
        if has_captured:
            return step
        return step + 1

    def names(self, first_start: int) -> set[str]:
        """Return the names that snapshots of the run have or will get. ``first_start``: see ``KeeperClient.names``."""
        return self._client.names(first_start) | set(self._names_for_next)

    def _give_name(self, name: str, step: int) -> None:
        self.forbid_repeat()
        self._client.keep(name, step)

    def release(self, name: str) -> None:
        """Remove the name from every snapshot of the run."""
        self._names_for_next.pop(name, None)
        self._client.release(name)

    def _lose_names_for_next(self, did: str) -> None:
        for name in self._names_for_next:
            self.memory.events.lose_name(name, f"training {did} before it was captured")
        self._names_for_next = {}

    def end_names(self) -> None:
        """Report names that wait for a capture as lost: captures have stopped."""
        self._lose_names_for_next("ended")
