"""Which of many alike cases a tier tries. The seed decides, not the order or the worker."""

import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import pytest

T = TypeVar("T")
SAMPLED_FOLDERS = ("accelerate", "faults", "huggingface", "lightning", "many", "nodes", "notice", "oddities", "warm")
"""Their tests start trainings: what has no mark of its own is one family for each folder."""
SAMPLED_MODULES = (
    "test_backpressure",
    "test_broken_connection",
    "test_first_capture",
    "test_frozen_damage",
    "test_frozen_keeper",
    "test_frozen_storage",
    "test_hanging_levels",
    "test_hostile_levels",
    "test_new_run",
    "test_reader_s3",
    "test_rollback",
    "test_s3",
    "test_s3_faults",
    "test_slots",
    "test_spilled",
    "test_trouble",
    "test_unprotected",
)
"""Of folders where others are quick: a family each."""
REAL_FOLDERS = ("nfs", "nodes")
"""Their tests need a real server, or nodes that really die: only the full tier runs them."""


@dataclass(frozen=True)
class Sample:
    """All in the full tier; in the quick one a tenth of each family, rounded up."""

    seed: str
    is_whole: bool

    def of(self, cases: Iterable[T], family: Callable[[T], object] = lambda case: None) -> list[T]:
        """The cases to be tried, in the order given. ``str`` of a case must tell it from the others."""
        cases = list(cases)
        if self.is_whole:
            return cases
        families = defaultdict(list)
        for case in cases:
            families[family(case)].append(str(case))
        taken = {name for names in families.values() for name in sorted(names, key=self._draw)[: -(-len(names) // 10)]}
        return [case for case in cases if str(case) in taken]

    def of_tests(self, items: Iterable[pytest.Item]) -> set[pytest.Item]:
        """In the quick tier nothing slow, and a part of what is ``sampled``: a family is what the mark names so, else
        the cases of a test function.
        """
        if self.is_whole:
            return set(items)
        items = [item for item in items if not item.get_closest_marker("slow")]
        families = {item.nodeid: _family(item) for item in items if item.get_closest_marker("sampled")}
        taken = set(self.of(families, families.__getitem__))
        return {item for item in items if item.nodeid in taken or item.nodeid not in families}

    def _draw(self, name: str) -> float:
        return random.Random(f"{self.seed} {name}").random()


def mark(item: pytest.Item) -> None:
    """Sample what has no mark of its own, where it starts trainings or keepers."""
    is_real = item.path.parent.name in REAL_FOLDERS
    if is_real or "s3_server" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.slow)
    if any(item.get_closest_marker(name) for name in ("slow", "sampled", "always")):
        return
    if (folder := item.path.parent.name) in SAMPLED_FOLDERS:
        item.add_marker(pytest.mark.sampled(folder))
    elif item.path.stem in SAMPLED_MODULES:
        item.add_marker(pytest.mark.sampled(item.path.stem))


def turn(item: pytest.Item) -> int:
    """Whose is less, runs earlier: no worker begins with what takes long when the others are done."""
    kinds = ("slow", "always", "sampled")
    return next((turn for turn, kind in enumerate(kinds) if item.get_closest_marker(kind)), len(kinds))


def _family(item: pytest.Item) -> str:
    mark = item.get_closest_marker("sampled")
    return mark.args[0] if mark and mark.args else item.nodeid.split("[")[0]


SAMPLE = pytest.StashKey[Sample]()
