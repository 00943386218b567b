"""The state of the coordinator for one level, or for redundancy. Pure."""

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from lazysnap.core.messages import (
    MAX_IN_MESSAGE,
    GrantProgress,
    LevelOrder,
    LevelReport,
    LevelSettings,
    StepKey,
)

MAX_MARGIN_STEPS = 64
MAX_REMEMBERED = 256
"""Minimum number of complete snapshots that are remembered per level. Nodes judge older ones only by their age."""


@dataclass
class LevelGrants:
    """The coordinator's state of one level, or of redundancy."""

    settings: LevelSettings
    is_redundancy: bool = False
    """True for redundancy: a snapshot is complete only while all nodes have it."""
    reports: list[LevelReport] = field(default_factory=list)
    """The newest report of each node."""
    is_listing: bool = True
    """True while a node has not listed its files."""
    is_ready: bool = False
    """True if the level works on all nodes. Otherwise nothing is granted."""
    is_failing: bool = False
    """True while the level fails on some node."""
    named: set[StepKey] = field(default_factory=set)
    """Snapshots that have a name here."""
    is_open: bool = False
    """True once every node has reported its files, and from then on. Before that nothing is granted, cancelled or
    deleted.
    """
    grant: StepKey | None = None
    source: int | None = None
    """The level from which the granted step is copied; None: the slots."""
    version: int = 0
    """Incremented with each change of the grant."""
    complete: set[StepKey] = field(default_factory=set)
    """Invariant: when a key was added, every node had committed its part and read it back."""
    cancelled: set[StepKey] = field(default_factory=set)
    """Invariant: disjoint from ``complete``, and never the current grant."""
    given_up: set[StepKey] = field(default_factory=set)
    """Steps that are not granted again: a node lost them, or a hanging thread works on them. Invariant: disjoint from
    ``complete``.
    """
    margin_steps: int = 0
    """Steps by which a grant lies further ahead. Grows with each miss, shrinks with each success."""
    is_ahead: bool = True
    """True if the granted step had perhaps not begun when it was granted. A miss then does not give it up."""
    is_overtaken: bool = False
    """True once a required step must be read before the granted one. Nodes then release the grant, which is no miss. It
    stays True until the grant is over.
    """
    due_start: int = 0
    """The start for which ``due_at`` was set, or 0. In another start the level is due at once."""
    due_at: float = 0.0

    @property
    def is_under_way(self) -> bool:
        """True if a granted step is not complete yet."""
        return self.grant is not None and self.grant not in self.complete

    @property
    def reads_slots(self) -> bool:
        """True if slots are held for a current grant."""
        return self.is_under_way and self.source is None

    @property
    def is_answered(self) -> bool:
        """True if every node obeyed the last order."""
        return all(report.version == self.version for report in self.reports)

    def receive(self, reports: list[LevelReport]) -> None:
        """Combine the reports of the nodes."""
        self.reports = reports
        self.is_listing = False
        self.is_ready = True
        self.is_failing = False
        self.named = set()
        for report in reports:
            if report.progress is GrantProgress.LISTING:
                self.is_listing = True
            if not report.is_ready:
                self.is_ready = False
            if report.is_failing:
                self.is_failing = True
            for named in report.names:
                self.named.add(named.key)

    def stored_on_all(self) -> set[StepKey]:
        """Return the snapshots of which every node stored its part."""
        return set.intersection(*(set(report.stored) for report in self.reports))

    def become_granted(self, key: StepKey | None, source: int | None, *, is_ahead: bool) -> None:
        """Grant a step, or nothing.

        Args:
            key: the step.
            source: the level from which it is copied; None: the slots.
            is_ahead: True if it has not begun yet.
        """
        self.grant = key
        self.source = source
        self.is_ahead = is_ahead
        self.is_overtaken = False
        self.version += 1
        if key is not None:
            self.cancelled.discard(key)

    def become_complete(self, key: StepKey) -> None:
        """Complete the grant: all nodes stored the step."""
        self.complete.add(key)
        self.cancelled.discard(key)
        self.given_up.discard(key)
        self.margin_steps = max(0, self.margin_steps - 1)
        num_remembered = max(MAX_REMEMBERED, self.settings.keep_last + 1)  # retention counts newer ones
        if len(self.complete) > 2 * num_remembered:
            self.complete = set(sorted(self.complete)[-num_remembered:])
            self.given_up = set(sorted(self.given_up)[-MAX_REMEMBERED:])

    def become_cancelled(self, key: StepKey, *, is_late: bool) -> None:
        """Cancel the grant: a node gave it up. ``is_late``: because the order reached it too late."""
        self.cancelled.add(key)
        if is_late:
            self.margin_steps = min(2 * self.margin_steps + 1, MAX_MARGIN_STEPS)
        self.due_start = 0  # due again at once
        self.become_granted(None, None, is_ahead=True)

    def is_done_with(self, key: StepKey) -> bool:
        """Return True if a step is complete, or is not granted again."""
        return key in self.complete or key in self.given_up

    def is_due(self, start: int, now: float) -> bool:
        """Return True if it is time for a snapshot. A level with a step interval is always due."""
        return self.settings.every_n_steps is not None or self.due_start != start or now >= self.due_at

    def was_granted_at(self, start: int, now: float) -> None:
        """Record that a due snapshot is being stored."""
        self.due_start = start
        self.due_at = now + self.settings.every_s

    def next_step(self, begun: int, capture_every: int) -> int:
        """Return the next due step that will be captured, more than ``margin_steps`` after ``begun``."""
        every = math.lcm(self.settings.every_n_steps or 1, capture_every)
        return (max(0, begun + self.margin_steps) // every + 1) * every

    def passes_a_multiple(self, key: StepKey) -> bool:
        """Return True if a due step lies between the newest complete snapshot and this one."""
        if self.settings.every_n_steps is None:
            return True
        newest = -1
        for complete in self.complete:
            if complete.start == key.start:
                newest = max(newest, complete.step)
        return key.step // self.settings.every_n_steps > newest // self.settings.every_n_steps

    def order(self, required: Collection[StepKey], named: Collection[StepKey]) -> LevelOrder:
        """Return this state for the nodes. Old cancelled steps are forgotten here.

        Args:
            required: required steps.
            named: snapshots that have or will get a name there.
        """
        newest = sorted(self.complete)[-max(MAX_IN_MESSAGE, self.settings.keep_last + 1) :]
        answered = self.complete & {*required, *named}
        self.cancelled = set(sorted(self.cancelled)[-MAX_IN_MESSAGE:])
        return LevelOrder(
            version=self.version,
            grant=self.grant,
            source=self.source,
            complete=tuple(sorted({*newest, *answered})),
            cancelled=tuple(sorted(self.cancelled)),
            given_up=tuple(sorted(self.given_up.intersection(required))),
            named=tuple(sorted(named)),
            is_overtaken=self.is_overtaken,
            is_open=self.is_open,
            is_failing=self.is_failing,
        )
