"""The work of a boundary: walk the state, plan, choose a slot, begin the capture."""

import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from lazysnap import faults
from lazysnap.capture.capture import Capture, Phase
from lazysnap.capture.captures import Captures
from lazysnap.capture.plan import CapturePlan
from lazysnap.capture.registration import registrar
from lazysnap.config import SnapshotConfig
from lazysnap.engine.estimate import bytes_of_share, estimate_image_bytes, growth_bytes, resident_bytes
from lazysnap.engine.events import KeeperEvents
from lazysnap.engine.frozen import FrozenTensors
from lazysnap.engine.history import History
from lazysnap.engine.messages import Event, Messages
from lazysnap.engine.meta import MetaWriter
from lazysnap.engine.names import Names
from lazysnap.engine.pace import Pace
from lazysnap.engine.planner import Planner
from lazysnap.engine.protection import Protection
from lazysnap.engine.report import Sizes
from lazysnap.errors import MemoryBoundExceeded
from lazysnap.keeper.client import KeeperClient
from lazysnap.keeper.protocol import SlotsChanged, Store
from lazysnap.memory.arena import Slot, SlotPhase, Word, capacity_fits
from lazysnap.memory.budget import NODE
from lazysnap.memory.slot_files import spill_dir
from lazysnap.memory.slot_pool import fits
from lazysnap.ranks.slots import choose_slot, kept_whole, least_slots, slots_needed, slots_to_return
from lazysnap.ranks.world import World
from lazysnap.state.source import StateSource

META_BYTES = 1 << 20
"""Least room for the small state in a slot."""
_PASSING = ("no slots yet", "all slots are in use", "frozen tensors are being captured")
"""Reasons for leaving out a capture that pass by themselves."""


