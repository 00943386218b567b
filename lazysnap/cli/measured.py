"""Times of a run, read from its file of events: steps, waits, storage, restarts and failures. Pure."""

import itertools
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lazysnap.events import (
    EventFile,
    KeeperStarted,
    PhaseEnded,
    Progress,
    Protected,
    Stored,
    TrainerEnded,
    TrainerStarted,
)
from lazysnap.levels.redaction import shown

LEAST_STEPS = 20
"""Steps that a time per step is read from."""


@dataclass(frozen=True)
class AtLevel:
    """The work of one node at a level."""

    snapshots: int
    bytes: int
    """Size of the newest."""
    seconds: float
    """The median of the seconds from the beginning of a write until it is durable."""


@dataclass(frozen=True)
class Measured:
    """Figures of the newest run at a level; ``None``: not seen, or too seldom."""

    run_id: str
    nodes: int = 1
    ranks: int = 1
    steps: int = 0
    """Steps that were seen, in all starts."""
    every: int = 1
    """Steps from one capture to the next, in the newest start."""
    step_s: float | None = None
    """Seconds of a step, without its waits for captures."""
    stall_s: float | None = None
    """Seconds that training waited for one capture."""
    copy_s: float | None = None
    """Seconds from a boundary until its capture is whole: the median."""
    protect_s: float | None = None
    """Seconds from one protected step to the next: the median."""
    levels: dict[str, AtLevel] = field(default_factory=dict)
    trained_s: float = 0.0
    """Seconds for which trainers lived."""
    failures: int = 0
    """Starts that followed on one that did not end well."""
    new_keepers: int = 0
    """Failures after which another keeper began: memory was lost, too."""
    restart_memory_s: float | None = None
    """Seconds from a death to the first boundary, with the keeper of before: the median."""
    restart_elsewhere_s: float | None = None
    """The same with another keeper: from other nodes, or from storage."""


@dataclass(frozen=True)
class _Life:
    """One start of the first rank."""

    start: TrainerStarted
    progress: list[Progress]
    first_step: float | None
    """Time of its first boundary."""
    end: float
    is_over: bool
    """True if its training was over."""

    def counts(self) -> tuple[int, float, float, float]:
        """Return steps, seconds, seconds waited, and captures, between its first and its last progress."""
        if len(self.progress) < 2:
            return 0, 0.0, 0.0, 0.0
        first, last = self.progress[0], self.progress[-1]
        steps = max(0, last.step - first.step)
        return steps, last.t - first.t, last.waited_s - first.waited_s, steps / self.every()

    def every(self) -> int:
        """Return the steps from one capture to the next. With "auto" they are others than at the start."""
        seen = {event.captured for event in self.progress}
        if len(seen) < LEAST_STEPS:
            return self.start.every_n_steps
        fitting = (n for n in range(1000, 0, -1) if sum(step % n == 0 for step in seen) >= 0.9 * len(seen))
        return next(fitting)


def measure(files: Sequence[EventFile]) -> Measured | None:
    """Return the figures of the newest run; ``None``, if there is none."""
    files = [file for file in files if file.run_id == files[-1].run_id]
    if not files:
        return None
    lives = _lives(files[0])
    keepers = [event for event in files[0].events if isinstance(event, KeeperStarted)]
    protected = [event.t for event in files[0].events if isinstance(event, Protected) and event.step is not None]
    counts = [life.counts() for life in lives]
    steps, seconds, waited, captures = (sum(row[i] for row in counts) for i in range(4))
    again = [(old, new) for old, new in itertools.pairwise(lives) if not old.is_over]
    downs: dict[bool, list[float]] = {False: [], True: []}
    for old, new in again:
        is_other = any(old.end <= keeper.t <= new.start.t for keeper in keepers)
        downs[is_other].append((new.first_step or new.start.t) - old.end)
    return Measured(
        files[0].run_id,
        nodes=max((keeper.nodes for keeper in keepers), default=1),
        ranks=lives[-1].start.world_size if lives else 1,
        steps=int(steps),
        every=lives[-1].every() if lives else 1,
        step_s=max(0.0, seconds - waited) / steps if steps >= LEAST_STEPS else None,
        stall_s=waited / captures if captures >= 1 and steps >= LEAST_STEPS else None,
        copy_s=_median(event.copy_s for life in lives for event in life.progress),
        protect_s=_median(later - sooner for sooner, later in itertools.pairwise(protected)),
        levels=_levels(files),
        trained_s=sum(life.end - life.start.began for life in lives),
        failures=len(again),
        new_keepers=len(downs[True]),
        restart_memory_s=_median(downs[False]),
        restart_elsewhere_s=_median(downs[True]),
    )


def _lives(file: EventFile) -> list[_Life]:
    starts = [event for event in file.events if isinstance(event, TrainerStarted)]
    rank = min((event.rank for event in starts), default=0)
    lives = []
    for start in sorted((event for event in starts if event.rank == rank), key=lambda event: event.start):
        own = [event for event in file.events if getattr(event, "start", None) == start.start]
        own = [event for event in own if getattr(event, "rank", None) == rank]
        ends = [event for event in own if isinstance(event, TrainerEnded)]
        firsts = [event.t for event in own if isinstance(event, PhaseEnded) and event.phase == "first_step"]
        progress = [event for event in own if isinstance(event, Progress)]
        is_over = any(event.how == "goodbye" for event in ends)
        lives.append(_Life(start, progress, next(iter(firsts), None), (ends or own)[-1].t, is_over))
    return lives


def _levels(files: Sequence[EventFile]) -> dict[str, AtLevel]:
    stored: dict[str, list[Stored]] = defaultdict(list)
    for event in (event for file in files for event in file.events if isinstance(event, Stored)):
        stored[shown(event.level)].append(event)
    return {
        url: AtLevel(len(found), found[-1].bytes, statistics.median(event.seconds for event in found))
        for url, found in stored.items()
    }


def _median(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.median(found) if found else None
