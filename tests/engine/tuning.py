"""A small fine-tuning: a frozen base, low-rank adapters that are trained; with an engine, a keeper, a directory.

As a program: ``tuning.py DIRECTORY STEPS JOURNAL WIDTH EVERY LINGER`` trains, resumes from "latest", and writes a line
per event; every ``EVERY``-th step goes to storage, memory is kept for ``LINGER`` seconds after a crash.
"""

import hashlib
import os
import select
import sys

import torch
from support.waiting import until  # noqa: F401  for tests that look for it here

from lazysnap import MemoryLevel, PersistentLevel, SnapshotConfig, SnapshotEngine

TIMEOUT_S = 60


class LowRank(torch.nn.Module):
    """What LoRA does to a linear layer."""

    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = torch.nn.Parameter(torch.randn(rank, base.in_features) / 30)
        self.up = torch.nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, batch):
        return self.base(batch) + batch @ self.down.t() @ self.up.t()


class Tuning:
    """Deterministic; what one step does is in ``train``."""

    def __init__(self, config, width=512, layers=2, extra=None):
        torch.manual_seed(0)
        self.width = width
        self.model = torch.nn.Sequential(
            *(LowRank(torch.nn.Linear(width, width)) for _ in range(layers)), torch.nn.BatchNorm1d(width)
        )
        self.optimizer = torch.optim.AdamW([p for p in self.model.parameters() if p.requires_grad], lr=1e-2)
        self.after_step = lambda: None
        self.state = {"model": self.model, "optimizer": self.optimizer, **(extra or {})}
        self.engine = SnapshotEngine(config, self.state)
        self.began = []
        self.held = {}

    def train(self):
        batch = torch.randn(4, self.width)
        (self.model(batch) - batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.after_step()

    def run(self, first, last):
        for step in range(first, last + 1):
            self.train()
            self.held[step] = self.facts()
            self.began.append(self.engine.boundary(step))
        self.engine.gate()

    def run_until_captured(self, first, attempts=400):
        """Train until boundaries are captured again; the step that was."""
        for step in range(first, first + attempts):
            self.run(step, step)
            if self.began[-1]:
                return step
            self.engine._wait_ready(TIMEOUT_S)
        raise AssertionError("nothing was captured any more")

    def facts(self):
        """All values, as one checksum per tensor."""
        modules = [value for value in self.state.values() if isinstance(value, torch.nn.Module)]
        tensors = {
            f"{index} {name}": value for index, one in enumerate(modules) for name, value in one.state_dict().items()
        }
        for index, state in self.optimizer.state_dict()["state"].items():
            tensors |= {f"{index}.{key}": value for key, value in state.items()}
        return {name: digest(tensor) for name, tensor in tensors.items()}


def digest(tensor):
    return hashlib.sha256(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()


def keeper_of(tuning):
    """The keeper's process, to wait for."""
    return os.pidfd_open(tuning.engine._client.keeper_pid)


def keeper_gone(pidfd):
    """Wait until the keeper has ended."""
    assert select.select([pidfd], [], [], TIMEOUT_S)[0], "the keeper did not end"
    os.close(pidfd)


def main():
    directory, steps, journal_path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    journal = os.open(journal_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def write(*words):
        os.write(journal, (" ".join(map(str, words)) + "\n").encode())

    width, every, linger_s = (int(argument) for argument in sys.argv[4:])
    levels = (PersistentLevel(directory, every_n_steps=every, keep_last=2),)
    tuning = Tuning(SnapshotConfig(levels=levels, memory=MemoryLevel(linger_s=linger_s)), width=width)
    engine = tuning.engine
    snapshot = engine.restore("latest")
    write("resumed", snapshot.step if snapshot else 0, snapshot.level if snapshot else "nothing")
    engine._wait_ready(TIMEOUT_S)
    image = engine._client.frozen_slot(engine._recorder.frozen.reference().digest)
    # Filling a slot counts its sequence number up.
    write("image", os.fstat(image.fd).st_ino, image.status().sequence)
    for step in range((snapshot.step if snapshot else 0) + 1, steps + 1):
        tuning.run(step, step)
        write("begun" if tuning.began[-1] else "skipped", step)
        if not tuning.began[-1]:
            engine._wait_ready(TIMEOUT_S)
    engine.close()
    write("end", hashlib.sha256(repr(sorted(tuning.facts().items())).encode()).hexdigest())


if __name__ == "__main__":
    main()
