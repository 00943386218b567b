"""The snapshots that a restart may restore, from the contents of memory and levels, and the choice of one. Pure.

A choice is ``"latest"``, a step, a name or ``run:1f3a@200``. A run id has 16 hexadecimal digits (``shard.names``).
Users see and type its first ones: at least eight, and as many as are unique among the runs of a level.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from operator import attrgetter

from lazysnap.console import some_of
from lazysnap.errors import ConfigError, SnapshotNotFound
from lazysnap.shard.best import BEST, best_first, has_name
from lazysnap.shard.names import SnapshotName, check_name

LATEST = "latest"
RUN = "run:"
MOST_DIGITS = 18
"""Maximum length of a text that is parsed as a step."""
_LEAST_DIGITS = 8
_ID_DIGITS = 16
_MOST_LISTED = 8
_DIGITS = frozenset("0123456789abcdef")

MEMORY = "memory"
"""The level of captures in the memory of keepers, instead of a URL."""
PARITY = "parity"
"""The level of shards that are computed from parity, instead of a URL."""
_COMPARED = 2
"""Number of snapshots that the check of a restart needs."""


@dataclass(frozen=True)
class Entry:
    """One rank's committed shard of one snapshot at one level: part of a node's file, or a slot."""

    level: str
    """``MEMORY``, ``PARITY`` or the URL of a level."""
    run_id: str
    start: str
    """The start: only shards of the same start belong to one snapshot."""
    step: int
    rank: int
    world_size: int
    location: tuple[int, ...] = ()
    """In memory the local rank and the number of the capture; for parity the number of the lost part. Empty at a level,
    where the name of the ``snapshot`` is the directory.
    """
    node: str | None = None
    """The node that can read it; ``None``: all nodes."""
    names: tuple[str, ...] = ()
    """Names given by ``keep``."""
    file: str = ""
    """The name of the node's file that holds it, without suffix; empty in memory."""
    distance: int = 0
    """The position of the level in the read order of a restart: 0 for memory, the nearest."""
    is_repeatable: bool | None = None
    """True if a restart may repeat its step: see ``can_repeat``; ``None`` outside of slots of the rank itself."""

    @property
    def snapshot(self) -> SnapshotName:
        """Return the snapshot to which it belongs."""
        return SnapshotName(self.run_id, self.step, self.start)


@dataclass(frozen=True)
class Inventory:
    """The contents of one level, and its problems (incomplete, foreign, damaged)."""

    level: str
    entries: tuple[Entry, ...] = ()
    problems: tuple[str, ...] = ()


def entries_in(inventories: Iterable[Inventory]) -> Iterator[Entry]:
    """Yield the entries of all inventories."""
    for inventory in inventories:
        yield from inventory.entries


@dataclass(frozen=True)
class RestartPlan:
    """One snapshot, and for each rank the levels that offer its shard, the nearest first."""

    run_id: str
    start: str
    step: int
    world_size: int
    sources: tuple[tuple[Entry, ...], ...]

    @property
    def key(self) -> "SnapshotKey":
        """Its identity."""
        return SnapshotKey(self.run_id, self.step, self.start, self.world_size)

    @property
    def level(self) -> str:
        """The farthest of the first sources."""
        first_sources = [offers[0] for offers in self.sources]
        return max(first_sources, key=attrgetter("distance")).level


@dataclass(frozen=True, order=True)
class SnapshotKey:
    """The common facts of the shards of one snapshot. Newer snapshots have greater keys."""

    run_id: str
    step: int
    start: str
    world_size: int

    @classmethod
    def of(cls, entry: Entry) -> "SnapshotKey":
        """Return the snapshot that a shard is part of."""
        return cls(entry.run_id, entry.step, entry.start, entry.world_size)


def snapshots(entries: Iterable[Entry]) -> dict[SnapshotKey, list[Entry]]:
    """Return the shards of each snapshot, complete or not, at any level."""
    entries_by_key: dict[SnapshotKey, list[Entry]] = defaultdict(list)
    for entry in entries:
        entries_by_key[SnapshotKey.of(entry)].append(entry)
    return dict(entries_by_key)


def is_complete(entries: Sequence[Entry]) -> bool:
    """True if these shards are a complete snapshot: the shard of every rank is present.

    Restarts, retention and commands all use this rule.
    """
    ranks = {entry.rank for entry in entries}
    return bool(entries) and len(ranks) == entries[0].world_size and max(ranks) < entries[0].world_size


