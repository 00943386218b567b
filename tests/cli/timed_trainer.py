"""A training that writes down when it did what, for a stopwatch beside it: ``timed_trainer.py URL STEPS JOURNAL``.

It trains so many steps more than there are.
"""

import os
import sys
import time

import torch

from lazysnap import MemoryLevel, PersistentLevel, SnapshotConfig, SnapshotEngine


def main() -> None:
    url, steps = sys.argv[1], int(sys.argv[2])
    journal = os.open(sys.argv[3], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def note(what, number):
        os.write(journal, f"{what} {number} {time.time()}\n".encode())

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    level = PersistentLevel(url, every_n_steps=250, keep_last=2)
    config = SnapshotConfig(levels=(level,), memory=MemoryLevel(linger_s=30.0))
    engine = SnapshotEngine(config, {"model": model, "optimizer": optimizer})
    snapshot = engine.restore("latest")
    done = snapshot.step if snapshot else 0
    note("resumed", done)
    for step in range(done + 1, done + steps + 1):
        model(torch.randn(256, 256)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        note("step", step)
        engine.boundary(step)
        engine.gate()
        if step == done + 1:
            note("first", step)
    note("waited", engine.statistics().waited_s)
    keeper = engine._client.keeper_pid
    assert keeper
    engine.close()
    note("closed", done + steps)


if __name__ == "__main__":
    main()
