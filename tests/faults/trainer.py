"""A small deterministic training that resumes from "latest"; the fault tests run it as a process and kill it.

usage: trainer.py DIRECTORY STEPS JOURNAL RESULT

JOURNAL gets one line per event, each with a single append: what was there before the process died stays readable.
"""

import os
import sys

import torch
from support.bits import digest
from support.waiting import TIMEOUT_S

from lazysnap import MemoryLevel, PersistentLevel, SnapshotConfig, SnapshotEngine


class Journal:
    def __init__(self, path: str) -> None:
        self.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(self, *words: object) -> None:
        os.write(self.fd, (" ".join(map(str, words)) + "\n").encode())


def main() -> None:
    directory, steps, journal_path, result_path = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
    journal = Journal(journal_path)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(24, 96), torch.nn.BatchNorm1d(96), torch.nn.ReLU(), torch.nn.Linear(96, 24)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps + 1)
    config = SnapshotConfig(
        levels=(PersistentLevel(directory, every_n_steps=1, keep_last=2),),
        memory=MemoryLevel(linger_s=30.0),
        io_timeout_s=20.0,  # so long it asks again and again for a keeper, where each one dies as it begins
    )
    engine = SnapshotEngine(config, {"model": model, "optimizer": optimizer, "scheduler": scheduler})
    snapshot = engine.restore("latest")
    journal.write("resumed", snapshot.step if snapshot else 0, snapshot.level if snapshot else "nothing")
    os.environ.pop("LAZYSNAP_FAULT", None)  # the keeper runs: one that takes its place does not die as well
    engine._prepare()
    engine._wait_ready(timeout_s=TIMEOUT_S)
    for step in range((snapshot.step if snapshot else 0) + 1, steps + 1):
        batch = torch.randn(8, 24)
        loss = (model(batch) - batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        journal.write("trained", step)
        began = engine.boundary(step)
        if not began and engine._wait_ready(timeout_s=TIMEOUT_S):  # the keeper was being replaced
            began = engine.boundary(step)
        journal.write("begun" if began else "skipped", step)
        engine.gate()
        journal.write("gated", step)
        if step % 3 == 0 and engine.wait(step, until="durable", timeout_s=TIMEOUT_S):
            journal.write("durable", step)
    engine.close()
    with open(result_path, "w") as result:
        result.write(digest([model.state_dict(), optimizer.state_dict()["state"]]))


if __name__ == "__main__":
    main()