@dataclass(frozen=True)
class Choice:
    """The choice of a snapshot: the best of those that it includes. By default it includes all."""

    step: int | None = None
    name: str | None = None
    """A name that ``keep`` gave, or ``"best"``."""
    run: str | None = None
    """The first digits of the id of its run."""

    @classmethod
    def of(cls, which: int | str) -> "Choice":
        """Read ``"latest"``, a step, a name, ``"run:1f3a"`` or ``"run:1f3a@200"``. Raises: ConfigError, for others."""
        check_choice(which)
        if which == LATEST:
            return cls()
        if isinstance(which, int):
            return cls(step=which)
        if not which.startswith(RUN):
            check_name(which)
            return cls(name=which)
        digits, at, step = which.removeprefix(RUN).partition("@")
        is_step = step.isascii() and step.isdigit() and len(step) <= MOST_DIGITS
        if not digits or len(digits) > _ID_DIGITS or not set(digits.lower()) <= _DIGITS or bool(at) != is_step:
            raise ConfigError(
                f'expected "run:" and the first digits of a run id (0-9, a-f), then "@" and a step or nothing, as in '
                f'"run:1f3a" or "run:1f3a@200"; got {which!r:.100}. `lazysnap ls` shows the runs of a level'
            )
        if not at:
            return cls(run=digits.lower())
        return cls(step=int(step), run=digits.lower())

    @property
    def is_latest(self) -> bool:
        """True if the choice is the newest snapshot."""
        return self == ANY

    @property
    def is_best(self) -> bool:
        """True for the best snapshots by a metric, which are ordered by the metric."""
        return self.name == BEST

    def includes(self, snapshot: SnapshotKey | SnapshotName, names: Collection[str]) -> bool:
        """True if a snapshot may be chosen. ``names``: its names."""
        is_of_run = self.run is None or snapshot.run_id.startswith(self.run)
        is_named = self.name is None or has_name(names, self.name)
        return is_of_run and is_named and self.step in (None, snapshot.step)

    def plans(self, inventories: list[Inventory]) -> list[RestartPlan]:
        """Return complete snapshots of this choice, the best first. Raises: SnapshotNotFound, for an unknown run."""
        if self.run is None:
            return candidates(inventories, self)
        return candidates(inventories, replace(self, run=run_of(self.run, inventories)))

    def missing(self, inventories: list[Inventory]) -> str:
        """Return a message that there is no such snapshot, with the existing ones.

        Raises: SnapshotNotFound, for an unknown run.
        """
        message = "no complete snapshot"
        if self.step is not None:
            message += f" of step {self.step}"
        if self.name is not None:
            message += f" called {self.name!r}"
        existing = ANY
        if self.run is not None:
            message += f" of run {self.run}"
            existing = Choice(run=run_of(self.run, inventories))
        steps = set()
        names: set[str] = set()
        for plan in candidates(inventories, existing):
            steps.add(plan.step)
            for entry in chain.from_iterable(plan.sources):
                names.update(entry.names)
        if steps:
            message += f"; there are the steps {_newest_of(sorted(steps))}"
        else:
            message += "; there is none"
        if names:
            message += f", and the names {some_of(sorted(names), _MOST_LISTED)}"
        elif steps and self.name is not None:
            message += ", and no names"
        if self.run is not None:
            message += f"; {listed(inventories)}"
        return message


ANY = Choice()
"""The choice ``"latest"``: it includes all snapshots."""


def check_choice(which: object) -> None:
    """Check the type of ``which``. Raises: ConfigError, if it is neither a step (0 or more) nor a text."""
    if isinstance(which, bool) or not isinstance(which, (int, str)) or (isinstance(which, int) and which < 0):
        raise ConfigError(
            f'which must be "latest", a step, a name or a run ("run:1f3a", "run:1f3a@200"), got {which!r:.100}'
        )


def means_snapshot(which: object) -> bool:
    """True if ``which`` means a snapshot, and not a checkpoint of a framework.

    Raises: ConfigError, for a bad ``"run:…"``.
    """
    return isinstance(which, str) and (which == LATEST or (which.startswith(RUN) and bool(Choice.of(which))))


