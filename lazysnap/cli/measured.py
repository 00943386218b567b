"""The figures that advice follows from, and those of a run, read from its file of events. Pure."""

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lazysnap.cli.history import GOODBYE, levels_of, microseconds, starts_of
from lazysnap.config import Redundancy
from lazysnap.events import EventFile, KeeperStarted, Protected

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
    protect_s: float = 0.0
    """Seconds from one protected step to the next: the median."""
    persist: dict[str, float] = field(default_factory=dict)
    """Seconds until a snapshot is durable, by level: the median."""
    trained_s: float = 0.0
    """Seconds for which trainers lived."""
    failures: int = 0
    """Starts that followed on one that did not end well."""
    new_keepers: int = 0
    """Failures after which another keeper began: memory was lost, too."""
    restart_memory_s: float = 0.0
    """Seconds from a death to the first boundary, with the keeper of before: the median."""
    restart_elsewhere_s: float = 0.0
    """The same with another keeper: from other nodes, or from storage."""
    rate: float = 0.0
    """Failures per second, of the whole training."""
    rate_text: str = ""
    node_share: float = 1.0
    """Share of failures that take the memory of a node along."""
    redundancy: Redundancy | None = None

    @property
    def window_s(self) -> float:
        """Seconds from the loss of a node until the memory of the others is protected again."""
        return self.restart_elsewhere_s + 2 * self.protect_s


def measure(files: Sequence[EventFile]) -> Facts | None:
    """Return the figures of the newest run; ``None``, if there is none."""
    files = [file for file in files if file.run_id == files[-1].run_id]
    if not files:
        return None
    starts = starts_of(files)
    keepers = [event for event in files[0].events if isinstance(event, KeeperStarted)]
    protected = [event.t for event in files[0].events if isinstance(event, Protected) and event.step is not None]
    lines = [pair for start in starts for pair in itertools.pairwise(start.progress)]
    steps = sum(max(0, new.step - old.step) for old, new in lines)
    waited_s = sum(new.waited_s - old.waited_s for old, new in lines)
    captures = sum(max(0, new.step - old.step) / max(1, new.every) for old, new in lines)
    again = [(old, new) for old, new in itertools.pairwise(starts) if old.how != GOODBYE]
    downs: dict[bool, list[float]] = {False: [], True: []}
    for old, new in again:
        is_other = any(old.ended <= microseconds(keeper.t) <= microseconds(new.name.t) for keeper in keepers)
        up = new.waits[0][0] if new.waits else microseconds(new.name.t)
        downs[is_other].append((up - old.ended) / 1e6)
    return Facts(
        files[0].run_id,
        nodes=max((keeper.nodes for keeper in keepers), default=1),
        ranks=starts[-1].name.world_size if starts else 1,
        steps=steps,
        every=starts[-1].every if starts else 1,
        step_s=max(0.0, sum(new.t - old.t for old, new in lines) - waited_s) / steps if steps >= LEAST_STEPS else None,
        stall_s=waited_s / captures if captures >= 1 and steps >= LEAST_STEPS else 0.0,
        copy_s=_median(event.copy_s for start in starts for event in start.progress),
        protect_s=_median(later - sooner for sooner, later in itertools.pairwise(protected)),
        persist={url: level.seconds for url, level in levels_of(files).items() if level.snapshots},
        trained_s=sum(start.ended - start.began for start in starts) / 1e6,
        failures=len(again),
        new_keepers=len(downs[True]),
        restart_memory_s=_median(downs[False]),
        restart_elsewhere_s=_median(downs[True]),
    )


def _median(values: Iterable[float]) -> float:
    found = list(values)
    return statistics.median(found) if found else 0.0
