"""The work of a boundary: walk the state, plan, choose a slot, begin the capture."""

import sys
import time
from collections import Counter

from lazysnap import faults
from lazysnap.capture.capture import Capture, Phase
from lazysnap.capture.plan import CapturePlan
from lazysnap.config import SnapshotConfig
from lazysnap.engine.estimate import bytes_of_share, estimate_image_bytes
from lazysnap.engine.events import Connection, KeeperEvents
from lazysnap.engine.history import History
from lazysnap.engine.messages import Event, Messages
from lazysnap.engine.meta import MetaWriter
from lazysnap.engine.planner import Planner
from lazysnap.engine.protection import Protection
from lazysnap.engine.report import Sizes
from lazysnap.engine.slots import Slots
from lazysnap.errors import KeeperError
from lazysnap.keeper.client import KeeperClient
from lazysnap.memory.budget import NODE
from lazysnap.memory.failures import MemoryBoundExceeded
from lazysnap.memory.slots import TrainerSlot
from lazysnap.ranks.world import World
from lazysnap.state.source import StateSource
from lazysnap.state.walk import Walk

_NO_SLOTS = "no slots yet"
_ALL_IN_USE = "all slots are in use"
_NO_MEMORY = "no memory"
_PASSING = (_NO_SLOTS, _ALL_IN_USE)
"""Reasons for leaving out a capture that pass by themselves."""