def candidates(inventories: Iterable[Inventory], choice: Choice = ANY) -> list[RestartPlan]:
    """Return every complete snapshot that the choice includes, the best first.

    The best is of the newest run, of the greatest step and of the newest start. With the name ``"best"`` it is the best
    by the metric. The parts of a snapshot may be at different levels. The caller tries the plans in this order until
    one can be read.

    Raises: SnapshotNotFound, if ``"best"`` may mean several metrics.
    """
    plans = []
    names_of_plans = []
    for key, entries in sorted(snapshots(entries_in(inventories)).items(), reverse=True):
        names: set[str] = set()
        for entry in entries:
            names.update(entry.names)
        if choice.includes(key, names) and is_complete(entries):
            plans.append(RestartPlan(key.run_id, key.start, key.step, key.world_size, _sources_of(entries)))
            names_of_plans.append(names)
    if choice.is_best:
        return best_first(zip(plans, names_of_plans, strict=True))
    return plans


def _sources_of(entries: Iterable[Entry]) -> tuple[tuple[Entry, ...], ...]:
    """Return the entries of each rank, in the order of the ranks; the nearest level first."""
    offers: dict[int, list[Entry]] = defaultdict(list)
    for entry in sorted(entries, key=attrgetter("rank", "distance", "location")):
        offers[entry.rank].append(entry)
    return tuple(map(tuple, offers.values()))


def can_repeat(plans: Sequence[RestartPlan]) -> bool:
    """True if a restart can resume the second best of ``plans`` and repeat the step of the best one.

    The second best is of the previous step, of the same start and in memory. Each rank has the best one in its own
    slot.
    """
    if len(plans) < _COMPARED:
        return False
    newest, before = plans[:_COMPARED]
    is_next_step = before.key == replace(newest.key, step=newest.step - 1)
    is_before_in_memory = all(offers[0].distance == 0 for offers in before.sources)
    return is_next_step and is_before_in_memory and all(any(map(_is_repeatable, offers)) for offers in newest.sources)


def _is_repeatable(entry: Entry) -> bool:
    return entry.is_repeatable is True


def short_id(run_id: str) -> str:
    """Return the digits of a run id in messages. Commands accept the first digits of an id."""
    return run_id[:_LEAST_DIGITS]


def short_ids(run_ids: Iterable[str]) -> dict[str, str]:
    """Return the short id of each run: the first digits, all of one length."""
    ids = set(run_ids)
    length = _LEAST_DIGITS
    while length < _ID_DIGITS and len({run_id[:length] for run_id in ids}) < len(ids):
        length += 1
    return {run_id: run_id[:length] for run_id in ids}


def runs_in(inventories: Iterable[Inventory]) -> list[str]:
    """Return the ids of the runs with at least one shard, the newest first."""
    return sorted({entry.run_id for entry in entries_in(inventories)}, reverse=True)


def run_of(digits: str, inventories: Sequence[Inventory], where: str = "") -> str:
    """Return the id of the one run that begins with these digits. ``where``: for the message.

    Raises: SnapshotNotFound, if no run does, or several; it lists the runs.
    """
    run_ids = [run_id for run_id in runs_in(inventories) if run_id.startswith(digits.lower())]
    if len(run_ids) == 1:
        return run_ids[0]
    message = f"no run begins with {digits!r}; {listed(inventories)}"
    if run_ids:
        message = f"several runs begin with {digits!r}: give more digits; {listed(inventories)}"
    if where:
        message = f"{where}: {message}"
    raise SnapshotNotFound(message)


def listed(inventories: Sequence[Inventory]) -> str:
    """Return the runs, the newest first, for a message."""
    run_ids = runs_in(inventories)
    if not run_ids:
        return "there is no run"
    short = short_ids(run_ids)
    newest_steps: dict[str, int] = {}
    for plan in candidates(inventories):
        newest_steps.setdefault(plan.run_id, plan.step)
    texts = []
    for run_id in run_ids:
        newest = "no complete snapshot"
        if run_id in newest_steps:
            newest = f"newest step {newest_steps[run_id]}"
        texts.append(f"{short[run_id]} ({newest})")
    return f"the runs there, the newest first: {some_of(texts, _MOST_LISTED)}"


def _newest_of(steps: list[int]) -> str:
    text = ", ".join(map(str, steps[-_MOST_LISTED:]))
    if len(steps) > _MOST_LISTED:
        return f"…, {text}"
    return text
