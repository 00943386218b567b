"""One node's side of the coordinator's orders. Pure.

``coordinator`` decides which step all nodes store. This is the other side: is the step in the slots of this node, which
slots are held for it, and what does the node report? ``messages.GrantProgress`` draws the states.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import Struct, structs

from lazysnap.core.messages import (
    MAX_STORED_REPORTED,
    GrantProgress,
    LevelOrder,
    LevelReport,
    LevelSettings,
    NamedStep,
    Order,
    StepKey,
)
from lazysnap.core.retention import Retention
from lazysnap.memory.slot_choice import SlotPhase, SlotView, is_untouchable

NO_LEVEL_ORDER = LevelOrder(0, None, None, (), (), (), (), is_overtaken=False, is_open=False)
NO_ORDER = Order(job=0, coordinator=0, levels=(), may_delete=False)
"""Before the first order nothing is granted, complete or deleted."""


class RankView(Struct, frozen=True):
    """One rank of the node at one moment."""

    rank: int
    start: int
    """The start of its last trainer; 0 if there was none, or it still restores."""
    begun: int
    """Newest step that was begun in this start; before the first one the step from which the start goes on."""
    is_capturing: bool
    """True if its trainer may still begin a capture."""
    num_kept: int
    """K; see ``memory.slot_choice``."""
    slots: tuple[SlotView, ...]
    has_spare: bool = True
    """False if its trainer, which does not restore any more, does without the slot beyond K + 1: nothing may be held
    for redundancy alone then."""

    def capture_of(self, key: StepKey) -> SlotView | None:
        """Return the slot that has this capture whole, or in which its trainer is writing it now."""
        for slot in self.slots:
            if slot.step != key.step or slot.start != key.start:
                continue
            is_being_written = slot.phase is SlotPhase.CAPTURING and self.is_capturing and key.start == self.start
            if slot.is_whole or is_being_written:
                return slot
        return None

    def keeps(self, slot: SlotView) -> bool:
        """Return True if the capture stays: it is held already, or can be held in time."""
        return slot.is_held or not self.is_capturing or is_untouchable(slot, self.slots, self.num_kept)

    @property
    def awaits_first(self) -> bool:
        """True if this start began no capture yet, and may still do so."""
        return self.is_capturing and all(slot.start != self.start for slot in self.slots)

    def whole(self) -> set[StepKey]:
        """Return the captures that the rank has whole."""
        return {key_of(slot) for slot in self.slots if slot.is_whole}

    def held(self) -> set[StepKey]:
        """Return the captures that the keeper, or one before it, holds."""
        return {key_of(slot) for slot in self.slots if slot.is_held}


def key_of(slot: SlotView) -> StepKey:
    """Return which capture a slot has. It must not be empty."""
    assert slot.step is not None
    return StepKey(slot.start, slot.step)


def whole_on_all(ranks: Sequence[RankView]) -> set[StepKey]:
    """Return the captures that all ranks of the node have whole."""
    if not ranks:
        return set()
    common = ranks[0].whole()
    for rank in ranks[1:]:
        common &= rank.whole()
    return common


def newest_begun(ranks: Sequence[RankView]) -> StepKey:
    """Return the newest step that a rank of the node began; of a start without a step, that from which it goes on."""
    newest = StepKey(0, -1)
    for rank in ranks:
        newest = max(newest, StepKey(rank.start, rank.begun))
    return newest


def is_in_memory(key: StepKey, ranks: Sequence[RankView]) -> bool:
    """Return True if each rank of the node has the capture whole, or is writing it.

    Whether it can be held is another question: see ``is_missed``.
    """
    return all(rank.capture_of(key) is not None for rank in ranks)


def is_missed(key: StepKey, ranks: Sequence[RankView]) -> bool:
    """Return True if a rank of the node does not have the capture, and never will."""
    is_begun = False
    is_anybody_capturing = False
    for rank in ranks:
        if rank.start == key.start and rank.begun >= key.step:
            is_begun = True
        if rank.is_capturing:
            is_anybody_capturing = True
    for rank in ranks:
        slot = rank.capture_of(key)
        if slot is not None:
            if not rank.keeps(slot):
                return True
            continue
        if rank.start > key.start:
            return True
        if rank.start == key.start and rank.begun >= key.step:
            return True
        # As long as others capture, a step ahead is not missed: the next grant would be missed too, and so on for ever.
        if not rank.is_capturing and (is_begun or not is_anybody_capturing):
            return True
    return False


@dataclass
class NodeLevel:
    """The node's state of one level, or of redundancy. Each transition of ``GrantProgress`` is a method."""

    settings: LevelSettings
    is_redundancy: bool = False
    """True for redundancy: what is stored is lost with the keeper, and its slots are held along with it."""
    progress: GrantProgress = GrantProgress.LISTING
    order: LevelOrder = NO_LEVEL_ORDER
    """The last order. From a coordinator that does not know yet what is stored it has the version alone."""
    is_ready: bool = True
    has_slots: bool = True
    """False for redundancy where a rank has no slot to spare: nothing is held, counted or granted then."""
    failure: str = ""
    """Why the last task failed, until a real task works: a small write that works is not enough. Else empty."""
    stored: set[StepKey] = field(default_factory=set)
    """Invariant: this node's part of each of these was committed and read back, and its deletion has not begun."""
    leftovers: set[StepKey] = field(default_factory=set)
    """Snapshots of which a dead keeper, or a task that failed, may have left files.
    Invariant: disjoint from ``stored``.
    """
    unusable: set[StepKey] = field(default_factory=set)
    """Snapshots with committed files of this node that do not count. Retention deletes them like complete ones.
    Invariant: disjoint from ``stored``.
    """
    names: set[NamedStep] = field(default_factory=set)
    """Names that are given there. Node 0 alone gives them, so other nodes know none."""

    @property
    def grant(self) -> StepKey | None:
        """The granted step."""
        return self.order.grant

    @property
    def wanted_key(self) -> StepKey | None:
        """The granted step, as long as its source must stay."""
        if self.progress in (GrantProgress.WAITING, GrantProgress.WRITING):
            return self.grant
        return None

    @property
    def key_to_hold(self) -> StepKey | None:
        """The granted step, as long as its slots are to be held.

        Parity is worth nothing without the slots it is of, and a node that has its parity does not know yet whether the
        others have theirs.
        """
        if self.order.source is not None:
            return None
        if self.is_redundancy and self.progress is GrantProgress.STORED:
            return self.grant
        return self.wanted_key

    def is_done_with(self, key: StepKey) -> bool:
        """Return True if a step is complete here, or will never be."""
        return key in self.order.complete or key in self.order.given_up

    def obey(self, order: LevelOrder) -> None:
        """Take the coordinator's order. ``LevelTasks`` cancels a write for another grant."""
        if not order.is_open:  # what the coordinator does not know yet is as it was before
            order = structs.replace(
                self.order,
                version=order.version,
                is_overtaken=order.is_overtaken,
                is_open=False,
                is_failing=order.is_failing,
            )
        self._follow(order)

    def forget_orders(self) -> None:
        """No order is known, as at the beginning. What is stored stays so."""
        self._follow(NO_LEVEL_ORDER)

    def _follow(self, order: LevelOrder) -> None:
        is_other_grant = (order.grant, order.source) != (self.order.grant, self.order.source)
        self.order = order
        if is_other_grant and self.progress is not GrantProgress.LISTING:
            self._follow_grant()

    def _follow_grant(self) -> None:
        if self.grant is None:
            self.progress = GrantProgress.IDLE
        elif self.grant in self.stored:
            self.progress = GrantProgress.STORED
        else:
            self.progress = GrantProgress.WAITING

    def become_listed(
        self,
        stored: Sequence[StepKey],
        leftovers: Sequence[StepKey],
        unusable: Sequence[StepKey],
        names: Sequence[NamedStep],
    ) -> None:
        """The files of an earlier keeper are known: they count, and grants may begin.

        Args:
            stored: snapshots of which this node stored its part.
            leftovers: snapshots of which it has files, and no commit.
            unusable: snapshots of which it has committed files that do not count.
            names: names that are given there.
        """
        self.stored.update(stored)
        self.leftovers.update(leftovers)
        self.leftovers -= self.stored
        self.unusable.update(unusable)
        self.unusable -= self.stored
        self.names.update(names)
        self.is_ready = True
        self._follow_grant()

    def become_writing(self) -> None:
        """A task writes the granted step. Its source stays meanwhile."""
        assert self.progress is GrantProgress.WAITING
        self.progress = GrantProgress.WRITING

    def become_stored(self, key: StepKey) -> None:
        """A file was read back. It is there and counts, even if its grant is over."""
        self.stored.add(key)
        self.leftovers.discard(key)
        self.unusable.discard(key)
        if key == self.grant and self.progress is not GrantProgress.LISTING:
            self.progress = GrantProgress.STORED

    def become_missed(self, key: StepKey) -> None:
        """The step cannot be stored, through no fault of the level."""
        if key == self.wanted_key:
            self.progress = GrantProgress.MISSED

    def become_failed(self, text: str) -> None:
        """A task failed or hangs, whichever it was, for the reason in ``text``. No grant before a small write works.

        The present grant is given up: other levels wait until its step is read.
        """
        self.is_ready = False
        self.failure = text
        if self.progress in (GrantProgress.WAITING, GrantProgress.WRITING):
            self.progress = GrantProgress.FAILED

    def become_slotless(self) -> None:
        """A rank has no slot for redundancy any more: its captures go on, and what was protected is so no more."""
        assert self.is_redundancy
        self.has_slots = False
        self.leftovers |= self.stored
        self.stored.clear()
        if self.grant is not None and self.progress is not GrantProgress.LISTING:
            self.progress = GrantProgress.MISSED

    def become_ready(self) -> None:
        """A small write works."""
        self.is_ready = True

    def expired(self) -> list[StepKey]:
        """Return the snapshots that need not stay, oldest first. What is granted or has a name stays."""
        if not self.order.is_open or self.progress is GrantProgress.LISTING:
            return []
        spared = {self.grant, *self.order.named}
        for named in self.names:
            spared.add(named.key)
        keys = sorted(self.leftovers - {self.grant})
        retention = Retention(self.settings.keep_last, self.settings.keep_every_n_steps)
        for key in sorted((self.stored | self.unusable) - spared):
            if retention.may_delete(key, self.order.complete, self.order.cancelled):
                keys.append(key)
        return keys

    def forget(self, keys: Sequence[StepKey]) -> None:
        """The deletion of these begins: they do not count any more."""
        self.stored.difference_update(keys)
        self.leftovers.difference_update(keys)
        self.unusable.difference_update(keys)

    def report(self) -> LevelReport:
        """Return this state for the coordinator."""
        num_reported = max(MAX_STORED_REPORTED, self.settings.keep_last + 1)  # retention counts newer ones
        newest = sorted(self.stored, reverse=True)[:num_reported]
        names = tuple(sorted(self.names))
        is_ready = self.is_ready and self.has_slots
        return LevelReport(
            self.order.version, self.grant, self.progress, is_ready, tuple(newest), names, bool(self.failure)
        )


