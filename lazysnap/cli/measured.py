"""The figures that advice follows from, and those of a run, read from its file of events. Pure."""

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lazysnap.cli.history import GOODBYE, levels_of, microseconds, starts_of
from lazysnap.events import EventFile, KeeperStarted

LEAST_STEPS = 20
"""Steps that a time per step is read from."""


@dataclass(frozen=True)
class Facts:
    """Figures of a training; ``None``, or 0 seconds: not known."""

    run_id: str = ""
    nodes: int = 1
    ranks: int = 1
    steps: int = 0
    """Steps that were seen, in all starts."""
    every: int | None = None
    """Steps from one capture to the next, in the newest start."""
    step_s: float | None = None
    """Seconds of a step, without its waits for captures."""
    stall_s: float = 0.0
    """Seconds that training waits for one capture."""
    copy_s: float = 0.0
    """Seconds from a boundary until its capture is whole: the median."""
    persist: dict[str, float] = field(default_factory=dict)
    """Seconds until a snapshot is durable, by level: the median."""
    trained_s: float = 0.0
    """Seconds for which trainers lived."""
    failures: int = 0
    """Starts that followed on one that did not end well."""
    restart_s: float = 0.0
    """Seconds from a death to the first boundary: the median."""
    mtbf_s: float | None = None
    """Mean time between failures of the whole training."""


def measure(files: Sequence[EventFile]) -> Facts | None:
    """Return the figures of the newest run; ``None``, if there is none."""
    files = [file for file in files if file.run_id == files[-1].run_id]
    if not files:
        return None
    starts = starts_of(files)
    keepers = [event for event in files[0].events if isinstance(event, KeeperStarted)]
    lines = [pair for start in starts for pair in itertools.pairwise(start.progress)]
    steps = sum(max(0, new.step - old.step) for old, new in lines)
    waited_s = sum(new.waited_s - old.waited_s for old, new in lines)
    captures = sum(max(0, new.step - old.step) / max(1, new.every) for old, new in lines)
    again = [(old, new) for old, new in itertools.pairwise(starts) if old.how != GOODBYE]
    restarts_s = []
    for old, new in again:
        up = new.waits[0][0] if new.waits else microseconds(new.name.t)
        restarts_s.append((up - old.ended) / 1e6)
    return Facts(
        files[0].run_id,
        nodes=max((keeper.nodes for keeper in keepers), default=1),
        ranks=starts[-1].name.world_size if starts else 1,
        steps=steps,
        every=starts[-1].every if starts else 1,
        step_s=max(0.0, sum(new.t - old.t for old, new in lines) - waited_s) / steps if steps >= LEAST_STEPS else None,
        stall_s=waited_s / captures if captures >= 1 and steps >= LEAST_STEPS else 0.0,
        copy_s=_median(event.copy_s for start in starts for event in start.progress),
        persist={url: level.seconds for url, level in levels_of(files).items() if level.snapshots},
        trained_s=sum(start.ended - start.began for start in starts) / 1e6,
        failures=len(again),
        restart_s=_median(restarts_s),
    )


def _median(values: Iterable[float]) -> float:
    found = list(values)
    return statistics.median(found) if found else 0.0
