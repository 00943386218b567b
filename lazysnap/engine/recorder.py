"""The work of a boundary: walk the state, plan, choose a slot, begin the capture."""

import functools
import sys
import time
from collections import Counter
from collections.abc import Callable

from lazysnap import faults
from lazysnap.capture.capture import Capture, Phase
from lazysnap.capture.plan import CapturePlan
from lazysnap.config import SnapshotConfig
from lazysnap.engine.estimate import bytes_of_share, estimate_image_bytes
from lazysnap.engine.events import KeeperEvents
from lazysnap.engine.frozen import FrozenTensors
from lazysnap.engine.history import History
from lazysnap.engine.messages import Event, Messages
from lazysnap.engine.meta import MetaWriter
from lazysnap.engine.names import Names
from lazysnap.engine.planner import Planner
from lazysnap.engine.protection import Protection
from lazysnap.engine.report import Sizes
from lazysnap.engine.slots import Slots
from lazysnap.keeper.client import KeeperClient
from lazysnap.keeper.protocol import SlotsChanged, Store
from lazysnap.memory.arena import Slot, SlotPhase, Word
from lazysnap.memory.budget import NODE
from lazysnap.memory.failures import MemoryBoundExceeded
from lazysnap.ranks.world import World
from lazysnap.state.source import StateSource

_PASSING = ("no slots yet", "all slots are in use", "frozen tensors are being captured")
"""Reasons for leaving out a capture that pass by themselves."""