class Recorder:
    """Begins captures; all on the training thread, and under the engine's lock."""

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
        self.spill_dir = spill_dir(config.memory, config.levels)
        """Directory in which the keeper makes slots as files if memory does not suffice."""
        self.captures = Captures()
        self._messages = messages
        self._statistics = messages.statistics
        self.protection = Protection(config, messages)
        self.events = KeeperEvents(config, messages, self.protection)
        self._world = world
        self.meta = MetaWriter.agreed(world, config)
        self.names = Names(client, messages)
        self.history = History(self.captures, client)
        self.frozen = FrozenTensors(source, client, messages, self.meta)
        self.planner = Planner(source, world, self.frozen, messages)
        self.pace = Pace(config, world, messages)
        self._meta_capacity = META_BYTES
        self._reserved: tuple[int, int] | None = None
        self._expects_first_step = True
        """True while the keeper still leaves room for the memory of the first step."""
        self._peak_before = 0
        """The peak of this process's memory before the first step."""
        self._resumed_step: int | None = None
        self.seen_step: int | None = None
        """The step of the last boundary, or of the snapshot that was resumed."""
        self._skipped: tuple[int | None, str] | None = None
        """The step that was left out since the newest capture began, and why."""
        self._keepers_lost = 0
        self.group = (1, 0)
        """Nodes that protect each other, and how many of them may be lost."""
        self.encoded_once = False
        self.is_sealed = False
        """True if nothing is captured any more, though training may go on for a moment. Set by other threads."""
        self.stores_next = False
        """True if storage gets the next capture, due there or not."""
        self.waits_for_memory = True
        """True if the next capture waits for memory: the first one, also after ``resume`` and ``wait_ready``."""
        self._waits_until = 0.0
        """Time until which the current capture waits for memory."""
        self._waits_for_storage = True
        """True if a capture waits for a slot that storage reads. Not again after such a wait has failed."""
        self._waits_for_named = True

    # ---------------------------------------------------------------- getting ready

    def prepare(self) -> None:
        """Ask for memory before the first boundary. Does not block."""
        if self.planner.plan is None:
            self.frozen.prepare(is_alone=self._world.is_alone)
        if self._reserved is None:
            size = bytes_of_share(self.planner.replicated(), self._world.node_ranks)
            self._reserve(estimate_image_bytes(self._source, self.frozen.names, size))

    def sizes(self) -> Sizes | None:
        """Return the sizes of the state and of its memory; ``None`` before the first plan."""
        plan = self.planner.plan
        if plan is None:
            return None
        slot_bytes = Slot.bytes_for(*(self._reserved or (self._meta_capacity, plan.layout.size_bytes)))
        frozen = plan.frozen.size_bytes if plan.frozen is not None else 0
        slots = self._client.slots()
        held = sum(slot.memory_bytes for slot in slots)
        available = min(NODE.free_bytes() + held + frozen, self._config.memory.max_bytes or sys.maxsize)
        place = self.spill_dir if any(slot.is_file for slot in slots) else None
        return Sizes(plan.layout.size_bytes, frozen, self._slots_needed(), slot_bytes, available, self.group, place)

    def is_ready(self) -> bool:
        """True if every slot is there, and the frozen tensors that every capture refers to."""
        return len(self._client.slots()) >= self._slots_needed() and not self.frozen.is_awaited()

    def _slots_needed(self) -> int:
        world = self._world
        return slots_needed(self._config, world.size, runs_ahead=world.runs_ahead, is_redundant=self.group[1] > 0)

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
        return is_first or step % self.pace.every == 0 or force or bool(self.names.wanted)

    def _reach(self, step: int) -> None:
        """Note in memory that training passed ``step``: after its death the keeper knows how many steps are lost."""
        newest = self.history.newest
        if newest is not None and not newest.is_dropped:
            newest.slot.set_word(Word.REACHED, step + 1)

    def begin(self, step: int) -> bool:
        """Begin the capture; ``False``, and the reason counted, if it cannot be.

        Blocks: the first one until its memory is there, at most ``io_timeout_s``.
        Raises: UnsupportedState; JobBusy; whatever a capture meets.
        """
        try:
            return self._begin(step)
        finally:
            self.waits_for_memory = False  # no capture waits after such a wait has failed

    def _begin(self, step: int) -> bool:
        if not self.captures.wait_released(self._config.io_timeout_s):
            return self.skip("an earlier copy hangs")
        self.settle()
        if self.is_unprotected():
            # The first boundary raises what no snapshot can hold; and with several ranks a walk may end in a
            # collective, which all of them take at the same steps.
            if self.encoded_once and self._world.is_alone:
                return self._skip_unprotected()
        elif self.waits_for_memory:
            self.register_slots()  # before slots that an earlier start left are made ready
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
        slot = self._await_slot(slots, lambda: self._fitting(plan, len(meta)))
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
        if self.frozen.refusal or self._reserved is None:
            return True
        fitting = [slot for slot in self._client.slots() if capacity_fits(slot.image_capacity, self._reserved[1])]
        return len(fitting) < self._least_slots()

    def _ask_again(self) -> None:
        """Start a keeper where there is none, and ask it for memory. Does not block."""
        self._client.start()
        if self._reserved is None:  # the keeper failed before anything was asked for
            self.prepare()
        else:
            self._request(*self._reserved)

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
            self._messages.tell(Event.FILES, directory=self.spill_dir)
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
        """Slots that the capture fits; asks for others where it does not."""
        if meta_bytes > self._meta_capacity:
            self._meta_capacity = 2 * meta_bytes
        slots, needed = self._fitting(plan, meta_bytes), plan.layout.size_bytes
        if not slots or self._reserved is None or not capacity_fits(self._reserved[1], needed):
            # Also where some fit that an earlier start left: those asked for so far would not be enough.
            self._reserve(needed)
        if self._reserved is not None and self._expects_first_step:
            self._request(*self._reserved)
        if not slots and self._waits_for(lambda: bool(self._fitting(plan, meta_bytes))):
            slots = self._fitting(plan, meta_bytes)
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

    def _fitting(self, plan: CapturePlan, meta_bytes: int) -> list[Slot]:
        """Slots that the capture fits, without those that are returned."""
        self.return_slots()
        there, needed = self._client.slots(), plan.layout.size_bytes
        fits = [slot for slot in there if capacity_fits(slot.image_capacity, needed)]
        return [slot for slot in fits if slot.meta_capacity >= meta_bytes]

    def return_slots(self) -> None:
        """Return to the keeper slots of another size, and those beyond the number needed, that hold nothing needed.

        The keeper frees no slot by itself, so nothing that a capture writes into is ever freed.
        """
        mapped, count = self._client.mapped(), self._slots_needed()
        if self._reserved is None:
            return
        fitting = [fits(slot, *self._reserved) for slot in mapped]
        if all(fitting) and len(mapped) <= count:
            return
        statuses = [slot.status() for slot in mapped]
        for index in slots_to_return(statuses, self._idle(mapped), self._kept(), fitting, count):
            self._client.return_slot(mapped[index])
            self.captures.forget(mapped[index])

    def _kept(self) -> int:
        return kept_whole(self._config, self._world.size, runs_ahead=self._world.runs_ahead)

    def _least_slots(self) -> int:
        return least_slots(self._config, self._world.size, runs_ahead=self._world.runs_ahead)

    def _idle(self, slots: Sequence[Slot]) -> list[bool]:
        # A copy that still writes its last capture would write into the next one's bytes.
        return [not self.captures.is_writing(slot) for slot in slots]

    def _reserve(self, image_bytes: int) -> None:
        wanted = (self._meta_capacity, image_bytes)
        if self._reserved is None or self._reserved != wanted:
            self._reserved = wanted
            self.register_slots()
            self._request(*wanted)

    def _request(self, meta_capacity: int, image_bytes: int) -> None:
        needed = self._slots_needed()
        least = self._least_slots() if self._world.is_alone else needed
        self._expects_first_step = self.planner.plan is None
        if not self._peak_before:
            self._peak_before = resident_bytes()[1]
        growth = growth_bytes(self._source, self._peak_before)
        # Where memory is short parity goes first: it would take memory, too.
        self._client.reserve((meta_capacity, image_bytes), needed, least, growth, spills=not self.group[1])

    def drain_events(self) -> None:
        """Count and report the events of keeper and levels since the last call."""
        for text in self.events.take(self._client.poll_events()):
            if self.group[1] and self._reserved is not None:
                # What is only there for other nodes' protection goes first.
                self.group = (1, 0)
                self._messages.tell(Event.NO_PARITY, text=text)
                self._request(*self._reserved)
            else:
                self.protection.lost(MemoryBoundExceeded(text))

    def register_slots(self) -> None:
        """Slots are registered with CUDA before they count as ready, if the state is on such a device."""
        self._client.make_ready(registrar(self._source.expected().values()))

    def _await_slot(self, slots: list[Slot], look_again: Callable[[], list[Slot]]) -> Slot | None:
        """A slot for the next capture. Blocks, where storage holds all of them."""
        # With several ranks no capture is left out on one of them alone: then no common one might be left.
        waits = not self._world.is_alone or self.waits_for_memory
        timeout_s = self._config.io_timeout_s if waits and self._waits_for_storage else 0.0
        started, made, has_waited = time.monotonic(), len(slots), False
        while (slot := self._choose(slots)) is None and time.monotonic() - started < timeout_s:
            if self._client.is_silent:
                break
            has_waited = True
            time.sleep(0.001)
            slots = look_again()  # those of another size may have made room for more
        if has_waited and len(slots) <= made:  # else it waited for memory that was still being made
            self._statistics.slot_waits.add(time.monotonic() - started)
        if slot is not None:
            self._waits_for_storage = self._waits_for_storage or not has_waited
            return slot
        if waits or self._client.is_silent:
            # What reads a slot whose pin is passed over finds another capture there, and commits nothing.
            slot = self._choose(slots, is_pin_passed_over=True)
            self._waits_for_storage = False
        return slot

    def _choose(self, slots: list[Slot], *, is_pin_passed_over: bool = False) -> Slot | None:
        statuses = [slot.status() for slot in slots]
        if is_pin_passed_over:
            statuses = [replace(status, pinned_step=None) for status in statuses]
        index = choose_slot(statuses, self._idle(slots), self._kept())
        # Held in this moment: the next look sees that.
        return slots[index] if index is not None and slots[index].take() else None

    def settle(self) -> None:
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
        self._await_named(name)
        newest = self.history.newest
        if is_over and newest is not None and newest.step == self.seen_step and _is_there(newest):
            # Before the keeper receives it: from now on the slot is not used for another capture.
            newest.slot.pin(newest.step, until_stored=True)
            self.names.give(newest.step, [name])
            return newest.step
        self.names.wanted.append(name)
        return (self.seen_step or 0) + 1

    def _await_named(self, name: str) -> None:
        """Wait until storage has taken what must be stored of other steps: memory has one slot to spare for that.

        Not again after such a wait has failed.
        """
        deadline = time.monotonic() + (self._config.io_timeout_s if self._waits_for_named else 0.0)
        self._waits_for_named = True
        while waiting := self._waiting_for_storage():
            if time.monotonic() >= deadline or self._client.is_silent:
                self._waits_for_named = False
                self._messages.tell(Event.NAME_IN_DANGER, name=name, waiting=self.names.described(waiting))
                return
            time.sleep(0.001)

    def _waiting_for_storage(self) -> list[int]:
        """Steps before this one that memory keeps until they are stored."""
        kept = {slot.kept_step for slot in self._client.slots()}
        return sorted(step for step in kept if step not in (None, self.seen_step))

    def resend_to_new_keeper(self) -> None:
        """After a keeper's death: the next one does not know what was asked of the last."""
        lost = self._statistics.keepers_lost
        if lost != self._keepers_lost and self._client.slots():
            self._keepers_lost = lost
            self.names.resend()

    # ---------------------------------------------------------------- ending

    def close(self) -> None:
        """Let go of the state and of the slots. Blocks: at most some seconds."""
        self.frozen.close()
        self.planner.forget()


def _is_there(capture: Capture) -> bool:
    return capture.is_in_slot and capture.slot.status().phase in (SlotPhase.CAPTURING, SlotPhase.WHOLE)
