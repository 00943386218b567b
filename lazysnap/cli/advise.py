"""``lazysnap advise``: how often to capture and store, the required memory, and the expected goodput.

It uses the times of a run, or given figures. docs/tuning.md has the formulas.
"""

import argparse
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from rich.filesize import decimal

from lazysnap.cli.history import GOODBYE, Start, levels_of, microseconds, read_run, starts_of
from lazysnap.cli.output import Output, count_of, percent, seconds_text
from lazysnap.config import PersistentLevel, SnapshotConfig, redundancy_for
from lazysnap.console import duration
from lazysnap.errors import ConfigError
from lazysnap.events import EventFile, KeeperStarted
from lazysnap.memory.slot_choice import kept_whole, slots_needed
from lazysnap.parity.groups import groups_of
from lazysnap.resolver import MEMORY, short_id

BUDGET = 0.01
"""Maximum share of the time of training for captures."""
_LEAST_STEPS = 20
"""Minimum steps for a time per step."""
_LEAST_FAILURES = 3
"""Minimum failures for a failure rate."""
_RESTART_S = 300.0
"""Assumed seconds of a restart, if none was measured."""
_STORAGE_WASTE = 0.001
"""Maximum share of the time for work lost since the last stored snapshot."""
_LONGEST_S = 3600.0
"""Maximum seconds between stored snapshots."""
_LARGEST = 1e15


# ---------------------------------------------------------------- numbers with units


def _quantity(expected: str, units: Mapping[str, float], least: float = 1e-9) -> Callable[[str], float]:
    """Return a function that parses a number with one of ``units`` after it, for an argument of a command."""
    form = re.compile(rf"(\d+(?:\.\d+)?(?:e\d{{1,2}})?)\s*({'|'.join(units)})")

    def parse(text: str) -> float:
        match = form.fullmatch(text.strip().lower())
        value = 0.0
        if match is not None:
            value = float(match[1]) * units[match[2]]
        if not least <= value <= _LARGEST:
            raise argparse.ArgumentTypeError(f"expected {expected}, got {text!r}")
        return value

    return parse


parse_params = _quantity(
    "a number of parameters such as 7b, 350m or 125000000", {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}, least=1
)
parse_time = _quantity("a time such as 0.4s, 5min, 3h or 2d", {"s": 1.0, "min": 60.0, "h": 3600.0, "d": 86_400.0})


# ---------------------------------------------------------------- the command


@dataclass(frozen=True)
class TrainingFigures:
    """Figures of a training; ``None`` or 0 seconds: unknown."""

    run_id: str = ""
    nodes: int = 1
    ranks: int = 1
    timed_steps: int = 0
    """Measured steps in all starts."""
    every: int | None = None
    """Steps between captures in the newest start."""
    step_s: float | None = None
    """Seconds of a step, without its waits for captures."""
    stall_s: float = 0.0
    """Seconds that training waits for one capture."""
    copy_s: float = 0.0
    """Seconds from a boundary until its capture is whole: the median."""
    persist: dict[str, float] = field(default_factory=dict)
    """Seconds until a snapshot is durable, by level: the median."""
    trained_s: float = 0.0
    """Seconds of running trainers."""
    failures: int = 0
    """Starts after a failed one."""
    restart_s: float = 0.0
    """Seconds from a death to the first boundary: the median."""
    mtbf_s: float | None = None
    """Mean time between failures of the whole training."""


