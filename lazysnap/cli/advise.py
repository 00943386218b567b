"""``lazysnap advise``: how often to capture and store, what failures cost, what survives, how much memory it takes.

From the times of a run, or from figures that are given. Formulas and sources: docs/tuning.md.
"""

import argparse
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table

from lazysnap import events
from lazysnap.cli import sizes
from lazysnap.cli.measured import LEAST_STEPS, Facts, measure
from lazysnap.cli.output import Output, count_of, percent
from lazysnap.cli.sizes import groups_for
from lazysnap.config import Redundancy, SnapshotConfig, redundancy_for
from lazysnap.console import duration
from lazysnap.errors import ConfigError
from lazysnap.intervals import (
    BUDGET,
    Loss,
    daly_goodput,
    daly_s,
    goodput,
    steps_within,
    survival,
    unprotected_share,
    up_share,
    young_s,
)

_DAY_S, _WEEK_S = 86_400.0, 604_800.0
_LEAST_FAILURES = 3
"""Failures of a run that its rate is read from."""
_RESTART_S = 300.0
"""Seconds that a restart is taken to last where none was seen and none is given."""
_STORAGE_WASTE, _LONGEST_S = 0.001, 3600.0
"""Storage is asked for so often that going back to it costs that share of time, and at least once in an hour."""
_WORTH_TELLING = 0.0005
"""Share of the time that rarer captures must gain to be named."""


@dataclass(frozen=True)
class Published:
    """A rate of failures from the literature."""

    text: str
    failures: float
    node_days: float
    node_share: float
    """Share of them that take the memory of a node along."""


RATES = {
    "llama3": Published(
        "Llama 3 405B: 419 failures in 54 days on 2,048 nodes of 8 GPUs, 78 % hardware (arXiv 2407.21783)",
        419,
        54 * 2048,
        0.78,
    ),
    "opt": Published(
        "OPT-175B: 35 manual and about 70 automatic restarts in 2 months on 124 nodes (arXiv 2205.01068)",
        105,
        60 * 124,
        1.0,
    ),
    "bloom": Published(
        "BLOOM: 1 to 2 failures of GPUs a week on about 50 nodes (huggingface.co/blog/bloom-megatron-deepspeed)",
        1.5,
        7 * 50,
        1.0,
    ),
    "rsc1": Published("Meta's RSC-1: 6.50 failures in 1,000 node-days (arXiv 2410.21680)", 6.50, 1000, 1.0),
    "rsc2": Published("Meta's RSC-2: 2.34 failures in 1,000 node-days (arXiv 2410.21680)", 2.34, 1000, 1.0),
}


def run(args: argparse.Namespace, output: Output) -> int:
    """Advise. Blocks: reads the file of events. Raises: ConfigError; LevelError."""
    if args.url is None and args.params is None:
        raise ConfigError("advise: name a level of a run (advise runs/a), or describe a training (--params 7b)")
    seen = None if args.url is None else measure(events.read(args.url, dict(args.storage_option) or None))
    if args.url is not None and seen is None:
        output.say(f"{args.url}: there is no file of events: no run stored anything there, or an older lazysnap did")
        if args.params is None:
            return output.result(ok=False, too_young=["no events"])
    nodes = args.nodes or (seen.nodes if seen is not None else 1)
    ranks = args.ranks or (seen.ranks if seen is not None and not args.nodes else nodes)
    if ranks < 1 or nodes < 1 or ranks % nodes:
        raise ConfigError(f"--ranks {ranks} --nodes {nodes}: expected at least one rank, and as many on every node")
    found = None if args.params is None else sizes.estimate(args, nodes, ranks)
    facts = _with_arguments(seen or Facts(), args, found, nodes)
    lacks = _lacks(seen, facts)
    advice = {**(found or {}), **advise(facts), "too_young": lacks or None}
    for part in _screen(seen, facts, advice, output):
        output.show(part)
    for line in () if found is None else sizes.lines(found, args, nodes, ranks):
        output.line(line)
    for line in lacks:
        output.line(line, "yellow")
    return output.result(**advice)


