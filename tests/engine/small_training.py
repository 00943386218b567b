"""A small training with an engine, a real keeper and a real directory."""

import dataclasses
import os
import uuid

import torch
from support.waiting import until

from lazysnap import MemoryLevel, PersistentLevel, SnapshotConfig, SnapshotEngine
from lazysnap.core.messages import Farewell
from lazysnap.keeper.client import KeeperClient
from lazysnap.keeper.identity import JobIdentity

TIMEOUT_S = 60


def fetch_stored(engine):
    """What a restart reads where memory is not asked: also while another process of this job trains."""
    run = engine._run
    return run.fetch("latest", dataclasses.replace(run.restart, client=None))


def connected_client(config):
    """Become the trainer of a job, as another process would; its client."""
    client = KeeperClient(
        JobIdentity.from_config(config), 0, linger_s=config.memory.linger_s, io_timeout_s=config.io_timeout_s
    )
    client.connect(TIMEOUT_S)
    return client


def end(training):
    """Close a training, and wait for its keeper: a restart that comes before finds memory."""
    pid = training.engine._client.keeper_pid
    assert training.engine.close()
    until(lambda: not os.path.exists(f"/proc/{pid}"))


class Training:
    """Deterministic; ``run`` goes on from wherever the objects stand."""

    def __init__(self, config, width=16, **extra):
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(6, width), torch.nn.BatchNorm1d(width), torch.nn.Dropout(0.2), torch.nn.Linear(width, 6)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 50)
        self.counters = {"seen": 0}
        objects = {"model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler}
        self.engine = SnapshotEngine(config, {**objects, "counters": self.counters, **extra})
        self.began = []

    def train(self):
        batch = torch.randn(8, 6)
        (self.model(batch) - batch).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.counters["seen"] += 8

    def run(self, first, last):
        for step in range(first, last + 1):
            self.train()
            self.began.append(self.engine.boundary(step))
        self.engine.gate()

    def wait_for_io(self, timeout_s):
        """From now on boundaries, gates and names wait for so long; the keeper had as long as it took to start."""
        config = dataclasses.replace(self.engine._config, io_timeout_s=timeout_s)
        for part in (
            self.engine._recorder,
            self.engine._recorder.memory,
            self.engine._boundaries,
            self.engine._shutdown,
        ):
            part._config = config

    def facts(self):
        """Everything that must be equal after a restart, as bytes and numbers."""
        tensors = {**self.model.state_dict()}
        for index, state in self.optimizer.state_dict()["state"].items():
            tensors |= {f"{index}.{key}": value for key, value in state.items()}
        facts = {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}
        return facts | {
            "lr": self.scheduler.get_last_lr(),
            "seen": self.counters["seen"],
            "next": torch.rand(3).tolist(),
        }


class Starter:
    def __init__(self):
        self.job_id = uuid.uuid4().hex
        self.trainings = []

    def config(self, *levels, **settings):
        levels = tuple(PersistentLevel(str(path), every_n_steps=1) for path in levels)
        usual = {"job_id": self.job_id, "memory": MemoryLevel(linger_s=60), "io_timeout_s": TIMEOUT_S}
        return SnapshotConfig(levels=levels, **{**usual, **settings})

    def start(self, *levels, width=16, extra=None, ready=True, **settings):
        training = Training(self.config(*levels, **settings), width, **(extra or {}))
        self.trainings.append(training)
        if ready:
            assert training.engine._wait_ready(TIMEOUT_S)
        return training

    def crash(self, training):
        """As far as the keeper can tell, this trainer died."""
        training.engine.abandon()

    def clean_up(self):
        """End what still runs."""
        for training in self.trainings:
            training.engine.close(drain=False)


def damage_newest_at_rest(job, where):
    """Change a byte of the newest capture once its keeper, which waits for a restart, knows the checksums."""

    def is_done():
        client = connected_client(job.config())
        try:
            newest = max(client.memory(TIMEOUT_S).entries, key=lambda entry: entry.step)
            if newest.checksums is not None:
                newest.slot.image[where % newest.slot.view().image_bytes] ^= 2
            return newest.checksums is not None
        finally:
            client.leave(Farewell.LEFT, TIMEOUT_S)

    until(is_done)
