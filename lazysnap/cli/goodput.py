"""The accounting of a run: every microsecond of its wall time belongs to exactly one class. Pure.

``docs/report.md`` defines the classes.
"""

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from operator import attrgetter, itemgetter
from statistics import median

from lazysnap.cli.history import GOODBYE, UNSEEN, Marks, Start, microseconds, rising, starts_of, value_at
from lazysnap.cli.survival import OTHER_NODES
from lazysnap.events import Complete, EventFile, Protected, TrainerEnded
from lazysnap.resolver import MEMORY

CLASSES = ("productive", "waiting", "setup", "lost", "down", "restarting", "draining")

Newest = list[tuple[int, int | None]]
"""Times, and the newest complete step from each time on; ``None``: none."""


@dataclass(frozen=True)
class TimeSpan:
    """A part of the wall time."""

    begin: int
    end: int
    kind: str
    """A class, except "waiting"."""
    waited: int = 0
    """Time within it that training waited for copies."""


@dataclass(frozen=True)
class Interruption:
    """The end of a start that was followed by another one, or that failed."""

    at: int
    how: str
    """``died``, ``left`` (by an exception or preemption), ``goodbye``, or ``lost with its keeper``."""
    step: int
    resumed_step: int | None
    """The step from which the next start continued, if any."""
    source: str | None
    """The source from which it was resumed."""
    lost: int
    """Time of the steps that were trained again, and of the incomplete step."""
    first: tuple[int, int] | None
    """The rank that ended first without a goodbye, and its node."""
    new_at: int | None
    """Time of the first step that is greater than all earlier ones, if any."""

    @property
    def lost_steps(self) -> int:
        """Steps that were trained again."""
        if self.resumed_step is None:
            return 0
        return max(0, self.step - self.resumed_step)


@dataclass
class Account:
    """The result. ``spans`` follow one another without gaps, from ``began`` to ``ended``."""

    starts: list[Start]
    spans: list[TimeSpan]
    waits: Marks
    """Time that training waited for copies, over all starts."""
    newest: dict[str, Newest]
    """The newest complete steps of memory, of the memory of other nodes, and of each level."""
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
        if not self.wall:
            return 0.0
        return self.classes()["productive"] / self.wall

    def classes(self) -> dict[str, int]:
        """Return the time of each class. The sum is ``wall``."""
        times = dict.fromkeys(CLASSES, 0)
        for span in self.spans:
            times[span.kind] += span.end - span.begin - span.waited
            times["waiting"] += span.waited
        return times

    def step_at(self, time: int) -> int | None:
        """Return the newest step passed at a time; ``None`` if no process trained then."""
        index = bisect_right(self.starts, time, key=attrgetter("began")) - 1
        start = self.starts[max(0, index)]
        if not start.marks[0][0] <= time <= start.ended:
            return None
        return value_at(start.marks, time)

    def behind(self, source: str, time: int) -> int | None:
        """Return by how many steps the newest complete step of ``source`` was behind training; ``None`` without one."""
        series = self.newest[source]
        newest: int | None = None
        if source == MEMORY:  # sampled together with the step
            newest = value_at([(at, step) for at, step in series if step is not None], time)
        else:
            index = bisect_right(series, time, key=itemgetter(0)) - 1
            if index >= 0:
                newest = series[index][1]
        step = self.step_at(time)
        if step is None or newest is None:
            return None
        return max(0, step - newest)


def account(files: Sequence[EventFile]) -> Account | None:
    """Return the account of a run, following one rank, as ``starts_of``. ``None`` if no training reported itself."""
    starts = starts_of(files)
    if not starts:
        return None
    spans = []
    for before, after in pairwise(starts):
        spans.append(TimeSpan(before.ended, after.began, "down"))
    waits: Marks = [(starts[0].began, 0)]
    usual_us = _usual_step_us(starts)
    kind = "setup"
    for start, follower in zip_longest(starts, starts[1:]):
        starting = _before_work(start, usual_us, kind)
        kind = "restarting"
        spans += starting
        waited_before = waits[-1][1]
        for at, waited in start.waits:
            waits.append((at, waited_before + waited))
        start.marks = _marks(start, starting[-1].end, follower)
        start.kept = start.reached
    losses = [_cut(starts, index) for index in range(len(starts))]
    for start in starts:
        spans += _work(start, waits)
    spans = [span for span in spans if span.end > span.begin]
    spans.sort(key=attrgetter("begin"))
    return Account(starts, spans, waits, _newest(files, starts), list(_interruptions(files, starts, losses)))


def _usual_step_us(starts: Sequence[Start]) -> int:
    """Return the time of a step, for starts with too few steps."""
    step_times = [start.step_us for start in starts if start.step_us is not None]
    if not step_times:
        return 0
    return int(median(step_times))