def _with_arguments(seen: Facts, args: argparse.Namespace, found: dict[str, Any] | None, nodes: int) -> Facts:
    """Return what is given, else what was measured, else what is assumed. Raises: ConfigError."""
    if args.node_share is not None and not 0 <= args.node_share <= 1:
        raise ConfigError(f"--node-share must be from 0 to 1, got {args.node_share}")
    published = RATES[args.like or "llama3"]
    if args.mtbf is not None:
        rate, text, share = 1 / args.mtbf, "as given", published.node_share
    elif args.like is None and seen.failures >= _LEAST_FAILURES:
        rate, share = seen.failures / seen.trained_s, seen.new_keepers / seen.failures
        text = f"as this run: {count_of(seen.failures, 'restart')} in {duration(seen.trained_s)} of training"
    else:
        rate, text = published.failures / published.node_days * nodes / _DAY_S, f"as {published.text}"
        share = published.node_share
    stored_s = args.persist or (found or {}).get("seconds_per_snapshot")
    persist = seen.persist if stored_s is None else dict.fromkeys(seen.persist or ["storage"], stored_s)
    restart_s = args.restart or seen.restart_memory_s or seen.restart_elsewhere_s or _RESTART_S
    return replace(
        seen,
        nodes=nodes,
        rate=rate,
        node_share=share if args.node_share is None else args.node_share,
        rate_text=text,
        step_s=args.step or seen.step_s,
        stall_s=seen.stall_s if args.stall is None else args.stall,
        persist=persist,
        restart_memory_s=restart_s,
        restart_elsewhere_s=args.restart or seen.restart_elsewhere_s or restart_s,
        redundancy=None if args.no_redundancy else redundancy_for(SnapshotConfig(), nodes),
    )


def _lacks(seen: Facts | None, facts: Facts) -> list[str]:
    """Return what a run is too young to say, and what is therefore assumed."""
    found = []
    if facts.step_s is None:
        found.append("goodput and steps need the time of a step: --step 0.4s")
        if seen is not None:
            steps = f"{count_of(seen.steps, 'step')} seen, {LEAST_STEPS} needed"
            found[0] = f"this run is too young: {steps}; {found[0]}"
    if seen is not None and not seen.persist:
        found.append(
            "this run is too young: nothing is stored yet, so losses that need storage do not count (--persist 30s)"
        )
    if seen is not None and seen.failures < _LEAST_FAILURES and "as this run" not in facts.rate_text:
        seen_text = f"{count_of(seen.failures, 'restart')} in {duration(seen.trained_s)}"
        found.append(f"{seen_text}: too few for a rate of failures: the one above is not of this run (--mtbf 3h)")
    return found


# ---------------------------------------------------------------- the advice


