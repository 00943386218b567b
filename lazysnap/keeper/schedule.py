"""Which level does what next. Pure: values in, decisions out.

One level reads the slots, the *head*: the fastest one that did not fail at its last try. Slower levels copy the file
of a faster one. A level in front of the head, which failed, tries each new capture from its slot as well: that is how
it recovers by itself. Every level takes the newest first; what it has not begun when a newer one is ready is left out,
but for what its retention asks for by step or by name.

With several ranks everything goes in order, and the level that reads the slots leaves out nothing that is pinned:
back-pressure holds the captures instead, for a while (``engine.backpressure``). A slower level has none, as slots are
free when a faster one has them. Where it cannot keep up it leaves out steps that others leave out as well, as far as
possible (``late``), or no snapshot might be complete there. Of what is not due the newest wait for the case that all
ranks die: as many as memory holds, since not all may have the very newest.
"""

import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from lazysnap.arena import SlotPhase, SlotStatus
from lazysnap.config import PersistentLevel
from lazysnap.policy import is_due, is_wanted
from lazysnap.resolver import Entry
from lazysnap.shard.manifest import CaptureMeta, Manifest


@dataclass(frozen=True)
class Committed:
    """A capture that some level has."""

    sequence: int
    entry: Entry
    meta: CaptureMeta
    level: int
    """Index of the level that has it."""
    manifest: Manifest | None = None
    """What it wrote there; ``None`` in tests of the schedule, which writes nothing."""

    @property
    def size_bytes(self) -> int:
        """Of its file."""
        return 0 if self.manifest is None else self.manifest.size_bytes


@dataclass
class LaneState:
    """How far one level has come. Changed under the persister's lock."""

    level: PersistentLevel
    world_size: int = 1
    tried: set[int] = field(default_factory=set)
    """Sequence numbers of captures that were tried there, with whatever result."""
    durable: int | None = None
    """Newest step committed there."""
    durable_sequence: int = 0
    """Its sequence number: steps repeat when a run resumes, these do not."""
    sound_sequence: int = 0
    """That of the newest capture that counts as durable: it was read back, where the level does that."""
    failing: bool = False
    """Whether the last try failed, or was read back damaged."""
    queue: list[Committed] = field(default_factory=list)
    """What a faster level has and this one did not begin, oldest first."""

    def note_tried(self, sequence: int) -> None:
        """Remember the last few."""
        self.tried.add(sequence)
        if len(self.tried) > 256:
            self.tried = set(sorted(self.tried)[-128:])

    def note_committed(self, step: int, sequence: int) -> None:
        """A capture is there; ``note_read_back`` follows."""
        self.note_tried(sequence)
        if sequence >= self.durable_sequence:
            self.durable, self.durable_sequence = step, sequence

    def note_read_back(self, sequence: int, *, is_sound: bool) -> None:
        """What was committed counts as durable, or never will: the level failed. Its pace stays, it wrote as much."""
        self.failing = not is_sound
        if is_sound:
            self.note_tried(sequence)  # a second chance may have been given meanwhile
        if is_sound and sequence >= self.sound_sequence:
            self.sound_sequence = sequence


def _is_due(lane: LaneState, step: int) -> bool:
    return is_due(lane.level, step, lane.durable, lane.world_size)


def head(lanes: Sequence[LaneState]) -> int:
    """The index of the fastest level that works; the last one if none does."""
    return next((index for index, lane in enumerate(lanes) if not lane.failing), len(lanes) - 1)


def takes(lanes: Sequence[LaneState], index: int, status: SlotStatus, *, force: bool, named: Collection[int]) -> bool:
    """Whether level ``index`` is to write the capture of a slot, from that slot."""
    lane = lanes[index]
    if status.step is None or status.sequence in lane.tried or index > head(lanes):
        return False
    # The fastest level takes what any level wants: the others copy from it. A later one, standing in, keeps its pace.
    return index == 0 or force or status.sequence in named or _is_due(lane, status.step)


def slots_for(
    lanes: Sequence[LaneState], index: int, statuses: Sequence[SlotStatus], *, force: int, named: Collection[int]
) -> list[int]:
    """Which slots level ``index`` is to write, in order: pinned ones, newest first; then the ``force`` newest whole."""
    pinned = [
        number
        for number, status in enumerate(statuses)
        if status.pinned
        and status.phase in (SlotPhase.CAPTURING, SlotPhase.WHOLE)
        and takes(lanes, index, status, force=bool(force), named=named)
    ]
    pinned.sort(key=lambda number: statuses[number].sequence, reverse=lanes[index].world_size == 1)
    whole = [number for number, status in enumerate(statuses) if status.phase is SlotPhase.WHOLE]
    whole.sort(key=lambda number: statuses[number].sequence)
    forced = [
        number
        for number in (whole[-force:] if force else [])
        if number not in pinned and takes(lanes, index, statuses[number], force=True, named=named)
    ]
    return pinned + forced


