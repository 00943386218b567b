"""The names that ``keep_best`` gives. A name contains the value, so the names alone tell which snapshots are the best.

``best-val_loss-min-0.25-1200`` is the snapshot of step 1200, whose value is 0.25; smaller values are better. There is
no other record: a restart, another process or a command only needs the names at the levels. Pure.
"""

import operator
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TypeVar

from lazysnap.errors import SnapshotNotFound

BEST = "best"
"""Means the best of all snapshots, instead of a step or a name."""
_NAME = re.compile(
    r"best-(?P<metric>[A-Za-z0-9._-]+)-(?P<mode>min|max)-(?P<value>-?[0-9]+(?:\.[0-9]+)?(?:e-?[0-9]+)?)-(?P<step>[0-9]+)"
)
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]")
_METRIC_LENGTH = 24
"""Maximum characters of a metric in a name: the last ones."""

_Item = TypeVar("_Item")


@dataclass(frozen=True)
class BestName:
    """The name of a snapshot that is among the best by a metric."""

    metric: str
    mode: str
    """``min`` if smaller values are better, ``max`` if greater ones are."""
    value: float
    """The value with nine significant digits, which represent any float32 number exactly."""
    step: int

    @classmethod
    def of(cls, metric: str, mode: str, value: float, step: int) -> "BestName":
        """Return the name for a metric of any name, such as ``val/loss``."""
        short_metric = _NOT_IN_NAMES.sub("_", metric)[-_METRIC_LENGTH:]
        return cls(short_metric, mode, float(f"{value:.9g}"), step)

    @classmethod
    def parse(cls, name: str) -> "BestName | None":
        """Return the parts of a name; ``None`` for a name that is not of ``keep_best``."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        return cls(match["metric"], match["mode"], float(match["value"]), int(match["step"]))

    @property
    def text(self) -> str:
        """The name."""
        value = f"{self.value:.9g}".replace("+", "")
        return f"best-{self.metric}-{self.mode}-{value}-{self.step}"

    @property
    def ranking(self) -> tuple[str, str]:
        """Metric and mode: only names with the same ones are compared."""
        return self.metric, self.mode

    @property
    def sort_key(self) -> tuple[float, int]:
        """The sort key in its ranking: smallest for the best name. Of equal values the earlier step is better."""
        if self.mode == "max":
            return -self.value, self.step
        return self.value, self.step


def best_names(names: Iterable[str]) -> list[BestName]:
    """Return the names of ``keep_best``, the best first."""
    parsed = []
    for name in names:
        best_name = BestName.parse(name)
        if best_name is not None:
            parsed.append(best_name)
    return sorted(parsed, key=operator.attrgetter("sort_key"))


def has_name(names: Collection[str], choice: str) -> bool:
    """True if ``choice``, a name or "best", may mean a snapshot with these names."""
    return choice in names or (choice == BEST and len(best_names(names)) > 0)


def best_first(named: Iterable[tuple[_Item, Collection[str]]]) -> list[_Item]:
    """Return the items in the order of ``"best"``.

    Args:
        named: items and their names, the newest first. Each has a name that ``keep_best`` gave, or is called "best".

    Raises: SnapshotNotFound, if they are the best by different metrics.
    """
    called_best = []
    ranked = []
    rankings: set[tuple[str, str]] = set()
    for item, names in named:
        ranked_names = best_names(names)
        rankings.update(name.ranking for name in ranked_names)
        if BEST in names:
            called_best.append(item)
        elif ranked_names:
            ranked.append((ranked_names[0].sort_key, item))
    if called_best:
        return called_best
    if len(rankings) > 1:
        metrics = ", ".join(sorted(f"{metric} ({mode})" for metric, mode in rankings))
        raise SnapshotNotFound(f'"best" may mean the best by {metrics}: give a name instead, `lazysnap ls` shows them')
    ranked.sort(key=operator.itemgetter(0))
    return [item for _, item in ranked]
