"""A training whose program configures no logging; see ``test_visible_runs.py``. Argument: the settings, as JSON."""

import json
import logging
import os
import signal
import sys

import torch

from lazysnap import MemoryLevel, PersistentLevel, SnapshotConfig, SnapshotEngine


def main() -> None:
    settings = json.loads(sys.argv[1])
    if settings.get("logging"):
        logging.basicConfig(level=logging.INFO, format="LOG %(levelname)s %(name)s: %(message)s")
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    level = PersistentLevel(settings["url"], every_n_steps=1)
    config = SnapshotConfig(
        every_n_steps=settings.get("every_n_steps", 1),
        levels=(level,),
        memory=MemoryLevel(linger_s=30),
        drain_timeout_s=settings.get("drain_timeout_s", 60),
    )
    engine = SnapshotEngine(config, {"model": model, "optimizer": optimizer})
    if settings.get("fetch_only"):
        engine._fetch()
        engine.abandon()
        return
    snapshot = engine.restore("latest") if settings.get("restore", True) else None
    assert engine._wait_ready(60)
    for step in range((snapshot.step if snapshot else 0) + 1, settings.get("steps", 8) + 1):
        model(torch.randn(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        engine.boundary(step)
        engine.gate()
        if step == settings.get("die_at"):
            for pid in [engine._client.keeper_pid] * bool(settings.get("with_keeper")) + [os.getpid()]:
                os.kill(pid, signal.SIGKILL)
    if settings.get("abandon"):
        engine.abandon()
        return
    print("closed", engine.close(), flush=True)


if __name__ == "__main__":
    main()
