"""How long does a rollback in place take, beside a plain copy of the same bytes?"""

import argparse
import functools
from collections.abc import Iterator

from benchmarks.raw import memcpy_s
from benchmarks.report import Report
from benchmarks.workers import Line, call

TARGET_S = 0.5
"""For 1 GB in memory on a CPU."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--megabytes", type=int, default=1000, help="of state: weights and two moments")
    parser.add_argument("--repeats", type=int, default=5)


def run(args: argparse.Namespace, report: Report) -> None:
    job = {"level": "memory", "megabytes": args.megabytes, "repeats": args.repeats}
    report.take("rollback", functools.partial(call, "rollback.measure", job))
    newest = report.find(measure="rollback", case="newest")
    report.target("newest: 1 GB", "<= {} s", TARGET_S, newest["rollback_s"] * 1e3 / newest["state_mb"])


def measure(job: Line) -> Iterator[Line]:
    """A worker: back to the last capture, as after a bad loss; and over a capture, so that a new run begins."""
    import torch

    from benchmarks.training import capture, engine_of, layers, ready

    model = layers(job["megabytes"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine = engine_of(job, {"model": model, "optimizer": optimizer}, slots=3)

    def train(step: int) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        optimizer.step()
        optimizer.zero_grad()
        capture(engine, step)

    ready(engine)
    train(1)
    step, size = 1, engine.statistics().shard_bytes
    facts = {"measure": "rollback", "state_mb": size / 1e6, "memcpy_s": memcpy_s(size, torch.get_num_threads())}
    for case, steps in (("newest", 1), ("older", 2)):
        found = []
        for _ in range(job["repeats"]):
            train(step + 1)
            train(step + 2)
            done = engine.rollback(steps=steps)
            assert done.level == "memory"
            step = done.step
            found.append(done.seconds)
        yield {**facts, "case": case, "rollback_s": found}
    engine.close(drain=False)
