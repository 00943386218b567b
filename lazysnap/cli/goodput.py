"""The accounting of a run: every microsecond of its wall time belongs to exactly one class. Pure.

``docs/report.md`` defines the classes.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from lazysnap.cli.history import GOODBYE, UNSEEN, Marks, Start, microseconds, rising, starts_of, value_at
from lazysnap.events import Complete, EventFile, Protected, TrainerEnded

CLASSES = ("productive", "waiting", "setup", "lost", "down", "restarting", "draining")
MEMORY, OTHER_NODES = "memory", "memory of other nodes"


@dataclass(frozen=True)
class Span:
    """A part of the wall time. ``start``: the index of its start; of the span ``down``, that of the start before."""

    begin: int
    end: int
    kind: str
    """``starting``, ``productive``, ``lost``, ``down`` or ``draining``."""
    start: int
    waited: int = 0
    """Time in it that training waited for copies."""

    @property
    def of_class(self) -> str:
        """The class, apart from the time waited."""
        if self.kind != "starting":
            return self.kind
        return "restarting" if self.start else "setup"


@dataclass(frozen=True)
class Interruption:
    """The end of a start that another one followed, or that was no good end."""

    at: int
    how: str
    """``died``, ``left`` (by an exception or preemption), ``goodbye``, or ``lost with its keeper``."""
    step: int
    resumed_step: int | None
    """``None``: it was not started again."""
    source: str | None
    """The place from which it was resumed."""
    lost: int
    """Time of the work that was trained again, and of the step that was not completed."""
    first: tuple[int, int] | None
    """The rank that ended first without a goodbye, and its node."""
    new_at: int | None
    """Time of the first step that is greater than all before; ``None`` if there was none yet."""
    until_new: dict[str, int]
    """Time between, by kind of span; ``productive`` is that of steps trained again, and of that first one."""

    @property
    def lost_steps(self) -> int:
        """Steps that were trained again."""
        return 0 if self.resumed_step is None else max(0, self.step - self.resumed_step)


@dataclass
class Account:
    """The result. ``spans`` follow one another without gaps, from ``began`` to ``ended``."""

    starts: list[Start]
    spans: list[Span]
    waits: Marks
    """Time that training waited for copies, over all starts."""
    newest: dict[str, list[tuple[int, int | None]]]
    """The newest step that memory, the memory of other nodes, and each level held complete from each time on."""
    interruptions: list[Interruption]

    @property
    def began(self) -> int:
        """The beginning of the first process."""
        return self.starts[0].began

    @property
    def ended(self) -> int:
        """The end of the last process; of one that still runs, the newest line."""
        return self.starts[-1].ended

    @property
    def wall(self) -> int:
        """Wall time."""
        return self.ended - self.began

    @property
    def reached(self) -> int:
        """The greatest step."""
        return max(start.reached for start in self.starts)

    @property
    def goodput(self) -> float:
        """The part of wall time that trained steps which count."""
        return self.classes()["productive"] / self.wall if self.wall else 0.0

    def classes(self) -> dict[str, int]:
        """Return the time of each class. The sum is ``wall``."""
        times = dict.fromkeys(CLASSES, 0)
        for span in self.spans:
            times[span.of_class] += span.end - span.begin - span.waited
            times["waiting"] += span.waited
        return times

    def step_at(self, time: int) -> int | None:
        """Return the newest step passed at a time; ``None`` if no process trained then."""
        start = self.starts[max(0, bisect_right(self.starts, time, key=lambda one: one.began) - 1)]
        return value_at(start.marks, time) if start.marks[0][0] <= time <= start.ended else None

    def behind(self, place: str, time: int) -> int | None:
        """Return how many steps the newest one complete at ``place`` was behind training; ``None`` if none was."""
        step, series = self.step_at(time), self.newest[place]
        index = bisect_right(series, time, key=lambda one: one[0]) - 1
        newest = series[index][1] if index >= 0 else None
        if place == MEMORY:  # sampled together with the step
            newest = value_at([(at, captured) for at, captured in series if captured is not None], time)
        return None if step is None or newest is None else max(0, step - newest)


def account(files: Sequence[EventFile], rank: int | None = None) -> Account | None:
    """Return the account of a run, following one rank, as ``starts_of``. ``None`` if no training named itself."""
    starts = starts_of(files, rank)
    if not starts:
        return None
    spans = [Span(one.ended, other.began, "down", index) for index, (one, other) in enumerate(pairwise(starts))]
    waits: Marks = [(starts[0].began, 0)]
    usual = int(median([one.step_us for one in starts if one.step_us is not None] or [0]))
    for index, start in enumerate(starts):
        before_work = list(_before_work(index, start, usual))
        waits += [(at, waits[-1][1] + waited) for at, waited in start.waits]
        start.marks = _marks(start, before_work[-1].end, starts[index + 1 : index + 2])
        start.kept = start.reached
        spans += before_work
    losses = [_cut(starts, index) for index in range(len(starts))]
    for index, start in enumerate(starts):
        spans += _work(index, start, waits)
    spans = sorted((span for span in spans if span.end > span.begin), key=lambda span: span.begin)
    return Account(starts, spans, waits, _newest(files, starts), list(_interruptions(files, starts, spans, losses)))


def _before_work(index: int, start: Start, usual: int) -> Iterator[Span]:
    """Yield the spans until work begins. A first step takes as long as any other; what it takes more is no work.

    ``usual``: the time of a step, where this start passed too few.
    """
    if start.waits:
        first = start.waits[0][0]
        step_us = usual if start.step_us is None else start.step_us
        yield Span(start.began, max(start.began, first - step_us), "starting", index)
        return
    named = min(max(microseconds(start.name.t), start.began), start.ended)
    yield Span(start.began, named, "starting", index)
    yield Span(named, start.ended, "draining" if start.how == GOODBYE else "starting", index)


# ---------------------------------------------------------------- work


def _marks(start: Start, work_begins: int, follower: Sequence[Start]) -> Marks:
    marks = [(work_begins, start.name.step)]
    if start.waits:
        first = start.waits[0][0]
        marks.append((first, start.name.step + 1))
        for line in start.progress:
            at, taken = min(max(microseconds(line.t), first), start.ended), microseconds(line.taken)
            marks.append((at, line.step))
            if first < taken <= at:
                marks.append((taken, line.captured))  # exactly the time at which that step was passed
    if start.end is not None:
        marks.append((start.ended, start.end.step))
    marks += [(start.ended, one.name.step) for one in follower]  # it had passed that one, seen or not
    return rising(marks)


def _cut(starts: list[Start], index: int) -> int:
    """Take from earlier starts the steps that the start ``index`` trains again. Return the time that this costs."""
    cost, step = 0, starts[index].name.step
    for earlier in reversed(starts[:index]):
        if earlier.kept <= step:
            break
        kept = max(step, earlier.name.step)
        cost += earlier.passed(earlier.kept) - earlier.passed(kept)
        earlier.kept = kept
    return cost


def _work(index: int, start: Start, waits: Marks) -> Iterator[Span]:
    """Yield what counts, what was trained again, and what follows the last boundary."""
    begin, kept_at, reached_at = start.marks[0][0], start.passed(start.kept), start.passed(start.reached)
    if start.how is None:  # as far as is known it trains
        kept_at = reached_at = start.ended
    waited = min(value_at(waits, kept_at) - value_at(waits, begin), kept_at - begin)
    yield Span(begin, kept_at, "productive", index, waited)
    yield Span(kept_at, reached_at, "lost", index)
    yield Span(reached_at, start.ended, "draining" if start.how == GOODBYE else "lost", index)


def _interruptions(
    files: Sequence[EventFile], starts: list[Start], spans: list[Span], losses: list[int]
) -> Iterator[Interruption]:
    ends = [(one, file.node) for file in files for one in file.events if isinstance(one, TrainerEnded)]
    bad = sorted((microseconds(one.t), one.rank, node) for one, node in ends if one.how != GOODBYE)
    most = 0
    for index, start in enumerate(starts):
        most, later = max(most, start.reached), starts[index + 1 :]
        if not later and start.how in (None, GOODBYE):
            return
        new_at = next((one.passed(most + 1) for one in later if one.reached > most), None)
        until = Counter[str]()
        for span in spans:
            part = min(span.end, starts[-1].ended if new_at is None else new_at) - max(span.begin, start.ended)
            if part > 0:
                until[span.kind] += part
        tail = 0 if start.how == GOODBYE else start.ended - start.passed(start.reached)
        yield Interruption(
            at=start.ended,
            how=start.how or UNSEEN,
            step=start.reached,
            resumed_step=later[0].name.step if later else None,
            source=later[0].name.source if later else None,
            lost=tail + (losses[index + 1] if later else 0),
            first=next(((rank, node) for at, rank, node in bad if start.began <= at <= start.ended), None),
            new_at=new_at,
            until_new=dict(until),
        )


def _newest(files: Sequence[EventFile], starts: list[Start]) -> dict[str, list[tuple[int, int | None]]]:
    newest: dict[str, list[tuple[int, int | None]]] = {MEMORY: []}
    completed: dict[str, Marks] = {}
    for start in starts:  # the last look at a trainer may come after its end
        lines = [line for line in start.progress if line.captured >= 0]
        newest[MEMORY] += [(min(microseconds(line.t), start.ended), line.captured) for line in lines]
    for event in (event for file in files for event in file.events):
        if isinstance(event, Protected):
            newest.setdefault(OTHER_NODES, []).append((microseconds(event.t), event.step))
        elif isinstance(event, Complete) and event.steps:
            completed.setdefault(event.level, []).append((microseconds(event.t), max(event.steps)))
    for level, steps in completed.items():  # an older step may be completed later
        newest[level] = list(rising(steps))
    return {place: sorted(series, key=lambda one: one[0]) for place, series in newest.items() if series}
