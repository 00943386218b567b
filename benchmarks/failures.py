"""Simulate trainings that fail, step by step, and compare them with the formulas of `lazysnap advise`."""

import argparse
import dataclasses
import math
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import simpy

from benchmarks.report import Report
from lazysnap.cli.advise import RATES, advise
from lazysnap.cli.measured import Facts
from lazysnap.cli.sizes import groups_for
from lazysnap.config import Redundancy
from lazysnap.intervals import daly_goodput, daly_s

RANKS_PER_NODE = 8
DAY_S = 86_400.0
ALLOWANCE = 0.001
"""Share of the time that formulas may be off beside the statistical error: to them an interval follows on another."""


@dataclass
class Training:
    """One training: steps, captures, protection, storage, and failures of each rank and each node."""

    facts: Facts
    every: int
    """Steps between captures; ``store_every`` between those that storage takes; 0: storage takes none."""
    store_every: int
    seed: int
    step: int = 0
    whole: int = 0
    protected: int = 0
    durable: int = 0
    lost: set[int] = field(default_factory=set)
    """Nodes that have lost their part of the protected snapshot."""
    lost_steps: int = 0
    restarts: dict[str, int] = field(default_factory=lambda: {"memory": 0, "nodes": 0, "storage": 0})

    def __post_init__(self) -> None:
        self.env = simpy.Environment()
        self.random = random.Random(self.seed)
        facts = self.facts
        redundancy = facts.redundancy
        self.groups = [] if redundancy is None else groups_for(redundancy, facts.nodes)
        self.is_idle = {"protection": True, "storage": True}
        self.epoch = 0
        """Restarts so far: work of before counts no more."""
        self.trainer = self.env.process(self._train())
        node_rate = facts.rate * facts.node_share / facts.nodes
        rank_rate = facts.rate * (1 - facts.node_share) / (facts.nodes * RANKS_PER_NODE)
        for node in range(facts.nodes):
            self._arm(node_rate, node)
            for _ in range(RANKS_PER_NODE):
                self._arm(rank_rate, None)

    def _arm(self, rate: float, node: int | None) -> None:
        if rate:
            self.env.process(self._fail(rate, node))

    def _fail(self, rate: float, node: int | None) -> Iterator[simpy.Event]:
        while True:
            yield self.env.timeout(self.random.expovariate(rate))
            self.trainer.interrupt(node)

    def _train(self) -> Iterator[simpy.Event]:
        facts, env = self.facts, self.env
        while True:
            try:
                while True:
                    yield env.timeout(facts.step_s)
                    self.step += 1
                    if self.step % self.every == 0:
                        self._work(self._copy(self.step))
                        if facts.stall_s:
                            yield env.timeout(facts.stall_s)
            except simpy.Interrupt as failure:
                yield from self._restart(failure.cause)

    def _restart(self, node: int | None) -> Iterator[simpy.Event]:
        kind = "memory"
        while True:
            self.epoch += 1
            self.is_idle = dict.fromkeys(self.is_idle, True)
            if node is not None:
                self.lost.add(node)
                kind = "nodes" if kind != "storage" and self._is_protected() else "storage"
            try:
                elsewhere_s = self.facts.restart_elsewhere_s
                yield self.env.timeout(self.facts.restart_memory_s if kind == "memory" else elsewhere_s)
                break
            except simpy.Interrupt as failure:
                node = failure.cause
        step = {"memory": self.whole, "nodes": self.protected, "storage": self.durable}[kind]
        self.restarts[kind] += 1
        self.lost_steps += self.step - step
        self.step = self.whole = step
        if kind == "storage":
            self.protected, self.lost = step, set()

    def _is_protected(self) -> bool:
        return bool(self.groups) and all(len(self.lost & {*group.members}) <= group.parity for group in self.groups)

    def _work(self, work: Iterator[simpy.Event]) -> None:
        self.env.process(work)

    def _copy(self, step: int) -> Iterator[simpy.Event]:
        """Copy a capture; then it is protected and stored, if that is due and nothing else is under way."""
        epoch = self.epoch
        yield self.env.timeout(self.facts.copy_s)
        if epoch != self.epoch:
            return
        self.whole = step
        if self.groups and self.is_idle["protection"]:
            self._work(self._move("protection", step, self.facts.protect_s))
        if self.store_every and step % self.store_every == 0 and self.is_idle["storage"]:
            self._work(self._move("storage", step, max(self.facts.persist.values())))

    def _move(self, where: str, step: int, seconds: float) -> Iterator[simpy.Event]:
        epoch, self.is_idle[where] = self.epoch, False
        yield self.env.timeout(seconds)
        if epoch == self.epoch:
            self.is_idle[where] = True
            if where == "storage":
                self.durable = step
            else:
                self.protected, self.lost = step, set()

    def run(self, seconds: float) -> float:
        """Return the share of time that made steps which are not lost."""
        self.env.run(until=seconds)
        return self.step * (self.facts.step_s or 0.0) / seconds