def slot_for(
    lanes: Sequence[LaneState], index: int, statuses: Sequence[SlotStatus], *, force: int, named: Collection[int]
) -> int | None:
    """Which slot level ``index`` writes next."""
    return next(iter(slots_for(lanes, index, statuses, force=force, named=named)), None)


def is_asked_for(lanes: Sequence[LaneState], step: int, sequence: int, named: Collection[int]) -> bool:
    """Whether some level's retention wants this capture, newer ones or not."""
    return sequence in named or any(is_wanted(lane.level, step) for lane in lanes)


def enqueue(lane: LaneState, item: Committed, named: Collection[int], spare: int = 1) -> list[Committed]:
    """Queue what a faster level has now; what is left out for it, of those that were due.

    ``spare``: with several ranks, how many of the newest stay that are not due; so many captures fit into memory.
    """
    if item.sequence in lane.tried or any(known.sequence == item.sequence for known in lane.queue):
        return []
    if lane.world_size > 1:
        items = _without_passed([*lane.queue, item], lane, named, spare)
        left_out = late(items, lane, named, spare)
        passed = {known.sequence for known in left_out}
        lane.queue = [known for known in items if known.sequence not in passed]
        return left_out
    dropped = [
        known
        for known in lane.queue
        if known.sequence < item.sequence
        and known.sequence not in named
        and not is_wanted(lane.level, known.entry.step)
    ]
    lane.queue = [*(known for known in lane.queue if known not in dropped), item]
    return [known for known in dropped if _is_due(lane, known.entry.step)]


def late(items: Sequence[Committed], lane: LaneState, named: Collection[int], spare: int) -> list[Committed]:
    """What a slower level leaves out, because it is behind, of what is due and neither named nor asked for by step.

    At most n wait: half of what other ranks keep that is complete nowhere, or those that have it all would take back
    what this one is about to bring. Never the newest; else what is a multiple of the smallest power of two times
    ``every_n_steps`` goes first, the oldest of these before others. So the slower a rank, the rarer its steps, but what
    is left to one is left to each that is faster.

    *Claim*: a level where a copy takes at most c times as long as training takes for ``every_n_steps`` leaves out no
    multiple of 2^v ``every_n_steps``, if 2^v >= 2c; c of the slowest rank says which steps all have. *Proof*: when such
    a step goes, n wait beside the newest that are all such multiples, as others would have gone before them. The oldest
    has waited for more than (n - 1) 2^v >= 2 (n - 1) c >= n c (for n >= 2), in which the copy at hand and those of the
    at most n - 1 before it were done, so it does not wait any more.
    """
    most = most_waiting(lane.level, spare)
    due = [item for item in items if _is_due(lane, item.entry.step)]
    due = [item for item in due if item.sequence not in named and not is_wanted(lane.level, item.entry.step)]
    older = sorted(due, key=lambda item: item.sequence)[:-1]
    older.sort(key=lambda item: (_power_of_two(item.entry.step // lane.level.every_n_steps), item.sequence))
    return older[: max(0, len(due) - most)]


def most_waiting(level: PersistentLevel, spare: int) -> int:
    """How many captures that are due wait for a slower level, with several ranks."""
    return max(2, (level.keep_last + spare + 2) // 2)


def _power_of_two(number: int) -> int:
    """The greatest that divides it."""
    return number & -number or sys.maxsize


def _without_passed(items: list[Committed], lane: LaneState, named: Collection[int], spare: int) -> list[Committed]:
    """Without those that would only ever be forced, and that newer ones are there for. On all ranks the same ones."""
    undue = sorted(item.sequence for item in items if item.sequence not in named and not _is_due(lane, item.entry.step))
    passed = set(undue[: -max(spare, 1)])
    return [item for item in items if item.sequence not in passed]


def queued(lane: LaneState, *, force: bool, named: Collection[int]) -> list[Committed]:
    """What to copy from a faster level, newest first."""
    items = lane.queue if lane.world_size > 1 else reversed(lane.queue)
    return [item for item in items if force or item.sequence in named or _is_due(lane, item.entry.step)]


def next_queued(lane: LaneState, *, force: bool, named: Collection[int]) -> Committed | None:
    """What to copy next."""
    return next(iter(queued(lane, force=force, named=named)), None)


def stale_pins(statuses: Sequence[SlotStatus]) -> list[int]:
    """Slots that are pinned for a capture that will never be whole: the pin would hold them for ever."""
    return [
        index
        for index, status in enumerate(statuses)
        if status.pinned and status.phase in (SlotPhase.EMPTY, SlotPhase.VOID)
    ]
