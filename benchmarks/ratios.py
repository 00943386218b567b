"""Tables and targets of the levels benchmark, from its JSON lines.

python benchmarks/ratios.py runs/levels/levels.jsonl      shows them again
"""

import json
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

OURS = "lazysnap"
ASKED = 0.85
"""Of the raw limit, for shards of 1 GB."""
FULL_SIZE = 1 << 30
DIRECTIONS = ("write", "read")
RAW = {"memory": "warm memcpy", "local": "O_DIRECT", "nfs": "copy on the same mount", "s3": "raw client"}

Lines = list[dict[str, Any]]


@dataclass(frozen=True)
class Comparison:
    """Ours and the best raw one, at one level in one direction."""

    level: str
    direction: str
    ours: dict[str, Any]
    raw: dict[str, Any]

    @property
    def ratio(self) -> float:
        """Our rate over the raw one: the median over pairs of rounds.

        The order turns with every round, and who comes first may find emptier caches on the way to the medium (over
        NFS: three times faster); in two rounds each side was first once.
        """
        return statistics.median(
            raw / ours for raw, ours in zip(_by_twos(self.raw["seconds"]), _by_twos(self.ours["seconds"]), strict=True)
        )

    @property
    def is_met(self) -> bool:
        """Whether it reaches the target."""
        return self.ratio >= ASKED


def _by_twos(seconds: list[float]) -> list[float]:
    """Sums of two rounds; what is over at the end is left out, unless it is all there is."""
    return [sum(pair) for pair in zip(seconds[::2], seconds[1::2], strict=False)] or seconds


def levels_of(lines: Lines) -> list[str]:
    """All levels that were asked for, in order."""
    return list(dict.fromkeys(line["level"] for line in lines if "level" in line))


def comparison(lines: Lines, level: str, direction: str) -> Comparison | None:
    """``None`` if it was not measured. Of several raw ways the one with the least time in all counts."""
    found = [
        line
        for line in lines
        if line["measure"] == "rate" and line["level"] == level and line["direction"] == direction
    ]
    ours = [line for line in found if line["who"] == OURS]
    others = [line for line in found if line["who"] != OURS]
    if not ours or not others:
        return None
    return Comparison(level, direction, ours[0], min(others, key=lambda line: sum(line["seconds"])))


def comparisons(lines: Lines) -> Iterable[Comparison]:
    """All that were measured."""
    for level in levels_of(lines):
        for direction in DIRECTIONS:
            found = comparison(lines, level, direction)
            if found is not None:
                yield found


def rate(line: dict[str, Any]) -> str:
    """MB/s: the median, and the range."""
    rates = sorted(line["bytes"] / seconds / 1e6 for seconds in line["seconds"])
    return f"{statistics.median(rates):,.0f} ({rates[0]:,.0f} to {rates[-1]:,.0f})"


def cpu(line: dict[str, Any]) -> str:
    """Seconds of processor time per GB."""
    return f"{statistics.median(line['cpu_s']) / line['bytes'] * 1e9:.2f}"


def spread(values: list[float], digits: int) -> str:
    """The median, and the range if there is one."""
    low, middle, high = min(values), statistics.median(values), max(values)
    text = f"{middle:.{digits}f}"
    return text if low == high else f"{text} ({low:.{digits}f} to {high:.{digits}f})"


def table(title: str, columns: Iterable[str], left: int) -> Table:
    """A table whose first columns are text."""
    made = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index < left else "right")
    return made


def rates(lines: Lines) -> Table:
    """Rates and processor time."""
    columns = ("level", "", "raw limit", "raw MB/s", "lazysnap MB/s", "of raw", "raw CPU s/GB", "lazysnap CPU s/GB")
    made = table("rates of one process: median (range)", columns, 3)
    for found in comparisons(lines):
        both = (found.raw, found.ours)
        made.add_row(
            found.level, found.direction, found.raw["who"], *map(rate, both), f"{found.ratio:.0%}", *map(cpu, both)
        )
    return made


def losses(lines: Lines) -> Table:
    """What a sudden death costs."""
    columns = ("level", "state MB", "step s", "killed at", "steps lost", "restore s", "start to first step s")
    made = table("SIGKILL: steps lost and time to resume: median (range)", (*columns, "of which imports s"), 1)
    for line in lines:
        if line["measure"] == "loss":
            made.add_row(
                line["level"],
                f"{line['state_bytes'][0] / 1e6:,.0f}",
                spread(line["step_s"], 2),
                spread(line["killed_at"], 0),
                spread(line["lost"], 0),
                *(spread(line[name], 2) for name in ("restore_s", "first_step_s", "import_s")),
            )
    return made


def targets(lines: Lines) -> Table:
    """At least 85 % of the raw limit in both directions, at every level."""
    made = table("targets", ("target", "reached", "asked", ""), 4)
    for level in levels_of(lines):
        for direction in DIRECTIONS:
            found = comparison(lines, level, direction)
            text = f"{level}: {direction} rate, against {RAW[level]}"
            if found is None:
                made.add_row(text, "", "", "[yellow]not measured")
                continue
            size = found.ours["bytes"]
            small = "" if size >= FULL_SIZE else f" (for {size >> 20} MiB; asked for 1 GB)"
            verdict = "[green]met" if found.is_met else "[red]not met"
            made.add_row(text, f"{found.ratio:.0%}{small}", f">= {ASKED:.0%}", verdict)
    return made


def show(console: Console, lines: Lines) -> None:
    """Everything."""
    for made in (rates(lines), losses(lines), targets(lines)):
        if made.row_count:
            console.print(made)
    for line in lines:
        if line["measure"] == "left out":
            console.print(f"{line['level']} left out: {line['reason']}", markup=False, highlight=False)


def main() -> None:
    lines = [json.loads(line) for line in Path(sys.argv[1]).read_text().splitlines()]
    show(Console(width=150), lines)


if __name__ == "__main__":
    main()
