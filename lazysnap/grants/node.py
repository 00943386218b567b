"""A node's decisions on the coordinator's orders. Pure: values in, decisions out.

After every call the caller brings shared memory up to date, in this order: it stores ``word`` in the control word that
the trainers read, *then* it removes every pin of another step. A trainer does it the other way round: it pins, then it
reads the word again. So a slot that is pinned for a step that is not wanted any more is let go by one of the two.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from lazysnap.grants.messages import LevelOrder, LevelReport, Order, Progress, Report, StepKey, newest


@dataclass(frozen=True)
class SlotView:
    """The words of one slot at one moment."""

    step: int
    is_whole: bool
    pin: int | None = None
    """The step it was pinned for. A trainer that takes the slot for another step clears it."""
    hold: int | None = None
    """The step for which parity holds it."""


@dataclass(frozen=True)
class RankView:
    """One rank of the node, read in the order of the fields: a step that was begun is seen in the slots."""

    begun: int
    """Newest step that it began to capture; -1 before the first."""
    is_gone: bool
    """True if its trainer is dead."""
    slots: tuple[SlotView, ...]

    def holding(self, step: int) -> SlotView | None:
        """The slot of a step, whole or being copied."""
        return next((slot for slot in self.slots if slot.step == step), None)


def _is_missed(step: int, ranks: Sequence[RankView]) -> bool:
    """True if a rank does not hold the step, and never will."""
    # While other ranks of the node live, a dead one says nothing of steps that nobody began: the next grant would be
    # missed as fast, and the one after it.
    is_begun = any(rank.begun >= step for rank in ranks) or all(rank.is_gone for rank in ranks)
    return any(rank.holding(step) is None and (rank.begun >= step or (rank.is_gone and is_begun)) for rank in ranks)


def common_whole(ranks: Sequence[RankView]) -> set[int]:
    """Steps that all ranks of the node hold whole."""
    if not ranks:
        return set()
    return set.intersection(*({slot.step for slot in rank.slots if slot.is_whole} for rank in ranks))


def whole_before_newest(ranks: Sequence[RankView]) -> list[int]:
    """Return the steps that all ranks of the node hold whole, the newest first, without the newest that one began.

    Among the first K of them, once there are so many, is one that all ranks of all nodes hold whole: see
    docs/architecture.md, *How many slots*.
    """
    newest = max((rank.begun for rank in ranks), default=-1)
    return sorted((step for step in common_whole(ranks) if step < newest), reverse=True)


@dataclass(frozen=True)
class Write:
    """One try to store a step at a level."""

    level: int
    step: int
    source: int | None
    """The level whose file is copied; ``None``: the slots."""
    attempt: int
    is_alone: bool = False
    """True if no coordinator granted it: see ``grants.alone``."""


@dataclass(frozen=True)
class Decision:
    """Decisions that follow from the words of the slots."""

    pin: tuple[int, ...] = ()
    """Ranks whose slot of the granted step (``NodeGrants.word``) is to be pinned by the keeper."""
    hold: tuple[int, ...] = ()
    """Ranks whose slot of the step to protect (``NodeGrants.held``) is to be held by the keeper."""
    writes: tuple[Write, ...] = ()
    """Writes to begin, once the pins are set."""


@dataclass
class NodeLevel:
    """The node's state for one level."""

    stored: set[int] = field(default_factory=set)
    """Steps of this start of which this node has a file that was read back. A new keeper lists what another stored."""
    grant: int | None = None
    source: int | None = None
    progress: Progress = Progress.IDLE
    grant_version: int = 0
    """See ``LevelOrder``."""
    is_open: bool = False
    """See ``LevelOrder``."""
    is_ready: bool = True
    attempt: int = 0
    complete: set[StepKey] = field(default_factory=set)
    """The newest of all starts of the run."""
    remembered: int = 1024
    """The least number of these; no fewer than ``keep_last``."""
    cancelled: frozenset[int] = frozenset()
    lost: frozenset[int] = frozenset()
    works: bool = True
    """True if the level works on all nodes."""
    is_memory: bool = False
    """See ``LevelGrants``: what an order does not list as complete is not complete any more."""
    required: set[int] = field(default_factory=set)
    """Steps that must be stored here."""
    asked: str | None = None
    """The frozen tensors that this node asks to write, or writes."""
    named: str | None = None
    """The frozen tensors for which the coordinator named this node."""

    @property
    def reads_slots(self) -> bool:
        """True if pins of the granted step stay."""
        return self.source is None and self.progress in (Progress.WAITING, Progress.WRITING)

    def learn(self, order: LevelOrder) -> None:
        """The complete steps."""
        self.complete.update(order.complete)
        if len(self.complete) > 2 * self.remembered:
            self.complete = set(sorted(self.complete)[-self.remembered :])

    def obey(self, order: LevelOrder) -> None:
        """Take the order."""
        self.cancelled, self.lost, self.works = frozenset(order.cancelled), frozenset(order.lost), order.is_ready
        self.named, self.grant_version = order.frozen, order.grant_version
        if self.is_memory:
            self.complete = set(order.complete)
        if order.grant == self.grant:
            return
        self.grant, self.source = order.grant, order.source
        self.attempt += 1  # a write under way cannot commit any more
        if self.progress is not Progress.LISTING:
            self._begin()

    def _begin(self) -> None:
        if self.grant is None:
            self.progress = Progress.IDLE
        else:
            self.progress = Progress.STORED if self.grant in self.stored else Progress.WAITING

    def list(self, steps: Collection[int]) -> None:
        """Count these steps, whose files are there, as stored. What was granted meanwhile begins."""
        self.stored.update(steps)
        if self.progress is Progress.LISTING:
            self._begin()

    def report(self) -> LevelReport:
        """Return the report for the coordinator."""
        stored = tuple(sorted({*newest(self.stored), *newest(self.stored & self.required)}))
        # The coordinator waits for the end alone: what lies before it is no news.
        progress = Progress.WAITING if self.progress in (Progress.WRITING, Progress.VERIFYING) else self.progress
        state = (self.grant, self.source, progress, self.is_ready, stored, self.grant_version, self.asked)
        return LevelReport(*state, required=newest(self.required))

    def leave(self) -> None:
        """Obey no more: what is there is of no start from now on."""
        self.progress, self.attempt = Progress.LISTING, self.attempt + 1