@dataclass
class Node:
    """The node's side of the grants."""

    storage: tuple[NodeLevel, ...]
    """The levels that are storage, fast to slow."""
    redundancy: NodeLevel | None = None
    """The level that stands for parity."""
    levels: tuple[NodeLevel, ...] = field(init=False)
    """Those of storage; then redundancy, if there is any."""
    order: Order = NO_ORDER
    """The last order."""
    is_restoring: bool = False
    """True while a trainer restores: what would be deleted now may be what it chooses."""
    protected: StepKey | None = None
    """The capture whose slots and parity stay until a newer one is protected. A new keeper takes the oldest of those
    that the keeper before it held: of two, the older one was protected. So it may be one whose parity is gone;
    ``JobCore.protected`` is what trainers get to know.
    """
    _has_inherited: bool = False

    def __post_init__(self) -> None:
        self.levels = self.storage
        if self.redundancy is not None:
            self.levels = (*self.storage, self.redundancy)

    def inherit(self, ranks: Sequence[RankView]) -> None:
        """Take over what was held for parity before. Only the first call that sees slots does something."""
        if self.redundancy is None or self._has_inherited:
            return
        held_keys: set[StepKey] = set()
        for rank in ranks:
            held_keys |= rank.held()
            if rank.slots:
                self._has_inherited = True
        if self._has_inherited:
            self.protected = min(held_keys, default=None)

    def obey(self, order: Order) -> None:
        """Take an order. Losing one, or taking one twice, changes nothing."""
        self.order = order
        for level, level_order in zip(self.levels, order.levels, strict=True):
            level.obey(level_order)
        redundancy = self.redundancy
        if redundancy is not None and redundancy.order.is_open and redundancy.order.complete:
            # Where parity was lost with a keeper nothing is complete. What is left of it is the best there is.
            self.protected = max(redundancy.order.complete)

    def forget_orders(self) -> None:
        """The node stores alone no more. What was complete for it alone is not complete for the job."""
        self.order = NO_ORDER
        for level in self.levels:
            level.forget_orders()

    def unanswered(self, required: Sequence[StepKey], names: Sequence[NamedStep]) -> list[StepKey]:
        """Return the steps that somebody waits for.

        Args:
            required: steps that every storage level is to have.
            names: names that the first level is to have. Once it has the step, the name is the matter of node 0 alone.
        """
        if not self.storage:
            return []
        keys = set()
        for key in required:
            if not all(level.is_done_with(key) for level in self.storage):
                keys.add(key)
        first = self.levels[0]
        for named in names:
            if not first.is_done_with(named.key):
                keys.add(named.key)
        return sorted(keys.difference(self.order.lost))

    def keys_to_hold(self, required: Sequence[StepKey], num_spare: int) -> set[StepKey]:
        """Return the captures that must not be written over.

        Args:
            required: steps that must be stored and are not answered yet.
            num_spare: slots of a rank beyond the K + 1 that captures need. No more are held in advance.
        """
        keys: set[StepKey] = set()
        if self.protected is not None:
            keys.add(self.protected)
        for level in self.levels:
            if level.key_to_hold is not None:
                keys.add(level.key_to_hold)
        for key in sorted(required):
            if len(keys) < num_spare:
                keys.add(key)
        return keys

    def expired(self, index: int) -> list[StepKey]:
        """Return what may be deleted at a level: no slower level reads it, and no names tell that it stays."""
        if not self.order.may_delete or self.is_restoring:
            return []
        read_by_slower = {level.wanted_key for level in self.levels if level.order.source == index}
        return [key for key in self.levels[index].expired() if key not in read_by_slower]

    def check_spare_slots(self, ranks: Sequence[RankView]) -> None:
        """Give redundancy up while a rank has no slot to spare for it.

        Ranks of earlier starts do not count, nor those that restore: what is protected may be what they read.
        """
        if self.redundancy is None:
            return
        start = newest_begun(ranks).start
        if all(rank.has_spare for rank in ranks if rank.start == start):
            self.redundancy.has_slots = True
        else:
            self.redundancy.become_slotless()
            self.protected = None

    def give_up_missed(self, ranks: Sequence[RankView], required: Sequence[StepKey]) -> None:
        """Give up the grants that this node cannot follow any more, and those that a required step overtook.

        Of a grant whose write runs already, ``LevelTasks`` cancels the write.

        Args:
            ranks: those of the node.
            required: steps that must be stored and are not answered yet.
        """
        begun = newest_begun(ranks)
        for level in self.levels:
            key = level.wanted_key
            if key is None:
                continue
            is_writing = level.progress is GrantProgress.WRITING
            is_overtaken = level.order.is_overtaken and (is_writing or key > begun)
            is_gone = not is_writing and self._is_gone(key, level.order.source, ranks)
            if is_overtaken or is_gone:
                level.become_missed(key)
        for level in self.storage:
            key = level.key_to_hold
            if key is not None and key <= begun and key not in required and self._is_crowded_out(level, key):
                level.become_missed(key)

    def _is_crowded_out(self, level: NodeLevel, key: StepKey) -> bool:
        """Return True if another level still reads an older step. Memory has one slot to spare for what is read."""
        if level.progress is not GrantProgress.WAITING:
            return False
        return any(other.key_to_hold is not None and other.key_to_hold < key for other in self.storage)

    def _is_gone(self, key: StepKey, source: int | None, ranks: Sequence[RankView]) -> bool:
        """Return True if the source of a grant does not have the step, and never will."""
        if source is None:
            return is_missed(key, ranks)
        return key not in self.levels[source].stored
