"""A small training that keeps its two best snapshots; the fault tests run it as a process and kill it.

usage: best_trainer.py DIRECTORY JOURNAL

Each step is stored before its value is given, and has its name before the next one: one name at a time is on its way.
"""

import contextlib
import functools
import os
import pathlib
import sys

import torch
from support.waiting import TIMEOUT_S, until
from trainer import Journal

from lazysnap import MemoryLevel, PersistentLevel, SnapshotConfig, SnapshotEngine

VALUES = [5.0, 4.0, 6.0, 3.0, 3.5, 2.0, 8.0, 1.0]
"""The value of each step."""
COUNT = 2


def names_at(directory: str, step: int | str = "*") -> list[pathlib.Path]:
    """Names of a step, or of all, at the level."""
    while True:
        with contextlib.suppress(FileNotFoundError):  # a snapshot that retention deletes meanwhile
            return list(pathlib.Path(directory).glob(f"*/keep-best-*-{step}"))


def main() -> None:
    directory, journal_path = sys.argv[1:]
    journal = Journal(journal_path)
    torch.manual_seed(0)
    model = torch.nn.Linear(24, 24)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config = SnapshotConfig(
        levels=(PersistentLevel(directory, every_n_steps=1, keep_last=1),), memory=MemoryLevel(linger_s=30.0)
    )
    engine = SnapshotEngine(config, {"model": model, "optimizer": optimizer})
    snapshot = engine.restore("latest")
    journal.write("resumed", snapshot.step if snapshot else 0)
    os.environ.pop("LAZYSNAP_FAULT", None)  # the keeper runs: one that takes its place does not die as well
    engine._wait_ready(timeout_s=TIMEOUT_S)
    for step in range(engine.step + 1, len(VALUES) + 1):
        model(torch.randn(8, 24)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if not engine.boundary(step) and engine._wait_ready(timeout_s=TIMEOUT_S):  # the keeper was being replaced
            engine.boundary(step)
        engine.wait(step, until="durable", timeout_s=TIMEOUT_S)
        if engine.keep_best("loss", VALUES[step - 1], count=COUNT) is not None:
            until(functools.partial(names_at, directory, step))
        journal.write("names", len(names_at(directory)))
    journal.write("closed", engine.close())


if __name__ == "__main__":
    main()
