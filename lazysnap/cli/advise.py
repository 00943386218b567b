"""``lazysnap advise``: how often to capture and store, the memory that it takes, and the goodput to expect.

From the times of a run, or from figures that are given. Formulas: docs/tuning.md.
"""

import argparse
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from rich.table import Table

from lazysnap import events
from lazysnap.cli import sizes
from lazysnap.cli.measured import LEAST_STEPS, Facts, measure
from lazysnap.cli.output import Output, count_of, percent
from lazysnap.console import duration
from lazysnap.errors import ConfigError
from lazysnap.intervals import BUDGET, goodput, rework_s, steps_within

_LEAST_FAILURES = 3
"""Failures of a run that its rate is read from."""
_RESTART_S = 300.0
"""Seconds that a restart is taken to last where none was seen."""
_STORAGE_WASTE = 0.001
"""Share of the time that work lost since the last stored snapshot may cost."""
_LONGEST_S = 3600.0
"""Longest time from one stored snapshot to the next."""
_MEMORY = "memory"


def run(args: argparse.Namespace, output: Output) -> int:
    """Advise. Blocks: reads the file of events. Raises: ConfigError; LevelError."""
    if args.url is None and args.params is None:
        raise ConfigError("advise: name a level of a run (advise runs/a), or describe a training (--params 7b)")
    seen = None
    if args.url is not None:
        seen = measure(events.read(args.url, dict(args.storage_option) or None))
        if seen is None:
            output.say(f"{args.url}: there is no file of events: no run stored anything there")
            if args.params is None:
                return output.result(ok=False, too_young=["no events"])
    facts = _with_arguments(seen or Facts(), args)
    advice = advise(facts)
    if args.params is not None:
        advice |= sizes.estimate(args, facts.nodes, facts.ranks)
    missing = _missing(seen, facts)
    advice["too_young"] = missing or None
    for part in _screen(seen, facts, advice, output):
        output.show(part)
    if args.params is not None:
        for line in sizes.lines(advice, args, facts.nodes, facts.ranks):
            output.line(line)
    for line in missing:
        output.line(line, "yellow")
    return output.result(**advice)


def _with_arguments(seen: Facts, args: argparse.Namespace) -> Facts:
    """Return what is given, else what was measured. Raises: ConfigError."""
    nodes = args.nodes or seen.nodes
    ranks = args.ranks or (nodes if args.nodes else seen.ranks)
    if ranks < 1 or nodes < 1 or ranks % nodes:
        raise ConfigError(f"--ranks {ranks} --nodes {nodes}: expected at least one rank, and as many on every node")
    mtbf_s = args.mtbf
    if mtbf_s is None and seen.failures >= _LEAST_FAILURES:
        mtbf_s = seen.trained_s / seen.failures
    persist = seen.persist
    if args.persist is not None:
        persist = dict.fromkeys(seen.persist or ["storage"], args.persist)
    return replace(
        seen,
        nodes=nodes,
        ranks=ranks,
        mtbf_s=mtbf_s,
        step_s=args.step or seen.step_s,
        persist=persist,
        restart_s=seen.restart_s or _RESTART_S,
    )


def _missing(seen: Facts | None, facts: Facts) -> list[str]:
    """Return what is not known, and the option that gives it."""
    missing = []
    if facts.step_s is None:
        text = "goodput and steps need the time of a step: --step 0.4s"
        if seen is not None:
            text = f"this run is too young: {count_of(seen.steps, 'step')} seen, {LEAST_STEPS} needed; {text}"
        missing.append(text)
    if not facts.persist:
        missing.append("intervals of storage need the time until a snapshot is durable: --persist 30s")
    if facts.mtbf_s is None:
        text = "goodput needs the mean time between failures of the whole training: --mtbf 3h"
        if seen is not None:
            text = f"{count_of(seen.failures, 'restart')} in {duration(seen.trained_s)}, too few to tell; {text}"
        missing.append(text)
    return missing


# ---------------------------------------------------------------- the advice