def run(args: argparse.Namespace, output: Output) -> int:
    """Advise. Blocks: reads the file of events. Raises: ConfigError; LevelError; SnapshotNotFound."""
    if args.url is None and args.params is None:
        raise ConfigError(
            "name the directory of a run (lazysnap advise runs/a), or describe a training (lazysnap advise --params 7b)"
        )
    measured = None
    if args.url is not None:
        _, files = read_run([args.url], args.storage_option, None)
        measured = measure(files)
    facts = _with_arguments(measured or TrainingFigures(), args)
    advice = advise(facts)
    missing = _missing(measured, facts)
    advice["too_young"] = missing or None
    _show(measured, facts, advice, output)
    if args.params is not None:
        sizes = estimate(args.params * args.bytes_per_param, args.sharding == "fsdp", facts)
        advice |= sizes
        for line in _texts_of_sizes(sizes, facts):
            output.line(line)
    for line in missing:
        output.line(line, "yellow")
    return output.result(**advice)


def _with_arguments(facts: TrainingFigures, args: argparse.Namespace) -> TrainingFigures:
    """Return given figures, else measured ones. Raises: ConfigError."""
    nodes = args.nodes
    ranks = args.ranks
    if ranks is None and args.url is None:
        ranks = nodes
    if ranks is None:
        ranks = facts.ranks
    if nodes is None:
        nodes = facts.nodes
    if ranks < 1 or nodes < 1 or ranks % nodes:
        raise ConfigError(f"--ranks {ranks} --nodes {nodes}: expected at least one rank, and as many on every node")
    if not 0 < args.bytes_per_param <= _LARGEST:
        raise ConfigError(f"--bytes-per-param must be more than 0, got {args.bytes_per_param}")
    mtbf_s = args.mtbf
    if mtbf_s is None and facts.failures >= _LEAST_FAILURES:
        mtbf_s = facts.trained_s / facts.failures
    persist = facts.persist
    if args.persist is not None:
        persist = dict.fromkeys(facts.persist or ["storage"], args.persist)
    return replace(
        facts,
        nodes=nodes,
        ranks=ranks,
        mtbf_s=mtbf_s,
        step_s=args.step_time or facts.step_s,
        persist=persist,
        restart_s=facts.restart_s or _RESTART_S,
    )


def _missing(measured: TrainingFigures | None, facts: TrainingFigures) -> list[str]:
    """Return texts for unknown figures, with the options to give them."""
    missing = []
    if facts.step_s is None:
        text = "steps and goodput need the time of a step"
        if measured is not None:
            text = f"this run is too young: {count_of(measured.timed_steps, 'step')} timed, {_LEAST_STEPS} needed"
        missing.append(f"{text}: --step-time 0.4s")
    if not facts.persist:
        missing.append("intervals of storage need the time of a write: --persist 30s")
    if facts.mtbf_s is None:
        text = "goodput needs the time between failures"
        if measured is not None:
            seen = f"{count_of(measured.failures, 'restart')} in {duration(measured.trained_s)}"
            text = f"too few failures ({seen}) to know the time between them"
        missing.append(f"{text}: --mtbf 3h")
    return missing


# ---------------------------------------------------------------- what a run measured


def measure(files: Sequence[EventFile]) -> TrainingFigures:
    """Return the figures of a run. Pure."""
    starts = starts_of(files)
    if not starts:
        return TrainingFigures(files[0].run_id)
    nodes = 1
    for event in files[0].events:
        if isinstance(event, KeeperStarted):
            nodes = max(nodes, event.nodes)
    timed_steps, step_s, stall_s = _times_of_steps(starts)
    copies_s = []
    trained_us = 0
    for start in starts:
        trained_us += start.ended - start.began
        for progress in start.progress:
            copies_s.append(progress.copy_s)
    restarts_s = _restarts_s(starts)
    persist = {}
    for url, level in levels_of(files).items():
        if level.snapshots:
            persist[url] = level.seconds
    return TrainingFigures(
        files[0].run_id,
        nodes=nodes,
        ranks=starts[-1].trainer_started.world_size,
        timed_steps=timed_steps,
        every=starts[-1].trainer_started.every_n_steps,
        step_s=step_s,
        stall_s=stall_s,
        copy_s=_median(copies_s),
        persist=persist,
        trained_s=trained_us / 1e6,
        failures=len(restarts_s),
        restart_s=_median(restarts_s),
    )