def advise(facts: Facts) -> dict[str, Any]:
    """Return the advice, as the JSON result has it. Pure."""
    step_s, mtbf_s = facts.step_s, 1 / facts.rate
    n = 1 if step_s is None else steps_within(BUDGET, step_s, facts.stall_s)
    lost_rate = facts.rate * facts.node_share
    storage_rate = lost_rate * _share_left(facts, _groups(facts.redundancy, facts.nodes), lost_rate)
    levels = {url: _storage_interval_s(seconds, storage_rate) for url, seconds in facts.persist.items()}
    advice: dict[str, Any] = {
        "mtbf_s": mtbf_s,
        "rate": facts.rate_text,
        "node_share": facts.node_share,
        "every_n_steps": n,
        "every_n_steps_now": facts.every,
        "young_s": young_s(facts.stall_s, mtbf_s),
        "daly_s": daly_s(facts.stall_s, mtbf_s),
        "storage_every_s": levels,
        "redundancy": _survivals(facts, lost_rate),
        "goodput": None,
    }
    if step_s is None:
        return advice
    step_with_stall_s = step_s + facts.stall_s / n
    stored = {url: max(1, int(seconds / (n * step_with_stall_s))) * n for url, seconds in levels.items()}
    slowest = max(facts.persist, key=lambda url: facts.persist[url], default=None)

    def losses(every: int) -> list[Loss]:
        """Return the kinds of failures if every ``every``-th step is captured; the mildest first."""
        own_s = every * step_with_stall_s
        found = [Loss(facts.rate - lost_rate, own_s, facts.copy_s, facts.restart_memory_s)]
        protected_s, delay_s = max(own_s, facts.protect_s), facts.copy_s + (facts.protect_s or own_s)
        found.append(Loss(lost_rate - storage_rate, protected_s, delay_s, facts.restart_elsewhere_s))
        if slowest is not None:
            stored_s, delay_s = stored[slowest] * step_with_stall_s, facts.copy_s + facts.persist[slowest]
            found.append(Loss(storage_rate, stored_s, delay_s, facts.restart_elsewhere_s))
        return found

    kinds, rare = losses(n), max(n, round(advice["young_s"] / step_s))
    up_s = _WEEK_S * up_share(kinds)
    # Whole steps: the one in progress, half of which is over on average, is not counted.
    lost_steps = up_s * sum(kind.rate * (kind.rework_s / step_with_stall_s - 0.5) for kind in kinds)
    advice |= {
        "overhead": 1 - step_s / step_with_stall_s,
        "goodput": goodput(1 - step_s / step_with_stall_s, kinds),
        "young_n_steps": rare,
        "young_goodput": goodput(1 - step_s / (step_s + facts.stall_s / rare), losses(rare)),
        "steps_per_week": up_s / step_with_stall_s,
        "steps_lost_per_week": lost_steps,
        "lost_per_failure_s": {
            name: kind.rework_s for name, kind in zip(("process", "node", "storage"), kinds, strict=False)
        },
        "storage_every_n_steps": stored,
    }
    if slowest is not None:
        cost_s = facts.persist[slowest]
        blocking_s = daly_s(cost_s, mtbf_s)
        advice |= {
            "blocking_every_s": {"young": young_s(cost_s, mtbf_s), "daly": blocking_s},
            "blocking_goodput": daly_goodput(blocking_s, cost_s, facts.restart_elsewhere_s, mtbf_s),
        }
    return advice


def _storage_interval_s(persist_s: float, rate: float) -> float:
    """Return the seconds from one stored snapshot to the next: the level is busy for at most half of them."""
    wanted_s = 2 * _STORAGE_WASTE / rate if rate else _LONGEST_S
    return max(2 * persist_s, min(wanted_s, _LONGEST_S))


def _groups(redundancy: Redundancy | None, nodes: int) -> list[tuple[int, int]]:
    return [] if redundancy is None else [(len(one.members), one.parity) for one in groups_for(redundancy, nodes)]


def _share_left(facts: Facts, groups: list[tuple[int, int]], lost_rate: float) -> float:
    """Return the share of node losses after which only storage is left."""
    return unprotected_share(groups, lost_rate, facts.window_s) if groups else 1.0


def _survivals(facts: Facts, lost_rate: float) -> dict[str, dict[str, Any]]:
    """Return what each redundancy survives, for that number of nodes: the probability by nodes lost at once."""
    found: dict[str, dict[str, Any]] = {}
    kinds = (Redundancy(parity=1), Redundancy(parity=2))
    for kind in (None, *(kind for kind in kinds if facts.nodes > kind.parity)):
        groups = _groups(kind, facts.nodes)
        losses = range(1, min(4, facts.nodes) + 1)
        left = _share_left(facts, groups, lost_rate)
        per_node = 0.0 if kind is None else kind.parity / (min(size for size, _ in groups) - kind.parity)
        found["none" if kind is None else f"parity={kind.parity}"] = {
            "survives": {str(lost): survival(groups, lost) if groups else 0.0 for lost in losses},
            "parity_of_state": per_node,
            "storage_needed_every_s": 1 / (lost_rate * left) if lost_rate * left > 1e-15 else None,
        }
    return found


# ---------------------------------------------------------------- the screen


