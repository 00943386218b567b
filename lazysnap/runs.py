"""Which snapshot is meant by ``"latest"``, a step, a name or ``run:1f3a@200``; short ids of runs. Pure.

A run id has 16 hexadecimal digits (``shard.names``). Users see and type its first ones: at least eight, and as many as
are unique among the runs of a level.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from lazysnap.errors import ConfigError, SnapshotNotFound
from lazysnap.resolver import Entry, Inventory, RestartPlan, SnapshotFilter, candidates
from lazysnap.shard.best import BEST, has_name
from lazysnap.shard.names import check_name

LATEST = "latest"
RUN = "run:"
MOST_DIGITS = 18
"""The longest text that is read as a step."""
_LEAST_DIGITS = 8
_MOST_LISTED = 8
_DIGITS = frozenset("0123456789abcdef")


def check_choice(which: object) -> None:
    """Raises: ConfigError, if ``which`` is neither a step (0 or more) nor a text."""
    if isinstance(which, bool) or not isinstance(which, (int, str)) or (isinstance(which, int) and which < 0):
        raise ConfigError(
            f'which must be "latest", a step, a name or a run ("run:1f3a", "run:1f3a@200"), got {which!r:.100}'
        )


def means_snapshot(which: object) -> bool:
    """True if ``which`` means a snapshot, and not a checkpoint of a framework.

    Raises: ConfigError, for a bad ``"run:…"``.
    """
    return isinstance(which, str) and (which == LATEST or (which.startswith(RUN) and bool(Choice.of(which))))


def short_ids(run_ids: Iterable[str]) -> dict[str, str]:
    """The short id of each run: the first digits, all of one length."""
    ids = set(run_ids)
    enough = (length for length in range(_LEAST_DIGITS, 17) if len({run_id[:length] for run_id in ids}) == len(ids))
    length = next(enough, 16)
    return {run_id: run_id[:length] for run_id in ids}


def runs_in(inventories: Iterable[Inventory]) -> list[str]:
    """Ids of the runs with at least one shard, the newest first."""
    entries: Iterable[Entry] = (entry for inventory in inventories for entry in inventory.entries)
    return sorted({entry.run_id for entry in entries}, reverse=True)


def run_of(digits: str, inventories: Sequence[Inventory], where: str = "") -> str:
    """The id of the one run that begins with these digits. ``where``: for the message.

    Raises: SnapshotNotFound, if no run does, or several; it lists the runs.
    """
    there = runs_in(inventories)
    meant = [run_id for run_id in there if run_id.startswith(digits.lower())]
    if len(meant) == 1:
        return meant[0]
    what = f"several runs begin with {digits!r}: give more digits" if meant else f"no run begins with {digits!r}"
    raise SnapshotNotFound(f"{where}{': ' if where else ''}{what}; {listed(inventories)}")


def listed(inventories: Sequence[Inventory]) -> str:
    """The runs, the newest first, for a message."""
    there = runs_in(inventories)
    if not there:
        return "there is no run"
    short = short_ids(there)
    newest: dict[str, int] = {}
    for plan in candidates(inventories):
        newest.setdefault(plan.run_id, plan.step)
    texts = [
        f"{short[run_id]} ({f'newest step {newest[run_id]}' if run_id in newest else 'no complete snapshot'})"
        for run_id in there[:_MOST_LISTED]
    ]
    more = f" and {len(there) - _MOST_LISTED} more" if len(there) > _MOST_LISTED else ""
    return f"the runs there, the newest first: {', '.join(texts)}{more}"


@dataclass(frozen=True)
class Choice:
    """Which snapshot is meant: the newest one, or that of a step, a name or a run."""

    step: int | None = None
    name: str | None = None
    run: str | None = None
    """The first digits of the id of a run: its newest complete snapshot, or that of ``step``."""

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
        if not digits or len(digits) > 16 or not set(digits.lower()) <= _DIGITS or bool(at) != is_step:
            raise ConfigError(
                f'expected "run:" and the first digits of a run id (0-9, a-f), then "@" and a step or nothing, as in '
                f'"run:1f3a" or "run:1f3a@200"; got {which!r:.100}. `lazysnap ls` shows the runs of a level'
            )
        return cls(step=int(step) if at else None, run=digits.lower())

    @property
    def is_latest(self) -> bool:
        """True if the newest snapshot is wanted, whichever it is."""
        return self == Choice()

    @property
    def is_best(self) -> bool:
        """True if the best snapshot by a metric is wanted: all names have to be known to tell which that is."""
        return self.name == BEST

    def may_mean(self, run_id: str, step: int, names: Collection[str]) -> bool:
        """True if a snapshot, of which only its directory is known, may be meant. ``names``: those that it has."""
        is_of_run = self.run is None or run_id.startswith(self.run)
        return is_of_run and self.step in (None, step) and (self.name is None or has_name(names, self.name))

    def wanted(self, run_of: Callable[[str], str]) -> SnapshotFilter:
        """Return the snapshots that are meant. ``run_of`` returns the id of the run that begins with these digits."""
        return SnapshotFilter(self.step, self.name, None if self.run is None else run_of(self.run))

    def plans(self, inventories: list[Inventory]) -> list[RestartPlan]:
        """Complete snapshots that are meant, the best first. Raises: SnapshotNotFound, for a run that is not there."""
        return candidates(inventories, self.wanted(lambda digits: run_of(digits, inventories)))

    def missing(self, inventories: list[Inventory]) -> str:
        """That there is none, and what there is."""
        if self.run is not None:
            found = candidates(inventories, SnapshotFilter(run_id=run_of(self.run, inventories)))
            steps = f", which has steps {sorted({plan.step for plan in found})}" if found else ""
            of_step = f"of step {self.step} " if self.step is not None else ""
            return f"no whole snapshot {of_step}of run {self.run}{steps}; {listed(inventories)}"
        held = sorted({plan.step for plan in candidates(inventories)})
        what = f"called {self.name!r}" if self.name is not None else f"of step {self.step}"
        names = sorted(
            {
                name
                for plan in candidates(inventories)
                for offers in plan.sources
                for entry in offers
                for name in entry.names
            }
        )
        there = f"steps {held}" if held else "none"
        called = f", and the names {', '.join(names)}" if names else ", and no names" if held and self.name else ""
        return f"no whole snapshot {what}; there are {there}{called}"
