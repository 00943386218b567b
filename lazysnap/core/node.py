"""One node's side of the coordinator's orders. Pure.

``coordinator`` decides which step all nodes store. This module checks whether the step is in the slots of this node,
decides which slots are held for it, and reports to the coordinator. ``messages.GrantProgress`` has the states.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec import Struct, structs

from lazysnap.core.actions import Listed
from lazysnap.core.messages import (
    MAX_STORED_REPORTED,
    GrantProgress,
    LevelOrder,
    LevelReport,
    LevelSettings,
    NamedStep,
    Order,
    StepKey,
    Wants,
)
from lazysnap.core.retention import may_delete
from lazysnap.memory.slot_choice import SlotPhase, SlotView, is_untouchable

NO_LEVEL_ORDER = LevelOrder(0, None, None, (), (), (), (), is_overtaken=False, is_open=False)
NO_ORDER = Order(job=0, coordinator=0, levels=(), may_delete=False)
"""The order before the first one: nothing is granted, complete or deleted."""


class RankView(Struct, frozen=True):
    """The state of one rank of the node at one time."""

    rank: int
    start: int
    """The start of its last trainer; 0 if there was none, or it still restores."""
    begun: int
    """Newest step that this start began; before the first one the step from which it continues."""
    is_capturing: bool
    """True if its trainer may still begin a capture."""
    num_kept: int
    """K; see ``memory.slot_choice``."""
    slots: tuple[SlotView, ...]
    has_spare: bool = True
    """False if its trainer, after restoring, has no slot beyond K + 1: then nothing may be held for redundancy only."""

    def capture_of(self, key: StepKey) -> SlotView | None:
        """Return the slot that contains this capture, whole or in progress."""
        for slot in self.slots:
            if slot.step != key.step or slot.start != key.start:
                continue
            is_being_written = slot.phase is SlotPhase.CAPTURING and self.is_capturing and key.start == self.start
            if slot.is_whole or is_being_written:
                return slot
        return None

    def keeps(self, slot: SlotView) -> bool:
        """Return True if the capture stays: it is held, or can be held in time."""
        return slot.is_held or not self.is_capturing or is_untouchable(slot, self.slots, self.num_kept)

    @property
    def awaits_first(self) -> bool:
        """True if this start began no capture yet, and may still do so."""
        return self.is_capturing and all(slot.start != self.start for slot in self.slots)

    def whole(self) -> set[StepKey]:
        """Return the captures that the rank has whole."""
        return {key_of(slot) for slot in self.slots if slot.is_whole}

    def held(self) -> set[StepKey]:
        """Return the captures that this keeper or an earlier one holds."""
        return {key_of(slot) for slot in self.slots if slot.is_held}


def key_of(slot: SlotView) -> StepKey:
    """Return the capture in a slot, which must not be empty."""
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
    """Return the newest step that a rank of the node began, or else the step from which its start continues."""
    newest = StepKey(0, -1)
    for rank in ranks:
        newest = max(newest, StepKey(rank.start, rank.begun))
    return newest


def is_in_memory(key: StepKey, ranks: Sequence[RankView]) -> bool:
    """Return True if each rank of the node has the capture, whole or in progress. See ``is_missed`` for holding it."""
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
        # While other ranks capture, a future step is not missed: otherwise the next grant would be missed too, and so
        # on forever.
        if not rank.is_capturing and (is_begun or not is_anybody_capturing):
            return True
    return False


@dataclass
class NodeLevel:
    """The node's state of one level, or of redundancy. Each transition of ``GrantProgress`` is a method."""

    settings: LevelSettings
    is_redundancy: bool = False
    """True for redundancy: its files are lost with the keeper, and its slots stay held."""
    progress: GrantProgress = GrantProgress.LISTING
    order: LevelOrder = NO_LEVEL_ORDER
    """The last order. It has only a version if the coordinator does not know all files yet."""
    is_ready: bool = True
    has_slots: bool = True
    """False for redundancy if a rank has no spare slot: then nothing is held, counted or granted."""
    failure: str = ""
    """The error of the last failed task, until a real task succeeds: a small write is not enough."""
    stored: set[StepKey] = field(default_factory=set)
    """Invariant: this node's part of each was committed and read back, and its deletion has not begun."""
    leftovers: set[StepKey] = field(default_factory=set)
    """Snapshots of which a dead keeper or a failed task may have left files.
    Invariant: disjoint from ``stored``.
    """
    unusable: set[StepKey] = field(default_factory=set)
    """Snapshots with committed files of this node that do not count. Retention deletes them like complete ones.
    Invariant: disjoint from ``stored``.
    """
    names: set[NamedStep] = field(default_factory=set)
    """Given names. Only node 0 gives names, so other nodes have none."""

    @property
    def grant(self) -> StepKey | None:
        """Return the granted step."""
        return self.order.grant

    @property
    def wanted_key(self) -> StepKey | None:
        """Return the granted step, while its source must stay."""
        if self.progress in (GrantProgress.WAITING, GrantProgress.WRITING):
            return self.grant
        return None

    @property
    def key_to_hold(self) -> StepKey | None:
        """Return the granted step, while its slots must be held.

        Parity needs the slots of which it was computed, and a node that has its parity does not know yet whether the
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
        """Obey the coordinator's order. ``LevelTasks`` cancels a write for another grant."""
        if not order.is_open:  # the coordinator does not know more yet
            order = structs.replace(
                self.order,
                version=order.version,
                is_overtaken=order.is_overtaken,
                is_open=False,
                is_failing=order.is_failing,
            )
        self._follow(order)

    def forget_orders(self) -> None:
        """Forget the order, as at the beginning. Stored files stay."""
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

    def become_listed(self, listed: Listed) -> None:
        """Count the listed files, after which grants may begin."""
        self.stored.update(listed.stored)
        self.leftovers.update(listed.leftovers)
        self.leftovers -= self.stored
        self.unusable.update(listed.unusable)
        self.unusable -= self.stored
        self.names.update(listed.names)
        self.is_ready = True
        self._follow_grant()

    def become_writing(self) -> None:
        """Begin to write the granted step. Its source stays meanwhile."""
        assert self.progress is GrantProgress.WAITING
        self.progress = GrantProgress.WRITING

    def become_stored(self, key: StepKey) -> None:
        """Count a file that was read back, even if its grant is over."""
        self.stored.add(key)
        self.leftovers.discard(key)
        self.unusable.discard(key)
        if key == self.grant and self.progress is not GrantProgress.LISTING:
            self.progress = GrantProgress.STORED

    def become_unusable(self, key: StepKey) -> None:
        """Record a committed file that does not count, unless the listing found that it does."""
        if key not in self.stored:
            self.unusable.add(key)
            self.leftovers.discard(key)

    def become_missed(self, key: StepKey) -> None:
        """Give up the step, which cannot be stored. The level itself works."""
        if key == self.wanted_key:
            self.progress = GrantProgress.MISSED

    def become_failed(self, text: str) -> None:
        """Handle a task that failed or hangs. ``text``: the reason. Nothing is granted before a small write succeeds.

        The current grant is given up: other levels wait until its step is read.
        """
        self.is_ready = False
        self.failure = text
        if self.progress in (GrantProgress.WAITING, GrantProgress.WRITING):
            self.progress = GrantProgress.FAILED

    def become_slotless(self) -> None:
        """Stop redundancy because a rank has no slot for it. Captures continue, and the protected step is no longer
        protected.
        """
        assert self.is_redundancy
        self.has_slots = False
        self.leftovers |= self.stored
        self.stored.clear()
        if self.grant is not None and self.progress is not GrantProgress.LISTING:
            self.progress = GrantProgress.MISSED

    def become_ready(self) -> None:
        """Recover: a small write succeeded."""
        self.is_ready = True

    def expired(self) -> list[StepKey]:
        """Return the snapshots that may be deleted, oldest first. The granted step and steps with names stay."""
        if not self.order.is_open or self.progress is GrantProgress.LISTING:
            return []
        spared = {self.grant, *self.order.named}
        for named in self.names:
            spared.add(named.key)
        keys = sorted(self.leftovers - {self.grant})
        for key in sorted((self.stored | self.unusable) - spared):
            if may_delete(key, self.settings, self.order.complete, self.order.cancelled):
                keys.append(key)
        return keys

    def forget(self, keys: Sequence[StepKey]) -> None:
        """Begin to delete these snapshots: they no longer count."""
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
    """The level for parity."""
    levels: tuple[NodeLevel, ...] = field(init=False)
    """The storage levels; then redundancy, if any."""
    order: Order = NO_ORDER
    """The last order."""
    is_restoring: bool = False
    """True while a trainer restores, which may choose any snapshot: nothing is deleted."""
    last_protected: StepKey | None = None
    """The capture whose slots and parity stay until a newer one is protected. A new keeper takes the oldest of those
    that the earlier keeper held: of two, the older one was protected. Its parity may be lost; trainers see
    ``JobCore.protected``.
    """
    _has_inherited: bool = False

    def __post_init__(self) -> None:
        self.levels = self.storage
        if self.redundancy is not None:
            self.levels = (*self.storage, self.redundancy)

    def inherit(self, ranks: Sequence[RankView]) -> None:
        """Take over the capture that was held for parity before. Only the first call with slots has an effect."""
        if self.redundancy is None or self._has_inherited:
            return
        held_keys: set[StepKey] = set()
        for rank in ranks:
            held_keys |= rank.held()
            if rank.slots:
                self._has_inherited = True
        if self._has_inherited:
            self.last_protected = min(held_keys, default=None)

    def obey(self, order: Order) -> None:
        """Obey an order. Idempotent."""
        self.order = order
        for level, level_order in zip(self.levels, order.levels, strict=True):
            level.obey(level_order)
        redundancy = self.redundancy
        if redundancy is not None and redundancy.order.is_open and redundancy.order.complete:
            # If parity was lost with a keeper, nothing is complete. The remaining parity is the best one.
            self.last_protected = max(redundancy.order.complete)

    def forget_orders(self) -> None:
        """Stop storing alone. Snapshots that were complete for this node are not complete for the job."""
        self.order = NO_ORDER
        for level in self.levels:
            level.forget_orders()

    def unanswered(self, wants: Wants) -> list[StepKey]:
        """Return the required steps that some storage level may still store, in ascending order."""
        keys = set()
        for index in range(len(self.storage)):
            keys |= self.unanswered_at(index, wants)
        return sorted(keys)

    def unanswered_at(self, index: int, wants: Wants) -> set[StepKey]:
        """Return the required steps that a storage level may still store.

        Those with a name are required at the first level. Once it has the step, node 0 gives the name.
        """
        required = set(wants.required)
        if index == 0:
            required |= wants.named_keys
        level = self.storage[index]
        return {key for key in required.difference(self.order.lost) if not level.is_done_with(key)}

    def keys_to_hold(self, required: Sequence[StepKey], num_spare: int) -> set[StepKey]:
        """Return the captures that must not be overwritten.

        Args:
            required: steps that must be stored and are not answered yet.
            num_spare: slots of a rank beyond the K + 1 that captures need, the maximum to hold in advance.
        """
        keys: set[StepKey] = set()
        if self.last_protected is not None:
            keys.add(self.last_protected)
        for level in self.levels:
            if level.key_to_hold is not None:
                keys.add(level.key_to_hold)
        for key in sorted(required):
            if len(keys) < num_spare:
                keys.add(key)
        return keys

    def expired(self, index: int) -> list[StepKey]:
        """Return the snapshots that may be deleted at a level: no slower level reads them, and they have no name."""
        if not self.order.may_delete or self.is_restoring:
            return []
        read_by_slower = {level.wanted_key for level in self.levels if level.order.source == index}
        return [key for key in self.levels[index].expired() if key not in read_by_slower]

    def check_spare_slots(self, ranks: Sequence[RankView]) -> None:
        """Stop redundancy while a rank has no spare slot for it.

        Ranks of earlier starts and restoring ranks do not count: they may read the protected step.
        """
        if self.redundancy is None:
            return
        start = newest_begun(ranks).start
        if all(rank.has_spare for rank in ranks if rank.start == start):
            self.redundancy.has_slots = True
        else:
            self.redundancy.become_slotless()
            self.last_protected = None

    def give_up_missed(self, ranks: Sequence[RankView], required: Sequence[StepKey]) -> None:
        """Give up grants that this node can no longer follow, and those that a required step overtook.

        If the write has begun, ``LevelTasks`` cancels it.

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
        """Return True if another level still reads an older step. Memory has only one spare slot for reading."""
        if level.progress is not GrantProgress.WAITING:
            return False
        return any(other.key_to_hold is not None and other.key_to_hold < key for other in self.storage)

    def _is_gone(self, key: StepKey, source: int | None, ranks: Sequence[RankView]) -> bool:
        """Return True if the source of a grant does not have the step, and never will."""
        if source is None:
            return is_missed(key, ranks)
        return key not in self.levels[source].stored
