"""The starts and levels of a run, read from its event files. All reports use them. Pure, except ``read_run``.

Times are whole microseconds of Unix time, so that sums are exact.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from operator import attrgetter, itemgetter
from statistics import median
from typing import Any

from lazysnap.cli.inspecting import open_existing
from lazysnap.errors import SnapshotNotFound
from lazysnap.events import (
    Event,
    EventFile,
    KeeperStarted,
    LevelFailed,
    Progress,
    Stored,
    TrainerEnded,
    TrainerStarted,
    read,
)

GOODBYE = "goodbye"
UNSEEN = "lost with its keeper"

Marks = list[tuple[int, int]]
"""Times, and a value at each: neither ever decreases."""


# ---------------------------------------------------------------- files


def read_run(urls: Sequence[str], options: Sequence[tuple[str, Any]], run: str | None) -> tuple[str, list[EventFile]]:
    """Return a run, by default the newest, and its files of all nodes. Blocks. Raises: LevelError, SnapshotNotFound."""
    files_of: dict[str, dict[int, EventFile]] = defaultdict(dict)
    """The newest file of each node, by run."""
    for url in urls:
        open_existing(url, options)
        for file in read(url, dict(options)):
            of_nodes = files_of[file.run_id]
            if file.node not in of_nodes or of_nodes[file.node].events[-1].t < file.events[-1].t:
                of_nodes[file.node] = file
    runs = sorted(files_of)
    if run is None:
        matching = runs[-1:]
        fault = "no events of a training"
    else:
        matching = [run_id for run_id in runs if run_id.startswith(run.lower())]
        fault = f"events of {len(matching)} runs begin with {run!r}"
    if len(matching) != 1:
        advice = "name the first level of a job, the directory that holds its snapshots (step-…)"
        if runs:
            advice = f"the runs there: {', '.join(runs)}"
        raise SnapshotNotFound(f"{' and '.join(urls)}: {fault}; {advice}")
    run_id = matching[0]
    by_node = sorted(files_of[run_id].items())
    return run_id, [file for _, file in by_node]


# ---------------------------------------------------------------- marks


def microseconds(seconds: float) -> int:
    """Return seconds as whole microseconds."""
    return round(seconds * 1e6)


def rising(marks: Iterable[tuple[int, int]]) -> Marks:
    """Return the marks by time, without those that are less than an earlier one."""
    kept: Marks = []
    for at, value in sorted(marks):
        if not kept or value >= kept[-1][1]:
            kept.append((at, value))
    return kept


def value_at(marks: Marks, time: int) -> int:
    """Return the value at a time, interpolated."""
    index = bisect_right(marks, time, key=itemgetter(0))
    if index == 0:
        return marks[0][1]
    if index == len(marks):
        return marks[-1][1]
    before, low = marks[index - 1]
    after, high = marks[index]
    return low + (high - low) * (time - before) // (after - before)


def time_of(marks: Marks, value: int) -> int:
    """Return the time at which ``value``, at most the last one, was reached, interpolated."""
    index = bisect_left(marks, value, key=itemgetter(1))
    after, high = marks[index]
    before, low = marks[max(0, index - 1)]
    if high == low:
        return after
    return before + (after - before) * (value - low) // (high - low)


# ---------------------------------------------------------------- starts


@dataclass
class Start:
    """One process of a rank, from its beginning to its end."""

    trainer_started: TrainerStarted
    began: int
    ended: int
    how: str | None
    """The way it ended; ``None`` if the end of the last start was not recorded: it is running, or was lost with its
    keeper.
    """
    progress: list[Progress]
    end: TrainerEnded | None
    waits: Marks = field(default_factory=list)
    """Time waited for copies since its first boundary; empty if it passed none."""
    marks: Marks = field(default_factory=list)
    """The newest step at each time. It begins when work begins, with the step from which this start continued."""
    kept: int = 0
    """The step up to which its work counts; later steps were trained again."""

    @property
    def reached(self) -> int:
        """The last step that it passed."""
        return self.marks[-1][1]

    @property
    def timed_steps(self) -> int:
        """Steps from the first boundary to the last sample."""
        if not self.waits:
            return 0
        return max(0, self.progress[-1].step - self.trainer_started.step - 1)

    @property
    def worked_us(self) -> int:
        """The time of ``timed_steps``, which are at least one, without waits."""
        return max(0, self.sampled_at - self.waits[0][0] - self.waits[-1][1])

    @property
    def step_us(self) -> int | None:
        """The usual time of a step, without waits; ``None`` if it passed too few."""
        if not self.timed_steps:
            return None
        return self.worked_us // self.timed_steps

    @property
    def sampled_at(self) -> int:
        """The time at which the step of the last sample was passed: exact, if that step was captured."""
        line = self.progress[-1]
        return microseconds(line.taken if line.captured == line.step else line.t)

    def passed(self, step: int) -> int:
        """Return the time at which ``step``, at most ``reached``, was passed, interpolated between marks."""
        return time_of(self.marks, step)


def starts_of(files: Sequence[EventFile]) -> list[Start]:
    """Return the starts of rank 0, or of the lowest rank with lines. They do not overlap.

    ``files``: those of all nodes, of one run. Empty if no training named itself.
    """
    rank = _lowest_rank(files)
    lines_of: dict[str, list[Event]] = {}
    file_of: dict[str, EventFile] = {}
    names: dict[str, TrainerStarted] = {}
    for file in files:
        for event in file.events:
            if not isinstance(event, (TrainerStarted, Progress, TrainerEnded)) or event.rank != rank:
                continue
            file_of.setdefault(event.start, file)
            lines_of.setdefault(event.start, []).append(event)
            if isinstance(event, TrainerStarted):
                names.setdefault(event.start, event)  # it reports itself again to a new keeper: the first time counts
    ordered = sorted(names.values(), key=attrgetter("t"))
    starts: list[Start] = []
    for name, follower in zip_longest(ordered, ordered[1:]):
        began = _began(name)
        if starts:
            began = max(began, starts[-1].ended)
        starts.append(_start(name, file_of[name.start], lines_of[name.start], began, follower))
    return starts


def _lowest_rank(files: Iterable[EventFile]) -> int:
    ranks = set()
    for file in files:
        for event in file.events:
            if isinstance(event, TrainerStarted):
                ranks.add(event.rank)
    return min(ranks, default=0)


def _began(name: TrainerStarted) -> int:
    return microseconds(min(name.began, name.t))


def _start(
    trainer_started: TrainerStarted, file: EventFile, lines: list[Event], began: int, follower: TrainerStarted | None
) -> Start:
    progress = []
    end = None
    for line in lines:
        if isinstance(line, Progress):
            progress.append(line)
        elif isinstance(line, TrainerEnded) and end is None:
            end = line
    how: str | None = None
    if end is not None:
        how = end.how
        ended = microseconds(end.t)
    else:
        if follower is not None:
            how = UNSEEN
        ended = _last_line_at(file, lines[-1].t, follower)
    if follower is not None:
        ended = min(ended, _began(follower))
    ended = max(began, ended)
    start = Start(trainer_started, began, ended, how, progress, end)
    start.waits = _waits(start)
    step_us = start.step_us
    if follower is not None and how == UNSEEN and step_us:
        unseen_steps = max(0, follower.step - progress[-1].step)  # their lines were lost with the keeper
        start.ended = max(ended, min(_began(follower), start.sampled_at + unseen_steps * step_us))
    return start


def _last_line_at(file: EventFile, last_t: float, follower: TrainerStarted | None) -> int:
    """Return when the keeper wrote its last line: before the next keeper, or the next start."""
    at = microseconds(last_t)
    for event in file.events[bisect_right(file.events, last_t, key=attrgetter("t")) :]:
        if isinstance(event, KeeperStarted):
            break
        if follower is not None and microseconds(event.t) >= _began(follower):
            break
        at = microseconds(event.t)
    return at


def _waits(start: Start) -> Marks:
    passed = [line for line in start.progress if line.step > start.trainer_started.step]
    if not passed:
        return []

    def within(seconds: float) -> int:
        return min(max(microseconds(seconds), start.began), start.ended)

    # The keeper notes the first boundary at once: its capture began then, if it is whole already.
    first = within(passed[0].t)
    if passed[0].captured > start.trainer_started.step:
        first = within(passed[0].taken)
    waits = [(first, 0)]
    for line in passed:
        at = within(line.taken)
        if at > first:
            waits.append((at, microseconds(line.waited_s - passed[0].waited_s)))
    return rising(waits)


# ---------------------------------------------------------------- levels


@dataclass(frozen=True)
class LevelUse:
    """The snapshots that nodes stored at a level."""

    snapshots: int = 0
    bytes: int = 0
    """Size of the newest."""
    seconds: float = 0.0
    """The time from the beginning of a write until it is committed and read back: the median."""
    failures: int = 0


def levels_of(files: Iterable[EventFile]) -> dict[str, LevelUse]:
    """Return the levels at which a run stored something, or failed to."""
    events: dict[str, list[Stored | LevelFailed]] = {}
    for file in files:
        for event in file.events:
            if isinstance(event, (Stored, LevelFailed)):
                events.setdefault(event.level, []).append(event)
    return {url: _level(at_level) for url, at_level in events.items()}


def _level(events: Sequence[Stored | LevelFailed]) -> LevelUse:
    failures = 0
    size_bytes = 0
    seconds = []
    for event in events:
        if isinstance(event, LevelFailed):
            failures += 1
            continue
        size_bytes = event.bytes
        seconds.append(event.seconds)
    if not seconds:
        return LevelUse(failures=failures)
    return LevelUse(
        snapshots=len(seconds),
        bytes=size_bytes,
        seconds=median(seconds),
        failures=failures,
    )
