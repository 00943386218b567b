"""The coordinator: chooses the step that all nodes store, and counts which snapshots are complete. Pure.

The coordinator is part of the keeper of node 0. It grants a level one step at a time. Each node stores that step and
reports it. When all nodes have reported it, the snapshot is complete::

                 all nodes reported their files
        CLOSED ─────────────────────────────────> OPEN
                                                   │  ▲
     level is due, idle and ready on every node: grant  │  every node reports STORED: complete
                                                   ▼  │  a node reports MISSED or FAILED: cancelled
                                                 GRANTED

Only a report of a node cancels a grant, never a clock: a slow node may have committed the file.

Only one storage level reads slots: the fastest one that works. Slower levels copy from the next faster one, and hold no
slot. Redundancy reads the same step as that level if both are due: then one slot serves both. A step that is due before
another granted one is granted in addition, unless storage missed a step before: memory is full while redundancy works,
so storage would miss the next one, too. A required step replaces one that is not required.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from lazysnap.core.level_grants import MAX_REMEMBERED, LevelGrants
from lazysnap.core.messages import MAX_IN_MESSAGE, GrantProgress, Order, Report, StepKey, Wants
from lazysnap.core.node import RankView, is_in_memory, is_missed, newest_begun

_UNDER_WAY = (GrantProgress.WAITING, GrantProgress.WRITING, GrantProgress.STORED)
_GIVEN_UP = (GrantProgress.MISSED, GrantProgress.FAILED)


@dataclass
class Coordinator:
    """Grants and counts. Call ``receive`` for each report, then ``decide``; send the returned order.

    The first order grants nothing. It distributes this coordinator's number, and reports count only after that.
    """

    number: int
    """A random number for the first coordinator of a keeper, then incremented. It distinguishes this coordinator from
    earlier ones, whose orders nodes may still answer.
    """
    job_digest: int
    """``JobCore.digest``: the settings that all nodes have."""
    num_nodes: int
    levels: tuple[LevelGrants, ...]
    """From fast to slow; then redundancy, if any."""
    capture_every_n_steps: int = 1
    is_alone: bool = False
    """True for a node that reaches no coordinator: it stores everything that it has, and deletes nothing."""
    reports: dict[int, Report] = field(default_factory=dict)
    """The newest report of each node that answers this coordinator. ``receive`` derives the fields below from them."""
    wants: Wants = field(default_factory=Wants)
    """The wants of all nodes."""
    captures_left: set[StepKey] | None = None
    """Captures that all nodes have, after training has ended everywhere; None before."""
    gone: set[StepKey] = field(default_factory=set)
    """Required steps that left the slots, while it is unknown whether a level has them."""
    lost: set[StepKey] = field(default_factory=set)
    """Required steps that neither the slots nor any level had."""
    is_drained: bool = False
    last_order: Order | None = None
    """The order for all nodes."""

    def receive(self, report: Report) -> bool:
        """Receive a node's state. Returns: True if it is new."""
        if report.coordinator != self.number or report.node >= self.num_nodes:
            return False
        if self.reports.get(report.node) == report:
            return False
        self.reports[report.node] = report
        self._gather()
        return True

    def _gather(self) -> None:
        """Combine the reports of all nodes."""
        self.wants = Wants()
        captures_left = []
        for report in self.reports.values():
            self.wants = self.wants.union(report.wants)
            if report.captures_left is not None:
                captures_left.append(set(report.captures_left))
        self.captures_left = None
        if len(captures_left) == len(self.reports):
            self.captures_left = set.intersection(*captures_left)
        for index, level in enumerate(self.levels):
            level.receive([report.levels[index] for report in self.reports.values()])

    def deadlines(self, now: float) -> list[float]:
        """Return the times at which a level becomes due."""
        times = []
        for level in self.levels:
            if level.settings.every_n_steps is None and not level.is_under_way and level.due_at > now:
                times.append(level.due_at)
        return times

    def order(self) -> Order:
        """Return the order for all nodes."""
        required = self._required_or_named
        # Includes steps that are no longer required: a trainer may not have seen them yet.
        lost = sorted(self.lost & required) + sorted(self.lost - required)[-MAX_IN_MESSAGE:]
        orders = []
        for index, level in enumerate(self.levels):
            if level.is_redundancy:
                orders.append(level.order(self.wants.protect, set()))
            else:
                orders.append(level.order(required, self._named_keys(index)))
        return Order(
            job=self.job_digest,
            coordinator=self.number,
            levels=tuple(orders),
            is_preempted=self.wants.is_preempted,
            lost=tuple(sorted(lost)),
            is_drained=self.is_drained,
            may_delete=not self.is_alone,
        )

    def decide(self, ranks: Sequence[RankView], now: float) -> Order | None:
        """Count, cancel and grant.

        Args:
            ranks: the ranks of node 0. Other ranks are at most two captures ahead (``memory.slot_choice``).
            now: seconds of a monotonic clock.

        Returns: the order for all nodes, if it changed.
        """
        if len(self.reports) == self.num_nodes:
            for level in self.levels:
                self._count_level(level)
            self._count_lost()
            if ranks and self._is_training_on_all():
                self._give_up_what_is_gone(ranks)
            # In this order a slower level sees the results of a faster one, and redundancy the step that storage reads.
            for index in range(len(self.levels)):
                self._grant_level(index, ranks, now)
            self._overtake_grants(ranks)
            self._give_up_what_nobody_has()
            self.is_drained = self._is_all_drained()
        order = self.order()
        if order == self.last_order:
            return None
        self.last_order = order
        return order

    def is_finished(self) -> bool:
        """Return True if all nodes know that everything is drained."""
        return self.is_drained and all(report.knows_drained for report in self.reports.values())

    # Counting

    def _count_level(self, level: LevelGrants) -> None:
        if level.is_listing:
            if level.is_redundancy:
                level.complete.clear()  # a new keeper has no parity of the earlier one
            return
        if not level.is_open:
            self._open(level)
        if level.is_redundancy:
            level.complete &= level.stored_on_all()
        if level.grant is not None and level.is_under_way:
            self._count_grant(level, level.grant)

    def _open(self, level: LevelGrants) -> None:
        """Become OPEN when all nodes know their files: count complete snapshots, and resume the grant of the previous
        coordinator.
        """
        level.is_open = True
        for key in level.stored_on_all():
            level.become_complete(key)
        under_way = set()
        for report in level.reports:
            if report.grant is not None and report.progress in _UNDER_WAY:
                under_way.add(report.grant)
        under_way -= level.complete
        newest = max(under_way, default=None)
        level.cancelled |= under_way  # a grant removes it again
        if newest is not None and self._may_read_slots(newest):
            level.become_granted(newest, None, is_ahead=True)
        else:
            level.become_granted(None, None, is_ahead=True)

    def _count_grant(self, level: LevelGrants, grant: StepKey) -> None:
        """Check whether the granted step is complete, or can no longer be stored."""
        num_answered = 0
        progress = set()
        for report in level.reports:
            if report.version != level.version:
                continue  # it answers an earlier grant
            num_answered += 1
            progress.add(report.progress)
        if num_answered == self.num_nodes and progress == {GrantProgress.STORED}:
            level.become_complete(grant)
        elif progress.intersection(_GIVEN_UP):
            # A missed step that had begun when it was granted is lost. One that lay ahead was granted too late.
            is_missed_step = GrantProgress.MISSED in progress
            if is_missed_step and not level.is_ahead and not level.is_overtaken:
                level.given_up.add(grant)
                if level.source is None and not level.is_redundancy and grant in self._required_or_named:
                    self._lose(grant)
            # A level by time may have got the newest capture. If steps are so short that it is missed, only a grant
            # further ahead is in time.
            is_due_by_time = level.settings.every_n_steps is None
            is_late = is_missed_step and (level.is_ahead or is_due_by_time) and not level.is_overtaken
            level.become_cancelled(grant, is_late=is_late)

    # Granting

    def _grant_level(self, index: int, ranks: Sequence[RankView], now: float) -> None:
        level = self.levels[index]
        if not level.is_open or level.is_under_way or not level.is_ready or not level.is_answered:
            return
        if self.captures_left is not None:
            if not level.is_redundancy:
                self._grant_what_is_left(index)
        elif ranks and self._is_training_on_all():
            self._grant_next(index, ranks, now)
        # Some nodes may have captured their last step before others: wait for all of them.

    def _is_training_on_all(self) -> bool:
        return all(report.captures_left is None for report in self.reports.values())

    def _grant_what_is_left(self, index: int) -> None:
        """Grant, after training has ended, what must be stored of the captures that all nodes have."""
        level = self.levels[index]
        missing = self._keys_to_drain(index) - level.complete - level.given_up
        if not missing:
            return
        key = max(missing)
        source = self._source_of(key, index)
        if source is None and not self._may_read_slots(key):
            return
        level.become_granted(key, source, is_ahead=False)

    def _grant_next(self, index: int, ranks: Sequence[RankView], now: float) -> None:
        """Grant a required step that is available; else the next due step."""
        begun = newest_begun(ranks)
        if begun.start == 0:
            return  # the trainers are still restoring
        level = self.levels[index]
        ahead = self._grant_required(index, begun, ranks)
        if level.is_under_way:
            return
        if self._copies_from_faster(index):
            self._grant_copy(index, begun.start, now)
        elif not self._follows_reading(level, begun, now):
            self._grant_due(level, begun, ahead, ranks, now)

    def _follows_reading(self, level: LevelGrants, begun: StepKey, now: float) -> bool:
        """Grant the step that another level reads from the slots, if it is due at this level, too.

        Returns: True if no other step may be granted now. False: a due step before it may be granted.
        """
        reading = self._key_that_is_read()
        if reading is None:
            return False
        is_reading_begun = reading.step <= begun.step
        must_wait = level.is_redundancy and self._has_storage_missed()
        is_next = reading.step <= level.next_step(begun.step, self.capture_every_n_steps)
        if not (is_reading_begun or is_next or must_wait):
            return False
        if self._is_due_along(level, reading, now):
            self._become_due_grant(level, reading, begun.start, now, is_ahead=not is_reading_begun)
        return True

    def _grant_due(
        self, level: LevelGrants, begun: StepKey, ahead: Sequence[int], ranks: Sequence[RankView], now: float
    ) -> None:
        """Grant the newest capture, the next due step, or an earlier required step (``ahead``)."""
        is_due = level.is_due(begun.start, now)
        if not is_due and not ahead:
            return
        if self._key_to_read_first(ranks) is not None:
            return  # another level will get that one
        if not ahead and self._takes_newest_begun(level, begun, ranks):
            self._become_due_grant(level, begun, begun.start, now, is_ahead=False)
            return
        steps = list(ahead)
        if is_due:
            steps.append(level.next_step(begun.step, self.capture_every_n_steps))
        self._become_due_grant(level, StepKey(begun.start, min(steps)), begun.start, now, is_ahead=True)

    def _has_storage_missed(self) -> bool:
        """Return True if a level reads slots for a future step, and missed the previous one."""
        return any(level.reads_slots and level.is_ahead and level.margin_steps > 0 for level in self.levels)

    def _is_due_along(self, level: LevelGrants, key: StepKey, now: float) -> bool:
        """Return True if a level that reads slots should store a step that another level reads."""
        if level.is_done_with(key):
            return False
        if level.is_redundancy:
            return level.passes_a_multiple(key)
        if level.settings.every_n_steps is None:
            return level.is_due(key.start, now)
        return key.step % level.settings.every_n_steps == 0

    def _takes_newest_begun(self, level: LevelGrants, key: StepKey, ranks: Sequence[RankView]) -> bool:
        """Return True if a level that is due by time should store the newest capture that was begun.

        So the first capture is stored at once, even if steps are long. If steps are so short that other nodes miss it,
        the next grant is for a future step.
        """
        if level.settings.every_n_steps is not None or level.is_redundancy or level.margin_steps > 0:
            return False
        return not level.is_done_with(key) and is_in_memory(key, ranks) and not is_missed(key, ranks)

    def _become_due_grant(self, level: LevelGrants, key: StepKey, start: int, now: float, *, is_ahead: bool) -> None:
        level.become_granted(key, None, is_ahead=is_ahead)
        level.was_granted_at(start, now)

    def _grant_required(self, index: int, begun: StepKey, ranks: Sequence[RankView]) -> list[int]:
        """Grant a required step that was begun, or that a faster level has.

        Args:
            index: the level.
            begun: the newest step that a rank of this node began.
            ranks: the ranks of this node.

        Returns: required steps that were not begun yet.
        """
        level = self.levels[index]
        ahead = []
        for key in sorted(self._keys_still_required(index)):
            source = self._source_of(key, index)
            if source is not None:
                level.become_granted(key, source, is_ahead=False)
                return []
            if key.start == begun.start and key > begun:
                ahead.append(key.step)
            elif is_missed(key, ranks):
                continue  # the remaining captures may be held once captures stop
            elif not self._copies_from_faster(index) and self._may_read_slots(key):
                level.become_granted(key, None, is_ahead=False)
                return []
        return ahead

    def _overtake_grants(self, ranks: Sequence[RankView]) -> None:
        """Drop grants of steps that are not required, if they block a required step that could be stored at once.

        After training has ended nothing is overwritten, and all steps are stored one after the other.
        """
        is_training = self._is_training_on_all()
        first = self._key_to_read_first(ranks)
        for index, level in enumerate(self.levels):
            # Never reset during a grant: a node may have released it already, which must not count as a miss.
            if is_training and not level.is_overtaken and self._may_be_overtaken(index):
                level.is_overtaken = first not in (None, level.grant) or self._has_copy_to_make(index)

    def _key_to_read_first(self, ranks: Sequence[RankView]) -> StepKey | None:
        """Return a required step that was begun, and that a level would read from the slots now."""
        begun = newest_begun(ranks)
        for index, level in enumerate(self.levels):
            is_free = not level.is_under_way or self._may_be_overtaken(index)
            if not is_free or not level.is_open or not level.is_ready or self._copies_from_faster(index):
                continue
            for key in sorted(self._keys_still_required(index)):
                if key <= begun and self._source_of(key, index) is None and not is_missed(key, ranks):
                    return key
        return None

    def _may_be_overtaken(self, index: int) -> bool:
        """Return True if a level reads slots for a future step, or for one that is not required.

        Memory has only one spare slot for reading, so a required step would be overwritten meanwhile.
        """
        level = self.levels[index]
        return level.reads_slots and (level.is_ahead or level.grant not in self._required_at(index))

    def _has_copy_to_make(self, index: int) -> bool:
        """Return True if a faster level has a required step that this one does not have."""
        return any(self._source_of(key, index) is not None for key in self._keys_still_required(index))

    def _keys_still_required(self, index: int) -> Set[StepKey]:
        """Return the required steps that a level may still store."""
        level = self.levels[index]
        return self._required_at(index) - level.complete - level.given_up - self.lost

    def _grant_copy(self, index: int, start: int, now: float) -> None:
        """Grant the newest snapshot of the next faster level, if one is due here."""
        level = self.levels[index]
        source = self._faster(index)
        if source is None or not level.is_due(start, now):
            return
        newest = max(self.levels[source].complete, default=None)
        if newest is None or level.is_done_with(newest) or newest < max(level.complete, default=newest):
            return
        if level.passes_a_multiple(newest):
            level.become_granted(newest, source, is_ahead=False)
            level.was_granted_at(start, now)

    def _copies_from_faster(self, index: int) -> bool:
        """Return True if the level copies from a faster one, False if it reads slots."""
        return self._faster(index) is not None

    def _faster(self, index: int) -> int | None:
        """Return the next faster storage level that works on all nodes."""
        if self.levels[index].is_redundancy:
            return None
        for faster in reversed(range(index)):
            level = self.levels[faster]
            if level.is_open and level.is_ready and self._may_copy(faster, index):
                return faster
        return None

    def _may_copy(self, faster: int, index: int) -> bool:
        """Return False if the faster level has only a share of what several nodes hold, and this level needs all of
        it.
        """
        return self.levels[index].settings.is_shared or not self.levels[faster].settings.is_shared

    def _source_of(self, key: StepKey, index: int) -> int | None:
        """Return the next faster level that works and has this snapshot."""
        if self.levels[index].is_redundancy:
            return None
        for faster in reversed(range(index)):
            level = self.levels[faster]
            if key in level.complete and level.is_ready and self._may_copy(faster, index):
                return faster
        return None

    def _key_that_is_read(self) -> StepKey | None:
        """Return the step whose slots are held for a grant."""
        for level in self.levels:
            if level.reads_slots:
                return level.grant
        return None

    def _may_read_slots(self, key: StepKey) -> bool:
        """Return True if no current grant reads another step from slots."""
        return self._key_that_is_read() in (None, key)

    # Requirements

    @property
    def _required_or_named(self) -> frozenset[StepKey]:
        """Return the steps that the first level must store."""
        return self.wants.required | self.wants.named_keys

    def _named_keys(self, index: int) -> set[StepKey]:
        """Return the snapshots of a level that have or will get a name there."""
        keys = self.wants.named_keys
        for level in self.levels[: index + 1]:
            keys |= level.named
        return keys

    def _required_at(self, index: int) -> Set[StepKey]:
        """Return the steps that a level must store: the required ones, and those with a name that a faster level
        has.
        """
        if self.levels[index].is_redundancy:
            return self.wants.protect
        if index == 0:
            return self._required_or_named
        required = set(self.wants.required)
        for key in self._named_keys(index):
            if self._source_of(key, index) is not None:
                required.add(key)
        return required

    def _give_up_what_is_gone(self, ranks: Sequence[RankView]) -> None:
        """Give up required steps during training that were begun, and are neither in memory nor at a level.

        This also happens while another step is granted: a trainer that waits for the lost step may never begin the
        granted one.
        """
        begun = newest_begun(ranks)
        if begun.start == 0:
            return  # the trainers are still restoring
        for index, level in enumerate(self.levels):
            if not level.is_open:
                continue  # its files are not known
            for key in self._keys_still_required(index):
                is_ahead = key.start == begun.start and key > begun
                if is_ahead or not is_missed(key, ranks) or is_in_memory(key, ranks):
                    continue
                is_being_stored = level.is_under_way and level.grant == key
                if not is_being_stored and not self._may_be_copied(key, index):
                    self._give_up(level, key)

    def _may_be_copied(self, key: StepKey, index: int) -> bool:
        """Return True if a faster level may have this snapshot or is granted it, also if that level must recover
        first.
        """
        if self.levels[index].is_redundancy:
            return False
        for faster in range(index):
            level = self.levels[faster]
            is_being_stored = level.is_under_way and level.grant == key
            may_have = not level.is_open or key in level.complete
            if (may_have or is_being_stored) and self._may_copy(faster, index):
                return True
        return False

    def _give_up_what_nobody_has(self) -> None:
        """Give up, after training has ended, required steps that are neither in memory nor at a level."""
        if self.captures_left is None or not self._is_storage_open():
            return
        for index, level in enumerate(self._storage):
            for key in self._required_at(index) - self.captures_left - level.complete:
                if self._source_of(key, index) is None:
                    self._give_up(level, key)

    def _give_up(self, level: LevelGrants, key: StepKey) -> None:
        """Give up a required step that left the slots and cannot be copied from a faster level."""
        level.given_up.add(key)
        if not level.is_redundancy:
            self._lose(key)

    def _lose(self, key: StepKey) -> None:
        """Record that a required step left the slots."""
        self.gone.add(key)
        self._count_lost()

    def _count_lost(self) -> None:
        """Count steps that left the slots as lost, unless a level has them."""
        if not self._is_storage_open():
            return
        for key in self.gone:
            if not any(key in level.complete for level in self._storage):
                self.lost.add(key)
        self.gone.clear()
        self.lost = set(sorted(self.lost)[-MAX_REMEMBERED:])

    @property
    def _storage(self) -> list[LevelGrants]:
        return [level for level in self.levels if not level.is_redundancy]

    def _is_storage_open(self) -> bool:
        """Return True if the files of each storage level are known."""
        return all(level.is_open for level in self._storage)

    def _keys_to_drain(self, index: int) -> set[StepKey]:
        """Return the steps that a level must store after training has ended.

        These are the newest capture that all nodes have, other required captures that all nodes have, and required
        steps that a faster level has. A node that stores alone stores all, because it does not know the captures of the
        others.
        """
        if not self.captures_left:
            return set()
        if self.is_alone:
            return self.captures_left
        required = self._required_or_named
        keys = {max(self.captures_left)} | (self.captures_left & required - self.lost)
        for key in self._required_at(index):
            if self._source_of(key, index) is not None:
                keys.add(key)
        return keys

    def _is_all_drained(self) -> bool:
        if self.captures_left is None:
            return False
        return all(self._is_level_drained(index) for index in range(len(self.levels)))

    def _is_level_drained(self, index: int) -> bool:
        """Return True if a level has all required steps, except those that it can never store."""
        level = self.levels[index]
        if level.is_redundancy:
            return True
        return level.is_open and all(level.is_done_with(key) for key in self._keys_to_drain(index))
