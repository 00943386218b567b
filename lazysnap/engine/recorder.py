"""The work of a boundary that is captured: collect the state, plan, choose a slot, begin the capture."""

import logging
import time
from collections import Counter

from lazysnap import faults
from lazysnap.capture.capture import Capture, CapturePhase
from lazysnap.capture.captures import slot_phase
from lazysnap.capture.plan import CapturePlan, check_walk, optimizer_signature
from lazysnap.config import SnapshotConfig
from lazysnap.engine.local_state import LocalState
from lazysnap.engine.memory import Memory
from lazysnap.engine.messages import MessageKind, Messages
from lazysnap.engine.meta import MetaWriter, names_of_parameters
from lazysnap.engine.statistics import ALL_IN_USE, NO_MEMORY, NO_SLOTS
from lazysnap.keeper.client import KeeperClient
from lazysnap.memory.slot_choice import SlotPhase
from lazysnap.ranks.world import World
from lazysnap.restore.snapshot import Snapshot
from lazysnap.state.source import StateSource
from lazysnap.state.walk import Walk

logger = logging.getLogger(__name__)


class Recorder:
    """Begins captures; all on the training thread, and under the engine's lock.

    A capture needs a plan, metadata and a slot, in this order. Here are the order, the steps that were captured or left
    out, and what was asked of the next capture. How each of the three is made is decided in ``LocalState``,
    ``MetaWriter`` and ``Memory``.
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
        self._source = source
        self._client = client
        self._world = world
        self.messages = messages
        self._statistics = messages.statistics
        self.memory = Memory(config, source, client, world, messages)
        self.captures = self.memory.captures
        self.check = self.memory.check
        self._forbids_repeats = False
        """True if no later restart of this run is to train a step again: one has proved the run."""
        self.meta = MetaWriter.agreed(world, config)
        self._state = LocalState(source, world, messages)
        self._plan: CapturePlan | None = None
        """The plan of the last capture. It holds as long as the structure of the state stays."""
        self._resumed_step: int | None = None
        self.seen_step: int | None = None
        """The step of the last boundary, or of the snapshot that was resumed."""
        self._skipped: tuple[int | None, str] | None = None
        """The step that was left out since the newest capture began, and why."""
        self._unprepared_since_s: float | None = None
        """The time since which steps are skipped because memory is being prepared; ``None`` while they are not."""
        self.encoded_once = False
        """True once the state could be captured: an error in a later boundary costs that snapshot alone."""
        self.is_sealed = False
        """True if nothing is captured any more, though training may go on for a moment. Set by other threads."""
        self.stores_next = False
        """True if every level must store the next capture, due there or not."""
        self._names_for_next: dict[str, int | None] = {}
        """Names for the capture of the next boundary, and the step of that boundary; None until it comes."""

    # Steps

    def resume(self, snapshot: Snapshot) -> None:
        """The state of ``snapshot`` is loaded."""
        step = snapshot.step
        self.check.cancel()
        self._forbids_repeats = snapshot.is_settled
        if snapshot.repeats is not None:
            self._forbids_repeats = True
            self.check.begin(snapshot.repeats)
        self.seen_step = step
        self._leave_past(step, "went back")

    def begin_again(self) -> None:
        """The loop began again at an earlier step: what was captured until now is of another start."""
        self.check.cancel()
        self._leave_past(None, "began again")

    def _leave_past(self, resumed_step: int | None, did: str) -> None:
        """No capture until now counts any more. ``did``: see ``_lose_names_for_next``."""
        self._resumed_step = resumed_step
        self._skipped = None
        self._lose_names_for_next(did)
        self.captures.leave_past()
        self.memory.is_awaited = True

    def go_back(self, step: int) -> None:
        """The state of ``step``, the newest that was captured, was loaded in place: training stands there again."""
        self.check.cancel()
        self.seen_step = step

    @property
    def last_step(self) -> int | None:
        """The step of the last capture, or of the snapshot that was resumed from."""
        newest = self.captures.newest
        if newest is None:
            return self._resumed_step
        return newest.step

    @property
    def last_due(self) -> int | None:
        """The step of the last boundary that was due, captured or not, since the last resume."""
        if self._skipped is not None:
            step, _ = self._skipped
            return step
        newest = self.captures.newest
        if newest is None:
            return None
        return newest.step

    @property
    def may_retry(self) -> bool:
        """True if the last boundary that was due was left out for want of memory that may come."""
        if self._skipped is None or self.memory.protection.cause is not None:
            return False
        _, reason = self._skipped
        return reason in (NO_SLOTS, ALL_IN_USE)

    # At a boundary

    def pass_boundary(self, step: int) -> None:
        """Note that training passed ``step``, here and in memory: so the keeper knows how many steps a death lost.

        A name of an earlier boundary that was not captured is lost: no other snapshot gets it.
        """
        self.seen_step = step
        newest = self.captures.newest
        if newest is not None and _is_in_memory(newest):
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
        # Of the step, and of calls that all ranks make alike (``force``, ``keep``): so all ranks answer alike. The
        # first boundary shows whether the state can be captured at all.
        is_first = self.last_step is None
        return is_first or step % self._config.every_n_steps == 0 or force or bool(self._names_for_next)

    def begin(self, step: int) -> bool:
        """Begin the capture; ``False``, and the reason counted, if it cannot be.

        Blocks: the first one until its memory is there, at most ``io_timeout_s``.
        Raises: StateError; JobBusy; whatever a capture meets.
        """
        try:
            reason = self._begin(step)
        finally:
            self.memory.is_awaited = False  # no capture waits after such a wait has failed
        if reason:
            self.skip(reason)
        return not reason

    def _begin(self, step: int) -> str:
        """Begin the capture. Returns: why it cannot be; empty if it began."""
        reason = self._reason_not_to_collect()
        if reason:
            return reason
        everything = self._state.collect()
        part = self._state.part_of(everything)
        plan = self._plan_for(part, everything)
        self.encoded_once = True
        meta = self.meta.write(step, plan, part)
        slot = self.memory.slot_for(plan.layout.size_bytes, len(meta))
        if slot is None:
            return self.memory.why_no_slot()
        if self.is_sealed:  # also while the state was collected
            return "training was ending"
        self._start(Capture(plan, slot, step, part.tensors, sequence=self._client.next_sequence()), meta)
        return ""

    def _reason_not_to_collect(self) -> str:
        """Return why there is no use in collecting the state; empty if there is. Looks for a keeper if need be."""
        if not self.captures.wait_released(self._config.io_timeout_s):
            return "an earlier copy hung"
        self.count_ended()
        if self.memory.is_missing:
            self.memory.retry()
            # The first boundary raises what no snapshot can hold; and with several ranks a walk may end in a
            # collective, which all of them take at the same steps.
            if self.encoded_once and self._world.is_alone:
                self.memory.protection.remind()
                return NO_MEMORY
        elif self.memory.is_awaited:
            self.memory.start()
        elif self._plan is not None and not self._client.slots():
            self._client.start()
            return NO_SLOTS
        return ""

    def _plan_for(self, part: Walk, everything: Walk) -> CapturePlan:
        """Return the plan for a capture of ``part``: that of the last capture, unless the state changed its structure.

        Raises: StateError.
        """
        if self._plan is not None:
            cause = self._plan.mismatch(part, optimizer_signature(self._source))
            if cause is None:
                return self._plan
            # Loading a checkpoint does this, too: nothing is lost, and the next step is captured as any other.
            logger.info("the capture plan is made anew: %s", cause)
        check_walk(everything)
        self.meta.parameters = names_of_parameters(self._source, everything, self.messages)
        self._plan = self._state.make_plan(part)
        return self._plan

    def forget_plan(self) -> None:
        """Drop the plan: ranks share less of the state than before, or nothing is captured any more."""
        self._plan = None
        self._state.forget_partition()

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
        self.memory.report_use(capture.slot)
        faults.point("engine.begun")
        self._count_begun(capture.step)
        self._statistics.shard_bytes = image_bytes
        self._require_begun(capture.step)

    def _count_begun(self, step: int) -> None:
        self._statistics.began += 1
        self._become_prepared()
        if self._skipped is not None:
            skipped_step, reason = self._skipped
            if skipped_step == step:  # tried again, with success
                self._statistics.skipped -= Counter([reason])
        self._skipped = None

    def _require_begun(self, step: int) -> None:
        """Ask the keeper for what this capture is to get: storage, and the names that wait for it."""
        if self.stores_next:
            self.stores_next = False
            self._client.require(step)
        for name in self._names_for_next:
            self._give_name(name, step)
        self._names_for_next = {}

    def forbid_repeat(self) -> None:
        """Let no restart train the step of the newest capture again: it was asked for, or training ends there."""
        newest = self.captures.newest
        if newest is not None and newest.is_in_slot:
            newest.slot.allow_repeat(is_repeatable=False)

    def skip(self, reason: str) -> None:
        """Count a boundary that began no capture; once, however often it is tried."""
        if reason != NO_SLOTS:
            self._become_prepared()
        elif self._unprepared_since_s is None:
            self._unprepared_since_s = time.monotonic()
        if self._skipped is None or self._skipped[0] != self.seen_step:
            self._skipped = (self.seen_step, reason)
            self._statistics.skipped[reason] += 1

    def _become_prepared(self) -> None:
        """Steps are not skipped for want of slots any more: one was captured, or there is another reason."""
        self.count_preparation()
        self._unprepared_since_s = None

    def count_preparation(self) -> None:
        """Count the time up to now, if steps are skipped because memory is being prepared."""
        if self._unprepared_since_s is not None:
            now_s = time.monotonic()
            self._statistics.preparation_s += now_s - self._unprepared_since_s
            self._unprepared_since_s = now_s

    def report_sizes(self) -> None:
        """Print what captures take, once there is a plan. Blocks, and raises: as ``Memory.report_sizes``."""
        if self._plan is not None:
            self.memory.report_sizes(self._plan.layout.size_bytes)

    # Ended captures

    def count_ended(self) -> None:
        """Count captures that ended, and how long devices waited at gates."""
        for capture in self.captures.take_ended():
            self._count_ended(capture)
        self.check.report()
        self._statistics.device_wait_s += self.captures.take_device_wait_s()

    def _count_ended(self, capture: Capture) -> None:
        """A capture into memory is over: count it, and say so if it was dropped."""
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
        """Name the capture of the last boundary, or else that of the next; its step (of the next: the least).

        ``is_over``: the step of the last boundary is the present one.
        """
        step = self.step_to_name(is_over=is_over)
        if step == self.seen_step:
            self._give_name(name, step)
        else:
            self._names_for_next[name] = None
        return step

    def step_to_name(self, *, is_over: bool) -> int:
        """Return the step that ``keep`` would name now."""
        newest = self.captures.newest
        if is_over and newest is not None and newest.step == self.seen_step and _is_in_memory(newest):
            return newest.step
        return (self.seen_step or 0) + 1

    def names(self, stored_names: set[str]) -> set[str]:
        """Return the names that snapshots of the run have, or are to get. ``stored_names``: at the first level."""
        return self.memory.events.names(stored_names) | set(self._names_for_next)

    def _give_name(self, name: str, step: int) -> None:
        self.forbid_repeat()
        self._client.keep(name, step)
        self.memory.events.name_given(name, step)

    def release(self, name: str) -> None:
        """Take the name from every snapshot of the run."""
        self._names_for_next.pop(name, None)
        self._client.release(name)
        self.memory.events.name_released(name)

    def _lose_names_for_next(self, did: str) -> None:
        for name in self._names_for_next:
            self.memory.events.lose_name(name, f"training {did} before it was captured")
        self._names_for_next = {}

    def end_names(self) -> None:
        """Nothing is captured any more: the names that wait for a capture are lost."""
        self._lose_names_for_next("ended")


def _is_in_memory(capture: Capture) -> bool:
    """True if a capture is still in its slot, whole or being copied."""
    return slot_phase(capture) in (SlotPhase.CAPTURING, SlotPhase.WHOLE)