class Recorder:
    """Begins captures; all on the training thread, and under the engine's lock.

    It is large because a capture needs all its parts in one order: plan, memory, slot, metadata. What each part decides
    stands in that part; here is the order, and why a boundary was left out.
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
        self._messages = messages
        self._statistics = messages.statistics
        self._world = world
        self.slots = Slots(config, source, client, world)
        self.captures = self.slots.captures
        self.protection = Protection(messages)
        self.events = KeeperEvents(config, messages, world.rank)
        self.meta = MetaWriter.agreed(world, config)
        self.history = History(self.captures, client)
        self.planner = Planner(source, world, messages)
        self.group = (1, 0)
        """Nodes that protect each other, and how many of them may be lost."""
        self._every_n_steps = config.every_n_steps
        self._resumed_step: int | None = None
        self.seen_step: int | None = None
        """The step of the last boundary, or of the snapshot that was resumed."""
        self._skipped: tuple[int | None, str] | None = None
        """The step that was left out since the newest capture began, and why."""
        self.encoded_once = False
        self.is_sealed = False
        """True if nothing is captured any more, though training may go on for a moment. Set by other threads."""
        self.stores_next = False
        """True if every level must store the next capture, due there or not."""
        self._names_for_next: list[str] = []
        """Names for the next capture."""
        self.waits_for_memory = True
        """True if the next capture waits for memory: the first one, also after ``resume`` and ``wait_ready``."""
        self._ignored_refusal = ""
        """Text of a refusal of memory that was answered by asking for less."""
        self._next_retry_s = 0.0
        """Time from which on a keeper may be started again, if none could be reached."""

    # Getting ready

    def use_redundancy(self, group: tuple[int, int]) -> None:
        """Make room for what other nodes read. ``group``: nodes that protect each other, and how many may be lost."""
        self.group = group
        self.slots.is_redundant = group[1] > 0

    def prepare(self) -> None:
        """Ask for memory before the first boundary. Does not block."""
        if not self.slots.is_asked:
            size = bytes_of_share(self.planner.replicated(), self._world.node_ranks)
            self.slots.ask(estimate_image_bytes(self._source, size))

    def sizes(self) -> Sizes | None:
        """Return the sizes of the state and of its memory; ``None`` before the first plan."""
        plan = self.planner.plan
        if plan is None:
            return None
        slots = self._client.slots()
        each_bytes = self.slots.bytes_each(plan.layout.size_bytes)
        held_bytes = sum(slot.memory_bytes for slot in slots)
        available_bytes = min(NODE.free_bytes() + held_bytes, self._config.memory.max_bytes or sys.maxsize)
        directory = None
        if any(slot.is_file for slot in slots):
            directory = self.slots.spill_dir
        return Sizes(
            plan.layout.size_bytes,
            self.slots.needed,
            each_bytes,
            available_bytes,
            group=self.group,
            spill_dir=directory,
        )

    def is_ready(self) -> bool:
        """True if every slot is there."""
        return len(self._client.slots()) >= self.slots.needed

    def resume(self, step: int) -> None:
        """The state of ``step`` is being loaded."""
        self._resumed_step = step
        self.seen_step = step
        self._skipped = None
        self._lose_names_for_next("went back")
        self.history.reset()
        self._statistics.last_whole_step = None
        self.waits_for_memory = True

    def go_back(self, step: int) -> None:
        """The state of ``step``, the newest that was captured, was loaded in place: training stands there again."""
        self.seen_step = step

    @property
    def last_step(self) -> int | None:
        """The step of the last capture, or of the snapshot that was resumed from."""
        newest = self.history.newest
        return self._resumed_step if newest is None else newest.step

    @property
    def last_due(self) -> int | None:
        """The step of the last boundary that was due, captured or not, since the last resume."""
        if self._skipped is not None:
            step, _ = self._skipped
            return step
        newest = self.history.newest
        return None if newest is None else newest.step

    @property
    def may_retry(self) -> bool:
        """True if the last boundary that was due was left out for want of memory that may come."""
        if self._skipped is None or self.protection.cause is not None:
            return False
        _, reason = self._skipped
        return reason in _PASSING

    # At a boundary

    def is_due(self, step: int, *, force: bool) -> bool:
        """True if the boundary after ``step`` is to be captured."""
        self.seen_step = step
        self._reach(step)
        if step == self.last_step:
            return False
        # Of the step alone: on all ranks alike. The first boundary shows whether the state can be captured at all.
        is_first = self.last_step is None
        return is_first or step % self._every_n_steps == 0 or force or bool(self._names_for_next)

    def _reach(self, step: int) -> None:
        """Note in memory that training passed ``step``: after its death the keeper knows how many steps are lost."""
        newest = self.history.newest
        if newest is not None and self.history.is_in_slot(newest):
            newest.slot.reach(step)

    def begin(self, step: int) -> bool:
        """Begin the capture; ``False``, and the reason counted, if it cannot be.

        Blocks: the first one until its memory is there, at most ``io_timeout_s``.
        Raises: StateError; JobBusy; whatever a capture meets.
        """
        try:
            return self._begin(step)
        finally:
            self.waits_for_memory = False  # no capture waits after such a wait has failed

    def _begin(self, step: int) -> bool:
        reason = self._reason_not_to_begin()
        if reason:
            return self.skip(reason)
        plan, walked = self._plan_capture()
        meta = self.meta.write(step, plan, walked)
        self.slots.ask_for(plan.layout.size_bytes, len(meta))
        slot = self._await_slot(plan, len(meta))
        if slot is None:
            return self.skip(self._reason_for_no_slot())
        if self.is_sealed:  # also while the state was walked
            return self.skip("training ends")
        self._start(Capture(plan, slot, step, walked.tensors, sequence=self.history.next_sequence()), meta)
        return True

    def _reason_not_to_begin(self) -> str:
        """Return why there is no use in walking the state; empty if there is. Starts a keeper where there is none."""
        if not self.captures.wait_released(self._config.io_timeout_s):
            return "an earlier copy hangs"
        self.count_ended()
        if self.is_unprotected():
            # The first boundary raises what no snapshot can hold; and with several ranks a walk may end in a
            # collective, which all of them take at the same steps.
            if self.encoded_once and self._world.is_alone:
                self.protection.remind()
                return _NO_MEMORY
        elif self.waits_for_memory:
            self.slots.register()  # before slots that an earlier start left are made ready
            self._client.start()
        elif self.planner.plan is not None and not self._client.slots():
            self._client.start()
            return _NO_SLOTS
        return ""

    def _plan_capture(self) -> tuple[CapturePlan, Walk]:
        """Return the plan, and this rank's part of the state. Raises: StateError."""
        everything = self.planner.collect()
        walked = self.planner.own_part(everything)
        plan = self.planner.for_capture(walked, everything)
        self.meta.parameters = self.planner.parameters
        self.encoded_once = True
        return plan, walked

    def _await_slot(self, plan: CapturePlan, meta_bytes: int) -> TrainerSlot | None:
        """Return a slot for this capture; ``None`` if there is none.

        Blocks, if this capture waits for memory: until there is a slot, or it is known that there will be none.
        """
        image_bytes = plan.layout.size_bytes
        if self.waits_for_memory and not self._has_memory(image_bytes, meta_bytes):
            started_s = time.monotonic()
            while time.monotonic() < started_s + self._config.io_timeout_s:
                if self.protection.cause is not None or self._client.is_silent:
                    break
                time.sleep(0.001)
                self.drain_events()
                if self._has_memory(image_bytes, meta_bytes):
                    break
            self._statistics.memory_wait_s += time.monotonic() - started_s
        return self.slots.choose(image_bytes, meta_bytes)

    def _has_memory(self, image_bytes: int, meta_bytes: int) -> bool:
        """True if a capture finds a slot; of several ranks, if each later one will, too.

        A rank that left out a step alone while its slots are made would have none in common with the others.
        """
        if not self._world.is_alone and not self.slots.are_enough:
            return False
        return self.slots.choose(image_bytes, meta_bytes) is not None

    def _reason_for_no_slot(self) -> str:
        """Return why no slot could be chosen. Raises: JobBusy."""
        if self.is_unprotected():
            refusal = self._client.refusal()
            if refusal is not None:
                raise refusal
            self.protection.remind()
            return _NO_MEMORY
        return _ALL_IN_USE if self.is_ready() else _NO_SLOTS

    def _start(self, capture: Capture, meta: bytes) -> None:
        """Begin the capture in its slot, then begin the copies."""
        image_bytes = capture.plan.layout.size_bytes
        faults.point("engine.begin")
        capture.slot.begin(
            self.meta.start_number, capture.step, sequence=capture.sequence, image_bytes=image_bytes, meta=meta
        )
        self._client.wake(capture.step)
        self._client.note_waited(self._statistics.waited_s)
        self.captures.begin(capture)
        self.protection.regain()
        if capture.slot.is_file:
            self._messages.tell(Event.FILES, directory=self.slots.spill_dir)
        faults.point("engine.begun")
        self._count_begun(capture.step)
        self._statistics.shard_bytes = image_bytes
        self._require_begun(capture.step)

    def _count_begun(self, step: int) -> None:
        self._statistics.began += 1
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
        self._names_for_next = []

    def skip(self, reason: str) -> bool:
        """Count a boundary that began no capture; once, however often it is tried."""
        if self._skipped is None or self._skipped[0] != self.seen_step:
            self._skipped = (self.seen_step, reason)
            self._statistics.skipped[reason] += 1
        return False

    # Memory

    def memory_error(self) -> KeeperError | None:
        """Return why there is no memory for captures now; ``None`` if there is, or it may still come. Hot."""
        if self._client.is_connected:
            text = self._client.state.memory_refusal
            if not text or text == self._ignored_refusal or self.slots.are_enough:
                return None
            return MemoryBoundExceeded(text)
        failure = self._client.failure()
        return KeeperError(failure) if failure else None

    def is_unprotected(self) -> bool:
        """True if captures cannot go into the keeper's memory, so that there are none. Hot."""
        if self.protection.cause is None:
            return False
        if self.slots.are_enough:
            return False
        now_s = time.monotonic()
        if now_s >= self._next_retry_s:
            self._next_retry_s = now_s + self._config.io_timeout_s
            self._client.start()
            self.prepare()  # the keeper may have failed before anything was asked for
        return True

    def drain_events(self) -> None:
        """Count and report what is new of the keeper and of levels since the last call."""
        self.events.compare(self._client.state, Connection.of(self._client))
        error = self.memory_error()
        if error is None:
            return
        if isinstance(error, MemoryBoundExceeded) and self._ask_for_less(str(error)):
            return
        is_new = self.protection.cause != str(error)
        if is_new:
            if not isinstance(error, MemoryBoundExceeded):
                self._statistics.keepers_lost += 1
            self._next_retry_s = time.monotonic() + self._config.io_timeout_s
        self.protection.lose(error, is_reported=self._client.refusal() is not None)

    def _ask_for_less(self, refusal: str) -> bool:
        """Give up the slot that is there for the protection by other nodes alone; ``False`` if there is none."""
        if not self.slots.is_redundant or self._config.levels:  # levels read that slot, too
            return False
        self.use_redundancy((1, 0))
        self._ignored_refusal = refusal
        self._messages.tell(Event.NO_PARITY, text=refusal)
        self.slots.ask_again()
        return True

    # Ended captures

    def count_ended(self) -> None:
        """Count captures that ended, and how long devices waited at gates."""
        for capture in self.captures.take_ended():
            self._count_ended(capture)
        self._statistics.device_wait_s += self.captures.take_device_wait_s()

    def _count_ended(self, capture: Capture) -> None:
        """A capture into memory is over: count it, and say so if it was dropped."""
        statistics = self._statistics
        if capture.phase is Phase.WHOLE:
            statistics.whole += 1
            statistics.bytes_captured += capture.plan.layout.size_bytes
            statistics.copy.add(capture.copy_s)
            statistics.last_whole_step = capture.step  # whoever reads it asks whether its keeper lives
            return
        event = Event.TORN if capture.phase is Phase.TORN else Event.FAILED
        self._messages.tell(event, step=capture.step, text=capture.reason)

    # Names

    def keep(self, name: str, *, is_over: bool) -> int:
        """Name the capture of the last boundary, or else that of the next; its step (of the next: the least).

        ``is_over``: the step of the last boundary is the present one.
        """
        newest = self.history.newest
        if is_over and newest is not None and newest.step == self.seen_step and self.history.is_in_slot(newest):
            self._give_name(name, newest.step)
            return newest.step
        self._names_for_next.append(name)
        return (self.seen_step or 0) + 1

    def _give_name(self, name: str, step: int) -> None:
        self._client.keep(name, step)
        self.events.name_given(name, step)

    def release(self, name: str) -> None:
        """Take the name from every snapshot of the run."""
        self._names_for_next = [waiting for waiting in self._names_for_next if waiting != name]
        self._client.release(name)
        self.events.name_released(name)

    def _lose_names_for_next(self, did: str) -> None:
        for name in self._names_for_next:
            self.events.lose_name(name, f"training {did} before it was captured")
        self._names_for_next = []

    # Ending

    def end_names(self) -> None:
        """Nothing is captured any more: the names that wait for a capture are lost."""
        self._lose_names_for_next("ended")

    def close(self) -> None:
        """Let go of the state and of the slots."""
        self.planner.forget()