def advise(facts: Facts) -> dict[str, Any]:
    """Return the advice, as the JSON result has it. Pure.

    ``snapshots`` has a row for memory and for each level: its interval, and if that is known the work that a failure
    loses which resumes from there, and the goodput if all failures do.
    """
    step_s = facts.step_s
    every = 1
    overhead = None
    step_with_stall_s = None
    if step_s is not None:
        every = steps_within(BUDGET, step_s, facts.stall_s)
        step_with_stall_s = step_s + facts.stall_s / every
        overhead = 1 - step_s / step_with_stall_s
    snapshots = {_MEMORY: _row(facts, overhead, every, step_with_stall_s, facts.copy_s)}
    for url, persist_s in facts.persist.items():
        level_every = None
        if step_with_stall_s is not None:
            captures = math.ceil(_storage_interval_s(persist_s, facts.mtbf_s) / (every * step_with_stall_s))
            level_every = max(1, captures) * every
        row = _row(facts, overhead, level_every, step_with_stall_s, facts.copy_s + persist_s)
        if row["every_s"] is None:
            row["every_s"] = _storage_interval_s(persist_s, facts.mtbf_s)
        snapshots[url] = row
    return {
        "mtbf_s": facts.mtbf_s,
        "restart_s": facts.restart_s,
        "every_n_steps_now": facts.every,
        "overhead": overhead,
        "snapshots": snapshots,
    }


def _row(
    facts: Facts, overhead: float | None, every: int | None, step_s: float | None, delay_s: float
) -> dict[str, float | None]:
    """Return the facts of one place. ``delay_s``: time from a step boundary until its snapshot is complete there."""
    row: dict[str, float | None] = dict.fromkeys(("every_s", "lost_s", "goodput"))
    row["every_n_steps"] = every
    if every is not None and step_s is not None and overhead is not None:
        row["every_s"] = every * step_s
        lost_s = rework_s(every * step_s, delay_s)
        row["lost_s"] = lost_s
        if facts.mtbf_s is not None:
            row["goodput"] = goodput(overhead, lost_s, facts.restart_s, facts.mtbf_s)
    return row


def _storage_interval_s(persist_s: float, mtbf_s: float | None) -> float:
    """Return the seconds from one stored snapshot to the next: the level is busy for at most half of them."""
    wanted_s = _LONGEST_S
    if mtbf_s is not None:
        wanted_s = min(_LONGEST_S, 2 * _STORAGE_WASTE * mtbf_s)
    return max(2 * persist_s, wanted_s)


# ---------------------------------------------------------------- the screen


def _screen(seen: Facts | None, facts: Facts, advice: dict[str, Any], output: Output) -> Iterator[Any]:
    if seen is not None:
        ranks = count_of(seen.ranks, "rank")
        yield output.cell(f"run {seen.run_id[:8]}, {ranks}: {count_of(seen.steps, 'step')} seen", "bold")
    if facts.mtbf_s is not None:
        yield output.cell(f"a failure every {duration(facts.mtbf_s)}; a restart takes {duration(facts.restart_s)}")
    if advice["overhead"] is not None:
        yield output.cell(f"captures take {percent(advice['overhead'], 2)} of the time of training")
    yield ""
    yield _table(facts, advice, output)
    yield ""


def _table(facts: Facts, advice: dict[str, Any], output: Output) -> Table:
    rows: list[Iterable[str]] = []
    for place, row in advice["snapshots"].items():
        every = row["every_n_steps"]
        steps = "" if every is None else f"{every:,}"
        if place == _MEMORY and facts.every not in (None, every):
            steps += f" (now {facts.every})"
        seconds = "" if row["every_s"] is None else duration(row["every_s"])
        lost = "" if row["lost_s"] is None else duration(row["lost_s"])
        share = "" if row["goodput"] is None else percent(row["goodput"], 2)
        rows.append((place, steps, seconds, lost, share))
    columns = ("snapshots in", "every steps>", "every>", "lost per failure>", "goodput>")
    return output.table("", *columns, rows=rows, is_plain=True)