def _times_of_steps(starts: Sequence[Start]) -> tuple[int, float | None, float]:
    """Return ``timed_steps``, ``step_s`` and ``stall_s`` of ``TrainingFigures``."""
    timed_steps = 0
    worked_us = 0
    waited_us = 0
    captures = 0.0
    for start in starts:
        if start.timed_steps:
            timed_steps += start.timed_steps
            waited_us += start.waits[-1][1]
            worked_us += start.worked_us
            captures += start.timed_steps / max(1, start.trainer_started.every_n_steps)
    if timed_steps < _LEAST_STEPS:
        return timed_steps, None, 0.0
    stall_s = 0.0
    if captures >= 1:
        stall_s = waited_us / 1e6 / captures
    return timed_steps, worked_us / 1e6 / timed_steps, stall_s


def _restarts_s(starts: Sequence[Start]) -> list[float]:
    """Return the seconds from each death to the first boundary after it."""
    restarts_s = []
    for before, after in itertools.pairwise(starts):
        if before.how == GOODBYE:
            continue
        resumed_at = microseconds(after.trainer_started.t)
        if after.waits:
            resumed_at = after.waits[0][0]
        restarts_s.append((resumed_at - before.ended) / 1e6)
    return restarts_s


def _median(values: Sequence[float]) -> float:
    if not values:
        return 0.0
    return median(values)


# ---------------------------------------------------------------- the advice


def advise(facts: TrainingFigures) -> dict[str, Any]:
    """Return the advice, as in the JSON result. Pure.

    ``snapshots`` has a row for memory and for each level: its interval, and, if that is known, the work lost by a
    failure that resumes from there, and the goodput if all failures do.
    """
    step_s = facts.step_s
    every = 1
    overhead = None
    step_with_stall_s = None
    if step_s is not None:
        every = steps_within(BUDGET, step_s, facts.stall_s)
        step_with_stall_s = step_s + facts.stall_s / every
        overhead = 1 - step_s / step_with_stall_s
    snapshots = {MEMORY: _row(facts, overhead, every, step_with_stall_s, facts.copy_s)}
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
    facts: TrainingFigures, overhead: float | None, every: int | None, step_s: float | None, delay_s: float
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
    """Return the seconds between stored snapshots: the level is busy for at most half of the time."""
    wanted_s = _LONGEST_S
    if mtbf_s is not None:
        wanted_s = min(_LONGEST_S, 2 * _STORAGE_WASTE * mtbf_s)
    return max(2 * persist_s, wanted_s)


def estimate(state_bytes: float, is_sharded: bool, facts: TrainingFigures) -> dict[str, Any]:
    """Return the sizes of a training. Bytes are those of all nodes, unless the name says otherwise. Pure.

    Args:
        state_bytes: bytes of the captured state, without copies.
        is_sharded: True if each rank has a part of it, False if each has all.
        facts: nodes and ranks.
    """
    config = SnapshotConfig(levels=(PersistentLevel("plan"),), job_id="plan")
    kept = kept_whole(config.every_n_steps, facts.ranks, runs_ahead=True)
    slots = slots_needed(kept, is_read=True)
    node_bytes = state_bytes
    if is_sharded:
        node_bytes = state_bytes / facts.nodes
    redundancy = redundancy_for(config, facts.nodes)
    parity_nodes = 0
    group = 1
    parity_bytes = 0.0
    if redundancy is not None:
        parity_nodes = redundancy.parity
        groups = groups_of(facts.nodes, redundancy.group_size, parity_nodes)
        group = min(len(each.members) for each in groups)
        if is_sharded:  # of two steps: the one that is protected, and the next
            parity_bytes = 2 * node_bytes * parity_nodes / (group - parity_nodes)
    memory_bytes = slots * node_bytes + parity_bytes
    return {
        "captured_bytes": round(state_bytes),
        "slots_per_rank": slots,
        "slots_kept_whole": kept,
        "nodes_per_group": group,
        "parity_nodes": parity_nodes,
        "parity_per_node_bytes": round(parity_bytes),
        "memory_per_rank_bytes": round(memory_bytes * facts.nodes / facts.ranks),
        "memory_per_node_bytes": round(memory_bytes),
    }


