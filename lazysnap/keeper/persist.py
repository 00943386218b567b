"""Takes captures from slots to the levels, in the background, one thread per level.

What each level does next is decided in ``keeper.schedule``; how, in ``keeper.lane``. A level that fails costs that
level that snapshot; one that hangs is given up after its deadline; neither holds up another level, nor training.
"""

import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence

from lazysnap import faults
from lazysnap.arena import Slot, SlotPhase, SlotStatus, Word
from lazysnap.config import PersistentLevel
from lazysnap.keeper.lane import Lane, Naming, Retaining, SlotWork, Work
from lazysnap.keeper.lifecycle import newest_whole
from lazysnap.keeper.protocol import LevelDropped, Message
from lazysnap.keeper.schedule import (
    Committed,
    LaneState,
    enqueue,
    is_asked_for,
    next_queued,
    slot_for,
    stale_pins,
    takes,
)
from lazysnap.keeper.team import Team
from lazysnap.levels.belongings import Told
from lazysnap.levels.redaction import shown
from lazysnap.shard.checksum import Checksums

logger = logging.getLogger(__name__)

_MOVING_S = 5.0
"""A reader that did not move for so long does not hold a slot any more."""
_REMEMBERED = 64
_MOVED_S = 1.0
_LOOK_S = 0.1


