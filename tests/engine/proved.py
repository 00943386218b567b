"""A training whose restart is checked: ``proved.py DIRECTORY CASE STEPS KILLED_AT VERIFY [END]``.

It kills itself when step KILLED_AT is captured (0: never), in the way that END says. What is printed at the end: the
check, and the digest of the weights. Each CASE but the first two has a hole: what it keeps is in no snapshot.
"""

import math
import os
import signal
import sys
import threading

import torch
from support.bits import digest
from support.waiting import until

from lazysnap import PersistentLevel, SnapshotConfig, SnapshotEngine

VERIFY = {"first": True, "always": "always", "never": False}


class Training:
    def __init__(self, case):
        torch.manual_seed(0)
        self.case = case
        self.model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 8))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.teacher = [parameter.detach().clone() for parameter in self.model.parameters()]
        self.held = None

    def batch(self):
        batch = self.held
        if batch is None:
            batch = torch.randn(4, 8)
        if self.case == "held":
            self.held = torch.randn(4, 8)
        return batch

    def loss(self):
        batch = self.batch()
        loss = (self.model(batch) - batch).square().mean()
        if self.case == "ema":
            for parameter, smoothed in zip(self.model.parameters(), self.teacher, strict=True):
                loss = loss + (parameter - smoothed).square().sum()
        return loss

    def step(self):
        for _ in range(3 if self.case == "accumulated" else 1):
            self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for parameter, smoothed in zip(self.model.parameters(), self.teacher, strict=True):
                smoothed.lerp_(parameter, 0.1)


def await_comparison():
    """Steps are shorter than a comparison here, and the next captures would need its slots."""
    until(lambda: all(thread.name != "lazysnap-restart-check" for thread in threading.enumerate()))


def main():
    directory, case, steps, killed_at, verify, *end = sys.argv[1:]
    training = Training(case)
    config = SnapshotConfig(levels=(PersistentLevel(directory),), verify_restart=VERIFY[verify])
    notes = {}
    engine = SnapshotEngine(config, {"model": training.model, "optimizer": training.optimizer, "notes": notes})
    snapshot = engine.restore("latest")
    print("resumed", snapshot and snapshot.step, flush=True)
    notes["limit"] = 1 << 60
    if case == "places":
        notes["file"] = f"{os.getpid()}.ckpt"
        notes["losses"] = {f"{os.getpid()}.ckpt": 0.5}
    if case == "number" and snapshot is not None:
        notes["limit"] = math.inf
    with engine:
        assert engine._wait_ready(60)
        while engine.step < int(steps):
            training.step()
            is_killed = engine.step + 1 == int(killed_at)
            engine.boundary(force=is_killed and end == ["forced"])
            hangs = os.environ.get("LAZYSNAP_FAULT", "").endswith(":hang")
            if snapshot is not None and engine.step == snapshot.step + 1 and not hangs:
                await_comparison()
            if is_killed:
                if end == ["named"]:
                    engine.keep("best")
                assert engine.wait(until="captured", timeout_s=60)
                os.kill(os.getpid(), signal.SIGKILL)
    print("check", engine.statistics().restart_check)
    print("digest", digest(training.model.state_dict()))


if __name__ == "__main__":
    main()