class Recorder:
    """Begins captures; all on the training thread, and under the engine's lock.

    It is large because a capture needs all its parts in one order: plan, memory, frozen tensors, slot, metadata. What
    each part decides stands in that part; here is the order, and why a boundary was left out.
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
        self.slots = Slots(config, source, client, messages.statistics, world)
        self.captures = self.slots.captures
        self.protection = Protection(config, messages)
        self.events = KeeperEvents(config, messages, self.protection)
        self._world = world
        self.meta = MetaWriter.agreed(world, config)
        self.names = Names(client, messages)
        self.history = History(self.captures, client)
        self.frozen = FrozenTensors(source, client, messages, self.meta)
        self.planner = Planner(source, world, self.frozen, messages)
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
        """True if storage gets the next capture, due there or not."""
        self.waits_for_memory = True
        """True if the next capture waits for memory: the first one, also after ``resume`` and ``wait_ready``."""
        self._waits_until = 0.0
        """Time until which the current capture waits for memory."""
        self._waits_for_named = True

    # ---------------------------------------------------------------- getting ready

    def prepare(self) -> None:
        """Ask for memory before the first boundary. Does not block."""
        if self.planner.plan is None:
            self.frozen.prepare(is_alone=self._world.is_alone)
        if not self.slots.is_asked:
            size = bytes_of_share(self.planner.replicated(), self._world.node_ranks)
            self.slots.ask(estimate_image_bytes(self._source, self.frozen.names, size))

    def sizes(self) -> Sizes | None:
        """Return the sizes of the state and of its memory; ``None`` before the first plan."""
        plan = self.planner.plan
        if plan is None:
            return None
        frozen = plan.frozen.size_bytes if plan.frozen is not None else 0
        slots, each = self._client.slots(), self.slots.bytes_each(plan.layout.size_bytes)
        held = sum(slot.memory_bytes for slot in slots)
        available = min(NODE.free_bytes() + held + frozen, self._config.memory.max_bytes or sys.maxsize)
        place = self.slots.spill_dir if any(slot.is_file for slot in slots) else None
        return Sizes(plan.layout.size_bytes, frozen, self.slots.needed, each, available, self.slots.group, place)

    def is_ready(self) -> bool:
        """True if every slot is there, and the frozen tensors that every capture refers to."""
        return len(self._client.slots()) >= self.slots.needed and not self.frozen.is_awaited()

    def resume(self, step: int) -> None:
        """The state of ``step`` is being loaded."""
        self._resumed_step = self.seen_step = step
        self._skipped = None
        if self.frozen.names:
            self.planner.plan = None  # it refers to a set that is chosen anew
        self.frozen.reset()
        self.names.begin_run()
        self.history.reset()
        self._statistics.last_whole_step = None
        self.waits_for_memory = True
        self.events.begin(step)

    def go_back(self, step: int) -> None:
        """The state of ``step``, the newest that was captured, was loaded in place: training stands there again."""
        self.seen_step = step
        self.frozen.reloaded()

    @property
    def last_step(self) -> int | None:
        """The step of the last capture, or of the snapshot that was resumed from."""
        newest = self.history.newest
        return self._resumed_step if newest is None else newest.step

    @property
    def last_due(self) -> int | None:
        """The step of the last boundary that was due, captured or not, since the last resume."""
        if self._skipped is not None:
            return self._skipped[0]
        newest = self.history.newest
        return None if newest is None else newest.step

    @property
    def may_retry(self) -> bool:
        """True if the last boundary that was due was left out for want of memory that may come."""
        return self._skipped is not None and self._skipped[1] in _PASSING and self.protection.cause is None

    # ---------------------------------------------------------------- at a boundary

    def is_due(self, step: int, *, force: bool) -> bool:
        """True if the boundary after ``step`` is to be captured."""
        self.seen_step = step
        self._reach(step)
        if step == self.last_step:
            return False
        # Of the step alone: on all ranks alike. The first boundary shows whether the state can be captured at all.
        is_first = self.last_step is None
        return is_first or step % self._every_n_steps == 0 or force or bool(self.names.wanted)

    def _reach(self, step: int) -> None:
        """Note in memory that training passed ``step``: after its death the keeper knows how many steps are lost."""
        newest = self.history.newest
        if newest is not None and not newest.is_dropped:
            newest.slot.set_word(Word.REACHED, step + 1)

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
        if not self.captures.wait_released(self._config.io_timeout_s):
            return self.skip("an earlier copy hangs")
        self.count_ended()
        if self.is_unprotected():
            # The first boundary raises what no snapshot can hold; and with several ranks a walk may end in a
            # collective, which all of them take at the same steps.
            if self.encoded_once and self._world.is_alone:
                return self._skip_unprotected()
        elif self.waits_for_memory:
            self.slots.register()  # before slots that an earlier start left are made ready
            self._client.start()
        elif self.planner.plan is not None and not self._client.slots():
            self._client.start()
            return self.skip("no slots yet")
        holds = self.frozen.look()
        if holds and self.planner.plan is not None and not self.waits_for_memory and not self.frozen.is_whole():
            return self._skip_frozen()
        everything = self.planner.collect()
        walked = self.planner.own_part(everything)
        plan = self.planner.for_capture(walked, everything, holds=holds)
        self.meta.parameters, self.encoded_once = self.planner.parameters, True
        is_whole = self.frozen.is_whole()
        meta = self.meta.write(step, plan, walked, self.frozen.reference())
        # From here on: before, with several ranks, the plan may have waited for another one.
        self._waits_until = time.monotonic() + (self._config.io_timeout_s if self.waits_for_memory else 0.0)
        slots = self._slots_for(plan, len(meta))
        if not is_whole and self._waits_for(lambda: not self.frozen.is_awaited()):
            is_whole = self.frozen.is_whole()
            meta = self.meta.write(step, plan, walked, self.frozen.reference())
        if not (slots and is_whole) and self.is_unprotected():
            refusal = self._client.refusal()
            if refusal is not None:
                raise refusal
            return self._skip_unprotected()
        if not is_whole:
            return self._skip_frozen()
        if not slots:
            return self.skip("no slots yet")
        look_again = functools.partial(self.slots.fitting, plan.layout.size_bytes, len(meta))
        slot = self.slots.await_one(slots, look_again, waits_alone=self.waits_for_memory)
        if slot is None:
            return self.skip("all slots are in use" if self.is_ready() else "no slots yet")
        if self.is_sealed:  # also while the state was walked
            return self.skip("training ends")
        self._start(Capture(plan, slot, step, walked.tensors, sequence=self.history.next_sequence()), meta)
        return True

    def is_unprotected(self) -> bool:
        """True if captures cannot go into the keeper's memory, so that there are none. Hot."""
        protection = self.protection
        if self.frozen.refusal and protection.cause is None:
            protection.lost(MemoryBoundExceeded(f"the frozen tensors do not fit: {self.frozen.refusal}"))
        if protection.cause is None:
            return False
        if protection.may_retry():
            self._ask_again()
        return bool(self.frozen.refusal) or not self.slots.are_enough

    def _ask_again(self) -> None:
        """Start a keeper where there is none, and ask it for memory. Does not block."""
        self._client.start()
        if self.slots.is_asked:
            self.slots.ask_again()
        else:  # the keeper failed before anything was asked for
            self.prepare()

    def _start(self, capture: Capture, meta: bytes) -> None:
        slot, step, size = capture.slot, capture.step, capture.plan.layout.size_bytes
        faults.point("engine.begin")
        slot.begin(step, sequence=capture.sequence, image_bytes=size, meta=meta, pin=slot.is_granted(step))
        slot.set_word(Word.WAITED, int(1e9 * self._statistics.waited_s))
        if slot.word(Word.PIN) and not slot.is_granted(step):
            slot.unpin()  # withdrawn in between: the keeper, which looks the other way round, may have missed the pin
        # While storage waits for a step ahead its keeper looks at the words by itself: a message costs 0.3 ms.
        if self._config.levels and slot.word(Word.GRANT) <= step + 1:
            self._client.tell(SlotsChanged())
        self.captures.begin(capture)
        self.protection.regained()
        if slot.is_file:
            self._messages.tell(Event.FILES, directory=self.slots.spill_dir)
        faults.point("engine.begun")
        self._statistics.began += 1
        if self._skipped is not None and self._skipped[0] == step:  # tried again, with success
            self._statistics.skipped -= Counter([self._skipped[1]])
        self._skipped = None
        self._statistics.shard_bytes = size
        if self._config.levels and (self.stores_next or self.names.wanted):
            slot.pin(step, until_stored=True)
        if self.stores_next:
            self.stores_next = False
            self._client.tell(Store(step))
        self.names.give_wanted(step)

    def skip(self, reason: str) -> bool:
        """Count a boundary that began no capture; once, however often it is tried."""
        if self._skipped is None or self._skipped[0] != self.seen_step:
            self._skipped = self.seen_step, reason
            self._statistics.skipped[reason] += 1
        return False

    def _skip_unprotected(self) -> bool:
        self.protection.remind()
        return self.skip("no memory")

    def _skip_frozen(self) -> bool:
        return self.skip("frozen tensors are being captured")

    def _slots_for(self, plan: CapturePlan, meta_bytes: int) -> list[Slot]:
        """Slots that the capture fits; asks for others where it does not. Blocks, if this capture waits for memory."""
        size = plan.layout.size_bytes
        slots = self.slots.ask_for(size, meta_bytes)
        if not slots and self._waits_for(lambda: bool(self.slots.fitting(size, meta_bytes))):
            slots = self.slots.fitting(size, meta_bytes)
        return slots

    def _waits_for(self, is_there: Callable[[], bool]) -> bool:
        """Wait for memory until the deadline of this capture, or until it is known that there is none; the result."""
        started = time.monotonic()
        while not (found := is_there()) and time.monotonic() < self._waits_until:
            if self.protection.cause is not None or self.frozen.refusal or self._client.is_silent:
                break
            time.sleep(0.001)
            self.drain_events()
        self._statistics.memory_wait_s += time.monotonic() - started
        return found

    def drain_events(self) -> None:
        """Count and report the events of keeper and levels since the last call."""
        for text in self.events.take(self._client.poll_events()):
            if self.slots.group[1] and self.slots.is_asked:
                # What is only there for other nodes' protection goes first.
                self.slots.group = (1, 0)
                self._messages.tell(Event.NO_PARITY, text=text)
                self.slots.ask_again()
            else:
                self.protection.lost(MemoryBoundExceeded(text))

    def count_ended(self) -> None:
        """Count captures that ended, and how long devices waited at gates."""
        for capture in self.captures.take_ended():
            self._count(capture)
        self._statistics.device_wait_s += self.captures.take_device_wait_s()

    def _count(self, capture: Capture) -> None:
        """A capture into memory is over: count it, and say so if it was dropped."""
        statistics = self._statistics
        if capture.phase is Phase.WHOLE:
            statistics.whole += 1
            statistics.bytes_captured += capture.plan.layout.size_bytes
            statistics.copy.add(capture.copy_s)
            statistics.last_whole_step = capture.step  # whoever reads it asks whether its keeper lives
            return
        kind = Event.TORN if capture.phase is Phase.TORN else Event.FAILED
        self._messages.tell(kind, step=capture.step, text=capture.reason)

    # ---------------------------------------------------------------- names

    def keep(self, name: str, *, is_over: bool) -> int:
        """Name the capture of the last boundary, or else that of the next; its step (of the next: the least).

        ``is_over``: the step of the last boundary is the present one.
        """
        self._await_named()
        newest = self.history.newest
        if is_over and newest is not None and newest.step == self.seen_step and _is_there(newest):
            # Before the keeper receives it: from now on the slot is not used for another capture.
            newest.slot.pin(newest.step, until_stored=True)
            self.names.give(newest.step, [name])
            return newest.step
        self.names.wanted.append(name)
        return (self.seen_step or 0) + 1

    def _await_named(self) -> None:
        """Wait until storage has taken what must be stored of other steps: memory has one slot to spare for that.

        Not again after such a wait was in vain: a level that is away must not hold up training at each call.
        """
        deadline = time.monotonic() + (self._config.io_timeout_s if self._waits_for_named else 0.0)
        self._waits_for_named = True
        while self._is_storage_behind():
            if time.monotonic() >= deadline or self._client.is_silent:
                self._waits_for_named = False
                return
            time.sleep(0.001)

    def _is_storage_behind(self) -> bool:
        """True if memory keeps a step before this one until it is stored."""
        return any(slot.kept_step not in (None, self.seen_step) for slot in self._client.slots())

    # ---------------------------------------------------------------- ending

    def close(self) -> None:
        """Let go of the state and of the slots. Blocks: at most some seconds."""
        self.frozen.close()
        self.planner.forget()


def _is_there(capture: Capture) -> bool:
    return capture.is_in_slot and capture.slot.status().phase in (SlotPhase.CAPTURING, SlotPhase.WHOLE)