def _screen(seen: Facts | None, facts: Facts, advice: dict[str, Any], output: Output) -> Iterator[Any]:
    if seen is not None:
        ranks = count_of(seen.ranks, "rank")
        yield output.cell(f"run {seen.run_id[:8]}, {ranks}: {count_of(seen.steps, 'step')} seen", "bold")
    yield output.cell(
        f"a failure every {duration(advice['mtbf_s'])} ({facts.rate_text}); "
        f"{percent(facts.node_share)} of them lose the memory of a node"
    )
    yield from ("", _levels(facts, advice, output))
    if facts.nodes > 1:
        yield from ("", _redundancies(facts, advice, output))
    if advice["goodput"] is not None:
        yield ""
        lost = f"{advice['steps_lost_per_week']:,.0f} of {advice['steps_per_week']:,.0f} steps a week are lost"
        yield output.cell(f"expected goodput {percent(advice['goodput'], 2)}: {lost}", "bold")
        if advice["young_goodput"] > advice["goodput"] + _WORTH_TELLING:
            rare, share = advice["young_n_steps"], advice["young_goodput"]
            yield output.cell(
                f"captures every {rare:,} steps, as Young says, would give {percent(share, 2)}, and lose more steps"
            )
    if "blocking_goodput" in advice:
        blocking = f"{percent(advice['blocking_goodput'], 2)} every {duration(advice['blocking_every_s']['daly'])}"
        yield output.cell(f"with checkpoints that stop training while they are stored, at Daly's interval: {blocking}")
    yield ""


def _levels(facts: Facts, advice: dict[str, Any], output: Output) -> Table:
    rows: list[Iterable[str]] = []
    lost = {name: duration(seconds) for name, seconds in advice.get("lost_per_failure_s", {}).items()}
    n, now = advice["every_n_steps"], advice["every_n_steps_now"]
    steps = ("step" if n == 1 else f"{n} steps") + ("" if now in (None, n) else f" (now {now})")
    costs = percent(advice["overhead"], 2) if "overhead" in advice else ""
    classics = map(duration, (advice["young_s"], advice["daly_s"])) if facts.stall_s else ("", "")
    rows.append(("memory", steps, costs, lost.get("process", ""), *classics))
    if facts.redundancy is not None:
        often = duration(facts.protect_s) if facts.protect_s else "step that the links take"
        rows.append((f"other nodes (parity={facts.redundancy.parity})", often, "0", lost.get("node", ""), "", ""))
    for url, every_s in advice["storage_every_s"].items():
        cost_s, mtbf_s = facts.persist[url], advice["mtbf_s"]
        count = advice.get("storage_every_n_steps", {}).get(url)
        often = f"{duration(every_s)}{'' if count is None else f': {count:,} steps'}"
        loss = duration(every_s / 2 + cost_s)
        classics = map(duration, (young_s(cost_s, mtbf_s), daly_s(cost_s, mtbf_s)))
        rows.append((url, often, f"0 (takes {duration(cost_s)})", loss, *classics))
    columns = ("snapshots in", "every", "costs training>", "lost per failure>", "by Young 1974>", "by Daly 2006>")
    return output.table("", *columns, rows=rows, is_plain=True)


def _redundancies(facts: Facts, advice: dict[str, Any], output: Output) -> Table:
    known = advice["redundancy"]
    losses = list(known["none"]["survives"])
    rows = []
    for name, kind in known.items():
        # Cut, not rounded: only what is certain is 100 %.
        survives = [f"{math.floor(1e4 * kind['survives'][lost]) / 100:g} %" for lost in losses]
        every_s = kind["storage_needed_every_s"]
        needed = "never" if every_s is None or every_s > 1000 * 365 * _DAY_S else f"every {_long(every_s)}"
        rows.append((name, *survives, f"{percent(kind['parity_of_state'])} of state, twice", needed))
    columns = (f"survives, of {facts.nodes} nodes", *(f"{lost} lost>" for lost in losses), "parity>", "storage needed>")
    return output.table("", *columns, rows=rows, is_plain=True)


def _long(seconds: float) -> str:
    return duration(seconds) if seconds < 1000 * _DAY_S else f"{seconds / (365 * _DAY_S):,.0f} years"
