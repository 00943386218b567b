"""Trainings that are no plain loop over one loader: ``odd.py DIRECTORY CASE DIES_AFTER SEED``; see accelerated.py."""

import json
import os
import random
import signal
import sys
import warnings
from pathlib import Path

warnings.simplefilter("ignore")

import accelerate  # noqa: E402
import torch  # noqa: E402
from accelerated import Augmented, Progress, weights  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

from lazysnap import LazyAccelerator, MemoryLevel, PersistentLevel, SnapshotConfig  # noqa: E402

STEPS, BATCH = 12, 4


def network():
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 4))


class Odd:
    """One training; each case makes and does something of its own."""

    settings = {}

    def __init__(self, directory, dies_after):
        level = PersistentLevel(str(directory / "level"), every_n_steps=5)
        config = SnapshotConfig(levels=(level,), memory=MemoryLevel(linger_s=200))
        self.accelerator = LazyAccelerator(cpu=True, project_dir=str(directory), snapshots=config, **self.settings)
        self.progress, self.dies_after = Progress(steps=0, epoch=0, batches=0), dies_after
        self.accelerator.register_for_checkpointing(self.progress)
        self.prepare()
        self.found = self.accelerator.load_state("latest")
        self.begins = self.progress["steps"]
        self.trace = (directory / "trace").open("a")
        resumed = {"resumed": self.found and self.found.step, "level": self.found and self.found.level}
        self.write(**resumed, batches=self.progress["batches"])

    def write(self, **facts):
        self.trace.write(json.dumps(facts) + "\n")
        self.trace.flush()

    def prepare(self):
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = DataLoader(Augmented(), BATCH, shuffle=True)
        self.model, self.optimizer, self.loader = self.accelerator.prepare(model, optimizer, loader)

    def train(self):
        while self.progress["steps"] < STEPS:
            for numbers, values in self.loader:
                self.step(values, ids=numbers.tolist())
                if self.progress["steps"] == STEPS:
                    break

    def step(self, values, **facts):
        loss = (self.model(values) - values).square().mean()
        self.update(self.optimizer, loss)
        self.done(loss=loss.item(), weights=weights(self.model, self.optimizer), **facts)

    def update(self, optimizer, loss):
        self.accelerator.backward(loss)
        if self.dies_after and self.progress["steps"] - self.begins == self.dies_after:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()

    def done(self, **facts):
        self.progress["steps"] += 1
        self.progress["batches"] += 1
        self.write(step=self.progress["steps"], batches=self.progress["batches"], draw=random.random(), **facts)


class Scaled(Odd):
    """Accelerate makes a GradScaler for GPUs only; every fourth batch overflows, and is no step."""

    def prepare(self):
        self.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        super().prepare()

    def update(self, optimizer, loss):
        super().update(optimizer, loss)
        if optimizer.step_was_skipped:
            self.progress["steps"] -= 1

    def step(self, values, **facts):
        overflows = self.progress["steps"] % 4 == 3 and not self.progress.get("overflowed")
        self.progress["overflowed"] = overflows
        scale = self.accelerator.scaler.get_scale()
        super().step(values * 1e30 if overflows else values, scale=scale, **facts)


class Adversarial(Odd):
    """Two models and two optimizers, which step one after the other for each batch."""

    def prepare(self):
        super().prepare()
        critic = torch.nn.Linear(4, 1)
        self.critic, self.other = self.accelerator.prepare(critic, torch.optim.SGD(critic.parameters(), 0.1, 0.9))

    def step(self, values, **facts):
        made = self.model(values)
        self.other.zero_grad()  # of gradients that the other's loss left: they are no part of a snapshot
        self.accelerator.backward((self.critic(made.detach()) - self.critic(values)).mean())
        self.other.step()
        loss = -self.critic(made).mean() + (made - values).square().mean()
        self.update(self.optimizer, loss)
        seen = weights(self.model, self.optimizer) + weights(self.critic, self.other)
        self.done(loss=loss.item(), weights=seen, **facts)


class Loaderless(Odd):
    """No loader at all: save_state() tells where a step ends."""

    def prepare(self):
        model = network()
        self.model, self.optimizer = self.accelerator.prepare(model, torch.optim.AdamW(model.parameters()))

    def train(self):
        while self.progress["steps"] < STEPS:
            self.step(torch.rand(BATCH, 4))
            self.accelerator.save_state()


class OneByOne(Odd):
    """Every step makes an iterator of its own."""

    def train(self):
        while self.progress["steps"] < STEPS:
            numbers, values = next(iter(self.loader))
            self.step(values, ids=numbers.tolist())


class Evaluated(Odd):
    """In half precision. After every second step a prepared loader of evaluation is read, which is no boundary."""

    settings = {"mixed_precision": "bf16"}

    def prepare(self):
        super().prepare()
        self.test_loader = self.accelerator.prepare(DataLoader(Augmented(), 9))

    def done(self, **facts):
        read = []
        if self.progress["steps"] % 2:
            with torch.no_grad():
                read = [self.model(values).sum().item() for _, values in self.test_loader]
        super().done(read=read, **facts)


class Broken(Odd):
    """Epochs that are left at their fifth batch."""

    def train(self):
        while self.progress["steps"] < STEPS:
            for numbers, values in self.loader:
                self.progress["epoch"] = self.progress["steps"] // 5
                self.step(values, ids=numbers.tolist())
                if self.progress["steps"] % 5 == 0 or self.progress["steps"] == STEPS:
                    break


CASES = {one.__name__: one for one in (Scaled, Adversarial, Loaderless, OneByOne, Evaluated, Broken)}


def main():
    directory, name, dies_after, seed = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    accelerate.utils.set_seed(seed)
    case = CASES[name](directory, dies_after)
    case.train()
    statistics = case.accelerator.statistics()
    case.write(end=True, draw=torch.rand(()).item())
    case.trace.close()
    case.accelerator.end_training()
    # None of what was no boundary took a snapshot, and no boundary was missed.
    assert dies_after or statistics.began <= STEPS, statistics
    if not dies_after and case.found is None:
        last = case.accelerator._lazysnap_integration.step
        assert last == STEPS, last


if __name__ == "__main__":
    main()
