"""The coordinator: which steps the levels store, and which snapshots are complete. Pure: values in, decisions out.

The coordinator is the keeper of rank 0's node. It grants each level one step at a time; every node stores that step
and reports it; when all nodes have reported it, the snapshot is complete there. ``grants.node`` is the other side.

Reports and orders carry the whole state of their sender. Losing, repeating or delaying one does no harm. The rules and
their reasons stand in docs/architecture.md, *Grants*; ``tests/keeper/test_grants.py`` runs them against faults.
"""

import heapq
from collections import Counter
from collections.abc import Collection, Mapping, Set
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice

from msgspec import structs

from lazysnap.config import PersistentLevel, due_every
from lazysnap.grants.messages import (
    GIVEN_UP,
    MAX_TOLD,
    UNDER_WAY,
    LevelOrder,
    LevelReport,
    Order,
    Progress,
    Report,
    StepKey,
    newest,
)
from lazysnap.grants.steps import StepSet


@dataclass(frozen=True)
class LocalView:
    """The coordinator's view of the slots of its own node. Other nodes are at most one step ahead."""

    begun: int = -1
    """Newest step that a rank began to capture; -1 before the first."""
    held: frozenset[int] = frozenset()
    """Steps that the slots of all ranks hold, whole or being copied."""
    slowest: int | None = None
    """Newest step that the slowest rank began; ``None``: all of them began the newest."""

    def is_gone(self, step: int) -> bool:
        """True if the slots do not hold the step any more. Before the slowest rank began it, that is not known."""
        return step <= (self.begun if self.slowest is None else self.slowest) and step not in self.held


@dataclass
class LevelGrants:
    """The coordinator's state for one level."""

    settings: PersistentLevel
    is_memory: bool = False
    """True if a node loses its data with its keeper: then only what all nodes have now is complete."""
    earlier: frozenset[StepKey] = frozenset()
    """Complete snapshots of earlier starts that led to this one, found in the files."""
    grant: int | None = None
    source: int | None = None
    grant_version: int = 0
    """See ``LevelOrder``."""
    is_open: bool = False
    """True once every node answered and said which files it has there. Before that nothing is decided."""
    is_ahead: bool = True
    """True if the step lay ahead of all ranks when it was granted: then a miss says that the margin is too small."""
    complete: StepSet = field(default_factory=StepSet)
    """The snapshots of this start."""
    to_copy: set[int] = field(default_factory=set)
    """Steps that are never deleted here or at a slower level, and were completed at a faster one before they were here.
    """
    cancelled: set[int] = field(default_factory=set)
    lost: StepSet = field(default_factory=StepSet)
    margin: int = 0
    """Steps added to a grant, so that it reaches all ranks before they begin the step."""
    span: int = 0
    """Steps that training went on during the last write: a step that must be stored is not overslept."""
    has_failed: bool = False
    """True from a failed write until a snapshot is complete. Slower levels do not copy from here meanwhile."""
    writers: Mapping[str, int] = field(default_factory=dict)
    """The nodes that write frozen tensors, by the digest of these. Replaced as a whole."""
    captures_every: int = 1
    """Steps from one capture to the next."""

    @property
    def every(self) -> int:
        """Steps from one snapshot that is due here to the next."""
        return due_every(self.settings.every_n_steps, self.captures_every)

    @property
    def is_under_way(self) -> bool:
        """True if a granted step is not complete yet."""
        return self.grant is not None and self.grant not in self.complete

    @property
    def holds_slots(self) -> bool:
        """True if a grant under way takes the slot that memory has to spare for storage."""
        return self.is_under_way and self.source is None and not self.is_memory

    def is_done_with(self, step: int) -> bool:
        """True if the step is complete here, or can never be."""
        return step in self.complete or step in self.lost

    def passes_a_multiple(self, step: int) -> bool:
        """True if a multiple of ``every`` lies between the newest step that is complete here and this one."""
        return step // self.every > max(self.complete.newest, self._newest_earlier) // self.every

    @cached_property
    def _newest_earlier(self) -> int:
        return max((key.step for key in self.earlier), default=-1)

    def take(self, step: int | None, source: int | None, *, is_ahead: bool) -> None:
        """Grant a step, or nothing."""
        self.grant_version += (step, source) != (self.grant, self.source)
        self.grant, self.source, self.is_ahead = step, source, is_ahead
        self.cancelled.discard(-1 if step is None else step)

    def publish(self, step: int) -> None:
        """The step is complete at this level: durable there, or (``is_memory``) protected."""
        self.complete.add(step)
        self.cancelled.discard(step)
        self.margin = max(0, self.margin - 1)
        self.has_failed = False

    def name_writers(self, asking: Mapping[int, str]) -> None:
        """Name one writer for each digest of frozen tensors. ``asking`` holds the digest that each node asks to write.

        A node stays named as long as it asks. Then the lowest of the other nodes that ask is named.
        """
        writers = {digest: node for digest, node in self.writers.items() if asking.get(node) == digest}
        for node in sorted(asking):
            writers.setdefault(asking[node], node)
        self.writers = writers

    def cancel(self, said: Collection[Progress]) -> None:
        """A node gave the granted step up."""
        assert self.grant is not None
        self.cancelled.add(self.grant)
        if len(self.cancelled) > 2 * MAX_TOLD:
            self.cancelled = {*newest(self.cancelled)}
        self.has_failed = self.has_failed or Progress.FAILED in said
        if Progress.MISSED in said:
            if self.is_ahead:
                self.margin = min(2 * self.margin + 1, 64)
            else:
                self.lost.add(self.grant)
        self.take(None, None, is_ahead=True)

    def order(self, start: str, required: Set[int], *, is_ready: bool) -> LevelOrder:
        """Return the order for every node. ``is_ready``: the level works on all nodes."""
        most = min(max(16, self.settings.keep_last), MAX_TOLD)
        keys = {StepKey(step, start) for step in islice(self.complete, most)} | self.earlier
        told = set(heapq.nlargest(most, keys))
        # An answered request may be older than the newest in the order.
        told |= {StepKey(step, start) for step in newest(self.complete & required)}
        lost = tuple(sorted({*islice(self.lost, MAX_TOLD), *newest(self.lost & required)}))
        complete, cancelled = tuple(sorted(told)), newest(self.cancelled)
        return LevelOrder(
            self.grant, self.source, complete, cancelled, lost, is_ready, self.grant_version, is_open=self.is_open
        )


