"""How long does a rollback in place take, beside a plain copy of the same bytes?"""

import argparse
import statistics
import uuid
from collections.abc import Iterator

from benchmarks.frame import Line, Report, Targets, call, table
from benchmarks.raw import memcpy_rate

TARGET_S = 0.5
"""For 1 GB in memory on a CPU."""
KEYS = ("measure", "case")
COMPARED = ("seconds", "memcpy_s")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--megabytes", type=int, default=1000, help="of state: weights and two moments")
    parser.add_argument("--repeats", type=int, default=5)


def run(args: argparse.Namespace, report: Report) -> None:
    for line in call("rollback.measure", {"megabytes": args.megabytes, "repeats": args.repeats}, args.timeout_s):
        report.note(line)
    lines, targets = list(report.of("rollback")), Targets()
    newest = [seconds * 1e9 / lines[0]["bytes"] for seconds in lines[0]["seconds"]]
    targets.check("newest: 1 GB", "<= {} s", TARGET_S, statistics.median(newest))
    rows = [(line["case"], line["bytes"] / 1e6, line["seconds"], line["memcpy_s"]) for line in lines]
    report.show(table("Rollback", ("case", "state MB", "seconds", "a copy"), rows), targets.table())


def measure(settings: Line) -> Iterator[Line]:
    """A worker: back to the last capture, as after a bad loss; and over a capture, so that a new run begins."""
    import torch

    from benchmarks.training import capture, ready
    from lazysnap import MemoryLevel, SnapshotConfig, SnapshotEngine

    width = 1024
    layers = max(1, round(settings["megabytes"] * 1e6 / 12 / width**2))
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    config = SnapshotConfig(job_id=uuid.uuid4().hex, memory=MemoryLevel(linger_s=0.0, slots=3))
    engine = SnapshotEngine(config, {"model": model, "optimizer": optimizer})

    def train(step: int) -> None:
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        optimizer.step()
        optimizer.zero_grad()
        capture(engine, step)

    ready(engine)
    train(1)
    step, size = 1, 12 * layers * width**2
    facts = {"measure": "rollback", "bytes": size, "memcpy_s": size / memcpy_rate(size, torch.get_num_threads())}
    for case, steps in (("newest", 1), ("older", 2)):
        found = []
        for _ in range(settings["repeats"]):
            train(step + 1)
            train(step + 2)
            done = engine.rollback(steps=steps)
            assert done.level == "memory"
            step = done.step
            found.append(done.seconds)
        yield {**facts, "case": case, "seconds": found}
    engine.close(drain=False)