def facts_of(nodes: int, redundancy: Redundancy | None, **others: Any) -> Facts:
    """A training of 10 s a step that fails as that of Llama 3 did, for its number of nodes."""
    llama = RATES["llama3"]
    rate = llama.failures / llama.node_days * nodes / DAY_S
    usual: dict[str, Any] = {
        "nodes": nodes, "rate": rate, "node_share": llama.node_share, "rate_text": "", "step_s": 10.0, "stall_s": 0.05,
        "copy_s": 2.0, "protect_s": 15.0, "persist": {"storage": 60.0}, "restart_memory_s": 60.0,
        "restart_elsewhere_s": 240.0, "redundancy": redundancy,
    }  # fmt: skip
    return Facts(**{**usual, **others})


def compare(facts: Facts, seconds: float, seeds: range) -> dict[str, float]:
    """Return goodput by formula and by simulation, with its standard error, and the share of failures per source."""
    advice = advise(facts)
    every, store_every = advice["every_n_steps"], advice["storage_every_n_steps"]["storage"]
    runs = [Training(facts, every, store_every, seed) for seed in seeds]
    found = [run.run(seconds) for run in runs]
    total = sum(sum(run.restarts.values()) for run in runs)
    return {
        "formula": advice["goodput"],
        "simulated": statistics.fmean(found),
        "error": statistics.stdev(found) / math.sqrt(len(found)),
        "lost_per_week": advice["steps_lost_per_week"],
        "lost_per_week_simulated": sum(run.lost_steps for run in runs) / len(runs) / seconds * 7 * DAY_S,
        "failures": total,
        "from_storage": sum(run.restarts["storage"] for run in runs) / max(total, 1),
    }


def compare_blocking(facts: Facts, seconds: float, seeds: range) -> dict[str, float]:
    """The same for checkpoints that stop training while they are stored, at Daly's interval."""
    cost_s, step_s = max(facts.persist.values()), facts.step_s or 1.0
    every = max(1, round(daly_s(cost_s, 1 / facts.rate) / step_s))
    # They survive everything, as the memory of the processes would if nothing else failed.
    blocking = dataclasses.replace(
        facts, node_share=0.0, stall_s=cost_s, copy_s=cost_s, redundancy=None,
        restart_memory_s=facts.restart_elsewhere_s,
    )  # fmt: skip
    found = [Training(blocking, every, 0, seed).run(seconds) for seed in seeds]
    return {
        "formula": daly_goodput(every * step_s, cost_s, facts.restart_elsewhere_s, 1 / facts.rate),
        "simulated": statistics.fmean(found),
        "error": statistics.stdev(found) / math.sqrt(len(found)),
    }


def bound(found: dict[str, float]) -> float:
    """Return how far formula and simulation may be apart: three standard errors, and ``ALLOWANCE``."""
    return 3 * found["error"] + ALLOWANCE


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--days", type=float, default=54.0, help="simulated days of each run (54)")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each kind (5)")


def run(args: argparse.Namespace, report: Report) -> None:
    seconds, seeds = args.days * DAY_S, range(args.seeds)
    for nodes in (16, 128, 512, 2048):
        for redundancy in (None, Redundancy(parity=1), Redundancy(parity=2)):
            facts = facts_of(nodes, redundancy)
            scheme = f"parity={redundancy.parity}" if redundancy else "none"
            found = compare(facts, seconds, seeds)
            report.note({"measure": "failures", "ranks": nodes * RANKS_PER_NODE, "redundancy": scheme, **found})
        found = compare_blocking(facts_of(nodes, None), seconds, seeds)
        report.note({"measure": "failures", "ranks": nodes * RANKS_PER_NODE, "redundancy": "blocking", **found})
    apart = [abs(line["formula"] - line["simulated"]) - bound(line) for line in report.of("failures")]
    report.target("formula and simulation, beyond the bound", "<= {}", 0, max(apart))