def _stored_by_all(said: Collection[LevelReport]) -> set[int]:
    return set.intersection(*(set(one.stored) for one in said))


@dataclass
class Coordinator:
    """Grants and counts for one start of a job. Not thread-safe.

    Send ``order()``, addressed by ``order_to``, to every node once this is made and when ``decide`` says so, and to a
    node whose link is back. Each node answers a new coordinator with a report. It is large because all rules of what
    is granted next stand here, and nowhere else.
    """

    owner: int
    """A random number below 2**62, of this coordinator alone: of reports, only those that answer it count."""
    start: str
    num_nodes: int
    levels: tuple[LevelGrants, ...]
    """Fast to slow; then that of protection, if there is one."""
    reports: dict[int, Report] = field(default_factory=dict)
    """The newest report of each node."""
    is_parted: bool = False
    """See ``Order``. Set by whoever has the links."""
    is_ending: bool = False
    """See ``Order``."""
    _told: object = None
    """Differs when an order says something new."""

    def _required(self, index: int) -> set[int]:
        """Steps that some node asks to be stored at a level."""
        return {step for report in self.reports.values() for step in report.levels[index].required}

    def order(self) -> Order:
        """The present state, for every node."""
        levels = enumerate(self.levels)
        told = tuple(x.order(self.start, self._required(index), is_ready=self._is_ready(index)) for index, x in levels)
        return Order(self.owner, told, self.is_parted, self.is_ending)

    def order_to(self, node: int, order: Order) -> Order:
        """Return the order as that node gets it: it names the frozen tensors that this node writes."""
        report = self.reports.get(node)
        if report is None:
            return order
        levels = tuple(
            structs.replace(told, frozen=said.frozen)
            if said.frozen is not None and level.writers.get(said.frozen) == node
            else told
            for level, told, said in zip(self.levels, order.levels, report.levels, strict=True)
        )
        return structs.replace(order, levels=levels)

    def _is_ready(self, index: int) -> bool:
        return all(report.levels[index].is_ready for report in self.reports.values())

    def receive(self, report: Report) -> None:
        """Take a node's report."""
        is_of_this = report.node < self.num_nodes and len(report.levels) == len(self.levels)
        if is_of_this and report.owner == self.owner:  # else that node has no order of this coordinator yet
            self.reports[report.node] = report

    def forget(self, node: int) -> None:
        """Take note that the link to a node is lost. It is not named to write frozen tensors until it asks again.

        A level with ``is_memory`` is not decided on until that node has reported what it has.
        """
        report = self.reports.get(node)
        if report is not None:
            lost = Progress.LISTING
            levels = tuple(
                structs.replace(said, frozen=None, progress=lost if level.is_memory else said.progress)
                for level, said in zip(self.levels, report.levels, strict=True)
            )
            self.reports[node] = structs.replace(report, levels=levels)

    def decide(self, view: LocalView) -> bool:
        """Grant, count and cancel; ``True`` if ``order()`` is to be sent to every node.

        Call it after ``receive``. Reports that came together need one call for all.
        """
        if len(self.reports) < self.num_nodes:
            return False
        for index, level in enumerate(self.levels):
            said = [report.levels[index] for report in self.reports.values()]
            is_listed = all(one.progress is not Progress.LISTING for one in said)
            if is_listed and not level.is_open:
                self._open(index, said)
            if is_listed and level.is_memory:
                level.complete = StepSet(_stored_by_all(said) & level.complete)
            if is_listed or not level.is_memory:
                self._count(index, said, view)
            asking = ((node, report.levels[index].frozen) for node, report in self.reports.items())
            level.name_writers({node: digest for node, digest in asking if digest is not None})
        for index in range(len(self.levels)):
            if self._is_idle(index):
                self._grant(index, view)
        before = self._told
        self._told = (
            [
                (
                    *(x.grant, x.source, x.complete.newest, len(x.complete)),
                    *(len(x.complete & self._required(index)), len(x.cancelled), len(x.lost), x.writers, x.is_open),
                )
                for index, x in enumerate(self.levels)
            ],
            [self._is_ready(index) for index in range(len(self.levels))],
        )
        return self._told != before

    def _publish(self, index: int, step: int) -> None:
        """The step is complete at a level. What slower ones must have is remembered for them."""
        self.levels[index].publish(step)
        for slower in range(index + 1, len(self.levels)):
            if any(step % every == 0 for every in self._kept_for_ever(slower)):
                self.levels[slower].to_copy.add(step)

    def _open(self, index: int, said: list[LevelReport]) -> None:
        """All nodes know what they have: take up what is under way, count what all of them have."""
        level = self.levels[index]
        level.is_open = True
        for stored in _stored_by_all(said):
            self._publish(index, stored)
        source: int | None = None
        going = [(one.grant, one.source) for one in said if one.progress in UNDER_WAY and one.grant is not None]
        step: int | None = None
        if going:
            step, source = max(going, key=lambda one: one[0])
        held = Counter(step for one in said for step in one.stored) if level.is_memory else None
        if held:
            # It may have been protected before a keeper and its parity were lost. Not all nodes know that, and one that
            # does not would let it go for a newer grant.
            most = max(held, key=lambda one: (held[one], one))
            step = step if most in level.complete else most
        # One step alone may be pinned. Here two coordinators may have granted different ones.
        if (
            source is None
            and not level.is_memory
            and any(other.holds_slots and other.grant != step for other in self.levels)
        ):
            step = None
        level.take(step, source, is_ahead=True)
        level.cancelled.update({granted for granted, _ in going} - {step} - level.complete)

    def _count(self, index: int, said: list[LevelReport], view: LocalView) -> None:
        """Decide if the granted step is complete: all nodes have stored it. Or cancel it, if a node gave it up.

        Only reports on the present grant count: files that a node listed may be gone when the message is read.
        """
        level = self.levels[index]
        if level.grant is None:
            return
        present = [one for one in said if (one.grant_version, one.grant) == (level.grant_version, level.grant)]
        if len(present) == len(said) and all(one.progress is Progress.STORED for one in said):
            if level.is_under_way and level.source is None:
                level.span = max(0, view.begun - level.grant)
            self._publish(index, level.grant)
        # Never by a clock of this process: a node that is slow may have committed, and others may have counted it.
        how = {one.progress for one in present}
        if how & GIVEN_UP:
            level.cancel(how)

    def _is_idle(self, index: int) -> bool:
        level = self.levels[index]
        said = [report.levels[index] for report in self.reports.values()]
        present = (level.grant_version, level.grant)
        listing = Progress.LISTING
        return (
            level.is_open
            and not level.is_under_way
            and all(
                (one.grant_version, one.grant) == present and one.is_ready and one.progress is not listing
                for one in said
            )
        )

    def _works(self, index: int) -> bool:
        level = self.levels[index]
        return not level.has_failed and (level.is_open or self._is_ready(index))

    def _source(self, index: int) -> int | None:
        """The nearest faster level that works; ``None``: the slots.

        What all nodes see has of each node only its share: a disk of one node takes nothing from there.
        """
        own = self.levels[index].settings
        if self.levels[index].is_memory:
            return None
        return next(
            (
                above
                for above in reversed(range(index))
                if self._works(above) and (own.shared or not self.levels[above].settings.shared)
            ),
            None,
        )

    def _grant(self, index: int, view: LocalView) -> None:
        """The level is idle on all nodes."""
        level, source, required = self.levels[index], self._source(index), self._required(index)
        level.to_copy = {step for step in level.to_copy if not level.is_done_with(step)}
        left = [set(report.left) for report in self.reports.values() if report.left is not None]
        step: int | None = None
        is_ahead = False
        if len(left) == self.num_nodes:  # nobody trains: what all nodes hold stays as long as they linger
            common = set.intersection(*left)
            view = LocalView(max(common | required, default=-1), frozenset(common))
            self._give_up(index, source, view)
            step = self._unless_others_pin(index, self._of_the_dead(index, common), view.begun)
            source = source if step is None else None
        elif source is None and not left:
            self._give_up(index, source, view)
            step = self._step_to_capture(index, view)
            is_ahead = step > view.begun + (self.num_nodes > 1) + level.margin
            step = self._unless_others_pin(index, step, view.begun)
        if source is not None:
            self._give_up(index, source, view)
            step = self._step_to_copy(index, self.levels[source])
        if step is not None:
            level.take(step, source, is_ahead=is_ahead)

    def _give_up(self, index: int, source: int | None, view: LocalView) -> None:
        """Give up steps that were required too late."""
        level = self.levels[index]
        for step in self._required(index) - level.complete:
            is_gone = view.is_gone(step)
            if source is not None:
                above = self.levels[source]
                # A coordinator before this one may have counted it there, and it may have been deleted since.
                is_awaited = step in above.complete or step == above.grant or step in self._required(source)
                is_gone = step in above.lost or (is_gone and not is_awaited)
            if is_gone:
                level.lost.add(step)

    def _of_the_dead(self, index: int, common: set[int]) -> int | None:
        """The newest step that all nodes hold, then what is required."""
        level = self.levels[index]
        newest_held = max(common - level.lost, default=-1)
        wanted = ({newest_held} | self._required(index)) & common
        return max((step for step in wanted if not level.is_done_with(step)), default=None)

    def _kept_for_ever(self, index: int) -> list[int]:
        """Intervals of the steps that this level, or a slower one that copies from it, never deletes."""
        settings = [level.settings.keep_every_n_steps for level in self.levels[index:]]
        return [every for every in settings if every is not None]

    def _step_to_copy(self, index: int, above: LevelGrants) -> int | None:
        """A step that is complete at the level above: what must be stored, oldest first; else the newest due."""
        level = self.levels[index]
        must = {step for step in level.to_copy | self._required(index) if step in above.complete}
        must = {step for step in must if not level.is_done_with(step)}
        if must:
            return min(must)
        # What is older than this one is not due if this one is not.
        step = next((step for step in above.complete if step not in level.lost), None)
        return step if step is not None and level.passes_a_multiple(step) else None

    def _step_to_capture(self, index: int, view: LocalView) -> int:
        """A step that the ranks will capture, or one that must be stored and that the slots still hold."""
        level, begun, kept = self.levels[index], max(view.begun, 0), self._kept_for_ever(index)
        must = {(begun // every + 1) * every for every in kept} | self._required(index)
        must |= {begun // every * every for every in kept} & view.held
        must = {step for step in must if not level.is_done_with(step)}
        every = level.every
        # Ranks of other nodes may be a step ahead.
        due = ((begun + (self.num_nodes > 1) + level.margin) // every + 1) * every
        first = min(must, default=due)
        return first if first <= due + level.span else due

    def _unless_others_pin(self, index: int, step: int | None, begun: int) -> int | None:
        """Memory has one slot to spare for storage: levels that read slots at the same time read the same step."""
        level = self.levels[index]
        pinned = next((other.grant for other in self.levels if other is not level and other.holds_slots), None)
        if pinned is None or pinned == step or level.is_memory:
            return step
        if step is not None and step <= begun:
            return None  # it has to be stored, perhaps while training waits: never the other one instead
        # Once it was begun, some nodes may have stored it and let its slot go.
        is_wanted = pinned > begun and (pinned in self._required(index) or level.passes_a_multiple(pinned))
        return pinned if is_wanted and not level.is_done_with(pinned) else None
