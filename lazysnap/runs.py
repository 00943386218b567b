"""Chooses a snapshot by ``"latest"``, a step, a name or ``run:1f3a@200``; makes short ids of runs. Pure.

A run id has 16 hexadecimal digits (``shard.names``). Users see and type its first ones: at least eight, and as many as
are unique among the runs of a level.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from lazysnap.console import some_of
from lazysnap.errors import ConfigError, SnapshotNotFound
from lazysnap.resolver import Inventory, RestartPlan, SnapshotFilter, candidates, entries_in
from lazysnap.shard.names import check_name

LATEST = "latest"
RUN = "run:"
MOST_DIGITS = 18
"""Maximum length of a text that is parsed as a step."""
_LEAST_DIGITS = 8
_ID_DIGITS = 16
_MOST_LISTED = 8
_DIGITS = frozenset("0123456789abcdef")


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


@dataclass(frozen=True)
class Choice(SnapshotFilter):
    """The choice of a snapshot: the best one of those that the filter includes."""

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
        return self == Choice()

    def of_one_run(self, run_of: Callable[[str], str]) -> "Choice":
        """Return the same choice with all digits of the run, if any.

        ``run_of``: returns the id of the run that begins with the given digits. Raises: as ``run_of``.
        """
        if self.run is None:
            return self
        return replace(self, run=run_of(self.run))

    def plans(self, inventories: list[Inventory]) -> list[RestartPlan]:
        """Return complete snapshots of this choice, the best first. Raises: SnapshotNotFound, for an unknown run."""

        def run_in_inventories(digits: str) -> str:
            return run_of(digits, inventories)

        return candidates(inventories, self.of_one_run(run_in_inventories))

    def missing(self, inventories: list[Inventory]) -> str:
        """Return a message that there is no such snapshot, with the existing ones."""
        if self.run is not None:
            return self._missing_of_run(inventories, self.run)
        steps = set()
        names: set[str] = set()
        for plan in candidates(inventories):
            steps.add(plan.step)
            for entry in chain.from_iterable(plan.sources):
                names.update(entry.names)
        message = f"no whole snapshot of step {self.step}"
        if self.name is not None:
            message = f"no whole snapshot called {self.name!r}"
        message += "; there are "
        if steps:
            message += f"steps {sorted(steps)}"
        else:
            message += "none"
        if names:
            message += f", and the names {', '.join(sorted(names))}"
        elif steps and self.name:
            message += ", and no names"
        return message

    def _missing_of_run(self, inventories: list[Inventory], digits: str) -> str:
        plans = candidates(inventories, SnapshotFilter(run=run_of(digits, inventories)))
        message = "no whole snapshot "
        if self.step is not None:
            message += f"of step {self.step} "
        message += f"of run {digits}"
        if plans:
            message += f", which has steps {sorted({plan.step for plan in plans})}"
        return f"{message}; {listed(inventories)}"
