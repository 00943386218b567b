"""The starts and levels of a run, read from its files of events. Pure; all reports are made of them.

Times are whole microseconds of Unix time, so that sums are exact.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

from lazysnap.events import (
    Event,
    EventFile,
    KeeperStarted,
    LevelFailed,
    Progress,
    Stored,
    TrainerEnded,
    TrainerStarted,
)

GOODBYE, UNSEEN = "goodbye", "lost with its keeper"

Marks = list[tuple[int, int]]
"""Times, and a value at each: neither ever decreases."""


@dataclass
class Start:
    """One process of a rank, from its beginning to its end."""

    name: TrainerStarted
    node: int
    began: int
    ended: int
    how: str | None
    """The way it ended; ``None`` if nobody saw the end of the last start: it runs, or was lost with its keeper."""
    progress: list[Progress]
    end: TrainerEnded | None
    waits: Marks = field(default_factory=list)
    """Time waited for copies since its first boundary; empty if it passed none."""
    marks: Marks = field(default_factory=list)
    """The newest step passed. It begins when work begins, with the step from which this start went on."""
    kept: int = 0
    """The step up to which its work counts; later steps were trained again."""

    @property
    def every(self) -> int:
        """Steps from one capture to the next, at last."""
        return self.progress[-1].every if self.progress else self.name.every_n_steps

    @property
    def reached(self) -> int:
        """The last step that it passed."""
        return self.marks[-1][1]

    @property
    def step_us(self) -> int | None:
        """The usual time of a step, without waits; ``None`` if it passed too few."""
        if not self.waits or not self.progress or (steps := self.progress[-1].step - self.name.step - 1) <= 0:
            return None
        return max(0, self.sampled_at - self.waits[0][0] - self.waits[-1][1]) // steps

    @property
    def sampled_at(self) -> int:
        """The time at which the step of the last sample was passed: exact, if that step was captured."""
        line = self.progress[-1]
        return microseconds(line.taken if line.captured == line.step else line.t)

    def passed(self, step: int) -> int:
        """Return the time at which ``step``, at most ``reached``, was passed, interpolated between marks."""
        index = bisect_left(self.marks, step, key=lambda mark: mark[1])
        at, reached = self.marks[index]
        before, earlier = self.marks[max(0, index - 1)]
        return at if reached == earlier else before + (at - before) * (step - earlier) // (reached - earlier)


@dataclass(frozen=True)
class AtLevel:
    """The snapshots that nodes stored at a level. Seconds are medians."""

    snapshots: int = 0
    bytes: int = 0
    """Size of the newest."""
    seconds: float = 0.0
    """The time from the beginning of a write until it is durable."""
    checksum_s: float = 0.0
    """The part of ``seconds`` that checksums took, of all threads together."""
    read_back_s: float = 0.0
    """After these; 0: it is not read back."""
    failures: int = 0


def microseconds(seconds: float) -> int:
    """Return seconds as whole microseconds."""
    return round(seconds * 1e6)


def rising(marks: Iterable[tuple[int, int]]) -> Marks:
    """Return the marks by time, without those that are less than an earlier one."""
    found: Marks = []
    for at, value in sorted(marks):
        if not found or value >= found[-1][1]:
            found.append((at, value))
    return found


def value_at(marks: Marks, time: int) -> int:
    """Return the value at a time, interpolated."""
    index = bisect_right(marks, time, key=lambda mark: mark[0])
    if index in (0, len(marks)):
        return marks[max(index - 1, 0)][1]
    (before, low), (after, high) = marks[index - 1], marks[index]
    return low + (high - low) * (time - before) // (after - before)


def ranks_in(files: Iterable[EventFile]) -> list[int]:
    """Return the ranks whose starts are in the files."""
    return sorted({one.rank for file in files for one in file.events if isinstance(one, TrainerStarted)})


def starts_of(files: Sequence[EventFile], rank: int | None = None) -> list[Start]:
    """Return the starts of one rank: by default rank 0, or the least whose lines are there. They do not overlap.

    ``files``: those of all nodes, of one run. Empty if no training named itself.
    """
    if rank is None:
        rank = min(ranks_in(files), default=0)
    own: dict[str, tuple[EventFile, list[Event]]] = {}
    for file in files:
        for one in file.events:
            if isinstance(one, (TrainerStarted, Progress, TrainerEnded)) and one.rank == rank:
                own.setdefault(one.start, (file, []))[1].append(one)
    # A trainer names itself again to a new keeper: the first time counts.
    names = [next((one for one in lines if isinstance(one, TrainerStarted)), None) for _, lines in own.values()]
    ordered = sorted((one for one in names if one is not None), key=lambda one: one.t)
    found: list[Start] = []
    for name, follower in zip(ordered, [*ordered[1:], None], strict=False):
        began = max(_began(name), found[-1].ended if found else 0)
        found.append(_start(name, *own[name.start], began, follower))
    return found


def _began(name: TrainerStarted) -> int:
    return microseconds(min(name.began, name.t))


def _start(
    name: TrainerStarted, file: EventFile, lines: list[Event], began: int, follower: TrainerStarted | None
) -> Start:
    progress = [one for one in lines if isinstance(one, Progress)]
    end = next((one for one in lines if isinstance(one, TrainerEnded)), None)
    how = end.how if end is not None else None if follower is None else UNSEEN
    ended = microseconds(lines[-1].t if end is None else end.t)
    if end is None:  # the last line before the next keeper, or the next start, is the end
        for event in file.events[bisect_right(file.events, lines[-1].t, key=lambda one: one.t) :]:
            if isinstance(event, KeeperStarted) or (follower is not None and microseconds(event.t) >= _began(follower)):
                break
            ended = microseconds(event.t)
    ended = max(began, ended if follower is None else min(ended, _began(follower)))

    def within(seconds: float) -> int:
        return min(max(microseconds(seconds), began), ended)

    start = Start(name, file.node, began, ended, how, progress, end)
    passed = [line for line in progress if line.step > name.step]
    if passed:
        # The keeper notes the first boundary at once: its capture began then, if it is whole already.
        first = within(passed[0].taken if passed[0].captured > name.step else passed[0].t)
        waits = [(first, 0)]
        for line in passed:
            at = within(line.taken)
            if at > first:
                waits.append((at, microseconds(line.waited_s - passed[0].waited_s)))
        start.waits = rising(waits)
    if follower is not None and how == UNSEEN and progress and (step_us := start.step_us):
        unseen_steps = max(0, follower.step - progress[-1].step)  # their lines were lost with the keeper
        start.ended = max(ended, min(_began(follower), start.sampled_at + unseen_steps * step_us))
    return start


def levels_of(files: Iterable[EventFile]) -> dict[str, AtLevel]:
    """Return the levels at which a run stored something, or failed to."""
    events: dict[str, list[Stored | LevelFailed]] = {}
    for event in (event for file in files for event in file.events):
        if isinstance(event, (Stored, LevelFailed)):
            events.setdefault(event.level, []).append(event)
    return {url: _level(found) for url, found in events.items()}


def _level(events: Sequence[Stored | LevelFailed]) -> AtLevel:
    stored = [event for event in events if isinstance(event, Stored)]
    failures = len(events) - len(stored)
    if not stored:
        return AtLevel(failures=failures)
    seconds, checksum_s, read_back_s = (
        median(getattr(event, name) for event in stored) for name in ("seconds", "checksum_s", "read_back_s")
    )
    return AtLevel(len(stored), stored[-1].bytes, seconds, checksum_s, read_back_s, failures)