# ---------------------------------------------------------------- the screen


def _show(measured: TrainingFigures | None, facts: TrainingFigures, advice: dict[str, Any], output: Output) -> None:
    if measured is not None:
        ranks = count_of(measured.ranks, "rank")
        output.line(f"run {short_id(measured.run_id)}, {ranks}: {count_of(measured.timed_steps, 'step')} timed", "bold")
    if facts.mtbf_s is not None:
        output.line(f"a failure every {duration(facts.mtbf_s)}; a restart takes {duration(facts.restart_s)}")
    if advice["overhead"] is not None:
        output.line(f"captures take {percent(advice['overhead'], 2)} of the time of training")
    if facts.step_s is None and not facts.persist:
        return
    output.line("")
    rows = [_cells(source, row, facts) for source, row in advice["snapshots"].items()]
    output.show(output.table("", "snapshots in<", "every>", "steps>", "lost per failure>", "goodput>", rows=rows))
    output.line("")


def _cells(source: str, row: Mapping[str, Any], facts: TrainingFigures) -> Iterable[str]:
    steps = ""
    if row["every_n_steps"] is not None:
        steps = f"{row['every_n_steps']:,}"
        if source == MEMORY and facts.every not in (None, row["every_n_steps"]):
            steps += f" (now {facts.every})"
    share = ""
    if row["goodput"] is not None:
        share = percent(row["goodput"], 2)
    return source, seconds_text(row["every_s"]), steps, seconds_text(row["lost_s"]), share


def _texts_of_sizes(sizes: dict[str, Any], facts: TrainingFigures) -> Iterator[str]:
    state = decimal(sizes["captured_bytes"])
    yield f"snapshot  {state}: the state, as it is stored"
    kept = f"{sizes['slots_kept_whole']} newest whole, 1 being written, 1 being stored"
    yield f"slots     {sizes['slots_per_rank']} per rank: {kept}"
    if sizes["nodes_per_group"] > 1:
        lost = f"of each {sizes['nodes_per_group']} nodes any {sizes['parity_nodes']} may be lost"
        yield f"parity    {decimal(sizes['parity_per_node_bytes'])} per node for others: {lost}"
    node = f"node of {count_of(facts.ranks // facts.nodes, 'rank')}"
    yield f"memory    {decimal(sizes['memory_per_node_bytes'])} per {node}, in addition to the training"
    yield "          estimates; buffers, and what else the state holds, come on top"


def steps_within(budget: float, step_s: float, stall_s: float) -> int:
    """Return the smallest n for which a stall at every n-th step takes at most ``budget`` of all time."""
    if step_s <= 0:
        return 1
    return max(1, math.ceil(stall_s * (1 - budget) / (budget * step_s) - 1e-9))


def rework_s(interval_s: float, delay_s: float) -> float:
    """Return the seconds of training that a failure loses, on average.

    ``interval_s``: training from one snapshot to the next. ``delay_s``: time until a snapshot is complete.
    """
    return interval_s / 2 + delay_s


def goodput(overhead: float, lost_s: float, restart_s: float, mtbf_s: float) -> float:
    """Return the share of time for steps that are not lost.

    ``overhead``: the share that captures take. ``lost_s``: training that a failure loses. A failure during a restart
    begins the restart again.
    """
    try:
        down = math.expm1(restart_s / mtbf_s)
    except OverflowError:
        return 0.0
    return max(0.0, (1 - overhead) * (1 - lost_s / mtbf_s)) / (1 + down)