def _before_work(start: Start, usual_us: int, kind: str) -> list[TimeSpan]:
    """Return the spans until work begins. A first step counts as long as any other; the rest is not work."""
    if start.waits:
        first_boundary = start.waits[0][0]
        step_us = usual_us if start.step_us is None else start.step_us
        return [TimeSpan(start.began, max(start.began, first_boundary - step_us), kind)]
    named = min(max(microseconds(start.trainer_started.t), start.began), start.ended)
    rest = kind
    if start.how == GOODBYE:
        rest = "draining"
    return [TimeSpan(start.began, named, kind), TimeSpan(named, start.ended, rest)]


# ---------------------------------------------------------------- work


def _marks(start: Start, work_begins: int, follower: Start | None) -> Marks:
    marks = [(work_begins, start.trainer_started.step)]
    if start.waits:
        first = start.waits[0][0]
        marks.append((first, start.trainer_started.step + 1))
        for line in start.progress:
            at = min(max(microseconds(line.t), first), start.ended)
            taken = microseconds(line.taken)
            marks.append((at, line.step))
            if first < taken <= at:
                marks.append((taken, line.captured))  # exactly the time at which that step was passed
    if start.end is not None:
        marks.append((start.ended, start.end.step))
    if follower is not None:
        marks.append((start.ended, follower.trainer_started.step))  # it had passed that step, recorded or not
    return rising(marks)


def _cut(starts: list[Start], index: int) -> int:
    """Subtract from earlier starts the steps that the start ``index`` trains again. Return their time."""
    cost = 0
    step = starts[index].trainer_started.step
    for earlier in reversed(starts[:index]):
        if earlier.kept <= step:
            break
        kept = max(step, earlier.trainer_started.step)
        cost += earlier.passed(earlier.kept) - earlier.passed(kept)
        earlier.kept = kept
    return cost


def _work(start: Start, waits: Marks) -> list[TimeSpan]:
    """Return the spans that count, that were trained again, and that follow the last boundary."""
    begin = start.marks[0][0]
    kept_at = start.passed(start.kept)
    reached_at = start.passed(start.reached)
    if start.how is None:  # as far as is known it trains
        kept_at = start.ended
        reached_at = start.ended
    waited = min(value_at(waits, kept_at) - value_at(waits, begin), kept_at - begin)
    rest = "lost"
    if start.how == GOODBYE:
        rest = "draining"
    return [
        TimeSpan(begin, kept_at, "productive", waited),
        TimeSpan(kept_at, reached_at, "lost"),
        TimeSpan(reached_at, start.ended, rest),
    ]


def _interruptions(files: Sequence[EventFile], starts: list[Start], losses: list[int]) -> Iterator[Interruption]:
    """Yield the interruptions. ``losses``: by start, the time of the work that it trained again."""
    bad_ends = []
    for file in files:
        for event in file.events:
            if isinstance(event, TrainerEnded) and event.how != GOODBYE:
                bad_ends.append((microseconds(event.t), event.rank, file.node))
    bad_ends.sort()
    greatest = 0
    for index, start in enumerate(starts):
        later = starts[index + 1 :]
        greatest = max(greatest, start.reached)
        if not later and start.how in (None, GOODBYE):
            return
        lost = 0
        if start.how != GOODBYE:
            lost = start.ended - start.passed(start.reached)
        resumed_step = None
        source = None
        if later:
            lost += losses[index + 1]
            resumed_step = later[0].trainer_started.step
            source = later[0].trainer_started.source
        first = None
        for at, rank, node in bad_ends:
            if start.began <= at <= start.ended:
                first = (rank, node)
                break
        new_at = None
        for other in later:
            if other.reached > greatest:
                new_at = other.passed(greatest + 1)
                break
        how = start.how or UNSEEN
        yield Interruption(start.ended, how, start.reached, resumed_step, source, lost, first, new_at)


def _newest(files: Sequence[EventFile], starts: list[Start]) -> dict[str, Newest]:
    in_memory: Newest = []
    for start in starts:
        for line in start.progress:
            if line.captured >= 0:  # the last observation of a trainer may come after its end
                in_memory.append((min(microseconds(line.t), start.ended), line.captured))
    protected: Newest = []
    completed: dict[str, Marks] = {}
    for file in files:
        for event in file.events:
            if isinstance(event, Protected):
                protected.append((microseconds(event.t), event.step))
            elif isinstance(event, Complete) and event.steps:
                completed.setdefault(event.level, []).append((microseconds(event.t), max(event.steps)))
    newest: dict[str, Newest] = {}
    if in_memory:
        newest[MEMORY] = sorted(in_memory, key=itemgetter(0))
    if protected:
        newest[OTHER_NODES] = sorted(protected, key=itemgetter(0))
    for level, marks in completed.items():
        newest[level] = list(rising(marks))  # an older step may be completed later
    return newest