@dataclass
class NodeGrants:
    """The state of one node for one start of a job. Not thread-safe.

    Send ``report()`` to the coordinator when it differs from the last one, and when a link is back. It has many
    methods: one for each event, and for each question of a writer.
    """

    node: int
    start: str
    levels: tuple[NodeLevel, ...]
    """Fast to slow; then that of protection, with ``is_memory``, if there is one."""
    owner: int = 0
    """The coordinator that is obeyed: the newest one. Links bring nothing of one before behind it."""
    urgent: set[int] = field(default_factory=set)
    """Required steps that trainers keep in their slots meanwhile: what is being written gives way to them."""
    is_parted: bool = False
    """True if the coordinator has no link to some node."""
    is_ending: bool = False
    """See ``Report``."""

    @property
    def word(self) -> int | None:
        """The step that trainers pin when they begin it. See the module's docstring."""
        return self._read_step(is_memory=False)

    @property
    def held(self) -> int | None:
        """The step that is being protected."""
        return self._read_step(is_memory=True)

    def _read_step(self, *, is_memory: bool) -> int | None:
        chosen = (level for level in self.levels if level.is_memory == is_memory)
        return next((level.grant for level in chosen if level.reads_slots), None)

    @property
    def required(self) -> set[int]:
        """Steps that must be stored at some level."""
        return set().union(*(level.required for level in self.levels))

    def report(self, ranks: Sequence[RankView]) -> Report:
        """The whole state, for the coordinator."""
        left = newest(common_whole(ranks)) if all(rank.is_gone for rank in ranks) else None
        return Report(self.node, self.owner, tuple(level.report() for level in self.levels), left, self.is_ending)

    def receive(self, order: Order) -> None:
        """Take an order. Look at the slots afterwards."""
        if len(order.levels) != len(self.levels):
            return
        self.owner, self.is_parted = order.owner, order.is_parted
        for level, said in zip(self.levels, order.levels, strict=True):
            level.learn(said)
            level.is_open = said.is_open
            if said.is_open:
                level.obey(said)
            else:
                level.grant_version = said.grant_version
            level.required = {step for step in level.required if not self._is_answered(level, step)}
        self.urgent &= self.required

    def require(self, step: int, levels: Collection[int], *, is_urgent: bool = False) -> None:
        """Ask for a step to be stored at these levels. It may be begun, or still lie ahead."""
        asked = [level for level in map(self.levels.__getitem__, levels) if not self._is_answered(level, step)]
        for level in asked:
            level.required.add(step)
        if asked and is_urgent:
            self.urgent.add(step)

    def take_notice(self) -> None:
        """Note that all processes are about to be killed."""
        self.is_ending = True

    def ask(self, level: int, digest: str | None) -> None:
        """Ask to write these frozen tensors, or (``None``) be done with that."""
        self.levels[level].asked = digest

    def is_to_write(self, level: int, digest: str) -> bool:
        """True if this node writes these frozen tensors now. A coordinator that does not decide yet names nobody."""
        return not self.levels[level].is_open or self.levels[level].named == digest

    def is_answered(self, step: int, levels: Collection[int]) -> bool:
        """True if the step is complete, or lost, at all of these levels."""
        return all(self._is_answered(self.levels[index], step) for index in levels)

    def _is_answered(self, level: NodeLevel, step: int) -> bool:
        return step in level.lost or StepKey(step, self.start) in level.complete

    def decide(self, ranks: Sequence[RankView]) -> Decision:
        """The words of the slots may have changed. Call it after each change: it costs little.

        ``ranks``: all of the node, also those that did not come yet, or their part would be missing in the file.
        """
        pin: set[int] = set()
        hold: set[int] = set()
        writes = []
        for index, level in enumerate(self.levels):
            if level.progress is Progress.WRITING and level.source is None and self._is_pressed(level):
                # Memory has one slot to spare for storage, and that one is held for another step now.
                level.attempt, level.progress = level.attempt + 1, Progress.YIELDED
            if level.progress is not Progress.WAITING or level.grant is None:
                continue
            step = level.grant
            if level.source is not None:
                source = self.levels[level.source]
                if source.progress is Progress.LISTING and source.is_ready:
                    continue  # a new keeper does not know yet what it has there
                is_there, is_missed = True, step not in source.stored
            else:
                slots = [rank.holding(step) for rank in ranks]
                is_there = None not in slots
                is_missed = _is_missed(step, ranks)
                # Also slots of a step that was begun before the order came: they still hold it.
                found = [(number, slot) for number, slot in enumerate(slots) if slot is not None]
                if level.is_memory:
                    hold |= {number for number, slot in found if slot.hold != step}
                else:
                    pin |= {number for number, slot in found if slot.pin != step}
            if is_missed:
                level.progress = Progress.MISSED
            elif not is_there and self._has_to_yield(level, step, ranks):
                level.progress = Progress.YIELDED
            elif is_there:
                level.attempt, level.progress = level.attempt + 1, Progress.WRITING
                writes.append(Write(index, step, level.source, level.attempt))
        return Decision(
            tuple(sorted(pin)) if self.word is not None else (),
            tuple(sorted(hold)) if self.held is not None else (),
            tuple(writes),
        )

    def _is_pressed(self, level: NodeLevel) -> bool:
        if level.is_memory or level.grant in level.required:
            return False
        return any(not self._is_answered(level, step) for step in self.urgent)

    def _has_to_yield(self, level: NodeLevel, step: int, ranks: Sequence[RankView]) -> bool:
        """Trainers that flush wait for a step that they began: the granted one, which lies ahead, would never come."""
        begun = max((rank.begun for rank in ranks), default=-1)
        return begun < step and any(other <= begun for other in level.required)

    def is_wanted(self, write: Write) -> bool:
        """Ask before the commit, and obey: other nodes may already know that this write is void."""
        return self.levels[write.level].attempt == write.attempt

    def committed(self, write: Write) -> None:
        """The file and its manifest are there, so the slots are free again. It does not count before ``verified``."""
        if self.is_wanted(write) and self._is_granted(write):
            self.levels[write.level].progress = Progress.VERIFYING

    def verified(self, write: Write) -> None:
        """The file was read back, where the level does that: from here on it counts, and is reported."""
        if not self.is_wanted(write):  # cancelled meanwhile: the file may be deleted already
            return
        level = self.levels[write.level]
        level.stored.add(write.step)
        if self._is_granted(write):
            level.progress = Progress.STORED

    def missed(self, write: Write) -> None:
        """Record that the step to be written is not in memory any more. The level is well."""
        self._end(write, Progress.MISSED)

    def failed(self, write: Write) -> None:
        """The level refused, hangs, or gave other bytes back: call ``probed`` once a small write works."""
        self.levels[write.level].is_ready = False
        self._end(write, Progress.FAILED)

    def _end(self, write: Write, progress: Progress) -> None:
        level = self.levels[write.level]
        if self.is_wanted(write):
            if self._is_granted(write):
                level.progress = progress
            level.attempt += 1

    def _is_granted(self, write: Write) -> bool:
        """True if the write is for the present grant. What a node stores alone says nothing of that."""
        return not write.is_alone and self.levels[write.level].grant == write.step

    def probed(self, level: int) -> None:
        """A small write to the level worked."""
        self.levels[level].is_ready = True

    def listed(self, level: int, steps: Collection[int] | None) -> None:
        """Record the steps of this start that the level has; ``None``: it does not answer."""
        if steps is None:
            self.levels[level].is_ready = False
        else:
            self.levels[level].list(steps)

    def give_up(self, level: int, step: int) -> bool:
        """Ask before a file of this start is deleted: ``False``, if it was cancelled and is granted again. From now on
        the node does not count it.
        """
        if self.levels[level].grant == step and StepKey(step, self.start) not in self.levels[level].complete:
            return False
        self.levels[level].stored.discard(step)
        return True