class Persister:
    """All levels of one keeper. Thread-safe."""

    def __init__(
        self,
        levels: Sequence[PersistentLevel],
        slots: Callable[[], Sequence[Slot]],
        emit: Callable[[Message], None],
        frozen: Callable[[str], Slot | None] = lambda _: None,
        team: Team | None = None,
    ) -> None:
        """``frozen`` gives the whole slot that holds the frozen tensors of a digest, if there is one."""
        self.levels = tuple(levels)
        self.team = team or Team()
        self.emit = emit
        self.frozen = frozen
        self.changed = threading.Condition()
        self._slots = slots
        self._force = 0
        self._named: dict[int, set[str]] = {}
        self._committed: dict[tuple[int, int], Committed] = {}
        self._withdrawn: deque[Committed] = deque(maxlen=_REMEMBERED)
        self._checksums: weakref.WeakKeyDictionary[Slot, tuple[int, Checksums]] = weakref.WeakKeyDictionary()
        self.states = [LaneState(level, self.team.world_size) for level in self.levels]
        self.run_id: str | None = None
        """With one rank: the only run of which old snapshots are deleted; ``None``: any."""
        self.stopping = False
        self._lanes = [Lane(self, index) for index in range(len(self.levels))]
        for run in (*(lane.run for lane in self._lanes), self._run_checksums):
            threading.Thread(target=run, name="lazysnap-persist", daemon=True).start()

    # ---------------------------------------------------------------- what the keeper asks

    def wake(self) -> None:
        """Something may have to be done: a capture began, or became whole."""
        with self.changed:
            self.changed.notify_all()

    def set_force(self, force: int) -> None:
        """How many of the newest whole captures are to be persisted at every level, due or not."""
        with self.changed:
            self._force = force
            self.changed.notify_all()

    def try_again(self) -> None:
        """Forget failures: what is not durable at a level gets another chance there."""
        with self.changed:
            newest = max(self._committed.values(), key=lambda item: item.sequence, default=None)
            for index, state in enumerate(self.states):
                state.tried = {sequence for sequence in state.tried if sequence <= state.sound_sequence}
                if newest is not None and newest.level < index:
                    enqueue(state, newest, self.named, len(self._slots()))
            self.changed.notify_all()

    def keep(self, name: str, run_id: str, sequence: int) -> bool:
        """Name a capture: every level gets it, and the name. ``False`` if it is not there any more."""
        with self.changed:
            slots = [slot for slot in self._slots() if slot.status().sequence == sequence]
            known = [item for (_, held), item in self._committed.items() if held == sequence]
            whole = [slot for slot in slots if slot.status().phase in (SlotPhase.CAPTURING, SlotPhase.WHOLE)]
            if not whole and not known:
                return False
            self._named.setdefault(sequence, set()).add(name)
            for slot in whole:
                slot.set_word(Word.PIN, 1)
            for item in known:
                self._lanes[item.level].names.append(Naming(run_id, name, item.entry))
            fastest = min(known, key=lambda item: item.level, default=None)
            if fastest is not None:
                have = {item.level for item in known}
                for index, state in enumerate(self.states):
                    if index > fastest.level and index not in have:
                        state.tried.discard(sequence)
                        enqueue(state, fastest, self.named, len(self._slots()))
            self.changed.notify_all()
            return True

    def release(self, name: str, run_id: str) -> None:
        """Take a name from this run's snapshots at every level."""
        with self.changed:
            for names in self._named.values():
                names.discard(name)
            for lane in self._lanes:
                lane.names.append(Naming(run_id, name, None))
            self.changed.notify_all()

    def tell(self, url: str, told: Told) -> None:
        """All ranks have these snapshots at a level: older ones may go."""
        with self.changed:
            for lane, level in zip(self._lanes, self.levels, strict=True):
                if level.url == url:
                    lane.told, lane.owed = told, Retaining(None, frozenset())
            self.changed.notify_all()

    def stop(self) -> None:
        """Let the threads end after what they are doing."""
        with self.changed:
            self.stopping = True
            self.changed.notify_all()

    def wait_written(self, slot: Slot, stall_s: float) -> bool:
        """Block until no level reads ``slot`` or is going to; ``False`` if nothing moved for ``stall_s``."""
        moved = time.monotonic()
        with self.changed:
            while lanes := self._lanes_of(slot):
                if any(lane.is_busy and lane.idle_s < _MOVED_S for lane in lanes):
                    moved = time.monotonic()
                if time.monotonic() - moved > stall_s:
                    return False
                self.changed.wait(_LOOK_S)
        return True

    def _lanes_of(self, slot: Slot) -> list[Lane]:
        """The levels that read a slot, or are going to."""
        status = slot.status()
        is_offered = status.pinned and status.phase in (SlotPhase.CAPTURING, SlotPhase.WHOLE)
        return [
            lane
            for index, lane in enumerate(self._lanes)
            if lane.slot is slot
            or (is_offered and takes(self.states, index, status, force=bool(self._force), named=self.named))
        ]

    def has(self, sequence: int) -> bool:
        """Whether some level has the capture with that sequence number."""
        with self.changed:
            return any(held == sequence for _, held in self._committed)

    def is_sound_everywhere(self, sequence: int) -> bool:
        """Whether that capture, or a later one, is committed, and not found damaged, at every level."""
        with self.changed:
            return all(state.sound_sequence >= sequence for state in self.states)

    def is_reading(self, slot: Slot) -> bool:
        """Whether a thread reads this slot now."""
        return any(lane.slot is slot for lane in self._lanes)

    def checksums_of(self, slot: Slot) -> Checksums | None:
        """Checksums of the capture in ``slot``, if they are known."""
        sequence, checksums = self._checksums.get(slot, (0, None))
        return checksums if sequence == slot.status().sequence else None

    def busy_levels(self) -> list[str]:
        """What each level that is at work is doing, and for how long nothing has moved, in words."""
        with self.changed:
            found = [lane.doing for lane in self._lanes]
        return [text for text in found if text is not None]

    def is_drained(self) -> bool:
        """Whether the newest whole capture was brought, or tried, to every level."""
        with self.changed:
            return not any(lane.is_busy for lane in self._lanes) and all(
                self.work_for(index) is None for index in range(len(self.levels))
            )

    def is_durable_everywhere(self, least: int = 0) -> bool:
        """Whether the newest whole capture, at least that with the sequence number ``least``, is committed, and not
        found damaged, at every level; without levels whether it is there.
        """
        with self.changed:
            statuses = [slot.status() for slot in self._slots()]
            newest = newest_whole(statuses)
            sequence = 0 if newest is None else statuses[newest].sequence
            if not self.states:
                return sequence >= least
            return all(state.sound_sequence >= max(sequence, least) for state in self.states)

    def progress(self) -> tuple[int, int]:
        """Bytes of the newest whole capture that levels have, and bytes that all of them together are to have."""
        with self.changed:
            statuses = [slot.status() for slot in self._slots()]
            index = newest_whole(statuses)
            if index is None:
                return 0, 0
            size, sequence = statuses[index].image_bytes, statuses[index].sequence
            levels = zip(self.states, self._lanes, strict=True)
            had = (size if s.sound_sequence >= sequence else min(size, o.moved_bytes(sequence)) for s, o in levels)
            return sum(had), size * len(self.levels)

    def most_ahead(self) -> int:
        """How many persisted steps this rank may be ahead of one whose storage is slower: that one has a capture pinned
        in every slot, and reads another one back, when gradients hold this one up, which has captured one more.
        """
        return len(self._slots()) + 2

    # ---------------------------------------------------------------- what the lanes ask, under the lock

    def work_for(self, index: int) -> Work | None:
        """What level ``index`` is to do next; nothing is changed but pins that hold for nothing."""
        lane, state = self._lanes[index], self.states[index]
        if lane.names:
            return lane.names[0]
        slots = self._slots()
        self._settle_pins(slots)
        statuses = [slot.status() for slot in slots]
        chosen = slot_for(self.states, index, statuses, force=self._force, named=self.named)
        if chosen is not None:
            return SlotWork(slots[chosen], statuses[chosen])
        queued = next_queued(state, force=bool(self._force), named=self.named)
        if queued is None and lane.owed is not None and not lane.owed.waits_for & self._steps_to_copy(index):
            return lane.owed
        return queued

    @property
    def named(self) -> set[int]:
        """Sequence numbers of captures that have a name."""
        return {sequence for sequence, names in self._named.items() if names}

    def hold(self, work: SlotWork) -> None:
        """A level begins to read a slot."""
        if work.status.phase is SlotPhase.WHOLE:
            work.slot.set_word(Word.PIN, 1)

    def _settle_pins(self, slots: Sequence[Slot]) -> None:
        """Let go of slots that no level reads or will read. Only the keeper unpins."""
        for stale in stale_pins([slot.status() for slot in slots]):
            # Read again: a trainer sets the pin after everything else of a capture.
            if slots[stale].status().phase in (SlotPhase.EMPTY, SlotPhase.VOID):
                slots[stale].unpin()
        for slot in slots:
            status = slot.status()
            if status.pinned and status.phase in (SlotPhase.CAPTURING, SlotPhase.WHOLE) and self._is_idle(slot, status):
                slot.unpin()

    def _is_idle(self, slot: Slot, status: SlotStatus) -> bool:
        if any(lane.slot is slot and lane.idle_s < _MOVING_S for lane in self._lanes):
            return False
        wanted_by = [
            index
            for index in range(len(self.states))
            if takes(self.states, index, status, force=bool(self._force), named=self.named)
        ]
        if not wanted_by or self.states[wanted_by[0]].world_size > 1:
            return not wanted_by
        # Newer ones were tried meanwhile: this one is left out, but for what retention asks for.
        step = status.step or 0
        newest_tried = max(self.states[wanted_by[0]].tried, default=0)
        return newest_tried > status.sequence and not is_asked_for(self.states, step, status.sequence, self.named)

    def committed(self, item: Committed) -> list[Message]:
        """A level has a capture: slower ones may copy it. What is to be told, once the lock is free, of what is left
        out for it: a trainer that hangs takes its time to listen."""
        state = self.states[item.level]
        state.note_committed(item.entry.step, item.sequence)
        state.queue = [known for known in state.queue if known.sequence != item.sequence]
        self._committed[item.level, item.sequence] = item
        while len(self._committed) > _REMEMBERED:
            del self._committed[next(iter(self._committed))]
        for name in sorted(self._named.get(item.sequence, ())):
            self._lanes[item.level].names.append(Naming(item.entry.run_id, name, item.entry))
        for slot in self._slots():
            if item.manifest is not None and slot.status().sequence == item.sequence:
                self._checksums[slot] = (item.sequence, item.manifest.checksums)
        left_out: list[Message] = []
        for index in range(item.level + 1, len(self.states)):
            for dropped in enqueue(self.states[index], item, self.named, len(self._slots())):
                url, step = self.levels[index].url, dropped.entry.step
                logger.info("step %d is left out at %s: a newer one is ready", step, shown(url))
                left_out.append(LevelDropped(url, step))
        self.changed.notify_all()
        return left_out

    def read_back(self, item: Committed, *, is_sound: bool) -> None:
        """What a level committed counts as durable from now on, or never will, and nobody is to copy it."""
        self.states[item.level].note_read_back(item.sequence, is_sound=is_sound)
        if not is_sound:
            self._committed.pop((item.level, item.sequence), None)
            self._withdrawn.append(item)
            self._copy_from_elsewhere(item)
        self.changed.notify_all()

    def _copy_from_elsewhere(self, item: Committed) -> None:
        """What is damaged at one level may be whole at another, or in memory still."""
        for index in range(item.level + 1, len(self.states)):
            state = self.states[index]
            if (index, item.sequence) in self._committed:
                continue
            state.tried.discard(item.sequence)  # it may have copied the damaged one, and failed
            state.queue = [known for known in state.queue if known.sequence != item.sequence]
            origins = (self._committed.get((level, item.sequence)) for level in range(index))
            origin = next((known for known in origins if known is not None), None)
            if origin is not None:
                enqueue(state, origin, self.named, len(self._slots()))
        for slot in self._slots():
            if (status := slot.status()).sequence == item.sequence and status.phase is SlotPhase.WHOLE:
                slot.set_word(Word.PIN, 1)  # taken off again, if no level takes it

    def is_withdrawn(self, item: Committed) -> bool:
        """Whether what was to be copied was found damaged meanwhile."""
        with self.changed:
            return any(known is item for known in self._withdrawn)

    def failed(self, index: int, sequence: int) -> None:
        """A level could not take a capture."""
        self.states[index].failing = True
        self.states[index].note_tried(sequence)
        self.changed.notify_all()

    def steps_to_copy(self, index: int) -> frozenset[int]:
        """Steps that slower levels have still to copy from level ``index``."""
        with self.changed:
            return self._steps_to_copy(index)

    def _steps_to_copy(self, index: int) -> frozenset[int]:
        queued = [item for state in self.states[index + 1 :] for item in state.queue]
        copying = [lane.copying for lane in self._lanes if lane.copying is not None]
        return frozenset(item.entry.step for item in (*queued, *copying) if item.level == index)

    # ---------------------------------------------------------------- memory at rest

    def _run_checksums(self) -> None:
        """Without a trainer, memory rests: a restore can tell whether its bytes are the same."""
        while True:
            with self.changed:
                if self.stopping:
                    return
                slots = self._slots()
                statuses = [slot.status() for slot in slots]
                # With several ranks the newest that all have may be an older one.
                bare = [
                    index
                    for index, status in enumerate(statuses)
                    if status.phase is SlotPhase.WHOLE and self.checksums_of(slots[index]) is None
                ]
                # A level that writes the capture computes them anyway.
                if not bare or not self._force or any(lane.is_busy for lane in self._lanes):
                    self.changed.wait(0.5)
                    continue
            newest = max(bare, key=lambda index: statuses[index].sequence)
            try:
                faults.point("keeper.persist.checksum")
                checksums = Checksums.of(slots[newest].image[: statuses[newest].image_bytes])
                self._checksums[slots[newest]] = (statuses[newest].sequence, checksums)
            except Exception:  # the rim of the thread
                logger.exception("checksums")
